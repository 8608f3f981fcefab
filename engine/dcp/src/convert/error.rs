//! Why a conversion is not possible.

use std::path::PathBuf;

use crate::dtype::Dtype;
use crate::error::SliceError;

/// Names the key or the file.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The source or the disk is bad.
    #[error(transparent)]
    Checkpoint(#[from] crate::Error),
    /// Nothing is overwritten.
    #[error("{0} exists already: name something that does not, or remove it")]
    Exists(PathBuf),
    /// A file that is not what `torch.save` writes.
    #[error("{path} is not a state dict of torch.save: {source}")]
    Torch {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: SliceError,
    },
    /// A file of `torch.save` that holds something else than a state dict.
    #[error("{path}: {detail}")]
    Shape {
        /// The file.
        path: PathBuf,
        /// What it holds.
        detail: String,
    },
    /// A key that has no place in the target.
    #[error("{fqn}: {detail}")]
    Name {
        /// The key.
        fqn: String,
        /// Why.
        detail: String,
    },
    /// Types without a conversion.
    #[error("{fqn}: {from} cannot become {to}")]
    Cast {
        /// The tensor.
        fqn: String,
        /// Its type.
        from: Dtype,
        /// The type that was asked for.
        to: Dtype,
    },
    /// Something that the source would have to have.
    #[error("there is no {0} in the source")]
    Missing(String),
}
