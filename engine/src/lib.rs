//! The training engine: model, optimizer, data order and the training step
//! over a [`Communicator`](transport::collective::Communicator).
//!
//! The entry point is [`Engine`]: one rank's training state and its place in a
//! generation. What it computes does not depend on that place (TRAJ-1).
//!
//! Nothing here knows actors, QUIC or Raft; `tch` types stay inside.

mod aligned;
mod ballot;
mod canary;
pub mod config;
pub mod data;
pub mod digest;
mod drive;
mod error;
mod evaluate;
mod ffi;
mod generate;
pub mod gradient;
pub mod layout;
mod load;
mod memory;
pub mod model;
pub mod optimizer;
mod placement;
pub mod random;
mod seat;
mod snapshot;
mod state;
mod step;
mod sync;
pub mod tree;

pub use ballot::Verdict;
pub use canary::arithmetic_digest;
pub use config::Config;
pub use error::Error;
pub use evaluate::Digests;
pub use snapshot::Snapshot;
pub use state::Progress;
pub use step::{Engine, StepReport};
