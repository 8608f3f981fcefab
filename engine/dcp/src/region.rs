//! Boxes of a tensor, and how bytes move from one box to another (CKPT-2).

use std::fmt;

use serde::{Deserialize, Serialize};

/// A box of a tensor: along dimension `d` the indices
/// `offsets[d] .. offsets[d] + sizes[d]`. A 0-d tensor has one element and the
/// region of no dimensions. Elements of a region are always in C order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Region {
    /// First index along each dimension.
    pub offsets: Vec<u64>,
    /// Number of indices along each dimension; the same length as `offsets`.
    pub sizes: Vec<u64>,
}

impl Region {
    /// The region that is the whole tensor.
    #[must_use]
    pub fn whole(shape: &[u64]) -> Self {
        Self { offsets: vec![0; shape.len()], sizes: shape.to_vec() }
    }

    /// Rows `start .. start + rows` of a tensor with at least one dimension:
    /// the region of a shard along the first dimension.
    #[must_use]
    pub fn rows(shape: &[u64], start: u64, rows: u64) -> Self {
        let mut region = Self::whole(shape);
        if let (Some(offset), Some(size)) = (region.offsets.first_mut(), region.sizes.first_mut()) {
            *offset = start;
            *size = rows;
        }
        region
    }

    /// Number of elements; saturates instead of overflowing.
    #[must_use]
    pub fn elements(&self) -> u64 {
        elements(&self.sizes)
    }

    /// True when the region has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sizes.contains(&0)
    }

    /// True when the region has the tensor's dimensions and lies inside it.
    #[must_use]
    pub fn fits(&self, shape: &[u64]) -> bool {
        self.offsets.len() == shape.len()
            && self.sizes.len() == shape.len()
            && self.offsets.iter().zip(&self.sizes).zip(shape).all(|((&offset, &size), &dim)| {
                offset.checked_add(size).is_some_and(|end| end <= dim)
            })
    }

    /// The elements that both regions have, `None` when there are none or when
    /// the regions have different numbers of dimensions.
    #[must_use]
    pub fn intersect(&self, other: &Self) -> Option<Self> {
        let dims = self.sizes.len();
        if [self.offsets.len(), other.offsets.len(), other.sizes.len()] != [dims; 3] {
            return None;
        }
        let mut both = Self { offsets: Vec::new(), sizes: Vec::new() };
        for d in 0..dims {
            let low = self.offsets[d].max(other.offsets[d]);
            let high = self.end(d).min(other.end(d));
            if low >= high {
                return None;
            }
            both.offsets.push(low);
            both.sizes.push(high - low);
        }
        Some(both)
    }

    fn end(&self, d: usize) -> u64 {
        self.offsets[d].saturating_add(self.sizes[d])
    }
}

impl fmt::Display for Region {
    /// `[0..4, 2..6]`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        // A region from a file may be malformed, and is told all the same.
        for (d, (offset, size)) in self.offsets.iter().zip(&self.sizes).enumerate() {
            let comma = if d == 0 { "" } else { ", " };
            write!(f, "{comma}{offset}..{}", offset.saturating_add(*size))?;
        }
        f.write_str("]")
    }
}

/// Number of elements of a shape; saturates instead of overflowing.
pub(crate) fn elements(shape: &[u64]) -> u64 {
    if shape.contains(&0) {
        return 0;
    }
    shape.iter().fold(1, |product: u64, &size| product.saturating_mul(size))
}

/// Elements to step over for one index of each dimension of a C-order tensor,
/// as PyTorch counts them: an empty dimension counts as one.
pub(crate) fn strides(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1u64; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d].saturating_mul(shape[d].max(1));
    }
    strides
}

/// Comparisons of [`overlap`]: a grid of 65,536 shards needs 17 million. A
/// hostile index could ask for as many as the square of its length.
const MOST_PAIRS: usize = 1 << 27;

