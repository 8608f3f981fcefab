//! What a target needs of which shards, and how its memory is shared out.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use super::copy::{Job, Source};
use super::{check_fits, convert};
use crate::checkpoint::Checkpoint;
use crate::dtype::Dtype;
use crate::error::{Error, SliceError};
use crate::index::{Chunk, TensorEntry};
use crate::region::{Layout, Region, strides};

/// Bytes of a band: several for each core, and long reads.
const BAND: u64 = 4 << 20;

/// A target whose request was checked.
pub(super) struct Plan<'a> {
    pub(super) region: Region,
    entry: &'a TensorEntry,
    /// The type in memory.
    pub(super) dtype: Dtype,
    /// Distances in memory, in elements.
    strides: Vec<u64>,
    pub(super) parts: Vec<Part<'a>>,
}

/// A shard that holds elements of a target.
pub(super) struct Part<'a> {
    pub(super) fqn: &'a str,
    pub(super) chunk: &'a Chunk,
    pub(super) dtype: Dtype,
    /// The target needs all of it, so that its CRC-32 can be checked.
    whole: bool,
    source: OnceLock<Source>,
    /// Position, bytes and CRC-32 of what was read, by whichever thread.
    pieces: Mutex<Vec<(u64, u64, u32)>>,
}

impl<'a> Plan<'a> {
    pub(super) fn new(
        checkpoint: &'a Checkpoint,
        fqn: &'a str,
        region: Region,
        strides: Option<Vec<u64>>,
        dtype: Option<Dtype>,
        memory: usize,
    ) -> Result<Self, Error> {
        let entry = checkpoint.entry(fqn)?;
        let request = |detail| Error::Request { fqn: fqn.to_owned(), detail };
        check_fits(fqn, &region, &entry.shape)?;
        let dtype = dtype.unwrap_or(entry.dtype);
        if !convert::is_possible(entry.dtype, dtype) {
            return Err(request(format!("{} cannot be converted to {dtype}", entry.dtype)));
        }
        let strides = fit(&region, strides, dtype, memory as u64).map_err(request)?;
        entry.check_cover(&region).map_err(|detail| checkpoint.bad_cover(fqn, detail))?;
        let part = |chunk: &'a Chunk| {
            let part = chunk.region.intersect(&region)?;
            let whole = part == chunk.region;
            let (source, pieces) = (OnceLock::new(), Mutex::default());
            Some(Part { fqn, chunk, dtype: entry.dtype, whole, source, pieces })
        };
        let parts = entry.chunks.iter().filter_map(part).collect();
        Ok(Self { region, entry, dtype, strides, parts })
    }

    /// Bytes that the target needs, as they are saved.
    pub(super) fn bytes(&self) -> u64 {
        self.region.elements() * self.entry.dtype.size() as u64
    }

    /// The layout of a part of the memory that begins with the first element of
    /// `band`.
    pub(super) fn layout(&self, band: &Region) -> Layout {
        Layout::strided(band, 0, self.strides.clone())
    }

    /// Cuts the memory into bands. The sources are located.
    pub(super) fn bands<'p>(&'p self, memory: &'p mut [u8]) -> Vec<Job<'p>> {
        let mut jobs = Vec::new();
        if self.region.is_empty() {
            return jobs;
        }
        let Some((dim, rows)) = self.rows() else {
            jobs.extend(Job::new(self, self.region.clone(), memory));
            return jobs;
        };
        let row = self.strides[dim] as usize * self.dtype.size();
        let (mut rest, mut band) = (memory, self.region.clone());
        let end = self.region.offsets[dim] + self.region.sizes[dim];
        while band.offsets[dim] < end {
            band.sizes[dim] = rows.min(end - band.offsets[dim]);
            let bytes = (row * band.sizes[dim] as usize).min(rest.len());
            let (mine, others) = rest.split_at_mut(bytes);
            jobs.extend(Job::new(self, band.clone(), mine));
            rest = others;
            band.offsets[dim] += band.sizes[dim];
        }
        jobs
    }

    /// The dimension along which the memory can be cut, and the indices of a
    /// band; `None` when the memory is in another order, or when a shard must be
    /// rearranged, which happens in one go.
    fn rows(&self) -> Option<(usize, u64)> {
        let dim = self.region.sizes.iter().position(|&size| size > 1)?;
        let outermost = self.strides[dim + 1..]
            .iter()
            .zip(&self.region.sizes[dim + 1..])
            .all(|(&stride, &size)| size == 1 || stride <= self.strides[dim]);
        let simple = |part: &Part<'_>| part.source.get().is_some_and(Source::is_simple);
        let row = self.strides[dim] * self.dtype.size() as u64;
        (outermost && self.parts.iter().all(simple)).then(|| (dim, (BAND / row).max(1)))
    }
}

