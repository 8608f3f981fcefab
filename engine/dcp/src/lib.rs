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
//!
//! ```
//! use dcp::{Checkpoint, Dtype, Region, ShardWriter, Value, write_metadata};
//! # let scratch = tempfile::tempdir()?;
//! # let stage = scratch.path().join("stage");
//!
//! // Two ranks save rows 0..2 and 2..3 of a [3, 2] tensor, one also the step.
//! let mut shards = Vec::new();
//! for (rank, start, rows) in [(0, 0, 2), (1, 2, 1)] {
//!     let mut writer = ShardWriter::create(&stage, rank)?;
//!     let region = Region::rows(&[3, 2], start, rows);
//!     let bytes = vec![rank as u8; region.elements() as usize];
//!     writer.tensor("norm", &["norm".into()], Dtype::U8, &[3, 2], &region, &bytes)?;
//!     if rank == 0 {
//!         let path = ["train_state".into(), "step".into()];
//!         writer.object("train_state.step", &path, &Value::Int(7))?;
//!     }
//!     shards.push(writer.finish()?);
//! }
//! write_metadata(&stage, &shards)?;
//!
//! // Anyone reads any part, for example a column.
//! let checkpoint = Checkpoint::open(&stage)?;
//! let column = Region { offsets: vec![0, 1], sizes: vec![3, 1] };
//! let mut bytes = [9; 3];
//! checkpoint.read("norm", &column, &mut bytes)?;
//! assert_eq!(bytes, [0, 0, 1]);
//! assert_eq!(checkpoint.object("train_state.step")?, Value::Int(7));
//! assert!(checkpoint.verify()?.digests);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod checkpoint;
pub mod convert;
pub mod digest;
pub mod dtype;
pub mod error;
pub mod folder;
#[doc(hidden)]
pub mod fuzzing;
mod index;
mod item;
pub mod load;
mod payload;
pub mod pickle;
pub mod region;
pub mod staging;
pub mod storage;
pub mod titan;
pub mod value;
pub mod verify;
pub mod writer;
pub mod zip;

pub use checkpoint::{Checkpoint, TensorInfo};
pub use digest::{Digest, FileDigest};
pub use dtype::Dtype;
pub use error::Error;
pub use folder::Folder;
pub use load::{LoadReport, Target};
pub use region::Region;
pub use storage::{Dir, Storage};
pub use value::{Segment, Value};
pub use verify::VerifyReport;
pub use writer::{ShardIndex, ShardWriter, write_index, write_metadata};
