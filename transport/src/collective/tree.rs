//! The sum over micro-batches in tree order (TRAJ-1): node
//! `[k·2^j, (k+1)·2^j) ∩ [0, M)` is its left half plus its right half, a missing
//! right half passes through, and a leaf is moved, never added to zero
//! (0 + −0 is +0). Who computed which node does not show in a single bit of the
//! result, NaN payloads included.

use std::collections::BTreeMap;

use job::shares::TreeNode;

use super::Error;

/// Elements summed at a time, 16 KiB: the partial sums of a block stay in the
/// first-level cache.
const BLOCK: usize = 4096;

/// `left + right` in tree order. The sum of two NaNs is the left one, which
/// hardware leaves to the order that a compiler picks.
#[inline]
#[must_use]
pub fn plus(left: f32, right: f32) -> f32 {
    const QUIET: u32 = 0x0040_0000;
    if left.is_nan() { f32::from_bits(left.to_bits() | QUIET) } else { left + right }
}

/// `left[i] = left[i] + right[i]` in tree order.
///
/// # Panics
/// When the lengths differ.
pub fn add_assign(left: &mut [f32], right: &[f32]) {
    assert_eq!(left.len(), right.len(), "both halves of a node have the same length");
    for (left, &right) in left.iter_mut().zip(right) {
        *left = plus(*left, right);
    }
}

/// `out` = the sum of all `total` micro-batches, from partial sums of nodes that
/// cover them exactly, in any order. Each piece is as long as `out`.
///
/// # Errors
/// [`Error::Refused`] when the nodes do not cover `0..total` once, or a length
/// differs.
pub fn combine(total: u32, pieces: &[(TreeNode, &[f32])], out: &mut [f32]) -> Result<(), Error> {
    if let Some((node, piece)) = pieces.iter().find(|(_, piece)| piece.len() != out.len()) {
        let (has, needs) = (piece.len(), out.len());
        return Err(Error::refused(format!(
            "the piece of {node:?} has {has} elements, the sum has {needs}"
        )));
    }
    let nodes: Vec<_> = pieces.iter().map(|(node, _)| *node).collect();
    let slices: Vec<_> = pieces.iter().map(|(_, piece)| *piece).collect();
    Tree::new(total, &nodes)?.sum(&slices, out);
    Ok(())
}

/// The additions that turn a set of pieces into the whole sum.
#[derive(Debug)]
pub(super) struct Tree {
    program: Vec<Instruction>,
    stack: Vec<Operand>,
    // One block for each stack position but the lowest, which lives in `out`.
    scratch: Vec<f32>,
}

/// In postfix order: a node's left half, its right half, then their sum.
#[derive(Clone, Copy, Debug)]
enum Instruction {
    Piece(usize),
    Add,
}

/// A value on the stack: a piece where it lies, or a sum in the block of its
/// stack position.
#[derive(Clone, Copy, Debug)]
enum Operand {
    Piece(usize),
    Block,
}

impl Tree {
    pub(super) fn new(total: u32, nodes: &[TreeNode]) -> Result<Self, Error> {
        // By range: nodes of the same range, one above the other, have one value.
        let mut pieces = BTreeMap::new();
        for (index, node) in nodes.iter().enumerate() {
            let range = node.range(total);
            if pieces.insert((range.start, range.end), index).is_some() {
                return Err(Error::refused(format!("node {node:?} of {total} comes twice")));
            }
        }
        let mut program = Vec::with_capacity(2 * nodes.len());
        let root =
            TreeNode { level: u64::from(total).next_power_of_two().trailing_zeros(), index: 0 };
        visit(root, total, &mut pieces, &mut program)?;
        if let Some((&(start, end), _)) = pieces.first_key_value() {
            return Err(Error::refused(format!(
                "micro-batches {start}..{end} of {total} are in two pieces"
            )));
        }
        let (mut height, mut deepest) = (0_usize, 0);
        for instruction in &program {
            match instruction {
                Instruction::Piece(_) => height += 1,
                Instruction::Add => height -= 1,
            }
            deepest = deepest.max(height);
        }
        let scratch = vec![0.0; deepest.saturating_sub(1) * BLOCK];
        Ok(Self { program, stack: Vec::with_capacity(deepest), scratch })
    }

    /// Pieces come in the order of the nodes, each as long as `out`.
    pub(super) fn sum(&mut self, pieces: &[&[f32]], out: &mut [f32]) {
        for (block, out) in out.chunks_mut(BLOCK).enumerate() {
            let range = block * BLOCK..block * BLOCK + out.len();
            self.sum_block(|piece| &pieces[piece][range.clone()], out);
        }
    }

    fn sum_block<'a>(&mut self, piece: impl Fn(usize) -> &'a [f32], out: &mut [f32]) {
        let length = out.len();
        self.stack.clear();
        for &instruction in &self.program {
            let Instruction::Piece(index) = instruction else {
                // A program ends with one value, so an addition finds two.
                let (Some(right), Some(left)) = (self.stack.pop(), self.stack.pop()) else {
                    continue;
                };
                let position = self.stack.len();
                let (below, above) = self.scratch.split_at_mut(position * BLOCK);
                let to = match position {
                    0 => &mut *out,
                    _ => &mut below[(position - 1) * BLOCK..][..length],
                };
                match (left, right) {
                    (Operand::Piece(left), Operand::Piece(right)) => {
                        add_into(to, piece(left), piece(right));
                    }
                    (Operand::Piece(left), Operand::Block) => {
                        add_into(to, piece(left), &above[..length]);
                    }
                    (Operand::Block, Operand::Piece(right)) => add_assign(to, piece(right)),
                    (Operand::Block, Operand::Block) => add_assign(to, &above[..length]),
                }
                self.stack.push(Operand::Block);
                continue;
            };
            self.stack.push(Operand::Piece(index));
        }
        if let Some(&Operand::Piece(only)) = self.stack.first() {
            out.copy_from_slice(piece(only));
        }
    }
}

