//! PyTorch Distributed Checkpoint (DCP), without Python and without libtorch.
//!
//! A checkpoint is a directory: one data file per rank and one index,
//! `.metadata`. [`ShardWriter`] writes a rank's file, [`write_metadata`] merges
//! what the ranks wrote into the index, [`Checkpoint`] opens a directory that
//! we or PyTorch wrote and reads any [`Region`] of any tensor, whatever mesh it
//! was saved from (CKPT-2). [`folder`] says which directories are committed
//! (CKPT-1, LG-1, LG-2).
//!
//! Everything read from disk is untrusted: a truncated, torn, flipped or
//! missing shard is an error that names it, never data. Nothing is executed: a
//! pickle's globals stay names.

pub mod checkpoint;
pub mod digest;
pub mod dtype;
mod durable;
pub mod error;
pub mod folder;
mod index;
mod payload;
pub mod pickle;
pub mod region;
pub mod value;
pub mod verify;
pub mod writer;
pub mod zip;

pub use checkpoint::{Checkpoint, TensorInfo};
pub use digest::{Digest, FileDigest};
pub use dtype::Dtype;
pub use error::Error;
pub use folder::Folder;
pub use region::Region;
pub use value::{Segment, Value};
pub use verify::VerifyReport;
pub use writer::{ShardIndex, ShardWriter, write_metadata};
