//! Which kind of checkpoint a folder holds, from the names in it.

use std::collections::HashMap;

use super::{Index, METADATA, read, safetensors};
use crate::error::Error;
use crate::storage::Dir;

/// The index of Llama-3-8B over 256 ranks has 32 MB.
const INDEX_LIMIT: u64 = 1 << 30;

/// Reads the index of a folder, whatever form it has.
pub(crate) fn find(dir: &Dir) -> Result<Index, Error> {
    match dir.read(METADATA, INDEX_LIMIT) {
        Err(error) if error.is_not_found() => {}
        bytes => return read::parse(&bytes?, &dir.path_of(METADATA)),
    }
    let names = match dir.list() {
        Err(error) if error.is_not_found() => Vec::new(),
        names => names?,
    };
    let mut ranks: Vec<(u64, &String)> =
        names.iter().filter_map(|name| Some((rank(name)?, name))).collect();
    ranks.sort_unstable();
    if !ranks.is_empty() {
        let parse = |name: &String| read::parse(&dir.read(name, INDEX_LIMIT)?, &dir.path_of(name));
        return merge(dir, ranks.iter().map(|(_, name)| parse(name)));
    }
    let shards: Vec<&str> =
        names.iter().map(String::as_str).filter(|name| name.ends_with(".safetensors")).collect();
    if shards.is_empty() {
        return Err(Error::NoIndex(dir.path()));
    }
    safetensors::read(dir, &names, &shards)
}

/// The rank of an index that was saved without collectives.
fn rank(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("__")?.strip_suffix(METADATA)?;
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    digits.parse().ok()
}

/// Each rank's index tells its own shards, and what it holds like all others:
/// of an item that several ranks saved, that of the lowest rank counts.
fn merge(dir: &Dir, indices: impl Iterator<Item = Result<Index, Error>>) -> Result<Index, Error> {
    let mut all = Index::default();
    let mut numbers: HashMap<String, u32> = HashMap::new();
    for index in indices {
        let index = index?;
        let number = |name: String| {
            let next = all.files.len() as u32;
            *numbers.entry(name).or_insert_with_key(|name| {
                all.files.push(name.clone());
                next
            })
        };
        let files: Vec<u32> = index.files.into_iter().map(number).collect();
        for (fqn, mut tensor) in index.tensors {
            tensor.chunks.iter_mut().for_each(|c| c.place.file = files[c.place.file as usize]);
            match all.tensors.get_mut(&fqn) {
                None => drop(all.tensors.insert(fqn, tensor)),
                Some(known) if known.shape == tensor.shape && known.dtype == tensor.dtype => {
                    let new = |offsets: &[u64]| {
                        known.chunks.iter().all(|chunk| chunk.region.offsets != offsets)
                    };
                    tensor.chunks.retain(|chunk| new(&chunk.region.offsets));
                    known.chunks.extend(tensor.chunks);
                }
                Some(known) => {
                    let detail = format!(
                        "is a {} of shape {:?} on one rank and a {} of shape {:?} on another",
                        known.dtype, known.shape, tensor.dtype, tensor.shape
                    );
                    return Err(Error::Entry { path: dir.path(), fqn, detail });
                }
            }
        }
        for (fqn, mut place) in index.objects {
            place.file = files[place.file as usize];
            all.objects.entry(fqn).or_insert(place);
        }
        for (fqn, path) in index.paths {
            all.paths.entry(fqn).or_insert(path);
        }
    }
    Ok(all)
}
