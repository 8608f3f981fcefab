//! Accumulates the gradients of a rank's micro-batches in tree order (TRAJ-1).
//!
//! Leaves arrive in index order; the accumulator is a binary counter over
//! vectors ([`Counter`]) and ends with the pieces that the rank contributes to
//! the exchange of the step. All additions are f32, left plus right. libtorch
//! never accumulates into a gradient of its own.
//!
//! Buffers are kept from step to step: after the first step of a generation
//! nothing of the size of the model is allocated.

use std::ops::Range;

use job::shares::{TreeNode, cover};

use crate::{
    layout::AlignedBuffer,
    tree::{self, Counter},
};

/// The gradients of one rank's micro-batches of one step.
#[derive(Debug)]
pub struct TreeAccumulator {
    range: Range<u32>,
    next: u32,
    elements: usize,
    counter: Counter<AlignedBuffer>,
    spare: Vec<AlignedBuffer>,
}

impl TreeAccumulator {
    /// For the micro-batches `range` of `0..total` and gradients of `elements`
    /// f32 values.
    ///
    /// # Panics
    /// When `range` is not within `0..total`.
    #[must_use]
    pub fn new(range: Range<u32>, total: u32, elements: usize) -> Self {
        let mut new = Self {
            range: 0..0,
            next: 0,
            elements,
            counter: Counter::new(total),
            spare: Vec::new(),
        };
        new.restart(range, total);
        new
    }

    /// Drops what was accumulated, keeps the buffers, and starts over: for the
    /// next step, or for the shares of a new generation.
    ///
    /// # Panics
    /// When `range` is not within `0..total`.
    pub fn restart(&mut self, range: Range<u32>, total: u32) {
        assert!(range.start <= range.end && range.end <= total, "{range:?} is within 0..{total}");
        self.spare.extend(self.counter.drain().map(|(_, buffer)| buffer));
        self.counter.restart(total);
        self.next = range.start;
        self.range = range;
    }

    /// Length of a leaf.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// The micro-batch whose gradient is due; none when the range is complete.
    #[must_use]
    pub fn due(&self) -> Option<u32> {
        (self.next < self.range.end).then_some(self.next)
    }

    /// Takes the gradient of the micro-batch that is [`Self::due`].
    ///
    /// # Panics
    /// When none is due or `leaf` has another length than announced.
    pub fn push(&mut self, leaf: &[f32]) {
        assert!(self.next < self.range.end, "all of {:?} is accumulated", self.range);
        assert_eq!(leaf.len(), self.elements, "a leaf is as long as the flat gradient");
        let mut range = self.next..self.next + 1;
        self.next += 1;
        let sibling = if self.counter.joins(&range) { self.counter.pop() } else { None };
        let value = if let Some((left, mut sum)) = sibling {
            // A leaf whose sibling waits is added where it is, without a copy.
            add(&mut sum, leaf);
            range = left.start..range.end;
            sum
        } else {
            let spare = self.spare.pop();
            let mut buffer = spare.unwrap_or_else(|| AlignedBuffer::zeroed(self.elements));
            buffer.copy_from_slice(leaf);
            buffer
        };
        let spare = &mut self.spare;
        self.counter.push(range, value, |mut left, right| {
            add(&mut left, &right);
            spare.push(right);
            left
        });
    }

    /// The pieces of a complete range: those of [`cover`], in index order, each
    /// as long as the flat gradient. None while a micro-batch is still due.
    #[must_use]
    pub fn pieces(&self) -> Option<Vec<(TreeNode, &[f32])>> {
        if self.due().is_some() {
            return None;
        }
        let nodes = cover(self.range.clone(), self.counter.total());
        let sums = self.counter.held().iter().map(|(_, sum)| &**sum);
        Some(nodes.into_iter().zip(sums).collect())
    }
}

/// The sum over all micro-batches from the pieces of all ranks in index order,
/// into `out`: what the exchange of a step computes, in one process.
///
/// # Errors
/// [`tree::Error`] when the pieces do not make up the whole.
///
/// # Panics
/// When a piece is not as long as `out`.
pub fn combine(
    total: u32,
    pieces: &[(TreeNode, &[f32])],
    out: &mut [f32],
) -> Result<(), tree::Error> {
    let owned = pieces.iter().map(|(node, piece)| (*node, piece.to_vec()));
    let sum = tree::combine(total, owned, |mut left, right| {
        add(&mut left, &right);
        left
    })?;
    match sum {
        Some(sum) => out.copy_from_slice(&sum),
        None => out.fill(0.0),
    }
    Ok(())
}

