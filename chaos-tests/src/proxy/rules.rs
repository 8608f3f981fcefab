//! What happens to traffic from one node to another, and the waiting for it to
//! change.

use std::{
    collections::BTreeMap,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// Which connections of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Plane {
    /// Between agents: QUIC, and TCP for liveness.
    Control,
    /// Between workers: TCP.
    Tensors,
}

/// How traffic fares in one direction between two nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Condition {
    /// Whether anything passes: closed, datagrams vanish and streams stall, and
    /// nobody is told.
    pub open: bool,
    /// Whether the end of a stream is kept from the other side (half open).
    pub half_open: bool,
    /// Added to everything.
    pub delay: Duration,
    /// The most that passes.
    pub bytes_per_s: Option<u64>,
    /// Datagrams of a thousand that vanish.
    pub lost_per_mille: u32,
}

impl Condition {
    /// Nothing passes.
    pub const CUT: Self = Self { open: false, ..Self::FINE };
    /// Everything passes.
    pub const FINE: Self = Self {
        open: true,
        half_open: false,
        delay: Duration::ZERO,
        bytes_per_s: None,
        lost_per_mille: 0,
    };

    /// How long so many bytes take.
    pub(super) fn duration(&self, bytes: usize) -> Duration {
        let transfer = self.bytes_per_s.map_or(Duration::ZERO, |rate| {
            Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64)
        });
        self.delay + transfer
    }
}

type Direction = (Plane, usize, usize);

/// Conditions by direction; what is not in the table is fine.
#[derive(Debug, Default)]
pub(super) struct Rules {
    table: Mutex<(BTreeMap<Direction, Condition>, bool)>,
    changed: Condvar,
}

impl Rules {
    pub(super) fn set(&self, plane: Plane, from: usize, to: usize, condition: Condition) {
        self.lock().0.insert((plane, from, to), condition);
        self.changed.notify_all();
    }

    pub(super) fn clear(&self) {
        self.lock().0.clear();
        self.changed.notify_all();
    }

    pub(super) fn close(&self) {
        self.lock().1 = true;
        self.changed.notify_all();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.lock().1
    }

    /// A stranger's traffic is fine: it is no node.
    pub(super) fn of(&self, plane: Plane, from: Option<usize>, to: usize) -> Condition {
        let Some(from) = from else { return Condition::FINE };
        self.lock().0.get(&(plane, from, to)).copied().unwrap_or(Condition::FINE)
    }

    /// Waits until `passes` holds of the condition; `None` when the network is gone.
    pub(super) fn wait(
        &self,
        plane: Plane,
        from: Option<usize>,
        to: Option<usize>,
        passes: impl Fn(&Condition) -> bool,
    ) -> Option<Condition> {
        let mut table = self.lock();
        loop {
            if table.1 {
                return None;
            }
            let direction = from.zip(to).map(|(from, to)| (plane, from, to));
            let found = direction.and_then(|direction| table.0.get(&direction).copied());
            let found = found.unwrap_or(Condition::FINE);
            if passes(&found) {
                return Some(found);
            }
            table = self.changed.wait(table).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, (BTreeMap<Direction, Condition>, bool)> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
