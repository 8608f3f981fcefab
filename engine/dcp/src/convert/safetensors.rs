//! Into safetensors: one file, or a folder of several with Hugging Face's index.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;

use crate::dtype::Dtype;
use crate::region::Region;
use crate::storage::Upload;

use super::fresh::Fresh;
use super::pieces::Pieces;
use super::{Error, Progress, Report, Source, Tensor};

/// Writes all tensors into one file; objects are skipped, the format has none.
///
/// # Errors
/// When the target exists, a type has no name in safetensors, the source is
/// damaged, or the disk refuses.
pub fn to_safetensors(
    source: &dyn Source,
    to: &Path,
    progress: Progress<'_>,
) -> Result<Report, Error> {
    let fresh = Fresh::at(to)?;
    let tensors = ordered(source);
    let mut pieces = Pieces::new(source, &tensors, progress);
    write(&mut pieces, &tensors, fresh.file()?, &fresh)?;
    fresh.keep()?;
    Ok(report(source, &tensors))
}

/// Writes a folder as Hugging Face's `save_pretrained` does: `model.safetensors`,
/// or with more than `limit` bytes `model-00001-of-0000N.safetensors` and
/// `model.safetensors.index.json`. `extra` files are written beside them.
///
/// # Errors
/// As [`to_safetensors`].
pub fn to_safetensors_folder(
    source: &dyn Source,
    to: &Path,
    limit: u64,
    extra: &[(String, Vec<u8>)],
    progress: Progress<'_>,
) -> Result<Report, Error> {
    let fresh = Fresh::at(to)?;
    let dir = fresh.dir();
    dir.make()?;
    let tensors = source.tensors();
    let mut pieces = Pieces::new(source, &tensors, progress);
    let shards = cut(tensors.clone(), limit);
    let mut weight_map = BTreeMap::new();
    for (n, shard) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => "model.safetensors".to_owned(),
            count => format!("model-{:05}-of-{count:05}.safetensors", n + 1),
        };
        write(&mut pieces, shard, dir.create(&name)?, &fresh)?;
        weight_map.extend(shard.iter().map(|tensor| (tensor.fqn.clone(), name.clone())));
    }
    if shards.len() > 1 {
        let total_size = tensors.iter().map(Tensor::bytes).sum();
        let index = Index { metadata: Total { total_size }, weight_map };
        dir.replace("model.safetensors.index.json", &json(&index, true))?;
    }
    extra.iter().try_for_each(|(name, bytes)| dir.replace(name, bytes))?;
    dir.sync()?;
    fresh.keep()?;
    Ok(report(source, &tensors))
}

#[derive(Serialize)]
struct Index {
    metadata: Total,
    weight_map: BTreeMap<String, String>,
}

#[derive(Serialize)]
struct Total {
    total_size: u64,
}

#[derive(Serialize)]
struct Entry<'a> {
    dtype: &'static str,
    shape: &'a [u64],
    data_offsets: [u64; 2],
}

#[derive(Serialize)]
struct Header<'a> {
    #[serde(rename = "__metadata__")]
    metadata: BTreeMap<&'static str, &'static str>,
    #[serde(flatten)]
    tensors: BTreeMap<&'a str, Entry<'a>>,
}

/// Writes one file: the length of the header, the header, the elements.
fn write(
    pieces: &mut Pieces<'_>,
    tensors: &[Tensor],
    mut file: Box<dyn Upload>,
    fresh: &Fresh,
) -> Result<(), Error> {
    let mut entries = BTreeMap::new();
    let mut at = 0;
    for tensor in tensors {
        let data_offsets = [at, at + tensor.bytes()];
        let entry = Entry { dtype: name(tensor)?, shape: &tensor.shape, data_offsets };
        entries.insert(tensor.fqn.as_str(), entry);
        at += tensor.bytes();
    }
    let metadata = BTreeMap::from([("format", "pt")]);
    let mut header = json(&Header { metadata, tensors: entries }, false);
    // Elements begin at a multiple of eight.
    header.resize(header.len().next_multiple_of(8), b' ');
    fresh.told(file.write(&(header.len() as u64).to_le_bytes()))?;
    fresh.told(file.write(&header))?;
    for tensor in tensors {
        let whole = Region::whole(&tensor.shape);
        pieces.stream(tensor, &whole, |bytes| fresh.told(file.write(bytes)))?;
    }
    Ok(fresh.told(file.finish())?)
}

/// Largest elements first, so that all are aligned.
fn ordered(source: &dyn Source) -> Vec<Tensor> {
    let mut tensors = source.tensors();
    tensors.sort_by_key(|tensor| std::cmp::Reverse(tensor.dtype.size()));
    tensors
}

/// Tensors in the files that hold them; at least one file.
fn cut(tensors: Vec<Tensor>, limit: u64) -> Vec<Vec<Tensor>> {
    let mut shards = vec![Vec::new()];
    let mut room = limit;
    for tensor in tensors {
        if tensor.bytes() > room && shards.last().is_some_and(|shard| !shard.is_empty()) {
            shards.push(Vec::new());
            room = limit;
        }
        room = room.saturating_sub(tensor.bytes());
        shards.last_mut().into_iter().for_each(|shard| shard.push(tensor.clone()));
    }
    for shard in &mut shards {
        shard.sort_by_key(|tensor| std::cmp::Reverse(tensor.dtype.size()));
    }
    shards
}

fn report(source: &dyn Source, tensors: &[Tensor]) -> Report {
    Report {
        tensors: tensors.len(),
        bytes: tensors.iter().map(Tensor::bytes).sum(),
        objects: 0,
        skipped: source.objects().into_iter().map(|object| object.fqn).collect(),
    }
}

fn json(value: &impl Serialize, pretty: bool) -> Vec<u8> {
    let text = if pretty { serde_json::to_vec_pretty(value) } else { serde_json::to_vec(value) };
    // Maps of text and numbers have no way to fail.
    text.unwrap_or_default()
}

fn name(tensor: &Tensor) -> Result<&'static str, Error> {
    Ok(match tensor.dtype {
        Dtype::F64 => "F64",
        Dtype::F32 => "F32",
        Dtype::F16 => "F16",
        Dtype::BF16 => "BF16",
        Dtype::I64 => "I64",
        Dtype::I32 => "I32",
        Dtype::I16 => "I16",
        Dtype::I8 => "I8",
        Dtype::U64 => "U64",
        Dtype::U32 => "U32",
        Dtype::U16 => "U16",
        Dtype::U8 => "U8",
        Dtype::Bool => "BOOL",
        Dtype::C64 => "C64",
        Dtype::F8E4M3Fn => "F8_E4M3",
        Dtype::F8E5M2 => "F8_E5M2",
        Dtype::F8E8M0Fnu => "F8_E8M0",
        other => {
            let detail = format!("safetensors has no name for {other}: convert it to another type");
            return Err(Error::Name { fqn: tensor.fqn.clone(), detail });
        }
    })
}
