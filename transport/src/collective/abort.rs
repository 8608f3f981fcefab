//! Ending blocked collectives from another thread (GN-2).

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, OnceLock},
};

use rustix::event::{EventfdFlags, eventfd};

use super::Error;

/// Aborts every mesh that was connected with it. One handle serves one
/// generation: its meshes are aborted together, and stay so.
#[derive(Clone, Debug)]
pub struct AbortHandle(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    reason: OnceLock<String>,
    // Written once and never read, so that it stays ready in every poll set.
    wake: OwnedFd,
}

impl AbortHandle {
    /// A handle that nobody has aborted yet.
    ///
    /// # Errors
    /// [`Error::System`] when no descriptor is left.
    pub fn new() -> Result<Self, Error> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| Error::system("eventfd", errno))?;
        Ok(Self(Arc::new(Shared { reason: OnceLock::new(), wake })))
    }

    /// Ends operations that are blocked, and refuses later ones. Only the first
    /// reason is kept.
    pub fn abort(&self, reason: impl Into<String>) {
        if self.0.reason.set(reason.into()).is_ok() {
            // Cannot fail: the counter is far from full, and the descriptor is ours.
            let _ = rustix::io::write(&self.0.wake, &1_u64.to_ne_bytes());
        }
    }

    /// The reason, once aborted.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        self.0.reason.get().map(String::as_str)
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        match self.reason() {
            None => Ok(()),
            Some(reason) => Err(Error::Aborted { reason: reason.to_owned() }),
        }
    }
}

impl AsFd for AbortHandle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.wake.as_fd()
    }
}
