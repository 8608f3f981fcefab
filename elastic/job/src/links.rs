//! LS-2: whose tensor connections keep breaking, and how long such a node stays
//! apart. Soft state of a leader: a new one finds it out again.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::NodeId;

/// The beginning of the cause for which such a node is evicted.
pub const BROKEN: &str = "its tensor connections broke";

/// Doublings of the time apart: a connection that is repaired after days is tried
/// within minutes.
const DOUBLINGS: u32 = 7;

/// How far a node is trusted after its connections kept breaking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trust {
    /// It stands by: a generation with it would break again.
    Apart,
    /// It is tried again, and goes at once when a connection breaks.
    OnProbation,
}

/// Who was evicted for its connections and has not trained since.
#[derive(Debug, Default)]
pub(crate) struct Links {
    broken: BTreeMap<NodeId, Broken>,
}

#[derive(Clone, Copy, Debug)]
struct Broken {
    times: u32,
    since: Duration,
}

impl Links {
    /// A node went because its connections broke.
    pub(crate) fn broke(&mut self, node: &NodeId, now: Duration) {
        let times = self.broken.get(node).map_or(0, |broken| broken.times);
        self.broken.insert(node.clone(), Broken { times: times + 1, since: now });
    }

    /// These trained together.
    pub(crate) fn hold(&mut self, mesh: &[NodeId]) {
        self.broken.retain(|node, _| !mesh.contains(node));
    }

    /// Whom to trust how far; who is not named is trusted. The time apart is `base`
    /// the first time, and doubles.
    pub(crate) fn trust(&self, now: Duration, base: Duration) -> BTreeMap<NodeId, Trust> {
        let trust = |Broken { times, since }: Broken| {
            let apart = base * 2_u32.pow(times.saturating_sub(1).min(DOUBLINGS));
            if now.saturating_sub(since) < apart { Trust::Apart } else { Trust::OnProbation }
        };
        self.broken.iter().map(|(node, broken)| (node.clone(), trust(*broken))).collect()
    }
}

/// Of ranks between which connections are broken, those without which none is: the
/// one with the most goes first, of equals one that is on probation, then the
/// highest.
pub(crate) fn cover(
    mut broken: BTreeSet<(usize, usize)>,
    on_probation: impl Fn(usize) -> bool,
) -> BTreeSet<usize> {
    let mut gone = BTreeSet::new();
    loop {
        let mut links: BTreeMap<usize, usize> = BTreeMap::new();
        for rank in broken.iter().flat_map(|(a, b)| [*a, *b]) {
            *links.entry(rank).or_default() += 1;
        }
        let worst = links.into_iter().max_by_key(|(rank, links)| {
            let rank = *rank;
            (*links, on_probation(rank), rank)
        });
        let Some((worst, _)) = worst else { return gone };
        broken.retain(|(a, b)| *a != worst && *b != worst);
        gone.insert(worst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_broken_connection_is_left_and_few_go() {
        #[track_caller]
        fn check(broken: &[(usize, usize)], on_probation: &[usize], expected: &[usize]) {
            let gone = cover(broken.iter().copied().collect(), |rank| on_probation.contains(&rank));
            assert_eq!(gone.into_iter().collect::<Vec<_>>(), expected, "{broken:?}");
        }
        check(&[], &[], &[]);
        check(&[(0, 1)], &[], &[1]);
        check(&[(0, 1)], &[0], &[0]);
        check(&[(0, 3), (0, 2)], &[], &[0]);
        // Two and two, of which each accuses the first that it misses.
        check(&[(0, 2), (1, 2), (0, 3)], &[], &[2, 3]);
        check(&[(0, 2), (1, 2), (0, 3), (1, 3)], &[], &[2, 3]);
        check(&[(0, 2), (1, 2), (0, 3), (1, 3)], &[0, 1], &[0, 1]);
    }

    #[test]
    fn the_time_apart_doubles_until_it_trains() {
        let node = NodeId::new("n2").expect("a good name");
        let at = Duration::from_secs;
        let mut links = Links::default();
        let trust = |links: &Links, now| links.trust(at(now), at(2)).get(&node).copied();
        assert_eq!(trust(&links, 0), None);
        for (times, (now, apart)) in [(10, 2), (20, 4), (30, 8)].into_iter().enumerate() {
            links.broke(&node, at(now));
            assert_eq!(trust(&links, now + apart - 1), Some(Trust::Apart), "{times}");
            assert_eq!(trust(&links, now + apart), Some(Trust::OnProbation), "{times}");
        }
        (0..20).for_each(|_| links.broke(&node, at(100)));
        assert_eq!(trust(&links, 100 + 256), Some(Trust::OnProbation), "it is bounded");
        links.hold(std::slice::from_ref(&node));
        assert_eq!(trust(&links, 101), None);
    }
}