/// The first pair of regions that share an element, by position in the input;
/// an error when there are too many regions in each other's way to tell.
pub(crate) fn overlap(regions: &[&Region]) -> Result<Option<(usize, usize)>, String> {
    let Some(first) = regions.first() else { return Ok(None) };
    let mut order: Vec<usize> = (0..regions.len()).filter(|&i| !regions[i].is_empty()).collect();
    // Sweep along the dimension that separates most: shards of one dimension
    // then cost n log n, not n squared.
    let starts = |d: usize| {
        let mut starts: Vec<u64> = order.iter().map(|&i| regions[i].offsets[d]).collect();
        starts.sort_unstable();
        starts.dedup();
        starts.len()
    };
    let Some(along) = (0..first.sizes.len()).max_by_key(|&d| starts(d)) else {
        return Ok((order.len() > 1).then(|| (order[0], order[1])));
    };
    order.sort_by_key(|&i| regions[i].offsets[along]);
    let mut pairs = 0;
    for (at, &i) in order.iter().enumerate() {
        let end = regions[i].end(along);
        let near = order[at + 1..].iter().take_while(|&&j| regions[j].offsets[along] < end);
        for &j in near {
            if regions[i].intersect(regions[j]).is_some() {
                return Ok(Some((i, j)));
            }
            pairs += 1;
            if pairs > MOST_PAIRS {
                return Err(format!("its {} shards are no grid of any kind", regions.len()));
            }
        }
    }
    Ok(None)
}

/// Where the elements of a box lie in memory or in a storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// The tensor's index of the box's first element.
    origin: Vec<u64>,
    /// Where that element lies, in elements.
    first: u64,
    /// Elements to step over for one index of each dimension.
    pub(crate) strides: Vec<u64>,
}

impl Layout {
    /// The elements of `region` in C order.
    pub(crate) fn packed(region: &Region) -> Self {
        Self::strided(region, 0, strides(&region.sizes))
    }

    /// The elements of `region` at any place; the caller knows that no position
    /// in it overflows.
    pub(crate) fn strided(region: &Region, first: u64, strides: Vec<u64>) -> Self {
        Self { origin: region.offsets.clone(), first, strides }
    }

    /// The position of the first element of `part`.
    pub(crate) fn first_of(&self, part: &Region) -> u64 {
        let steps = part.offsets.iter().zip(&self.origin).zip(&self.strides);
        self.first + steps.map(|((at, from), stride)| (at - from) * stride).sum::<u64>()
    }

    /// The positions from the first to behind the last element of `part`.
    pub(crate) fn span(&self, part: &Region) -> std::ops::Range<u64> {
        let first = self.first_of(part);
        let reach = |(size, stride): (&u64, &u64)| (size - 1) * stride;
        let reach: u64 = part.sizes.iter().zip(&self.strides).map(reach).sum();
        first..first + reach + 1
    }
}

/// The contiguous runs that move `part`, which is not empty, from one layout
/// into another.
pub(crate) struct Runs {
    /// Elements of every run.
    pub(crate) len: u64,
    /// Per outer dimension: how often, and the step in `from` and `to`.
    outer: Vec<(u64, u64, u64)>,
    index: Vec<u64>,
    from: u64,
    to: u64,
    left: u64,
}

impl Runs {
    /// Runs in the C order of `part`.
    pub(crate) fn new(part: &Region, from: &Layout, to: &Layout) -> Self {
        let mut len = 1;
        let mut outer = Vec::new();
        let dims = part.sizes.iter().zip(&from.strides).zip(&to.strides);
        for ((&size, &from), &to) in dims.rev().filter(|dim| *dim.0.0 != 1) {
            // Grow the run outwards while it is whole in both layouts.
            if outer.is_empty() && from == len && to == len {
                len *= size;
            } else {
                outer.push((size, from, to));
            }
        }
        outer.reverse();
        let left = if part.is_empty() { 0 } else { outer.iter().map(|o| o.0).product() };
        Self {
            len,
            index: vec![0; outer.len()],
            outer,
            from: from.first_of(part),
            to: to.first_of(part),
            left,
        }
    }

    /// Elements in `from` between the end of a run and the next one's beginning;
    /// `None` when there is one run, or the next one lies before the end.
    pub(crate) fn gap(&self) -> Option<u64> {
        self.outer.last().and_then(|outer| outer.1.checked_sub(self.len))
    }

    /// True when all elements lie behind each other in `from`, in order.
    pub(crate) fn is_one_in_from(&self) -> bool {
        let mut len = self.len;
        self.outer.iter().rev().all(|&(count, from, _)| {
            let fits = from == len;
            len = len.saturating_mul(count);
            fits
        })
    }
}

impl Iterator for Runs {
    /// Element positions in `from` and in `to`.
    type Item = (u64, u64);

