//! Checks everything that can be checked about a checkpoint.

use std::collections::BTreeSet;
use std::fs;
use std::io;

use crate::checkpoint::{Checkpoint, check_tensor};
use crate::digest::{FileDigest, SUMS, from_sums};
use crate::durable::At;
use crate::error::{Error, SliceError};
use crate::index::METADATA;
use crate::payload;
use crate::region::Region;
use crate::zip::read::ReadAt;

/// How many problems are told; the rest is counted.
const TOLD: usize = 16;

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
    /// True when `SHA256SUMS` was there and every file was checked against it.
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
        let mut problems = Problems::default();
        for (fqn, entry) in &self.index.tensors {
            report.tensors += 1;
            if let Err(detail) = entry.check_cover(&Region::whole(&entry.shape)) {
                problems.add(Error::Cover { fqn: fqn.clone(), detail });
            }
            for chunk in &entry.chunks {
                report.shards += 1;
                let checked = self.slice(fqn, chunk.place).and_then(|slice| {
                    check_tensor(&slice, entry.dtype, &chunk.region.sizes)
                        .and_then(|tensor| check_storage(&slice, &tensor))
                        .map_err(|source| self.bad_slice(fqn, chunk.place, source))
                });
                match checked {
                    Ok(bytes) => report.bytes += bytes,
                    Err(problem) => problems.add(problem),
                }
            }
        }
        for fqn in self.objects() {
            report.objects += 1;
            if let Err(problem) = self.object(fqn) {
                problems.add(problem);
            }
        }
        match self.check_sums() {
            Ok(found) => report.digests = found,
            Err(problem) => problems.add(problem),
        }
        if problems.count == 0 {
            return Ok(report);
        }
        let Problems { count, first } = problems;
        Err(Error::Damaged { path: self.directory().to_owned(), count, first })
    }

    /// `false` when there are no digests to check.
    fn check_sums(&self) -> Result<bool, Error> {
        let path = self.directory().join(SUMS);
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            text => text.at("read", &path)?,
        };
        let bad = |detail: &str| Error::Entry {
            path: path.clone(),
            fqn: SUMS.to_owned(),
            detail: detail.to_owned(),
        };
        let sums = from_sums(&text).ok_or_else(|| bad("is not a list of digests"))?;
        let mut missing: BTreeSet<&str> = self.index.files.iter().map(String::as_str).collect();
        missing.insert(METADATA);
        for (sha256, name) in sums {
            // Other names are not ours to open.
            if missing.remove(name) && FileDigest::of(self.directory(), name)?.sha256 != sha256 {
                return Err(Error::Digest { path: self.directory().join(name), stored: sha256 });
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
        if self.first.len() < TOLD {
            self.first.push(problem);
        }
    }
}

/// Reads a storage through, and compares its CRC-32. Its size in bytes.
fn check_storage(slice: &dyn ReadAt, tensor: &payload::Tensor) -> Result<u64, SliceError> {
    let mut crc = crc32fast::Hasher::new();
    let mut buffer = vec![0; tensor.storage.size.min(256 << 10) as usize];
    let (mut at, end) = (tensor.at, tensor.at + tensor.storage.size);
    while at < end {
        let piece = (end - at).min(buffer.len() as u64) as usize;
        slice.read_at(at, &mut buffer[..piece]).map_err(crate::zip::Error::Io)?;
        crc.update(&buffer[..piece]);
        at += piece as u64;
    }
    tensor.storage.check(crc.finalize())?;
    Ok(tensor.storage.size)
}
