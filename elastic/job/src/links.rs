//! LS-2: which ranks have to go when tensor connections keep breaking.

use std::collections::{BTreeMap, BTreeSet};

/// The beginning of the cause for which such a node is evicted.
pub const BROKEN: &str = "its tensor connections broke";

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
}
