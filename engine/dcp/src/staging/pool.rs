//! Memory that is taken once: the first save is as fast as the others, and no
//! save can fail for want of memory.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use memmap2::{MmapMut, MmapOptions};

use super::Error;

/// A few buffers of one size, some of which are taken.
pub(super) struct Pool {
    free: Mutex<Vec<MmapMut>>,
    returned: Condvar,
    count: usize,
}

impl Pool {
    pub(super) fn new(count: usize, bytes: usize, lock: bool) -> Result<Self, Error> {
        let buffer = || {
            let buffer = MmapOptions::new()
                .len(bytes.max(1))
                // With its pages: a copy into fresh memory takes four times as long.
                .populate()
                .map_anon()
                .map_err(|source| Error::Memory { bytes, source })?;
            if lock {
                buffer.lock().map_err(|source| Error::Lock { bytes, source })?;
            }
            Ok(buffer)
        };
        let free = std::iter::repeat_with(buffer).take(count).collect::<Result<_, _>>()?;
        Ok(Self { free: Mutex::new(free), returned: Condvar::new(), count })
    }

    /// A free buffer, when there is one or `wait` says to wait for it.
    pub(super) fn take(&self, wait: bool) -> Option<MmapMut> {
        let mut free = self.free();
        if wait {
            let waited = self.returned.wait_while(free, |free| free.is_empty());
            free = waited.unwrap_or_else(PoisonError::into_inner);
        }
        free.pop()
    }

    pub(super) fn put(&self, buffer: MmapMut) {
        self.free().push(buffer);
        self.returned.notify_all();
    }

    /// Waits until no buffer is taken.
    pub(super) fn wait_all(&self) {
        let waited = self.returned.wait_while(self.free(), |free| free.len() < self.count);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn free(&self) -> MutexGuard<'_, Vec<MmapMut>> {
        // A list of buffers stays true whatever a panicking thread did.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
