//! The reduction tree over indices (TRAJ-1): a sum of `total` leaves whose bits
//! do not depend on who summed which part.
//!
//! The nodes are [`TreeNode`]s: level *j* pairs neighbours of level *j − 1*, a
//! missing sibling passes through, and the first leaf is moved, never added to
//! a zero (0 + −0 would be +0). A rank that owns a contiguous range of leaves
//! sums it like a binary counter counts and is left with the fewest nodes that
//! cover its range, [`cover`]; the same rule then joins the nodes of all ranks.
//!
//! Gradients ([`crate::gradient`]), the loss, token counts and gradient norms
//! ([`crate::optimizer::clip`]) all go through this one tree.

use std::ops::Range;

use job::shares::{TreeNode, cover};

/// Partial sums that do not make up a whole.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A node that starts elsewhere than the one before ended.
    #[error("partial sum of level {level}, index {index} does not start at leaf {expected}")]
    Gap {
        /// Level of the node.
        level: u32,
        /// Index of the node.
        index: u32,
        /// Where it should start.
        expected: u32,
    },
    /// The last node does not end at the last leaf.
    #[error("the partial sums cover {covered} of {total} leaves")]
    Short {
        /// Leaves covered.
        covered: u32,
        /// Leaves of the tree.
        total: u32,
    },
}

/// Sums leaves and nodes in index order, joining siblings as soon as both are
/// there. Holds at most ⌈log₂ total⌉ + 1 values per side of a range.
#[derive(Clone, Debug)]
pub struct Counter<T> {
    total: u32,
    held: Vec<(Range<u32>, T)>,
}

impl<T> Counter<T> {
    /// An empty counter for a tree of `total` leaves.
    #[must_use]
    pub fn new(total: u32) -> Self {
        Self { total, held: Vec::new() }
    }

    /// Leaves of the whole tree.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Takes the sum of the leaves `range`, which is a node's range and starts
    /// where the value before ended, and joins what can be joined. `add` is
    /// given the left and the right sibling.
    pub fn push(&mut self, range: Range<u32>, value: T, mut add: impl FnMut(T, T) -> T) {
        let (mut range, mut value) = (range, value);
        while self.joins(&range)
            && let Some((left, sum)) = self.held.pop()
        {
            range = left.start..range.end;
            value = add(sum, value);
        }
        self.held.push((range, value));
    }

    /// True when the last value held is the left sibling of the node `right`.
    #[must_use]
    pub fn joins(&self, right: &Range<u32>) -> bool {
        let Some((left, _)) = self.held.last() else { return false };
        // A left sibling is never clipped by the end of the tree, so its length
        // is a power of two; the right one may be.
        let length = left.end - left.start;
        length.is_power_of_two()
            && left.start.is_multiple_of(length.saturating_mul(2))
            && right.start == left.end
            && right.end == left.end.saturating_add(length).min(self.total)
    }

    /// Takes out the last value held, with its leaves.
    pub fn pop(&mut self) -> Option<(Range<u32>, T)> {
        self.held.pop()
    }

    /// What is held, in index order, with the leaves that each value sums.
    #[must_use]
    pub fn held(&self) -> &[(Range<u32>, T)] {
        &self.held
    }

    /// Takes out what is held.
    pub fn drain(&mut self) -> impl Iterator<Item = (Range<u32>, T)> {
        self.held.drain(..)
    }

    /// Restarts for a tree of `total` leaves; what was held is dropped.
    pub fn restart(&mut self, total: u32) {
        self.held.clear();
        self.total = total;
    }
}

/// The partial sums of the leaves `first, first + 1, …` of a tree of `total`:
/// the nodes of [`cover`] over their range.
#[must_use]
pub fn partials<T>(
    first: u32,
    total: u32,
    leaves: impl IntoIterator<Item = T>,
    mut add: impl FnMut(T, T) -> T,
) -> Vec<(TreeNode, T)> {
    let mut counter = Counter::new(total);
    let mut at = first;
    for leaf in leaves {
        counter.push(at..at + 1, leaf, &mut add);
        at += 1;
    }
    let nodes = cover(first..at, total);
    debug_assert_eq!(nodes.len(), counter.held.len());
    nodes.into_iter().zip(counter.drain()).map(|(node, (_, sum))| (node, sum)).collect()
}

