//! The index of safetensors files: their headers. PyTorch's Hugging Face writer
//! puts each rank's shards into a file and says in its header where they belong;
//! other files hold whole tensors.

use std::collections::{BTreeMap, HashMap};

use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;

use super::{Chunk, Form, Index, Place, TensorEntry, check_name, check_shape};
use crate::dtype::Dtype;
use crate::error::Error;
use crate::region::Region;
use crate::storage::Dir;
use crate::value::Segment;

/// The names of a repository's index, by which only the files it lists belong
/// to the model.
const WEIGHT_MAPS: [&str; 2] =
    ["model.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.json"];
/// The format's own limit.
const HEADER_LIMIT: u64 = 100_000_000;

#[derive(Deserialize)]
struct WeightMap {
    weight_map: BTreeMap<String, String>,
}

/// Where PyTorch's writer says that a shard begins.
#[derive(Deserialize)]
struct Saved {
    saved_offsets: Vec<u64>,
}

/// A shard before the tensor's shape is known.
struct Shard {
    dtype: Dtype,
    region: Region,
    place: Place,
}

/// Reads the headers of the files `shards`, or of those that an index among
/// `names` lists.
pub(crate) fn read(dir: &Dir, names: &[String], shards: &[&str]) -> Result<Index, Error> {
    let map = WEIGHT_MAPS.into_iter().find(|map| names.iter().any(|name| name == map));
    let map = map.map(|map| weight_map(dir, map)).transpose()?;
    let files = match &map {
        None => shards.iter().map(|&name| name.to_owned()).collect(),
        Some(map) => {
            let mut files: Vec<String> = map.values().cloned().collect();
            files.sort_unstable();
            files.dedup();
            files
        }
    };
    let mut index = Index { files, ..Index::default() };
    let mut found: BTreeMap<String, Vec<Shard>> = BTreeMap::new();
    for (number, name) in index.files.iter().enumerate() {
        header(dir, name, number as u32, &mut found)?;
    }
    for (fqn, shards) in found {
        let tensor = join(&shards).map_err(|detail| entry(dir, "", &fqn, detail))?;
        index.paths.insert(fqn.clone(), vec![Segment::Key(fqn.clone())]);
        index.tensors.insert(fqn, tensor);
    }
    for (fqn, name) in map.iter().flatten() {
        if !index.tensors.contains_key(fqn) {
            return Err(entry(dir, name, fqn, "is listed in the index, but not in the file"));
        }
    }
    Ok(index)
}

fn weight_map(dir: &Dir, name: &str) -> Result<BTreeMap<String, String>, Error> {
    let bytes = dir.read(name, HEADER_LIMIT)?;
    let map: WeightMap = serde_json::from_slice(&bytes)
        .map_err(|e| entry(dir, name, "weight_map", e.to_string()))?;
    for (fqn, file) in &map.weight_map {
        check_name(file).map_err(|detail| entry(dir, name, fqn, detail))?;
    }
    Ok(map.weight_map)
}

/// Adds the shards of one file.
fn header(
    dir: &Dir,
    name: &str,
    file: u32,
    found: &mut BTreeMap<String, Vec<Shard>>,
) -> Result<(), Error> {
    let wrong = |detail: String| entry(dir, name, "header", detail);
    let object = dir.open(name)?;
    let told = |source| Error::Io { action: "read", path: dir.path_of(name), source };
    let mut length = [0; 8];
    if object.len() < 8 {
        return Err(wrong(format!("the file has {} bytes, its length alone 8", object.len())));
    }
    object.read_at(0, &mut length).map_err(told)?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_LIMIT || length > object.len() - 8 {
        let rest = object.len() - 8;
        return Err(wrong(format!(
            "it claims {length} bytes, the file holds {rest} and the format allows {HEADER_LIMIT}"
        )));
    }
    let mut bytes = vec![0; length as usize];
    object.read_at(8, &mut bytes).map_err(told)?;
    let header: Metadata = serde_json::from_slice(&bytes).map_err(|e| wrong(e.to_string()))?;
    let (start, size) = (8 + length, header.data_len() as u64);
    if start + size != object.len() {
        let found = object.len() - start;
        return Err(wrong(format!("its tensors have {size} bytes, the file holds {found}")));
    }
    let saved: Option<HashMap<String, Saved>> = header
        .metadata()
        .as_ref()
        .and_then(|metadata| metadata.get("DCP_SHARDING_INFO"))
        .map(|text| serde_json::from_str(text))
        .transpose()
        .map_err(|e| wrong(format!("DCP_SHARDING_INFO: {e}")))?;
    for (fqn, info) in header.tensors() {
        let offsets = saved.as_ref().and_then(|saved| saved.get(&fqn));
        let shard = shard(info, offsets.map(|saved| saved.saved_offsets.as_slice()), file, start)
            .map_err(|detail| entry(dir, name, &fqn, detail))?;
        found.entry(fqn).or_default().push(shard);
    }
    Ok(())
}

