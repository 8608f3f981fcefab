//! What this node knows from the checkpoint folder, and of others that have no
//! quorum either: soft state for `reforming`.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::SocketAddr,
    time::Duration,
};

use job::{NodeId, reforming::Pulse};

use super::ledger::Begun;

/// Pulses that leaders named and that a look at the folder may still find.
const TOLD: usize = 64;

#[derive(Debug)]
pub(super) struct Witness {
    began: Duration,
    /// The pulse that was seen last, and when it was first seen.
    pulse: Option<Pulse>,
    moved_at: Duration,
    told: VecDeque<Pulse>,
    /// Since when the leader names pulses that are not seen.
    missed_since: Option<Duration>,
    shared: Option<bool>,
    /// The next record of the ledger to look for.
    pub(super) next_record: u64,
    /// The newest era in the ledger, when it is above this node's own.
    pub(super) newer: Option<Begun>,
    /// The ledger says that the job is finished.
    pub(super) finished: bool,
    /// Where others left word that they can be met, while no quorum answers.
    pub(super) met: Vec<SocketAddr>,
    pub(super) looking: bool,
    pub(super) next_look: Duration,
    /// Nodes without a quorum, when they said so last and whom they hear.
    orphans: BTreeMap<NodeId, (Duration, BTreeSet<NodeId>)>,
    /// An era is being begun or entered.
    pub(super) moving: bool,
    /// When to try the next time.
    pub(super) next_try: Duration,
    /// Own pulses, while leading.
    pub(super) written: u64,
    pub(super) next_pulse: Duration,
}

impl Witness {
    pub(super) fn new(now: Duration) -> Self {
        Self {
            began: now,
            pulse: None,
            moved_at: now,
            told: VecDeque::new(),
            missed_since: None,
            shared: None,
            next_record: 0,
            newer: None,
            finished: false,
            met: Vec::new(),
            looking: false,
            next_look: now,
            orphans: BTreeMap::new(),
            moving: false,
            next_try: now,
            written: 0,
            next_pulse: now,
        }
    }

    /// Whether this node sees what leaders write into the folder.
    pub(super) fn shared(&self) -> Option<bool> {
        self.shared
    }

    /// The leader names the pulse that it wrote last.
    pub(super) fn told(&mut self, pulse: Pulse) {
        if self.told.back() != Some(&pulse) {
            self.told.push_back(pulse);
            let surplus = self.told.len().saturating_sub(TOLD);
            self.told.drain(..surplus);
        }
    }

    /// What a look at the folder found.
    pub(super) fn seen(&mut self, pulse: Option<Pulse>, now: Duration, patience: Duration) {
        if pulse != self.pulse {
            self.pulse = pulse;
            self.moved_at = now;
        }
        if pulse.is_some_and(|pulse| self.told.contains(&pulse)) {
            self.shared = Some(true);
            self.missed_since = None;
        } else if !self.told.is_empty() {
            let since = *self.missed_since.get_or_insert(now);
            if now.saturating_sub(since) > patience {
                self.shared = Some(false);
            }
        }
    }

    /// A newer era is in the ledger.
    pub(super) fn overtaken(&mut self, begun: Begun, now: Duration) {
        if self.newer.as_ref().is_none_or(|known| known.era < begun.era) {
            self.newer = Some(begun);
            // Its founder has as long as any leader to show that it lives.
            self.moved_at = now;
        }
    }

    /// The last sign of a quorum: an answered beat, a pulse, or this process's own
    /// begin.
    pub(super) fn quorum_at(&self, answered: Duration) -> Duration {
        self.began.max(self.moved_at).max(answered)
    }

    pub(super) fn orphan(&mut self, node: NodeId, reaches: Vec<NodeId>, now: Duration) {
        self.orphans.insert(node, (now, reaches.into_iter().collect()));
    }

    /// Who said within `limit` that it has no quorum either, and whom it hears.
    pub(super) fn orphans(
        &mut self,
        now: Duration,
        limit: Duration,
    ) -> BTreeMap<NodeId, BTreeSet<NodeId>> {
        self.orphans.retain(|_, (at, _)| now.saturating_sub(*at) <= limit);
        self.orphans.iter().map(|(name, (_, reaches))| (name.clone(), reaches.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use job::Era;

    use super::*;

    fn pulse(count: u64) -> Pulse {
        Pulse { era: Era(0), boot: 7, count }
    }

    const PATIENCE: Duration = Duration::from_secs(4);

    #[test]
    fn lg_3_a_folder_is_shared_when_what_the_leader_names_is_seen_in_it() {
        let at = Duration::from_secs;
        let mut witness = Witness::new(at(0));
        witness.seen(None, at(1), PATIENCE);
        assert_eq!(witness.shared(), None, "no leader has named a pulse yet");
        witness.told(pulse(1));
        witness.seen(None, at(2), PATIENCE);
        assert_eq!(witness.shared(), None, "it may be on its way");
        witness.seen(Some(pulse(1)), at(3), PATIENCE);
        assert_eq!(witness.shared(), Some(true));
        witness.told(pulse(2));
        // A copy of the folder stays as it is.
        witness.told.pop_front();
        witness.seen(Some(pulse(1)), at(4), PATIENCE);
        assert_eq!(witness.shared(), Some(true));
        witness.seen(Some(pulse(1)), at(9), PATIENCE);
        assert_eq!(witness.shared(), Some(false));
    }

    #[test]
    fn lg_3_a_pulse_that_moves_is_a_quorum() {
        let at = Duration::from_secs;
        let mut witness = Witness::new(at(0));
        witness.seen(Some(pulse(1)), at(5), PATIENCE);
        assert_eq!(witness.quorum_at(at(1)), at(5));
        witness.seen(Some(pulse(1)), at(6), PATIENCE);
        assert_eq!(witness.quorum_at(at(1)), at(5), "it stands still");
        witness.seen(Some(pulse(2)), at(7), PATIENCE);
        assert_eq!(witness.quorum_at(at(1)), at(7));
        assert_eq!(witness.quorum_at(at(8)), at(8), "an answered beat is one too");
    }
}
