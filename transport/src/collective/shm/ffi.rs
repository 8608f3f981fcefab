//! Memory that several processes have mapped.
//!
//! What lies there is bytes and 64-bit words and no more, so a peer that breaks
//! the rules can spoil values but no invariant of this process.

use std::{
    os::fd::{AsFd, OwnedFd},
    ptr::NonNull,
    sync::{Arc, atomic::AtomicU64},
};

use rustix::{
    fs::{MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create},
    io::Errno,
    mm::{MapFlags, ProtFlags, mmap, munmap},
};

use crate::collective::buffer::Memory;

/// A shared mapping of a whole memory file.
#[derive(Debug)]
pub(in crate::collective) struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping is owned, and every access is through `&self` methods that
// copy bytes or use atomic words.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// A new memory file of this size, whose size nobody can change any more: a
/// mapping of it never faults. The memory is there, or this fails.
pub(in crate::collective) fn memory_file(name: &str, length: usize) -> rustix::io::Result<OwnedFd> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, length as u64)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

impl Mapping {
    /// Maps a memory file of exactly this size.
    pub(in crate::collective) fn new(file: impl AsFd, length: usize) -> rustix::io::Result<Self> {
        if !fcntl_get_seals(&file)?.contains(SealFlags::SHRINK)
            || fstat(&file)?.st_size != length as i64
            || length == 0
        {
            return Err(Errno::INVAL);
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address that the kernel chooses touches no
        // memory of this process; the file is as long and cannot shrink.
        let start = unsafe { mmap(std::ptr::null_mut(), length, protection, flags, &file, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(Errno::INVAL)?;
        Ok(Self { start, length })
    }

    pub(in crate::collective) fn len(&self) -> usize {
        self.length
    }

    /// The place of some memory in this mapping, if it is inside.
    pub(in crate::collective) fn offset_of(&self, bytes: &[u8]) -> Option<usize> {
        let at = bytes.as_ptr().addr().checked_sub(self.start.addr().get())?;
        (at + bytes.len() <= self.length).then_some(at)
    }

    /// The word at this offset, a multiple of 8.
    pub(in crate::collective) fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.length, "word {at} of {}", self.length);
        // SAFETY: inside the mapping and aligned, as just checked; words are only
        // accessed as atomics, by every process.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(at).cast()) }
    }

    /// Copies bytes into the mapping.
    pub(in crate::collective) fn write(&self, at: usize, bytes: &[u8]) {
        self.check(at, bytes.len());
        // SAFETY: the destination is inside the mapping and the source is not in
        // a place that this process writes meanwhile. The protocol gives this
        // range to one writer at a time; bytes have no invalid values.
        unsafe { std::ptr::copy(bytes.as_ptr(), self.start.as_ptr().add(at), bytes.len()) }
    }

    /// Copies bytes out of the mapping.
    pub(in crate::collective) fn read(&self, at: usize, into: &mut [u8]) {
        self.check(at, into.len());
        // SAFETY: as for `write`, the other way round.
        unsafe { std::ptr::copy(self.start.as_ptr().add(at), into.as_mut_ptr(), into.len()) }
    }

    /// A range of the mapping.
    ///
    /// # Safety
    /// For as long as the slice lives, no process writes to the range, as far as
    /// they keep to the protocol.
    pub(in crate::collective) unsafe fn slice(&self, at: usize, length: usize) -> &[u8] {
        self.check(at, length);
        // SAFETY: inside the mapping, initialised by the kernel; see above.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(at), length) }
    }

    /// A range of the mapping, to write.
    ///
    /// # Safety
    /// For as long as the slice lives, nobody else reads or writes the range, as
    /// far as they keep to the protocol.
    #[expect(clippy::mut_from_ref, reason = "as of a cell: exclusive by protocol, not by borrow")]
    pub(in crate::collective) unsafe fn slice_mut(&self, at: usize, length: usize) -> &mut [u8] {
        self.check(at, length);
        // SAFETY: inside the mapping; see above.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(at), length) }
    }

    /// Calls `with` with the same range of several mappings, for it to read.
    pub(in crate::collective) fn read_all<'a>(
        mappings: impl Iterator<Item = (&'a Self, usize)>,
        length: usize,
        with: impl FnOnce(&[&[u8]]),
    ) {
        // SAFETY: the slices live for this call. By the protocol of the operation
        // that this is part of, the calling rank alone accesses this range of all
        // ranks' memory meanwhile.
        let slices: Vec<_> =
            mappings.map(|(memory, at)| unsafe { memory.slice(at, length) }).collect();
        with(&slices);
    }

    fn check(&self, at: usize, length: usize) {
        let end = at.checked_add(length);
        assert!(end.is_some_and(|end| end <= self.length), "{at}+{length} of {}", self.length);
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this mapping was made by `new`, and all borrows of it end with
        // it. A failure would only leave it mapped.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// This rank's part of a region, as the memory of the one buffer that has it.
/// Between operations nobody else accesses it; in an operation, which borrows
/// the buffer, peers do.
pub(super) struct Exclusive {
    memory: Arc<Mapping>,
    bytes: usize,
}

impl Exclusive {
    pub(super) fn new(memory: Arc<Mapping>, bytes: usize) -> Self {
        memory.check(0, bytes);
        Self { memory, bytes }
    }
}

impl Memory for Exclusive {
    fn bytes(&self) -> &[u8] {
        // SAFETY: peers write here only in operations that borrow the buffer
        // mutably.
        unsafe { self.memory.slice(0, self.bytes) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and no other borrow of the only buffer exists.
        unsafe { self.memory.slice_mut(0, self.bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memory_file_keeps_its_size_and_is_checked() {
        let file = memory_file("test", 8192).unwrap();
        assert!(rustix::fs::ftruncate(&file, 0).is_err());
        assert!(Mapping::new(&file, 4096).is_err());
        let (one, two) = (Mapping::new(&file, 8192).unwrap(), Mapping::new(&file, 8192).unwrap());
        one.write(8190, &[1, 2]);
        let mut got = [0; 2];
        two.read(8190, &mut got);
        assert_eq!(got, [1, 2]);
        assert!(std::panic::catch_unwind(|| one.write(8191, &[1, 2])).is_err());
        let loose = memfd_create("loose", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&loose, 8192).unwrap();
        assert!(Mapping::new(&loose, 8192).is_err(), "a peer could shrink it");
    }
}
