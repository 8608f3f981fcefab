//! Zeroed memory whose pages come when they are written and can be given back:
//! a rank that holds a part of the weights has address space for all of them.

use std::{
    ops::{Deref, DerefMut, Range},
    ptr::NonNull,
};

/// f32 values from a page boundary on, zero at first. The memory never moves.
#[derive(Debug)]
pub(crate) struct Pages {
    start: NonNull<f32>,
    length: usize,
    page: usize,
}

// SAFETY: the mapping is owned by this value alone, like a `Vec`'s memory.
unsafe impl Send for Pages {}
// SAFETY: shared access only reads.
unsafe impl Sync for Pages {}

impl Pages {
    /// `length` zeros, of which none takes memory yet.
    ///
    /// # Errors
    /// When there is no address space left.
    pub(crate) fn zeroed(length: usize) -> std::io::Result<Self> {
        // SAFETY: takes a constant and returns a number.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) }.max(4096) as usize;
        let bytes = length * size_of::<f32>();
        if bytes == 0 {
            return Ok(Self { start: NonNull::dangling(), length, page });
        }
        // SAFETY: a new private mapping at an address that the kernel chooses.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        let start = NonNull::new(address.cast()).ok_or_else(std::io::Error::last_os_error)?;
        Ok(Self { start, length, page })
    }

    /// Gives the whole pages within a range back: their values are zeros then.
    ///
    /// # Panics
    /// When the range leaves the memory.
    pub(crate) fn release(&mut self, range: Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.length, "{range:?}");
        let per_page = self.page / size_of::<f32>();
        let (first, end) =
            (range.start.next_multiple_of(per_page), range.end / per_page * per_page);
        if first >= end {
            return;
        }
        // SAFETY: whole pages of our own mapping, to which `&mut self` is the only
        // reference; afterwards they read as zeros, which are f32 values.
        let status = unsafe {
            let from = self.start.as_ptr().add(first);
            libc::madvise(from.cast(), (end - first) * size_of::<f32>(), libc::MADV_DONTNEED)
        };
        debug_assert_eq!(status, 0, "madvise on a mapping of our own");
    }
}

impl Deref for Pages {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        // SAFETY: mapped, zeroed and as long as said; dangling only when empty.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.length > 0 {
            // SAFETY: the mapping that `zeroed` made, which nobody uses any more.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.length * size_of::<f32>()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_pages_are_zeros_and_their_neighbours_stay() {
        let mut pages = Pages::zeroed(10_000).expect("address space");
        assert_eq!(pages.as_ptr() as usize % 64, 0);
        pages.fill(1.5);
        pages.release(100..7_000);
        let per_page = pages.page / 4;
        let zeros = 100usize.next_multiple_of(per_page)..7_000 / per_page * per_page;
        for (at, value) in pages.iter().enumerate() {
            assert_eq!(*value, if zeros.contains(&at) { 0.0 } else { 1.5 }, "{at}");
        }
        assert!(Pages::zeroed(0).expect("nothing").is_empty());
    }
}
