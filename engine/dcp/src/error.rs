//! What can be wrong with a checkpoint, or with the disk under it.

use std::io;
use std::path::PathBuf;

use crate::digest::Digest;
use crate::{pickle, zip};

/// Names the thing that is wrong, and its value.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused: no space, no permission, a failing disk.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file or directory.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// A directory without an index.
    #[error("{0} has no .metadata: it is not a checkpoint, or its save was interrupted")]
    NoIndex(PathBuf),
    /// A file that is too large to be what its name says.
    #[error("{path} has {bytes} bytes, more than any such file ({limit})")]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The largest accepted.
        limit: u64,
    },
    /// An index that cannot be understood.
    #[error("{path} is damaged{}: {source}", fqn.as_deref().map(|fqn| format!(" at {fqn}")).unwrap_or_default())]
    Index {
        /// The index.
        path: PathBuf,
        /// The key, when it is known.
        fqn: Option<String>,
        /// What is wrong with it.
        source: pickle::Error,
    },
    /// An index that says something impossible or unsupported about a key.
    #[error("{path}: {fqn}: {detail}")]
    Entry {
        /// The index.
        path: PathBuf,
        /// The key.
        fqn: String,
        /// What is wrong.
        detail: String,
    },
    /// A key that the checkpoint does not have, or has as the other kind.
    #[error("{path} has no {kind} {fqn:?}")]
    NoKey {
        /// The checkpoint.
        path: PathBuf,
        /// `tensor` or `object`.
        kind: &'static str,
        /// The key.
        fqn: String,
    },
    /// A request that does not fit the tensor, or bytes that do not fit the region.
    #[error("{fqn}: {detail}")]
    Request {
        /// The tensor.
        fqn: String,
        /// What does not fit.
        detail: String,
    },
    /// Shards that do not make up the tensor.
    #[error("{path}: {fqn}: {detail}")]
    Cover {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor.
        fqn: String,
        /// The overlap or the hole.
        detail: String,
    },
    /// A slice of a data file that is not the item that the index promises.
    #[error("{path}, bytes {start}..{end}, {fqn}: {source}")]
    Slice {
        /// The data file.
        path: PathBuf,
        /// First byte of the slice.
        start: u64,
        /// Byte after the slice.
        end: u64,
        /// The item.
        fqn: String,
        /// What is wrong.
        source: SliceError,
    },
    /// A file whose size is not the recorded one.
    #[error("{path} has {found} bytes, {stored} were written: it is cut short or torn")]
    FileSize {
        /// The file.
        path: PathBuf,
        /// The recorded size.
        stored: u64,
        /// The size on disk.
        found: u64,
    },
    /// A file whose bytes are not the recorded ones.
    #[error("{path} changed since it was written (BLAKE3 is not {stored})")]
    Digest {
        /// The file.
        path: PathBuf,
        /// The recorded digest.
        stored: Digest,
    },
    /// Everything that a verification found.
    #[error("{path} is damaged in {count} places; first: {}", first.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Damaged {
        /// The checkpoint.
        path: PathBuf,
        /// How many problems.
        count: usize,
        /// The first of them that differ.
        first: Vec<Error>,
    },
    /// Shards of several ranks that do not fit together.
    #[error("{fqn}: {detail}")]
    Merge {
        /// The key.
        fqn: String,
        /// What does not fit.
        detail: String,
    },
    /// A value that cannot be pickled.
    #[error("{fqn}: {source}")]
    Value {
        /// The key.
        fqn: String,
        /// Why not.
        source: pickle::Error,
    },
    /// A writer that already failed; its file is not complete.
    #[error("{0} is incomplete after an earlier error: save again into a new stage")]
    Incomplete(PathBuf),
}

/// What is wrong with one slice of a data file.
#[derive(Debug, thiserror::Error)]
pub enum SliceError {
    /// The archive is damaged.
    #[error(transparent)]
    Zip(#[from] zip::Error),
    /// The description of the tensor or the object is damaged.
    #[error(transparent)]
    Pickle(#[from] pickle::Error),
    /// A stream that does not decode.
    #[error("zstd stream is damaged: {0}")]
    Zstd(String),
    /// The file ends before the slice does.
    #[error("the file has only {0} bytes: it is cut short")]
    Short(u64),
    /// The archive holds something else than the index says.
    #[error("it holds {found}, the index says {expected}")]
    Mismatch {
        /// What the archive holds.
        found: String,
        /// What the index says.
        expected: String,
    },
    /// Something that the format allows and that is not read here.
    #[error("{0}")]
    Unsupported(String),
}

impl Error {
    /// True when the file or folder that was to be opened does not exist.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { source, .. } if matches!(
            source.kind(),
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
        ))
    }

    /// True when the checkpoint itself is bad and another one may be good;
    /// false when the request or the machine is at fault.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        match self {
            Self::Io { source, .. } => is_damage(source),
            Self::Slice { source: SliceError::Zip(zip::Error::Io(source)), .. } => {
                is_damage(source)
            }
            Self::NoKey { .. }
            | Self::Request { .. }
            | Self::Merge { .. }
            | Self::Value { .. }
            | Self::Incomplete(_) => false,
            Self::Damaged { first, .. } => first.iter().any(Self::is_damage),
            _ => true,
        }
    }
}

/// A missing file or an unreadable sector belongs to the checkpoint; a missing
/// permission or too many open files do not.
fn is_damage(error: &io::Error) -> bool {
    const EIO: i32 = 5;
    matches!(
        error.kind(),
        io::ErrorKind::NotFound
            | io::ErrorKind::UnexpectedEof
            | io::ErrorKind::NotADirectory
            | io::ErrorKind::InvalidData
    ) || error.raw_os_error() == Some(EIO)
}
