//! The tree sum of leaves that come one after the other in index order, by one
//! binary counter: at most 1 + log₂ M buffers are in memory.

use std::ops::Range;

use super::{Error, tree::add_assign};

/// Elements added at a time: a carry stays in the first-level cache.
const BLOCK: usize = 4096;

/// A running sum in tree order (TRAJ-1) of the leaves `0..next()` of `total`.
#[derive(Debug)]
pub struct Counter {
    total: u32,
    next: u32,
    length: usize,
    // The partial sum of 2^j leaves at j, where bit j of `next` is set.
    levels: Vec<Vec<f32>>,
    carry: Box<[f32; BLOCK]>,
}

impl Counter {
    /// For the sum of `total` leaves of `length` elements.
    #[must_use]
    pub fn new(total: u32, length: usize) -> Self {
        Self { total, next: 0, length, levels: Vec::new(), carry: Box::new([0.0; BLOCK]) }
    }

    /// The leaf that comes next.
    #[must_use]
    pub fn next(&self) -> u32 {
        self.next
    }

    /// Number of leaves.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Number of elements of each leaf.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether leaves have no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Adds the next leaf.
    ///
    /// # Errors
    /// [`Error::Refused`] after the last leaf, or when the length differs.
    pub fn push(&mut self, leaf: &[f32]) -> Result<(), Error> {
        if leaf.len() != self.length {
            let (has, needs) = (leaf.len(), self.length);
            return Err(Error::refused(format!("a leaf of {has} elements, the sum has {needs}")));
        }
        self.begin(1)?;
        self.add(0, 0..self.length, leaf);
        self.end(1);
        Ok(())
    }

    /// The sum of all leaves; the counter starts anew.
    ///
    /// # Errors
    /// [`Error::Refused`] while leaves are missing, or when the length differs.
    pub fn finish(&mut self, out: &mut [f32]) -> Result<(), Error> {
        let Self { total, next, length, .. } = *self;
        if next != total || total == 0 {
            return Err(Error::refused(format!("the sum has {next} of {total} leaves")));
        }
        if out.len() != length {
            return Err(Error::refused(format!("{} elements for a sum of {length}", out.len())));
        }
        // A missing right sibling passes through, so what is on the right is
        // added to the next larger sum on its left.
        let mut sum: Option<usize> = None;
        for level in (0..self.levels.len()).filter(|level| total >> level & 1 == 1) {
            if let Some(right) = sum {
                let (below, above) = self.levels.split_at_mut(level);
                add_assign(&mut above[0], &below[right]);
            }
            sum = Some(level);
        }
        out.copy_from_slice(&self.levels[sum.unwrap_or(0)]);
        self.next = 0;
        Ok(())
    }

    /// Makes room for so many leaves that are going to be added part by part.
    pub(super) fn begin(&mut self, leaves: u32) -> Result<(), Error> {
        let after = self.next.checked_add(leaves).filter(|after| *after <= self.total);
        let Some(after) = after else {
            let Self { total, next, .. } = self;
            return Err(Error::refused(format!("{leaves} leaves after {next} of {total}")));
        };
        let levels = (u32::BITS - after.leading_zeros()) as usize;
        while self.levels.len() < levels {
            self.levels.push(vec![0.0; self.length]);
        }
        Ok(())
    }

    /// Adds a range of elements of leaf `next() + index`. Each range gets all
    /// leaves in order; the order of ranges is free.
    pub(super) fn add(&mut self, index: u32, range: Range<usize>, leaf: &[f32]) {
        let number = self.next + index;
        let to = number.trailing_ones() as usize;
        for (block, leaf) in leaf.chunks(BLOCK).enumerate() {
            let start = range.start + block * BLOCK;
            let at = start..start + leaf.len();
            if to == 0 {
                // The first leaf is moved, not added to zeros.
                self.levels[0][at].copy_from_slice(leaf);
                continue;
            }
            let carry = &mut self.carry[..leaf.len()];
            carry.copy_from_slice(&self.levels[0][at.clone()]);
            add_assign(carry, leaf);
            for level in 1..to {
                let left = &mut self.levels[level][at.clone()];
                add_assign(left, carry);
                carry.copy_from_slice(left);
            }
            self.levels[to][at].copy_from_slice(carry);
        }
    }

    /// So many leaves are in, every range of them.
    pub(super) fn end(&mut self, leaves: u32) {
        self.next += leaves;
    }
}

#[cfg(test)]
mod tests {
    use job::shares::TreeNode;

    use super::*;

    fn leaf(index: u32, length: usize) -> Vec<f32> {
        let value = |at| (f64::from(index + 1) * 0.7 + f64::from(at) * 0.3).sin() as f32;
        (0..length as u32).map(value).collect()
    }

    #[test]
    fn the_counter_is_the_tree_for_any_number_of_leaves() {
        for total in 1..=40 {
            for length in [0, 1, BLOCK + 3] {
                let leaves: Vec<_> = (0..total).map(|index| leaf(index, length)).collect();
                let nodes: Vec<_> = leaves
                    .iter()
                    .enumerate()
                    .map(|(i, leaf)| (TreeNode { level: 0, index: i as u32 }, leaf.as_slice()))
                    .collect();
                let mut expected = vec![0.0; length];
                crate::collective::tree::combine(total, &nodes, &mut expected).unwrap();
                let mut counter = Counter::new(total, length);
                // Twice: it starts anew.
                for _ in 0..2 {
                    leaves.iter().for_each(|leaf| counter.push(leaf).unwrap());
                    let mut sum = vec![f32::NAN; length];
                    counter.finish(&mut sum).unwrap();
                    let bits =
                        |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&sum), bits(&expected), "{total} leaves of {length}");
                }
            }
        }
    }

    #[test]
    fn leaves_beyond_or_missing_are_refused() {
        let mut counter = Counter::new(2, 1);
        counter.push(&[-0.0]).unwrap();
        assert!(counter.finish(&mut [0.0]).is_err());
        assert!(counter.push(&[1.0, 2.0]).is_err());
        counter.push(&[-0.0]).unwrap();
        assert!(counter.push(&[1.0]).is_err());
        let mut sum = [1.0];
        counter.finish(&mut sum).unwrap();
        assert_eq!(sum[0].to_bits(), (-0.0_f32).to_bits());
    }
}