fn visit(
    node: TreeNode,
    total: u32,
    pieces: &mut BTreeMap<(u32, u32), usize>,
    program: &mut Vec<Instruction>,
) -> Result<(), Error> {
    let range = node.range(total);
    if let Some(piece) = pieces.remove(&(range.start, range.end)) {
        program.push(Instruction::Piece(piece));
        return Ok(());
    }
    if node.level == 0 {
        return Err(Error::refused(format!(
            "micro-batch {} of {total} is in no piece",
            node.index
        )));
    }
    let left = TreeNode { level: node.level - 1, index: node.index * 2 };
    let right = TreeNode { level: node.level - 1, index: node.index * 2 + 1 };
    visit(left, total, pieces, program)?;
    if !right.range(total).is_empty() {
        visit(right, total, pieces, program)?;
        program.push(Instruction::Add);
    }
    Ok(())
}

fn add_into(to: &mut [f32], left: &[f32], right: &[f32]) {
    for ((to, &left), &right) in to.iter_mut().zip(left).zip(right) {
        *to = plus(left, right);
    }
}

#[cfg(test)]
mod tests {
    use job::shares::{Shares, cover};

    use super::*;

    /// One addition after the other, straight from the definition.
    fn reference(node: TreeNode, leaves: &[f32]) -> f32 {
        if node.level == 0 {
            return leaves[node.index as usize];
        }
        let child = |index| TreeNode { level: node.level - 1, index };
        let left = reference(child(node.index * 2), leaves);
        if child(node.index * 2 + 1).range(leaves.len() as u32).is_empty() {
            return left;
        }
        let right = reference(child(node.index * 2 + 1), leaves);
        if left.is_nan() { f32::from_bits(left.to_bits() | 0x0040_0000) } else { left + right }
    }

    #[track_caller]
    fn check(leaves: &[f32], bounds: &[u32]) {
        let total = leaves.len() as u32;
        let root = TreeNode { level: 6, index: 0 };
        let expected = reference(root, leaves);
        let nodes: Vec<_> = bounds.windows(2).flat_map(|w| cover(w[0]..w[1], total)).collect();
        let values: Vec<_> = nodes.iter().map(|&node| reference(node, leaves)).collect();
        // Long enough for a vector body, a scalar tail and a second block.
        let pieces: Vec<_> = values.iter().map(|&value| vec![value; BLOCK + 7]).collect();
        let pieces: Vec<_> = nodes.iter().copied().zip(pieces.iter().map(Vec::as_slice)).collect();
        let mut out = vec![7.0; BLOCK + 7];
        combine(total, &pieces, &mut out).unwrap();
        for sum in out {
            assert_eq!(sum.to_bits(), expected.to_bits(), "{leaves:?} split at {bounds:?}");
        }
    }

    #[test]
    fn any_split_gives_the_bits_of_the_sequential_tree() {
        let mut random = 1_u64;
        let mut next = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 32) as u32
        };
        for total in 1..=40_u32 {
            for _ in 0..8 {
                let leaves: Vec<_> = (0..total)
                    .map(|_| match next() % 16 {
                        0 => -0.0,
                        1 => f32::from_bits(next() % 0x0080_0000),
                        2 if total > 9 => f32::from_bits(0x7f80_0001 | (next() & 0x007f_ffff)),
                        _ => (next() as f32 / 1e9 - 2.0) * 10_f32.powi(next() as i32 % 8),
                    })
                    .collect();
                let mut bounds: Vec<_> = (0..next() % 6).map(|_| next() % (total + 1)).collect();
                bounds.extend([0, total]);
                bounds.sort_unstable();
                check(&leaves, &bounds);
            }
        }
    }

    #[test]
    fn negative_zero_survives_alone_and_added() {
        check(&[-0.0], &[0, 1]);
        check(&[-0.0, -0.0, -0.0], &[0, 1, 2, 3]);
    }

    #[test]
    fn of_two_nans_the_left_one_wins() {
        let nan = |payload: u32| f32::from_bits(0x7fc0_0000 | payload);
        check(&[nan(1), nan(2), 1.0, nan(3)], &[0, 1, 3, 4]);
        assert_eq!(plus(nan(1), nan(2)).to_bits(), nan(1).to_bits());
        assert_eq!(plus(1.0, nan(2)).to_bits(), nan(2).to_bits());
    }

    #[test]
    fn pieces_that_do_not_cover_once_are_refused() {
        #[track_caller]
        fn check(total: u32, nodes: &[(u32, u32)], expected: &str) {
            let nodes: Vec<_> =
                nodes.iter().map(|&(level, index)| TreeNode { level, index }).collect();
            let error = Tree::new(total, &nodes).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        check(4, &[(1, 0)], "micro-batch 2 of 4 is in no piece");
        check(4, &[(1, 0), (1, 1), (0, 3)], "micro-batches 3..4 of 4 are in two pieces");
        check(2, &[(0, 0), (0, 0)], "comes twice");
        check(0, &[], "micro-batch 0 of 0 is in no piece");
        check(2, &[(40, 0), (40, 0)], "comes twice");
        assert!(combine(1, &[(TreeNode { level: 0, index: 0 }, &[1.0])], &mut []).is_err());
        assert!(Shares::even(3, 2).pieces(0).len() == 1);
    }
}
