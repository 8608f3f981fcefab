//! The models that the engine knows, by name and flavor.

pub use job::model::{Error, FLAVORS, RopeScaling, Shape, find};