/// The distances of a region's elements in memory; what is wrong with them
/// otherwise.
fn fit(
    region: &Region,
    wanted: Option<Vec<u64>>,
    dtype: Dtype,
    memory: u64,
) -> Result<Vec<u64>, String> {
    let Some(wanted) = wanted else {
        let expected = region.elements().saturating_mul(dtype.size() as u64);
        if memory != expected {
            return Err(format!("{region} has {expected} bytes, the buffer {memory}"));
        }
        return Ok(strides(&region.sizes));
    };
    let dims = region.sizes.len();
    if wanted.len() != dims {
        return Err(format!("{} strides were given for {dims} dimensions", wanted.len()));
    }
    if region.is_empty() {
        return Ok(wanted);
    }
    let mut order: Vec<usize> = (0..dims).filter(|&d| region.sizes[d] > 1).collect();
    order.sort_by_key(|&d| wanted[d]);
    let mut end = 1u64;
    for d in order {
        if wanted[d] < end {
            return Err(format!("with the strides {wanted:?}, elements of {region} share memory"));
        }
        end = end.saturating_add((region.sizes[d] - 1).saturating_mul(wanted[d]));
    }
    let bytes = end.saturating_mul(dtype.size() as u64);
    if bytes > memory {
        return Err(format!(
            "{region} with the strides {wanted:?} needs {bytes} bytes, the buffer has {memory}"
        ));
    }
    Ok(wanted)
}

impl Part<'_> {
    /// Finds the elements in the file.
    pub(super) fn locate(&self, checkpoint: &Checkpoint, read: &AtomicU64) -> Result<(), Error> {
        let place = self.chunk.place;
        let item = checkpoint.item(self.fqn, place, self.chunk.bytes(self.dtype))?;
        let source = Source::locate(item, place.form, self.dtype, &self.chunk.region, read)
            .map_err(|source| checkpoint.bad_slice(self.fqn, place, source))?;
        // Two targets never share a part: nobody else has set it.
        let _ = self.source.set(source);
        Ok(())
    }

    pub(super) fn source(&self) -> Result<&Source, SliceError> {
        let lost = || SliceError::Unsupported("it was not located".to_owned());
        self.source.get().ok_or_else(lost)
    }

    /// Notes what was read of a shard that is read whole.
    pub(super) fn note(&self, at: u64, bytes: u64, crc: u32) {
        if self.whole {
            let pieces = &mut self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
            pieces.push((at, bytes, crc));
        }
    }

    /// Compares the CRC-32 of a shard that was read whole.
    pub(super) fn check(&self, checkpoint: &Checkpoint) -> Result<(), Error> {
        if !self.whole {
            return Ok(());
        }
        let mut pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        // A rearranged shard may leave out some of its storage.
        if pieces.is_empty() && self.source.get().is_none_or(|source| !source.is_simple()) {
            return Ok(());
        }
        pieces.sort_unstable();
        let mut crc = crc32fast::Hasher::new();
        for &(_, bytes, piece) in pieces.iter() {
            crc.combine(&crc32fast::Hasher::new_with_initial_len(piece, bytes));
        }
        self.source()
            .and_then(|source| source.check(crc.finalize()))
            .map_err(|source| checkpoint.bad_slice(self.fqn, self.chunk.place, source))
    }
}

/// Counts bytes that were read.
pub(super) fn count(read: &AtomicU64, bytes: usize) {
    read.fetch_add(bytes as u64, Ordering::Relaxed);
}
