//! Tensor collectives of one generation, without a runtime: calls block the
//! thread that makes them, which is the thread that owns the tensors.
//!
//! Start with the [`Communicator`] trait. [`Listener::connect`] builds the mesh
//! of a generation over TCP; [`Solo`] is the mesh of one rank; [`tree`] is the
//! arithmetic of the sum, which depends on no rank and no placement (TRAJ-1).
//!
//! - GEN-1: connections are keyed by a generation's secret, and every frame
//!   carries its token; anything else is refused.
//! - GN-2: [`AbortHandle::abort`] ends a blocked call at once. An operation runs
//!   in its calling thread alone, so once the call has returned nothing of the
//!   old generation can touch a buffer (ME-1).
//! - SEC-1: a peer proves that it holds the generation's key before anything is
//!   allocated for it.
//!
//! Absent on purpose: encryption of tensors, retries within a generation (a
//! broken mesh stays broken; the group plans the next one), and any idea of
//! what a tensor means.

mod abort;
mod accept;
mod arguments;
mod broadcast;
mod communicator;
mod dial;
mod error;
mod exchange;
mod frame;
mod handshake;
mod link;
mod listener;
mod mesh;
mod recorder;
mod reduce;
mod sink;
mod solo;
mod splits;
pub mod tree;

#[cfg(test)]
mod tests;

pub use abort::AbortHandle;
pub use communicator::Communicator;
pub use error::Error;
pub use listener::{Listener, ListenerStats, MeshSpec};
pub use mesh::TcpMesh;
pub use recorder::{Record, Recorder, State};
pub use solo::Solo;

#[cfg(target_endian = "big")]
compile_error!("tensors travel as they lie in memory, in little-endian order");
