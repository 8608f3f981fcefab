//! The index of a checkpoint, `.metadata`: which tensors and objects there are,
//! and in which bytes of which file each shard lies. Per-rank indices and the
//! headers of safetensors files make an index of the same kind.

mod find;
pub(crate) mod read;
pub(crate) mod safetensors;
pub(crate) mod write;

use std::collections::BTreeMap;

use crate::dtype::Dtype;
use crate::region::{Region, elements, overlap};
use crate::value::Segment;

pub(crate) use find::find;

/// The name of the index. A checkpoint exists for PyTorch when it does.
pub(crate) const METADATA: &str = ".metadata";

/// Names of Python's modules.
const TYPES: &str = "torch.distributed.checkpoint.metadata";
const FILES: &str = "torch.distributed.checkpoint.filesystem";

/// An index in memory. Every shard is known to lie in its tensor.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Index {
    pub(crate) tensors: BTreeMap<String, TensorEntry>,
    pub(crate) objects: BTreeMap<String, Place>,
    pub(crate) paths: BTreeMap<String, Vec<Segment>>,
    /// Data files, relative to the checkpoint.
    pub(crate) files: Vec<String>,
}

/// A tensor and its shards.
#[derive(Debug, PartialEq)]
pub(crate) struct TensorEntry {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) chunks: Vec<Chunk>,
}

/// A shard: which part of the tensor, and where its bytes are.
#[derive(Debug, PartialEq)]
pub(crate) struct Chunk {
    pub(crate) region: Region,
    pub(crate) place: Place,
}

/// A slice of a data file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Position in [`Index::files`].
    pub(crate) file: u32,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) form: Form,
}

/// What the bytes of a slice are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// The archive that `torch.save` writes.
    Archive,
    /// The same, as one zstd stream.
    Zstd,
    /// The elements themselves, in C order.
    Raw,
}

impl Chunk {
    /// Bytes of the elements.
    pub(crate) fn bytes(&self, dtype: Dtype) -> u64 {
        self.region.elements().saturating_mul(dtype.size() as u64)
    }
}

impl TensorEntry {
    /// Checks that the parts of the shards that lie in `region` cover it
    /// exactly once. What is wrong otherwise.
    pub(crate) fn check_cover(&self, region: &Region) -> Result<(), String> {
        let parts: Vec<Region> =
            self.chunks.iter().filter_map(|chunk| chunk.region.intersect(region)).collect();
        let parts: Vec<&Region> = parts.iter().collect();
        if let Some((one, other)) = overlap(&parts)? {
            return Err(format!(
                "two shards hold elements of both {} and {}",
                parts[one], parts[other]
            ));
        }
        let (held, wanted) =
            (parts.iter().map(|part| part.elements()).sum::<u64>(), region.elements());
        if held == wanted {
            return Ok(());
        }
        let missing = wanted.saturating_sub(held);
        Err(format!("no shard holds {missing} of the {wanted} elements of {region}"))
    }
}

/// Checks that a tensor of this shape can exist: every element has a 63-bit
/// byte position, so that no later arithmetic overflows.
pub(crate) fn check_shape(dtype: Dtype, shape: &[u64]) -> Result<(), String> {
    if shape.len() > 64 {
        return Err(format!("{} dimensions are more than 64", shape.len()));
    }
    let padded: Vec<u64> = shape.iter().map(|&size| size.max(1)).collect();
    if elements(&padded).checked_mul(dtype.size() as u64).is_none_or(|n| n > i64::MAX as u64) {
        return Err(format!("a {dtype} tensor of shape {shape:?} is too large to exist"));
    }
    Ok(())
}

/// Checks that a data file's name stays in the checkpoint's directory.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    let good = !name.is_empty()
        && !name.contains('\0')
        && std::path::Path::new(name)
            .components()
            .all(|part| matches!(part, std::path::Component::Normal(_)));
    if good { Ok(()) } else { Err(format!("file name {name:?} leaves the checkpoint")) }
}
