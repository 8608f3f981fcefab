//! LS-2: how far a leader trusts nodes that ended generations. Soft state: a new
//! leader finds it out again.
//!
//! A node whose tensor connections keep breaking stands by, for a generation with
//! it would break again. One that comes and goes costs the others a pause each
//! time, and is held back as long as they are enough without it. Either time
//! doubles until the node proves itself.

use std::{collections::BTreeMap, time::Duration};

use crate::{NodeId, Step};

/// Doublings of the time apart: what is repaired after days is tried within
/// minutes.
const DOUBLINGS: u32 = 7;

/// Steps of a stay in the mesh that are worth the pauses of coming and going.
pub const PROOF: u64 = 16;

/// Stays in a row that were too short and mean nothing yet: where everything breaks,
/// nobody is worse than the others.
const FORGIVEN: u32 = 4;

/// How far a node is trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trust {
    /// Its connections broke: it stands by.
    Apart,
    /// It is tried again, and goes at once when a connection breaks.
    OnProbation,
    /// It comes and goes: it stands by while there are enough nodes without it.
    HeldBack {
        /// Short stays in a row.
        stays: u32,
        /// For so long after the last one.
        pause: Duration,
    },
}

#[derive(Clone, Copy, Debug)]
struct Setbacks {
    times: u32,
    since: Duration,
}

impl Setbacks {
    /// `base` the first time, and doubles.
    fn pause(self, base: Duration) -> Duration {
        base * 2_u32.pow(self.times.saturating_sub(1).min(DOUBLINGS))
    }

    fn lasts(self, base: Duration, now: Duration) -> bool {
        now.saturating_sub(self.since) < self.pause(base)
    }
}

/// What is held against nodes.
#[derive(Debug, Default)]
pub(crate) struct Reputation {
    /// Evicted for broken connections, and not trained since.
    broken: BTreeMap<NodeId, Setbacks>,
    /// Lost soon after they had come, and not proven since.
    short: BTreeMap<NodeId, Setbacks>,
    /// The step at which a node of the mesh came into it.
    entered: BTreeMap<NodeId, Step>,
}

impl Reputation {
    /// A node went because its connections broke.
    pub(crate) fn broke(&mut self, node: &NodeId, now: Duration) {
        count(&mut self.broken, node, now);
    }

    /// A node of the mesh was lost at a step.
    pub(crate) fn lost(&mut self, node: &NodeId, step: Step, now: Duration) {
        let stayed =
            self.entered.remove(node).map_or(0, |entered| step.0.saturating_sub(entered.0));
        if stayed >= PROOF {
            self.short.remove(node);
        } else if !self.broken.contains_key(node) {
            count(&mut self.short, node, now);
        }
    }

    /// These train together from a step on.
    pub(crate) fn hold(&mut self, mesh: &[NodeId], step: Step) {
        self.broken.retain(|node, _| !mesh.contains(node));
        for node in mesh {
            self.entered.entry(node.clone()).or_insert(step);
        }
    }

    /// Who is not named is trusted.
    pub(crate) fn trust(
        &mut self,
        step: Step,
        now: Duration,
        base: Duration,
    ) -> BTreeMap<NodeId, Trust> {
        let entered = &self.entered;
        self.short.retain(|node, _| {
            entered.get(node).is_none_or(|entered| step.0.saturating_sub(entered.0) < PROOF)
        });
        let held = self.short.iter().filter_map(|(node, setbacks)| {
            let counted = Setbacks { times: setbacks.times.checked_sub(FORGIVEN)?, ..*setbacks };
            let held = counted.times > 0 && counted.lasts(base, now);
            let trust = Trust::HeldBack { stays: setbacks.times, pause: counted.pause(base) };
            held.then(|| (node.clone(), trust))
        });
        let broken = self.broken.iter().map(|(node, setbacks)| {
            let apart = setbacks.lasts(base, now);
            (node.clone(), if apart { Trust::Apart } else { Trust::OnProbation })
        });
        held.chain(broken).collect()
    }
}

fn count(setbacks: &mut BTreeMap<NodeId, Setbacks>, node: &NodeId, now: Duration) {
    let times = setbacks.get(node).map_or(0, |setbacks| setbacks.times);
    setbacks.insert(node.clone(), Setbacks { times: times + 1, since: now });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn n2() -> NodeId {
        NodeId::new("n2").expect("a good name")
    }

    const BASE: Duration = Duration::from_secs(2);

    fn trust(reputation: &mut Reputation, step: u64, now: u64) -> Option<Trust> {
        reputation.trust(Step(step), Duration::from_secs(now), BASE).get(&n2()).copied()
    }

    #[test]
    fn with_broken_connections_the_time_apart_doubles_until_it_trains() {
        let at = Duration::from_secs;
        let mut reputation = Reputation::default();
        assert_eq!(trust(&mut reputation, 0, 0), None);
        for (times, (now, apart)) in [(10, 2), (20, 4), (30, 8)].into_iter().enumerate() {
            reputation.broke(&n2(), at(now));
            assert_eq!(trust(&mut reputation, 0, now + apart - 1), Some(Trust::Apart), "{times}");
            let then = trust(&mut reputation, 0, now + apart);
            assert_eq!(then, Some(Trust::OnProbation), "{times}");
        }
        (0..20).for_each(|_| reputation.broke(&n2(), at(100)));
        assert_eq!(trust(&mut reputation, 0, 100 + 256), Some(Trust::OnProbation), "it is bounded");
        reputation.hold(&[n2()], Step(0));
        assert_eq!(trust(&mut reputation, 0, 101), None);
    }

    #[test]
    fn who_comes_and_goes_is_held_back_longer_each_time_until_it_stays() {
        let at = Duration::from_secs;
        let mut reputation = Reputation::default();
        // Two steps, and it is gone: that may happen.
        let stay = |reputation: &mut Reputation, from: u64, steps: u64, now: u64| {
            reputation.hold(&[n2()], Step(from));
            reputation.lost(&n2(), Step(from + steps), at(now));
        };
        for now in 1..=u64::from(FORGIVEN) {
            stay(&mut reputation, 10, 2, now);
            assert_eq!(trust(&mut reputation, 12, now), None);
        }
        for (more, now, pause) in [(1, 20, 2), (2, 30, 4), (3, 40, 8)] {
            let stays = FORGIVEN + more;
            stay(&mut reputation, 20, 15, now);
            let held = Some(Trust::HeldBack { stays, pause: at(pause) });
            assert_eq!(trust(&mut reputation, 35, now + pause - 1), held);
            assert_eq!(trust(&mut reputation, 35, now + pause), None, "it may try again");
        }
        // A stay that is long enough is forgiven all, when it ends or before.
        reputation.hold(&[n2()], Step(40));
        assert_eq!(trust(&mut reputation, 40 + PROOF, 41), None);
        stay(&mut reputation, 60, 1, 50);
        assert_eq!(trust(&mut reputation, 61, 50), None, "it counts from the beginning");
    }

    #[test]
    fn broken_connections_are_not_counted_twice() {
        let mut reputation = Reputation::default();
        for now in [1, 2, 3] {
            reputation.broke(&n2(), Duration::from_secs(now));
            reputation.lost(&n2(), Step(1), Duration::from_secs(now));
        }
        assert_eq!(trust(&mut reputation, 1, 3), Some(Trust::Apart));
    }
}
