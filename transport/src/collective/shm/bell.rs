//! How a rank sleeps until a peer has done something in shared memory, and why
//! nobody sleeps through it.
//!
//! The sleeper says so, looks once more, and sleeps in `poll` on an event file
//! among its sockets. A peer first changes the shared memory and then looks
//! whether somebody sleeps. Of the two looks one sees the other's mark, since a
//! full fence lies between each mark and look.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::atomic::{AtomicU64, Ordering, fence},
};

use rustix::event::{EventfdFlags, eventfd};

/// The event file of one rank; peers hold copies of it.
#[derive(Debug)]
pub(in crate::collective) struct Bell(OwnedFd);

/// The word that says that somebody sleeps.
pub(super) trait Mark {
    fn load(&self) -> u64;
    fn store(&self, value: u64);
    fn swap(&self, value: u64) -> u64;
    fn fence();
}

/// Says that this rank is about to sleep. It looks for work after this, and
/// sleeps only if there is none.
pub(super) fn drowse<M: Mark>(mark: &M) {
    mark.store(1);
    M::fence();
}

/// After work was made: whether its rank has to be woken. Only one peer does.
pub(super) fn must_ring<M: Mark>(mark: &M) -> bool {
    M::fence();
    mark.load() == 1 && mark.swap(0) == 1
}

/// Awake again.
pub(super) fn rouse<M: Mark>(mark: &M) {
    mark.store(0);
}

impl Mark for AtomicU64 {
    fn load(&self) -> u64 {
        AtomicU64::load(self, Ordering::Relaxed)
    }

    fn store(&self, value: u64) {
        AtomicU64::store(self, value, Ordering::Relaxed);
    }

    fn swap(&self, value: u64) -> u64 {
        AtomicU64::swap(self, value, Ordering::Relaxed)
    }

    fn fence() {
        fence(Ordering::SeqCst);
    }
}

impl Bell {
    pub(super) fn new() -> rustix::io::Result<Self> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self)
    }

    /// For a peer.
    pub(super) fn copy(&self) -> rustix::io::Result<OwnedFd> {
        rustix::io::fcntl_dupfd_cloexec(&self.0, 0)
    }

    pub(super) fn ring(&self) {
        // Fails only when the counter is full, and then it rings already.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    pub(super) fn silence(&self) {
        // Fails when it has not rung.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl From<OwnedFd> for Bell {
    fn from(file: OwnedFd) -> Self {
        Self(file)
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use loom::sync::{Arc, atomic};

    use super::*;

    impl Mark for Arc<atomic::AtomicU64> {
        fn load(&self) -> u64 {
            atomic::AtomicU64::load(self, Ordering::Relaxed)
        }

        fn store(&self, value: u64) {
            atomic::AtomicU64::store(self, value, Ordering::Relaxed);
        }

        fn swap(&self, value: u64) -> u64 {
            atomic::AtomicU64::swap(self, value, Ordering::Relaxed)
        }

        fn fence() {
            atomic::fence(Ordering::SeqCst);
        }
    }

    #[test]
    fn nobody_sleeps_through_work() {
        loom::model(|| {
            let mark = Arc::new(atomic::AtomicU64::new(0));
            let work = Arc::new(atomic::AtomicU64::new(0));
            let peer = {
                let (mark, work) = (Arc::clone(&mark), Arc::clone(&work));
                loom::thread::spawn(move || {
                    atomic::AtomicU64::store(&work, 1, Ordering::Release);
                    must_ring(&mark)
                })
            };
            drowse(&mark);
            let sleeps = atomic::AtomicU64::load(&work, Ordering::Acquire) == 0;
            let rang = peer.join().unwrap();
            assert!(!sleeps || rang, "asleep, with work, and nobody rang");
        });
    }
}
