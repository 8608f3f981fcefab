//! The pure vocabulary and the decisions of an elastic training job.
//!
//! Nothing here reads a clock, opens a socket or knows a runtime: time comes in
//! as an argument, effects go out as values. Start with [`shares`] and [`ids`].

pub mod codec;
pub mod command;
pub mod ids;
pub mod incident;
pub mod message;
pub mod plan;
pub mod planner;
pub mod replicated;
pub mod report;
pub mod shares;
pub mod spec;
pub mod state;
pub mod timeouts;
pub mod tokens;
pub mod voters;

pub use ids::{Era, Generation, Incarnation, JobId, NodeId, Rank, Step, StoreId, Token, WorkerId};