fn add(sum: &mut [f32], more: &[f32]) {
    for (sum, more) in sum.iter_mut().zip(more) {
        *sum += more;
    }
}

#[cfg(test)]
mod tests {
    use job::shares::Shares;
    use proptest::prelude::*;

    use super::*;

    /// Leaves that differ in every bit that rounding can touch.
    fn leaf(index: u32, elements: usize) -> Vec<f32> {
        let value = |i: usize| {
            let x = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (i as u64) << 17;
            ((x >> 20) % 100_003) as f32 / 977.0 - 51.0
        };
        (0..elements).map(value).collect()
    }

    fn whole(total: u32, elements: usize) -> Vec<f32> {
        let leaves: Vec<_> = (0..total).map(|i| leaf(i, elements)).collect();
        let nodes: Vec<_> = (0..total).map(|index| TreeNode { level: 0, index }).collect();
        let pieces: Vec<_> = nodes.into_iter().zip(leaves.iter().map(Vec::as_slice)).collect();
        let mut out = vec![0.0; elements];
        combine(total, &pieces, &mut out).expect("all leaves");
        out
    }

    #[track_caller]
    fn check(shares: &Shares, elements: usize, accumulators: &mut Vec<TreeAccumulator>) {
        let total = shares.total();
        accumulators.resize_with(shares.ranks(), || TreeAccumulator::new(0..0, 0, elements));
        for (rank, accumulator) in accumulators.iter_mut().enumerate() {
            accumulator.restart(shares.of(rank), total);
            while let Some(index) = accumulator.due() {
                assert_eq!(accumulator.pieces(), None, "not before the range is complete");
                accumulator.push(&leaf(index, elements));
            }
            let pieces = accumulator.pieces().expect("complete");
            let nodes: Vec<_> = pieces.iter().map(|(node, _)| *node).collect();
            assert_eq!(nodes, shares.pieces(rank), "rank {rank} of {}", shares.ranks());
        }
        let pieces: Vec<_> =
            accumulators.iter().flat_map(|a| a.pieces().expect("complete")).collect();
        let mut out = vec![f32::NAN; elements];
        combine(total, &pieces, &mut out).expect("shares cover the global batch");
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(
            bits(&out),
            bits(&whole(total, elements)),
            "M = {total}, R = {}",
            shares.ranks()
        );
    }

    proptest! {
        /// TRAJ-1: M in 1..=40 micro-batches over any number of ranks.
        #[test]
        fn the_gradient_does_not_depend_on_the_mesh(
            total in 1u32..=40,
            ranks in prop::collection::vec(1u32..=41, 1..4),
            elements in 0usize..70,
        ) {
            let mut accumulators = Vec::new();
            for ranks in ranks {
                check(&Shares::even(total, ranks), elements, &mut accumulators);
            }
        }
    }

    #[test]
    fn the_first_leaf_is_moved_not_added_to_zero() {
        let mut accumulator = TreeAccumulator::new(0..1, 1, 2);
        accumulator.push(&[-0.0, 0.0]);
        let pieces = accumulator.pieces().expect("complete");
        assert_eq!(pieces[0].1.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), [1 << 31, 0]);
    }

    #[test]
    fn a_second_step_allocates_nothing_of_the_size_of_the_model() {
        let mut accumulator = TreeAccumulator::new(3..14, 16, 32);
        let run = |accumulator: &mut TreeAccumulator| {
            while let Some(index) = accumulator.due() {
                accumulator.push(&leaf(index, 32));
            }
            accumulator.restart(3..14, 16);
            let mut buffers: Vec<_> = accumulator.spare.iter().map(|b| b.as_ptr()).collect();
            buffers.sort_unstable();
            buffers
        };
        let first = run(&mut accumulator);
        assert!(first.len() <= 6, "{} buffers", first.len());
        assert_eq!(run(&mut accumulator), first);
    }
}
