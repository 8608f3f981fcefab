//! From one format to another: DCP, a single file of `torch.save`, safetensors,
//! Hugging Face's names for Llama. A [`Source`] has tensors and objects; each
//! writer takes any source, and streams it in pieces of a few MiB.
//!
//! | from | to |
//! |---|---|
//! | [`Checkpoint`]: DCP and safetensors | [`to_dcp`]: also another number of ranks |
//! | [`TorchFile`]: `torch.save(state_dict)` | [`to_torch`]: `torch.load(weights_only=True)` reads it |
//! | [`llama::to_hf`], [`llama::from_hf`]: the other names | [`to_safetensors`], [`to_safetensors_folder`] |
//! | [`cast`]: another type | [`diff`]: what differs |
//!
//! A target appears under its name when it is complete.

mod cast;
mod dcp;
mod diff;
mod error;
mod fresh;
pub mod llama;
mod pieces;
mod safetensors;
mod torch;

use crate::checkpoint::Checkpoint;
use crate::dtype::Dtype;
use crate::region::Region;
use crate::value::{Segment, Value};

pub use cast::{Cast, cast};
pub use dcp::to_dcp;
pub use diff::{Difference, diff};
pub use error::Error;
pub use safetensors::{to_safetensors, to_safetensors_folder};
pub use torch::{TorchFile, to_torch};

/// A tensor of a [`Source`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The key.
    pub fqn: String,
    /// Its path in the nested state dict.
    pub path: Vec<Segment>,
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<u64>,
}

impl Tensor {
    /// Bytes of all elements.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        Region::whole(&self.shape).elements().saturating_mul(self.dtype.size() as u64)
    }
}

/// An object of a [`Source`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// The key.
    pub fqn: String,
    /// Its path in the nested state dict.
    pub path: Vec<Segment>,
}

/// Something that holds a state dict.
pub trait Source {
    /// All tensors, in order of their keys.
    fn tensors(&self) -> Vec<Tensor>;

    /// Reads a region of a tensor: elements in C order, little-endian.
    ///
    /// # Errors
    /// As [`Checkpoint::read`].
    fn read(&self, tensor: &Tensor, region: &Region, into: &mut [u8]) -> Result<(), Error>;

    /// All objects, in order of their keys.
    fn objects(&self) -> Vec<Object> {
        Vec::new()
    }

    /// An object's value, opaque for what is no plain data.
    ///
    /// # Errors
    /// When there is no such object, or its bytes are damaged.
    fn value(&self, object: &Object) -> Result<Value, Error> {
        Err(Error::Name { fqn: object.fqn.clone(), detail: "is no object here".to_owned() })
    }

    /// An object as PyTorch wrote it, where that is kept.
    ///
    /// # Errors
    /// As [`value`](Self::value).
    fn archive(&self, _object: &Object) -> Result<Option<Vec<u8>>, Error> {
        Ok(None)
    }
}

/// What a conversion wrote.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Tensors.
    pub tensors: usize,
    /// Bytes of their elements.
    pub bytes: u64,
    /// Objects.
    pub objects: usize,
    /// Keys that the target cannot hold.
    pub skipped: Vec<String>,
}

/// Told after every piece: bytes done, and bytes in all.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

impl Source for Checkpoint {
    fn tensors(&self) -> Vec<Tensor> {
        let tensors = Self::tensors(self).map(|tensor| Tensor {
            fqn: tensor.fqn.to_owned(),
            path: path_of(self, tensor.fqn),
            dtype: tensor.dtype,
            shape: tensor.shape.to_vec(),
        });
        tensors.collect()
    }

    fn read(&self, tensor: &Tensor, region: &Region, into: &mut [u8]) -> Result<(), Error> {
        Ok(Self::read(self, &tensor.fqn, region, into)?)
    }

    fn objects(&self) -> Vec<Object> {
        let object = |fqn: &str| Object { fqn: fqn.to_owned(), path: path_of(self, fqn) };
        Self::objects(self).map(object).collect()
    }

    fn value(&self, object: &Object) -> Result<Value, Error> {
        Ok(self.object(&object.fqn)?)
    }

    fn archive(&self, object: &Object) -> Result<Option<Vec<u8>>, Error> {
        Ok(Some(self.object_archive(&object.fqn)?))
    }
}

fn path_of(checkpoint: &Checkpoint, fqn: &str) -> Vec<Segment> {
    checkpoint.path(fqn).map_or_else(|| vec![fqn.into()], <[Segment]>::to_vec)
}
