//! Resharding: any boxes out of any boxes (CKPT-2), reading the bytes that are
//! needed and no others, by all cores at once.
//!
//! A target's memory is cut into bands along its outermost dimension, so that
//! threads fill parts of it without sharing any. Every shard that a target needs
//! whole is checked against its CRC-32 on the way, which PyTorch never does.

pub mod convert;
mod copy;
mod plan;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::checkpoint::Checkpoint;
use crate::dtype::Dtype;
use crate::error::Error;
use crate::index::{Chunk, Form};
use crate::payload;
use crate::region::Region;
pub(crate) use copy::check_tensor;
use plan::Plan;

/// Below this, starting threads takes longer than the copy.
const ALONE: u64 = 1 << 20;

/// Where a part of a tensor goes: the caller's memory.
#[derive(Debug)]
pub struct Target<'a> {
    fqn: &'a str,
    region: Region,
    bytes: &'a mut [u8],
    strides: Option<Vec<u64>>,
    dtype: Option<Dtype>,
}

impl<'a> Target<'a> {
    /// The region of a tensor in C order, little-endian, in the tensor's own
    /// type; `bytes` has exactly its size.
    #[must_use]
    pub fn new(fqn: &'a str, region: Region, bytes: &'a mut [u8]) -> Self {
        Self { fqn, region, bytes, strides: None, dtype: None }
    }

    /// The same with other distances, in elements, between neighbours along each
    /// dimension. Elements may not share memory; bytes between them stay as
    /// they are.
    #[must_use]
    pub fn with_strides(self, strides: Vec<u64>) -> Self {
        Self { strides: Some(strides), ..self }
    }

    /// The same in another type, as PyTorch's `copy_` converts.
    #[must_use]
    pub fn convert_to(self, dtype: Dtype) -> Self {
        Self { dtype: Some(dtype), ..self }
    }
}

/// What a load did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// Bytes of the elements that were asked for, as they are saved.
    pub needed: u64,
    /// Bytes read for them: these, the descriptions, and gaps too short to skip.
    pub read: u64,
}

impl Checkpoint {
    /// Fills every target. The saved shards may be cut in any other way.
    ///
    /// # Errors
    /// When a tensor does not exist, a region does not fit it or its memory, a
    /// conversion is not possible, the shards leave a hole in a region or
    /// overlap in it, or bytes are damaged. The memory is then undefined.
    pub fn load(&self, targets: Vec<Target<'_>>) -> Result<LoadReport, Error> {
        let read = AtomicU64::new(0);
        let (mut plans, mut memories) = (Vec::new(), Vec::new());
        for Target { fqn, region, bytes, strides, dtype } in targets {
            plans.push(Plan::new(self, fqn, region, strides, dtype, bytes.len())?);
            memories.push(bytes);
        }
        let needed: u64 = plans.iter().map(Plan::bytes).sum();
        let threads = if needed <= ALONE { 1 } else { self.threads() };
        let parts = || plans.iter().flat_map(|plan| &plan.parts);
        in_parallel(threads, parts().collect(), |part| part.locate(self, &read))?;
        let mut jobs: Vec<_> =
            plans.iter().zip(memories).flat_map(|(plan, memory)| plan.bands(memory)).collect();
        // Front to back through each file.
        jobs.sort_by_key(copy::Job::position);
        in_parallel(threads, jobs, |job| job.run(self, &read))?;
        parts().try_for_each(|part| part.check(self))?;
        Ok(LoadReport { needed, read: read.into_inner() })
    }

    /// Reads a region of a tensor into `into`, as elements in C order,
    /// little-endian, in the tensor's own type.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn read(&self, fqn: &str, region: &Region, into: &mut [u8]) -> Result<(), Error> {
        self.load(vec![Target::new(fqn, region.clone(), into)]).map(|_| ())
    }

    /// Reads a region of a tensor into fresh memory.
    ///
    /// # Errors
    /// As [`load`](Self::load). The memory is taken only when the files are
    /// large enough to hold the region.
    pub fn read_vec(&self, fqn: &str, region: &Region) -> Result<Vec<u8>, Error> {
        let size = self.entry(fqn)?.dtype.size();
        let mut into = vec![0; self.check_held(fqn, region)? as usize * size];
        self.read(fqn, region, &mut into)?;
        Ok(into)
    }

    /// Reads a region of a tensor of any real type as `f32`, in C order.
    ///
    /// # Errors
    /// As [`read_vec`](Self::read_vec).
    pub fn read_f32(&self, fqn: &str, region: &Region) -> Result<Vec<f32>, Error> {
        let mut into = vec![0.0; self.check_held(fqn, region)? as usize];
        let bytes = bytemuck::cast_slice_mut(&mut into);
        self.load(vec![Target::new(fqn, region.clone(), bytes).convert_to(Dtype::F32)])?;
        into.iter_mut().for_each(|x: &mut f32| *x = f32::from_bits(u32::from_le(x.to_bits())));
        Ok(into)
    }

    /// The number of elements of a region, if the files can hold as many.
    fn check_held(&self, fqn: &str, region: &Region) -> Result<u64, Error> {
        let entry = self.entry(fqn)?;
        check_fits(fqn, region, &entry.shape)?;
        let bytes = region.elements().saturating_mul(entry.dtype.size() as u64);
        let mut slices = Vec::new();
        for Chunk { region: saved, place } in &entry.chunks {
            if saved.intersect(region).is_some() {
                let length = self.slice(fqn, *place)?.length;
                let most = if place.form == Form::Zstd { payload::ZSTD_RATIO } else { 1 };
                slices.push((place.file, place.offset, place.offset + length, most));
            }
        }
        slices.sort_unstable();
        // Bytes that shards share count once: together they hold no more.
        let (mut held, mut reached) = (0u64, (0, 0));
        for (file, start, end, most) in slices {
            let begin = if reached.0 == file { start.max(reached.1) } else { start };
            held = held.saturating_add(end.saturating_sub(begin).saturating_mul(most));
            reached = (file, begin.max(end));
        }
        if bytes > held {
            let detail =
                format!("{region} has {bytes} bytes, the shards in the files at most {held}");
            return Err(self.bad_cover(fqn, detail));
        }
        Ok(region.elements())
    }
}

fn check_fits(fqn: &str, region: &Region, shape: &[u64]) -> Result<(), Error> {
    if region.fits(shape) {
        return Ok(());
    }
    let detail = format!("{region} is not a region of shape {shape:?}");
    Err(Error::Request { fqn: fqn.to_owned(), detail })
}

/// Runs `work` on every item, on several threads when there are several items.
/// The first error ends it.
pub(crate) fn in_parallel<T: Send>(
    threads: usize,
    items: Vec<T>,
    work: impl Fn(T) -> Result<(), Error> + Sync,
) -> Result<(), Error> {
    if threads.min(items.len()) <= 1 {
        return items.into_iter().try_for_each(work);
    }
    let threads = threads.min(items.len());
    let (queue, failed) = (Mutex::new(items.into_iter()), AtomicBool::new(false));
    let take = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let serve = || {
        while !failed.load(Ordering::Relaxed) {
            let Some(item) = take() else { break };
            work(item).inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(serve)).collect();
        let mut done = serve();
        for other in others {
            let other = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            done = done.and(other);
        }
        done
    })
}
