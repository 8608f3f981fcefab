//! Who was turned away, counted by reason (SEC-1). A stranger costs a counter and
//! no log line: whoever knocks ten thousand times must not fill a disk.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What knocked at the control port and was not let in, since it was opened.
/// Datagrams that begin no connection are dropped by QUIC and not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TurnedAway {
    /// Handshakes that broke off: garbage, or another protocol.
    pub handshakes: u64,
    /// Certificates of another authority, or expired ones, or none where one is due.
    pub certificates: u64,
    /// Handshakes, hellos and requests that did not come in time.
    pub slow: u64,
    /// Hellos of peers that do not fit.
    pub hellos: u64,
    /// Join requests without a proof of the token on this very channel: a wrong
    /// token, or a replay.
    pub tokens: u64,
    /// Join requests against the protocol, such as too long ones.
    pub requests: u64,
    /// Connections over a limit of number or rate.
    pub crowded: u64,
    /// Liveness connections that named no peer.
    pub watchers: u64,
}

/// A field of [`TurnedAway`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    Handshake,
    Certificate,
    Slow,
    Hello,
    Token,
    Request,
    Crowded,
    Watcher,
}

/// The counters.
#[derive(Debug, Default)]
pub(super) struct Counters([AtomicU64; 8]);

impl Counters {
    pub(super) fn count(&self, reason: Reason) {
        self.0[reason as usize].fetch_add(1, Relaxed);
    }

    pub(super) fn read(&self) -> TurnedAway {
        let of = |reason: Reason| self.0[reason as usize].load(Relaxed);
        TurnedAway {
            handshakes: of(Reason::Handshake),
            certificates: of(Reason::Certificate),
            slow: of(Reason::Slow),
            hellos: of(Reason::Hello),
            tokens: of(Reason::Token),
            requests: of(Reason::Request),
            crowded: of(Reason::Crowded),
            watchers: of(Reason::Watcher),
        }
    }
}

impl TurnedAway {
    /// All of them.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.kinds().iter().map(|(_, count)| count).sum()
    }

    /// Every kind with its name.
    #[must_use]
    pub fn kinds(&self) -> [(&'static str, u64); 8] {
        [
            ("handshakes", self.handshakes),
            ("certificates", self.certificates),
            ("slow", self.slow),
            ("hellos", self.hellos),
            ("tokens", self.tokens),
            ("requests", self.requests),
            ("crowded", self.crowded),
            ("watchers", self.watchers),
        ]
    }
}