fn shard(
    info: &TensorInfo,
    offsets: Option<&[u64]>,
    file: u32,
    start: u64,
) -> Result<Shard, String> {
    let dtype =
        dtype(info.dtype).ok_or_else(|| format!("{} is not a type of PyTorch", info.dtype))?;
    let sizes: Vec<u64> = info.shape.iter().map(|&size| size as u64).collect();
    let offsets = offsets.map_or_else(|| vec![0; sizes.len()], <[u64]>::to_vec);
    if offsets.len() != sizes.len() {
        return Err(format!("it is saved at {offsets:?}, but has the shape {sizes:?}"));
    }
    let (from, to) = info.data_offsets;
    let (offset, length) = (start + from as u64, (to - from) as u64);
    let place = Place { file, offset, length, form: Form::Raw };
    Ok(Shard { dtype, region: Region { offsets, sizes }, place })
}

/// The tensor that shards make up: it reaches as far as the farthest of them.
fn join(shards: &[Shard]) -> Result<TensorEntry, String> {
    let dtype = shards[0].dtype;
    let mut shape = vec![0u64; shards[0].region.sizes.len()];
    for Shard { dtype: other, region, .. } in shards {
        if *other != dtype || region.sizes.len() != shape.len() {
            return Err("its shards differ in type or in dimensions".to_owned());
        }
        for (size, (offset, length)) in
            shape.iter_mut().zip(region.offsets.iter().zip(&region.sizes))
        {
            let end = offset.checked_add(*length).ok_or("its shards reach too far")?;
            *size = end.max(*size);
        }
    }
    check_shape(dtype, &shape)?;
    let mut chunks: Vec<Chunk> = shards
        .iter()
        .filter(|shard| !shard.region.is_empty())
        .map(|shard| Chunk { region: shard.region.clone(), place: shard.place })
        .collect();
    chunks.sort_by(|a, b| a.region.cmp(&b.region));
    Ok(TensorEntry { dtype, shape, chunks })
}

fn dtype(name: safetensors::Dtype) -> Option<Dtype> {
    use safetensors::Dtype as Theirs;
    Some(match name {
        Theirs::BOOL => Dtype::Bool,
        Theirs::U8 => Dtype::U8,
        Theirs::I8 => Dtype::I8,
        Theirs::F8_E5M2 => Dtype::F8E5M2,
        Theirs::F8_E4M3 => Dtype::F8E4M3Fn,
        Theirs::F8_E8M0 => Dtype::F8E8M0Fnu,
        Theirs::F8_E4M3FNUZ => Dtype::F8E4M3Fnuz,
        Theirs::F8_E5M2FNUZ => Dtype::F8E5M2Fnuz,
        Theirs::I16 => Dtype::I16,
        Theirs::U16 => Dtype::U16,
        Theirs::F16 => Dtype::F16,
        Theirs::BF16 => Dtype::BF16,
        Theirs::I32 => Dtype::I32,
        Theirs::U32 => Dtype::U32,
        Theirs::F32 => Dtype::F32,
        Theirs::C64 => Dtype::C64,
        Theirs::F64 => Dtype::F64,
        Theirs::I64 => Dtype::I64,
        Theirs::U64 => Dtype::U64,
        _ => return None,
    })
}

fn entry(dir: &Dir, name: &str, fqn: &str, detail: impl Into<String>) -> Error {
    Error::Entry { path: dir.path_of(name), fqn: fqn.to_owned(), detail: detail.into() }
}
