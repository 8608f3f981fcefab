//! Which rank computes which micro-batch (DATA-2), and the reduction tree over
//! micro-batch indices that makes the sum independent of it (TRAJ-1).

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Contiguous micro-batch ranges, one per rank, covering `0..total` in order.
/// Ranks beyond the number of micro-batches get an empty range.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shares {
    bounds: Vec<u32>,
}

/// A node of the reduction tree: the micro-batches
/// `[index·2^level, (index+1)·2^level) ∩ [0, total)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TreeNode {
    /// 0 for a single micro-batch.
    pub level: u32,
    /// Position within the level.
    pub index: u32,
}

impl Shares {
    /// Shares as even as possible over `ranks` ranks: the first `total % ranks`
    /// get one more. Every degree from 1 on works.
    ///
    /// # Panics
    /// When `ranks` is zero.
    #[must_use]
    pub fn even(total: u32, ranks: u32) -> Self {
        assert!(ranks > 0, "a mesh has at least one rank");
        let (base, more) = (total / ranks, total % ranks);
        let bounds = (0..=ranks).map(|r| r * base + r.min(more)).collect();
        Self { bounds }
    }

    /// Number of micro-batches M of the global batch.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.bounds.last().copied().unwrap_or(0)
    }

    /// Number of ranks.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.bounds.len().saturating_sub(1)
    }

    /// The micro-batches of one rank.
    ///
    /// # Panics
    /// When the rank is not in the mesh.
    #[must_use]
    pub fn of(&self, rank: usize) -> Range<u32> {
        self.bounds[rank]..self.bounds[rank + 1]
    }

    /// The fewest tree nodes that cover a rank's range, in index order: what
    /// the rank sends into the exchange of a step.
    #[must_use]
    pub fn pieces(&self, rank: usize) -> Vec<TreeNode> {
        cover(self.of(rank), self.total())
    }
}

impl TreeNode {
    /// The micro-batches below this node, of `total`.
    #[must_use]
    pub fn range(self, total: u32) -> Range<u32> {
        let start = u64::from(self.index) << self.level;
        let end = (u64::from(self.index) + 1) << self.level;
        let clip = |x: u64| x.min(u64::from(total)) as u32;
        clip(start)..clip(end)
    }

    /// The node above.
    #[must_use]
    pub fn parent(self) -> Self {
        Self { level: self.level + 1, index: self.index / 2 }
    }
}

/// The fewest tree nodes whose ranges cover `range` of `0..total` exactly, in
/// index order, each at the lowest level that has its range.
#[must_use]
pub fn cover(range: Range<u32>, total: u32) -> Vec<TreeNode> {
    let mut nodes = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let mut node = TreeNode { level: 0, index: at };
        let mut end = at + 1;
        loop {
            let above = node.parent().range(total);
            if above.start != at || above.end > range.end || above.end == end {
                break;
            }
            node = node.parent();
            end = above.end;
        }
        nodes.push(node);
        at = end;
    }
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(range: Range<u32>, total: u32, expected: &[(u32, u32)]) {
        let nodes: Vec<_> = cover(range, total).iter().map(|n| (n.level, n.index)).collect();
        assert_eq!(nodes, expected);
    }

    #[test]
    fn the_fewest_aligned_nodes_cover_a_range() {
        check(0..8, 8, &[(3, 0)]);
        check(0..3, 8, &[(1, 0), (0, 2)]);
        check(3..6, 8, &[(0, 3), (1, 2)]);
        check(4..6, 6, &[(1, 2)]);
        check(4..5, 5, &[(0, 4)]);
        check(0..5, 5, &[(3, 0)]);
        check(2..2, 5, &[]);
    }

    #[test]
    fn shares_cover_every_micro_batch_once_at_every_degree() {
        for total in 1..20 {
            for ranks in 1..25 {
                let shares = Shares::even(total, ranks);
                let all: Vec<u32> = (0..ranks as usize).flat_map(|r| shares.of(r)).collect();
                assert_eq!(all, (0..total).collect::<Vec<_>>());
                let pieces: Vec<u32> = (0..ranks as usize)
                    .flat_map(|r| shares.pieces(r))
                    .flat_map(|node| node.range(total))
                    .collect();
                assert_eq!(pieces, all);
            }
        }
    }
}
