//! The third way in which an agent learns of its worker's death, and the fastest
//! (LS-4). The kernel frees a dying process's memory before it closes its sockets
//! and signals its pidfd; what it does before that, thread by thread, is to walk the
//! thread's list of robust futexes, mark those that it holds and wake who waits.
//! So a thread of the worker that never ends holds one, in a page that the agent
//! owns and that outlives the worker.
//!
//! It says that a process is dying, not that it is gone: other threads of it may
//! still finish a system call. Proof of the end (GN-4) stays with the pidfd.

mod ffi;
#[cfg(test)]
mod tests;

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, atomic::Ordering, mpsc},
};

use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create},
    thread::futex::{self, Flags, OWNER_DIED, WAITERS},
};

use ffi::{PAGE, Page};

/// The agent's end.
#[derive(Clone, Debug)]
pub(crate) struct Lifeline(Arc<Page>);

impl Lifeline {
    /// A page, and the descriptor to hand to the worker.
    ///
    /// # Errors
    /// When the system has no memory or descriptors left.
    pub(crate) fn new() -> io::Result<(Self, OwnedFd)> {
        let memory = memfd_create("lifeline", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&memory, PAGE as u64)?;
        // A worker that shrank it would end its agent by a bus error.
        fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((Self(Arc::new(Page::map(memory.as_fd())?)), memory))
    }

    /// Blocks until the worker that holds it is dying, or until it is cut. A worker
    /// that never took hold of it does not end the wait.
    pub(crate) fn wait(&self) {
        loop {
            let word = self.0.word().load(Ordering::Acquire);
            if word & OWNER_DIED != 0 {
                return;
            }
            // A changed word or a signal: look again.
            let _ = futex::wait(self.0.word(), Flags::empty(), word, None);
        }
    }

    /// Ends the wait: the worker's death is known otherwise.
    pub(crate) fn cut(&self) {
        self.0.word().fetch_or(OWNER_DIED, Ordering::AcqRel);
        wake(&self.0);
    }
}

/// The worker's end: takes hold of the page for as long as this process lives.
///
/// # Errors
/// When the descriptor is no such page or the kernel knows no robust futexes. Death
/// is then noticed by the pidfd and the pipe.
pub(crate) fn hold(memory: OwnedFd) -> io::Result<()> {
    let page = Page::map(memory.as_fd())?;
    let (held, answer) = mpsc::channel();
    // A thread of its own: the C library uses the lists of the others.
    std::thread::Builder::new().name("lifeline".into()).spawn(move || {
        let head = page.list();
        let taken = head.register().map(|()| {
            page.word().store(thread_id() | WAITERS, Ordering::Release);
            wake(&page);
        });
        let holds = taken.is_ok();
        let _ = held.send(taken);
        if holds {
            loop {
                std::thread::park();
            }
        }
    })?;
    answer.recv().map_err(|_| io::Error::other("the thread that holds it ended"))?
}

fn thread_id() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()
}

fn wake(page: &Page) {
    // Fails only for an address that is none.
    let _ = futex::wake(page.word(), Flags::empty(), u32::MAX >> 1);
}
