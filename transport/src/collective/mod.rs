//! Tensor collectives of one generation, without a runtime: calls block the
//! thread that makes them, which is the thread that owns the tensors.
//!
//! Start with the [`Communicator`] trait. [`Listener::connect`] builds the mesh
//! of a generation: ranks of one machine find each other and talk through shared
//! memory, all others over TCP, and both at once where a mesh spans machines.
//! [`Solo`] is the mesh of one rank; [`tree`] is the arithmetic of the sum, which
//! depends on no rank and no placement (TRAJ-1).
//!
//! - GEN-1: connections are keyed by a generation's secret, and every frame
//!   carries its token; anything else is refused.
//! - GN-2: [`AbortHandle::abort`] ends a blocked call at once. An operation runs
//!   in its calling thread alone, so once the call has returned nothing of the
//!   old generation can touch a buffer; memory that ranks share is made for one
//!   mesh, and a buffer in it ([`Communicator::allocate`]) goes with it (ME-1).
//! - SEC-1: a peer proves that it holds the generation's key before anything is
//!   allocated for it.
//!
//! ```
//! # use std::time::{Duration, Instant};
//! # use job::{Era, Generation, JobId, Token};
//! use transport::collective::{AbortHandle, Communicator, Listener, MeshSpec};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let deadline = Instant::now() + Duration::from_secs(10);
//! # let job = JobId(Default::default());
//! # let token = Token { job, era: Era(0), generation: Generation(1) };
//! let listeners = [Listener::bind("127.0.0.1:0".parse()?)?, Listener::bind("127.0.0.1:0".parse()?)?];
//! let addresses: Vec<_> = listeners.iter().map(Listener::local_addr).collect();
//! let ranks = listeners.into_iter().enumerate().map(|(rank, listener)| {
//!     let spec = MeshSpec { token, key: [7; 32], rank, addresses: addresses.clone() };
//!     std::thread::spawn(move || {
//!         let mut mesh = listener.connect(spec, deadline, &AbortHandle::new()?)?;
//!         mesh.all_gather_bytes(&[rank as u8], 1, deadline)
//!     })
//! });
//! for rank in ranks.collect::<Vec<_>>() {
//!     assert_eq!(rank.join().unwrap()?, [[0], [1]]);
//! }
//! # Ok(()) }
//! ```
//!
//! Absent on purpose: encryption of tensors, retries within a generation (a
//! broken mesh stays broken; the group plans the next one), and any idea of
//! what a tensor means.

mod abort;
mod accept;
mod arguments;
mod broadcast;
mod buffer;
mod communicator;
mod counter;
mod dial;
mod direct;
mod dtype;
mod error;
mod exchange;
mod frame;
mod groups;
mod handshake;
mod inbox;
mod kernels;
mod link;
mod listener;
mod mesh;
mod neighbours;
mod outgoing;
mod overlap;
mod parcels;
mod pending;
mod recorder;
mod reduce;
mod shm;
mod sink;
mod solo;
mod split;
mod splits;
pub mod tree;
mod view;

#[cfg(test)]
mod tests;

pub use abort::AbortHandle;
pub use buffer::Buffer;
pub use communicator::{Communicator, Reduce};
pub use counter::Counter;
pub use dtype::{Dtype, Element};
pub use error::Error;
pub use groups::{Partition, groups};
pub use listener::{Listener, ListenerStats, MeshSpec};
pub use mesh::HostMesh;
pub use overlap::Overlapped;
pub use pending::{Job, Pending};
pub use recorder::{Record, Recorder, State};
pub use solo::Solo;
pub use view::{Cuda, View, ViewMut};

#[cfg(target_endian = "big")]
compile_error!("tensors travel as they lie in memory, in little-endian order");