/// The sum of a whole tree from partial sums that cover it in index order;
/// none for a tree without leaves.
///
/// # Errors
/// [`Error`] when the nodes overlap, leave a gap or end early.
pub fn combine<T>(
    total: u32,
    pieces: impl IntoIterator<Item = (TreeNode, T)>,
    mut add: impl FnMut(T, T) -> T,
) -> Result<Option<T>, Error> {
    let mut counter = Counter::new(total);
    let mut covered = 0;
    for (node, value) in pieces {
        let range = range_of(node, total);
        if range.start != covered || range.is_empty() {
            return Err(Error::Gap { level: node.level, index: node.index, expected: covered });
        }
        covered = range.end;
        counter.push(range, value, &mut add);
    }
    if covered != total {
        return Err(Error::Short { covered, total });
    }
    Ok(counter.drain().next().map(|(_, sum)| sum))
}

/// [`TreeNode::range`] for a node that a peer sent: a level that no tree of
/// `u32` leaves has gives an empty range, not a shift beyond the width.
fn range_of(node: TreeNode, total: u32) -> Range<u32> {
    if node.level > u32::BITS { 0..0 } else { node.range(total) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition, written as a recursion: the sum of node (level, index).
    fn reference(leaves: &[f32], level: u32, index: usize) -> Option<f32> {
        if level == 0 {
            return leaves.get(index).copied();
        }
        let left = reference(leaves, level - 1, 2 * index);
        let right = reference(leaves, level - 1, 2 * index + 1);
        match (left, right) {
            (Some(left), Some(right)) => Some(left + right),
            (one, other) => one.or(other),
        }
    }

    #[track_caller]
    fn check(leaves: &[f32], cuts: &[u32]) {
        let total = leaves.len() as u32;
        let mut pieces = Vec::new();
        for (start, end) in cuts.iter().zip(&cuts[1..]) {
            let own = leaves[*start as usize..*end as usize].iter().copied();
            let sums = partials(*start, total, own, |a, b| a + b);
            let nodes: Vec<_> = sums.iter().map(|(node, _)| *node).collect();
            assert_eq!(nodes, cover(*start..*end, total), "of {total}, cut {start}..{end}");
            pieces.extend(sums);
        }
        let sum = combine(total, pieces, |a, b| a + b).expect("the cuts cover the tree");
        let expected = reference(leaves, 6, 0);
        assert_eq!(sum.map(f32::to_bits), expected.map(f32::to_bits), "{total} cut at {cuts:?}");
    }

    proptest! {
        /// TRAJ-1: any M in 1..=40 and any split over ranks gives the same bits.
        #[test]
        fn the_sum_does_not_depend_on_the_split(
            leaves in prop::collection::vec(-1e3f32..1e3, 1..=40),
            cuts in prop::collection::vec(0u32..=40, 0..8),
        ) {
            let total = leaves.len() as u32;
            let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut.min(total)).collect();
            cuts.extend([0, total]);
            cuts.sort_unstable();
            check(&leaves, &cuts);
        }
    }

    #[test]
    fn every_even_split_gives_the_same_bits() {
        for total in 1..=40u32 {
            let leaves: Vec<_> = (0..total).map(|i| 1.0 / (i as f32 + 0.37)).collect();
            for ranks in 1..=total + 2 {
                let shares = job::shares::Shares::even(total, ranks);
                let mut cuts: Vec<_> = (0..ranks as usize).map(|r| shares.of(r).start).collect();
                cuts.push(total);
                check(&leaves, &cuts);
            }
        }
    }

    #[test]
    fn a_lone_negative_zero_stays_negative() {
        check(&[-0.0], &[0, 1]);
        check(&[-0.0, -0.0, -0.0], &[0, 2, 3]);
    }

    #[test]
    fn pieces_that_do_not_make_a_whole_are_refused() {
        let node = |level, index| (TreeNode { level, index }, 1.0f32);
        let sum = |pieces: Vec<_>| combine(5, pieces, |a, b| a + b);
        assert_eq!(sum(vec![node(2, 0), node(0, 4)]), Ok(Some(2.0)));
        assert_eq!(sum(vec![node(2, 0)]), Err(Error::Short { covered: 4, total: 5 }));
        let gap = |level, index, expected| Err(Error::Gap { level, index, expected });
        assert_eq!(sum(vec![node(1, 0), node(0, 3)]), gap(0, 3, 2));
        assert_eq!(sum(vec![node(2, 0), node(2, 0)]), gap(2, 0, 4));
        assert_eq!(sum(vec![node(99, 0)]), gap(99, 0, 0));
        assert_eq!(sum(vec![node(2, 0), node(0, 4), node(0, 5)]), gap(0, 5, 5));
        assert_eq!(combine(0, Vec::<(TreeNode, f32)>::new(), |a, b| a + b), Ok(None));
    }
}
