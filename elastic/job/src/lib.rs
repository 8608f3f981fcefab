//! The pure vocabulary and the decisions of an elastic training job.
//!
//! Nothing here reads a clock, opens a socket or knows a runtime: time comes in
//! as an argument, effects go out as values. Start with [`shares`] and [`ids`].

pub mod codec;
pub mod ids;
pub mod shares;
pub mod tokens;

pub use ids::{Era, Generation, Incarnation, JobId, NodeId, Rank, Step, StoreId, Token, WorkerId};
