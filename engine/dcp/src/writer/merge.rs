//! Merges what the ranks wrote into the index. Linear in the number of shards,
//! but for sorting: 100,000 of them take a fraction of a second.

use std::collections::hash_map::Entry as Slot;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use crate::digest::{Digest, FileDigest, SUMS, to_sums};
use crate::dtype::Dtype;
use crate::error::Error;
use crate::index::{self, Chunk, Form, Index, METADATA, Place, TensorEntry, check_name};
use crate::region::Region;
use crate::storage::Dir;

use super::{Entry, Kind, ShardIndex, beside, check_path, check_region, conflict, sync};

/// Merges what the ranks wrote into `.metadata`, durably: afterwards PyTorch
/// takes `stage` for a checkpoint. `B3SUMS` lists the digests of all files.
/// Returns the digest of the index itself.
///
/// # Errors
/// When shards overlap, leave holes, contradict each other, or their files are
/// not in `stage` in full; or the disk refuses.
pub fn write_metadata(stage: &Path, shards: &[ShardIndex]) -> Result<FileDigest, Error> {
    write_index(&beside(stage)?, shards)
}

/// [`write_metadata`] for a directory anywhere.
///
/// # Errors
/// The same.
pub fn write_index(stage: &Dir, shards: &[ShardIndex]) -> Result<FileDigest, Error> {
    for shard in shards {
        shard.file.check_size(stage)?;
    }
    let index = merge(shards)?;
    let bytes = index::write::pickle(&index, &save_id(shards))?;
    let metadata = FileDigest {
        name: METADATA.to_owned(),
        bytes: bytes.len() as u64,
        blake3: Digest::of(&bytes),
    };
    let mut files: Vec<FileDigest> = shards.iter().map(|shard| shard.file.clone()).collect();
    files.push(metadata.clone());
    stage.replace(SUMS, to_sums(&files).as_bytes())?;
    stage.replace(METADATA, &bytes)?;
    sync(stage)?;
    Ok(metadata)
}

/// A UUID that depends on nothing but the contents: equal states give equal
/// checkpoints, byte for byte.
fn save_id(shards: &[ShardIndex]) -> String {
    let mut hash = blake3::Hasher::new();
    shards.iter().for_each(|shard| {
        hash.update(&shard.file.blake3.0);
    });
    let mut half = [0; 16];
    hash.finalize_xof().fill(&mut half);
    uuid::Builder::from_random_bytes(half).into_uuid().to_string()
}

/// What is known about a key so far, and the first entry that told.
struct Found<'a> {
    first: &'a Entry,
    what: What<'a>,
}

enum What<'a> {
    /// Shards by offset: PyTorch looks them up by it.
    Tensor(BTreeMap<&'a [u64], Chunk>),
    Object(Place),
}

fn merge(shards: &[ShardIndex]) -> Result<Index, Error> {
    let mut index = Index::default();
    let mut names = BTreeSet::new();
    let mut found: HashMap<&str, Found<'_>> = HashMap::new();
    for (file, shard) in (0..).zip(shards) {
        let name = &shard.file.name;
        check_name(name).map_err(|detail| conflict(name, detail))?;
        if !names.insert(name) {
            return Err(conflict(name, "two ranks wrote this file"));
        }
        index.files.push(name.clone());
        for entry in &shard.entries {
            let (offset, length) = (entry.offset, entry.length);
            let place = Place { file, offset, length, form: Form::Archive };
            merge_entry(&mut found, entry, place)?;
        }
    }
    for (fqn, Found { first, what }) in found {
        index.paths.insert(fqn.to_owned(), first.path.clone());
        match (what, &first.kind) {
            (What::Tensor(chunks), Kind::Tensor { dtype, shape, .. }) => {
                let chunks = chunks.into_values().collect();
                let tensor = TensorEntry { dtype: *dtype, shape: shape.clone(), chunks };
                tensor
                    .check_cover(&Region::whole(shape))
                    .map_err(|detail| conflict(fqn, detail))?;
                index.tensors.insert(fqn.to_owned(), tensor);
            }
            (What::Object(place), _) => {
                index.objects.insert(fqn.to_owned(), place);
            }
            (What::Tensor(_), Kind::Object) => {}
        }
    }
    Ok(index)
}

fn merge_entry<'a>(
    found: &mut HashMap<&'a str, Found<'a>>,
    entry: &'a Entry,
    place: Place,
) -> Result<(), Error> {
    let fqn = &entry.fqn;
    check_path(fqn, &entry.path)?;
    let known = match found.entry(fqn) {
        Slot::Occupied(known) => known.into_mut(),
        Slot::Vacant(slot) => match &entry.kind {
            Kind::Object => {
                slot.insert(Found { first: entry, what: What::Object(place) });
                return Ok(());
            }
            Kind::Tensor { .. } => {
                slot.insert(Found { first: entry, what: What::Tensor(BTreeMap::new()) })
            }
        },
    };
    if known.first.path != entry.path {
        return Err(conflict(fqn, "two ranks give it different paths"));
    }
    match (&mut known.what, &entry.kind) {
        (What::Tensor(chunks), Kind::Tensor { dtype, shape, region }) => {
            check_region(*dtype, shape, region).map_err(|detail| conflict(fqn, detail))?;
            check_same(known.first, *dtype, shape)?;
            let chunk = Chunk { region: region.clone(), place };
            merge_chunk(chunks, &region.offsets, chunk).map_err(|detail| conflict(fqn, detail))
        }
        (What::Object(_), Kind::Object) => Err(conflict(fqn, "two ranks wrote this object")),
        _ => Err(conflict(fqn, "is both a tensor and an object")),
    }
}

/// All ranks mean the same tensor.
fn check_same(first: &Entry, dtype: Dtype, shape: &[u64]) -> Result<(), Error> {
    match &first.kind {
        Kind::Tensor { dtype: d, shape: s, .. } if (*d, s.as_slice()) != (dtype, shape) => {
            let detail = format!(
                "is a {d} of shape {s:?} on one rank and a {dtype} of shape {shape:?} on another"
            );
            Err(conflict(&first.fqn, detail))
        }
        _ => Ok(()),
    }
}

/// Empty shards of several ranks may share an offset, with each other or with
/// the shard that begins there; one entry stays.
fn merge_chunk<'a>(
    chunks: &mut BTreeMap<&'a [u64], Chunk>,
    offsets: &'a [u64],
    chunk: Chunk,
) -> Result<(), String> {
    match chunks.get(offsets) {
        Some(other) if !chunk.region.is_empty() && !other.region.is_empty() => {
            return Err(format!(
                "two ranks wrote the shards {} and {}",
                other.region, chunk.region
            ));
        }
        Some(_) if chunk.region.is_empty() => {}
        _ => {
            chunks.insert(offsets, chunk);
        }
    }
    Ok(())
}
