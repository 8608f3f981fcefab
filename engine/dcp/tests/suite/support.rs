//! Checkpoints to test with.

use std::path::Path;

use dcp::{Dtype, FileDigest, Region, Segment, ShardIndex, ShardWriter, Value, write_metadata};

/// A tensor with all of its bytes.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) fqn: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: Vec<u8>,
}

impl Tensor {
    /// A tensor whose bytes follow from its name.
    pub(crate) fn new(fqn: &str, dtype: Dtype, shape: &[u64]) -> Self {
        let count = shape.iter().product::<u64>() as usize * dtype.size();
        let mut state = fqn.bytes().fold(0x9e37_79b9_u32, |s, b| s.rotate_left(5) ^ u32::from(b));
        let bytes = std::iter::repeat_with(|| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        });
        Self {
            fqn: fqn.to_owned(),
            dtype,
            shape: shape.to_vec(),
            bytes: bytes.take(count).collect(),
        }
    }

    /// The bytes of a region, one element at a time: slow and plainly right.
    pub(crate) fn region(&self, region: &Region) -> Vec<u8> {
        let mut out = Vec::new();
        for n in 0..region.elements() {
            let (mut rest, mut at, mut stride) = (n, 0, 1);
            for d in (0..self.shape.len()).rev() {
                at += (region.offsets[d] + rest % region.sizes[d]) * stride;
                rest /= region.sizes[d];
                stride *= self.shape[d];
            }
            let item = self.dtype.size();
            out.extend(&self.bytes[at as usize * item..][..item]);
        }
        out
    }
}

/// The digest in which PyTorch's side of a comparison comes.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest as _;
    hex::encode(sha2::Sha256::digest(bytes))
}

/// The part of rank `rank` of `ranks` along dimension `dim`, as torch.chunk cuts.
pub(crate) fn cut(shape: &[u64], dim: usize, rank: u64, ranks: u64) -> Region {
    let mut region = Region::whole(shape);
    let (size, step) = (shape[dim], shape[dim].div_ceil(ranks));
    region.offsets[dim] = (rank * step).min(size);
    region.sizes[dim] = ((rank + 1) * step).min(size) - region.offsets[dim];
    region
}

/// A path of one key.
pub(crate) fn path(fqn: &str) -> Vec<Segment> {
    vec![fqn.into()]
}

/// Writes a small model over two ranks into `stage`.
pub(crate) fn save(stage: &Path, step: i64) -> (Vec<ShardIndex>, Vec<FileDigest>) {
    let tensors = [
        Tensor::new(&format!("tok_embeddings.weight.{step}"), Dtype::F32, &[7, 6]),
        Tensor::new("norm.weight", Dtype::F32, &[5]),
    ];
    let mut shards = Vec::new();
    for rank in 0..2 {
        let mut writer = ShardWriter::create(stage, rank).unwrap();
        for tensor in &tensors {
            let region = cut(&tensor.shape, 0, rank.into(), 2);
            let bytes = tensor.region(&region);
            let Tensor { fqn, dtype, shape, .. } = tensor;
            writer.tensor(fqn, &path(fqn), *dtype, shape, &region, &bytes).unwrap();
        }
        if rank == 0 {
            let path = ["train_state".into(), "step".into()];
            writer.object("train_state.step", &path, &Value::Int(step)).unwrap();
        }
        shards.push(writer.finish().unwrap());
    }
    let metadata = write_metadata(stage, &shards).unwrap();
    let mut files: Vec<FileDigest> = shards.iter().map(|shard| shard.file.clone()).collect();
    files.push(metadata);
    (shards, files)
}
