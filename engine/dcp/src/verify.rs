//! Checks everything that can be checked about a checkpoint.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use crate::checkpoint::Checkpoint;
use crate::digest::{FileDigest, SUMS, from_sums};
use crate::dtype::Dtype;
use crate::error::{Error, SliceError};
use crate::index::{Chunk, Form, METADATA};
use crate::item::{Edges, piece_of};
use crate::load::{check_tensor, in_parallel};
use crate::payload::Tensor;
use crate::region::Region;
use crate::storage::Object;

/// How many different problems are told; the rest is counted.
const TOLD: usize = 4;
/// A line for each data file.
const SUMS_LIMIT: u64 = 64 << 20;

/// What a verification looked at, and found good.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerifyReport {
    /// Data files.
    pub files: usize,
    /// Tensors.
    pub tensors: usize,
    /// Shards of tensors.
    pub shards: usize,
    /// Objects.
    pub objects: usize,
    /// Payload bytes of all shards.
    pub bytes: u64,
    /// True when `B3SUMS` was there and every file was checked against it.
    /// PyTorch writes none: then only the CRC-32 of every slice vouches.
    pub digests: bool,
}

impl Checkpoint {
    /// Reads everything: that every shard is where the index says and is what
    /// it says, with the right CRC-32, that shards cover every tensor exactly
    /// once, that objects can be read, and the digests of whole files where we
    /// wrote them.
    ///
    /// # Errors
    /// [`Error::Damaged`], which names the damaged places.
    pub fn verify(&self) -> Result<VerifyReport, Error> {
        let mut report = VerifyReport { files: self.index.files.len(), ..VerifyReport::default() };
        let problems = Mutex::new(Problems::default());
        let add = |problem| problems.lock().unwrap_or_else(PoisonError::into_inner).add(problem);
        let mut items = Vec::new();
        for (fqn, entry) in &self.index.tensors {
            report.tensors += 1;
            report.shards += entry.chunks.len();
            report.bytes += entry.chunks.iter().map(|chunk| chunk.bytes(entry.dtype)).sum::<u64>();
            if let Err(detail) = entry.check_cover(&Region::whole(&entry.shape)) {
                add(self.bad_cover(fqn, detail));
            }
            items.extend(entry.chunks.iter().map(|chunk| (fqn, Some((entry.dtype, chunk)))));
        }
        report.objects = self.index.objects.len();
        items.extend(self.index.objects.keys().map(|fqn| (fqn, None)));
        in_parallel(self.threads(), items, |(fqn, tensor)| {
            let checked = match tensor {
                Some((dtype, chunk)) => self.check_chunk(fqn, dtype, chunk),
                None => self.object(fqn).map(drop),
            };
            checked.or_else(|problem| {
                add(problem);
                Ok(())
            })
        })?;
        let mut problems = problems.into_inner().unwrap_or_else(PoisonError::into_inner);
        match self.check_sums() {
            Ok(found) => report.digests = found,
            Err(problem) => problems.add(problem),
        }
        if problems.count == 0 {
            return Ok(report);
        }
        let Problems { count, first } = problems;
        Err(Error::Damaged { path: self.dir().path(), count, first })
    }

    fn check_chunk(&self, fqn: &str, dtype: Dtype, chunk: &Chunk) -> Result<(), Error> {
        let (place, sizes) = (chunk.place, &chunk.region.sizes);
        let item = self.item(fqn, place, chunk.bytes(dtype))?;
        let tensor = match place.form {
            Form::Raw => Tensor::raw(dtype, sizes, item.len()),
            _ => Edges::of(&item).and_then(|item| check_tensor(&item, dtype, sizes)),
        };
        tensor
            .and_then(|tensor| check_storage(&item, &tensor))
            .map_err(|source| self.bad_slice(fqn, place, source))
    }

    /// `false` when there are no digests to check.
    fn check_sums(&self) -> Result<bool, Error> {
        let dir = self.dir();
        if !dir.exists(SUMS)? {
            return Ok(false);
        }
        let bad = |detail: &str| Error::Entry {
            path: dir.path_of(SUMS),
            fqn: SUMS.to_owned(),
            detail: detail.to_owned(),
        };
        let text = dir.read(SUMS, SUMS_LIMIT)?;
        let sums = str::from_utf8(&text).ok().and_then(from_sums);
        let sums = sums.ok_or_else(|| bad("is not a list of digests"))?;
        let mut missing: BTreeSet<&str> = self.index.files.iter().map(String::as_str).collect();
        missing.insert(METADATA);
        for (stored, name) in sums {
            // Other names are not ours to open.
            if missing.remove(name) && FileDigest::of(dir, name)?.blake3 != stored {
                return Err(Error::Digest { path: dir.path_of(name), stored });
            }
        }
        match missing.first() {
            None => Ok(true),
            Some(name) => Err(bad(&format!("has no digest of {name}"))),
        }
    }
}

#[derive(Default)]
struct Problems {
    count: usize,
    first: Vec<Error>,
}

impl Problems {
    fn add(&mut self, problem: Error) {
        self.count += 1;
        // A missing file is missed by each of its shards.
        let new = |told: &Error| told.to_string() != problem.to_string();
        if self.first.len() < TOLD && self.first.iter().all(new) {
            self.first.push(problem);
        }
    }
}

/// Reads a storage through, and compares its CRC-32.
fn check_storage(item: &dyn Object, tensor: &Tensor) -> Result<(), SliceError> {
    let mut crc = crc32fast::Hasher::new();
    let mut buffer = vec![0; tensor.storage.size.min(piece_of(item) as u64) as usize];
    let (mut at, end) = (tensor.at, tensor.at + tensor.storage.size);
    while at < end {
        let piece = (end - at).min(buffer.len() as u64) as usize;
        item.read_at(at, &mut buffer[..piece]).map_err(crate::zip::Error::Io)?;
        crc.update(&buffer[..piece]);
        at += piece as u64;
    }
    Ok(tensor.storage.check(crc.finalize())?)
}