    fn next(&mut self) -> Option<(u64, u64)> {
        self.left = self.left.checked_sub(1)?;
        let run = (self.from, self.to);
        for (index, &(count, from, to)) in self.index.iter_mut().zip(&self.outer).rev() {
            *index += 1;
            if *index < count {
                self.from += from;
                self.to += to;
                break;
            }
            *index = 0;
            self.from -= (count - 1) * from;
            self.to -= (count - 1) * to;
        }
        Some(run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(offsets: &[u64], sizes: &[u64]) -> Region {
        Region { offsets: offsets.to_vec(), sizes: sizes.to_vec() }
    }

    #[track_caller]
    fn check(part: &Region, from: &Region, to: &Region, len: u64, expected: &[(u64, u64)]) {
        let runs = Runs::new(part, &Layout::packed(from), &Layout::packed(to));
        assert_eq!(runs.len, len);
        assert_eq!(runs.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn runs_are_as_long_as_both_boxes_allow() {
        let whole = region(&[0, 0], &[4, 6]);
        check(&whole, &whole, &whole, 24, &[(0, 0)]);
        check(&region(&[1, 0], &[2, 6]), &whole, &region(&[1, 0], &[2, 6]), 12, &[(6, 0)]);
        check(&region(&[1, 2], &[2, 3]), &whole, &region(&[1, 2], &[2, 3]), 3, &[(8, 0), (14, 3)]);
        check(&region(&[], &[]), &region(&[], &[]), &region(&[], &[]), 1, &[(0, 0)]);
        check(&region(&[0, 0], &[0, 6]), &whole, &whole, 0, &[]);
        // Dimensions of one index do not end a run.
        let tall = region(&[0, 0, 0], &[4, 1, 6]);
        check(&tall, &tall, &tall, 24, &[(0, 0)]);
        let cube = region(&[0, 0, 0], &[2, 2, 2]);
        check(&region(&[0, 1, 0], &[2, 1, 2]), &cube, &cube, 2, &[(2, 2), (6, 6)]);
    }

    #[test]
    fn runs_of_other_orders() {
        let whole = region(&[0, 0], &[2, 3]);
        let columns = Layout::strided(&whole, 0, vec![1, 2]);
        let runs = Runs::new(&whole, &columns, &Layout::packed(&whole));
        assert_eq!((runs.len, runs.is_one_in_from(), runs.gap()), (1, false, Some(1)));
        let from: Vec<u64> = runs.map(|run| run.0).collect();
        assert_eq!(from, [0, 2, 4, 1, 3, 5]);
        assert_eq!(columns.span(&region(&[1, 0], &[1, 2])), 1..4);
        // Rows that are spread out in memory come from one place on disk.
        let spread = Layout::strided(&whole, 0, vec![8, 1]);
        let runs = Runs::new(&whole, &Layout::packed(&whole), &spread);
        assert_eq!((runs.len, runs.is_one_in_from(), runs.gap()), (3, true, Some(0)));
        assert_eq!(runs.collect::<Vec<_>>(), [(0, 0), (3, 8)]);
    }

    #[test]
    fn overlaps_are_found_and_grids_pass() {
        let grid: Vec<Region> =
            (0..4).flat_map(|i| (0..3).map(move |j| region(&[i * 2, j * 5], &[2, 5]))).collect();
        let mut grid: Vec<&Region> = grid.iter().collect();
        assert_eq!(overlap(&grid), Ok(None));
        let bad = region(&[3, 3], &[1, 1]);
        grid.push(&bad);
        assert_eq!(overlap(&grid), Ok(Some((3, 12))));
        let scalar = region(&[], &[]);
        assert_eq!(overlap(&[&scalar]), Ok(None));
        assert_eq!(overlap(&[&scalar, &scalar]), Ok(Some((0, 1))));
    }

    #[test]
    fn fits_is_safe_at_the_edge_of_u64() {
        assert!(!region(&[u64::MAX], &[2]).fits(&[u64::MAX]));
        assert!(region(&[5, 0], &[0, 6]).fits(&[5, 6]));
        assert!(!region(&[0], &[1]).fits(&[1, 1]));
        let malformed = region(&[7], &[u64::MAX, 2]);
        assert_eq!(malformed.to_string(), "[7..18446744073709551615]");
        assert_eq!(malformed.intersect(&malformed), None);
    }
}
