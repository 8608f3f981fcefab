//! The actors of an elastic job and their supervision.
//!
//! Two processes are made of them: [`agent::run`] is a node's agent, [`worker::run`]
//! a device's worker. [`control_group`] is the replicated state machine between
//! the agents. Decisions are `job::planner`'s; what is here performs them.

pub mod agent;
pub mod clock;
pub mod control_group;
mod lifeline;
pub mod observer;
mod pipe;
pub mod worker;
