//! The worker's side of a lease (LS-1): nothing is voted or applied without it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use crate::clock;

/// Deadline handed down by the agent, on the clock that counts suspended time.
#[derive(Clone, Debug, Default)]
pub(super) struct Lease(Arc<AtomicU64>);

/// What waiting for a lease came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Held {
    /// The lease is valid now.
    Valid,
    /// The work was aborted meanwhile.
    Aborted,
    /// It lapsed and was not renewed within the grace time: this process is
    /// fenced and ends (LIVE-2).
    Lost,
}

impl Lease {
    pub(super) fn renew(&self, until_micros: u64) {
        self.0.fetch_max(until_micros, Ordering::AcqRel);
    }

    /// Returns at once while the lease is valid; otherwise waits for a renewal.
    pub(super) fn hold(&self, grace: Duration, aborted: &dyn Fn() -> bool) -> Held {
        loop {
            let until = Duration::from_micros(self.0.load(Ordering::Acquire));
            let now = clock::now();
            if now < until {
                return Held::Valid;
            }
            if aborted() {
                return Held::Aborted;
            }
            if now > until + grace && until > Duration::ZERO {
                return Held::Lost;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ls_1_nothing_passes_without_a_valid_lease() {
        let lease = Lease::default();
        lease.renew(clock::now_micros() + 10_000_000);
        assert_eq!(lease.hold(Duration::ZERO, &|| false), Held::Valid);
        let lapsed = Lease::default();
        lapsed.renew(1);
        assert_eq!(lapsed.hold(Duration::ZERO, &|| false), Held::Lost);
        assert_eq!(lapsed.hold(Duration::MAX / 4, &|| true), Held::Aborted);
    }
}
