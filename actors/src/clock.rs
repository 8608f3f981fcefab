//! The only clocks of this crate.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use job::{leader::Moment, plan::Timestamp};
use rustix::time::{ClockId, clock_gettime};

/// Time since boot, suspended time included: leases run on it (LS-1).
#[must_use]
pub fn now() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// [`now`] in microseconds.
#[must_use]
pub fn now_micros() -> u64 {
    u64::try_from(now().as_micros()).unwrap_or(u64::MAX)
}

/// Wall time, for records that people read and for the expiry of join tokens.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "no decision about the living takes it")]
pub fn timestamp() -> Timestamp {
    let micros = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
    Timestamp(u64::try_from(micros).unwrap_or(u64::MAX))
}

/// [`now`] and [`timestamp`] together.
#[must_use]
pub fn moment() -> Moment {
    Moment { now: now(), clock: timestamp() }
}
