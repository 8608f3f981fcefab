//! The page that two processes share, and the kernel's list of robust futexes:
//! `set_robust_list(2)`, and "robust futex ABI" in the kernel's documentation.

use std::{io, os::fd::BorrowedFd, sync::atomic::AtomicU32};

use memmap2::{MmapOptions, MmapRaw};

/// Bytes of the page.
pub(super) const PAGE: usize = 4096;

/// What is in it.
#[repr(C)]
struct Content {
    /// A link of the list. Its value is an address in the worker, and nobody else
    /// follows it.
    next: usize,
    /// The holder's thread id, and the kernel's bits.
    word: AtomicU32,
}

/// A mapping of it.
#[derive(Debug)]
pub(super) struct Page(MmapRaw);

impl Page {
    pub(super) fn map(memory: BorrowedFd<'_>) -> io::Result<Self> {
        MmapOptions::new().len(PAGE).map_raw(&memory).map(Self)
    }

    /// The futex.
    pub(super) fn word(&self) -> &AtomicU32 {
        let content = self.0.as_ptr().cast::<Content>();
        // SAFETY: mapped for as long as `self`, aligned to a page, longer than the
        // content and sealed against shrinking; both processes use the word as an
        // atomic, and any value of it is valid.
        unsafe { &(*content).word }
    }

    /// A list with this page as its only link.
    pub(super) fn list(&self) -> Box<List<'_>> {
        let next = self.0.as_mut_ptr() as usize;
        let offset = std::mem::offset_of!(Content, word);
        Box::new(List { next, offset, pending: 0, page: self })
    }
}

/// The kernel's `struct robust_list_head`, and the page that it leads to.
#[repr(C)]
pub(super) struct List<'a> {
    /// The first link; the last one leads back to here.
    next: usize,
    /// From a link to its futex.
    offset: usize,
    /// A futex that is being taken; none is.
    pending: usize,
    page: &'a Page,
}

impl List<'_> {
    /// Makes it the calling thread's list. It must not move or go before the thread
    /// does, which is why it is boxed.
    pub(super) fn register(&self) -> io::Result<()> {
        let head: *const Self = self;
        let link = self.page.0.as_mut_ptr().cast::<Content>();
        // SAFETY: the page is mapped writable, and no reference to the link exists.
        unsafe { (*link).next = head as usize };
        let length = 3 * size_of::<usize>();
        // SAFETY: the kernel only reads the list, and only when this thread ends.
        match unsafe { libc::syscall(libc::SYS_set_robust_list, head, length) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}
