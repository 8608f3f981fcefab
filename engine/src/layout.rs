//! Where every parameter lives in one flat f32 buffer, how that buffer is cut
//! into shards, and the fixed blocks over which gradient norms are summed.
//!
//! A [`Layout`] depends on the model alone, never on the mesh (TRAJ-1). Weights,
//! gradients and both moments are buffers of the same layout. Parameters start
//! at 64-byte boundaries, because a matrix product may take another path on
//! other alignments; the padding between them holds zeros, has zero gradient and
//! zero updates, and belongs to no block.
//!
//! A *block* is a fixed number of whole rows of one parameter, counted from the
//! parameter's start ([`BLOCK_ELEMENTS`] elements or one row, whichever is
//! more). Shard cuts lie on block boundaries, so a shard of a parameter is a box
//! along its first dimension, as checkpoints need it (CKPT-2).

use std::ops::Range;

pub use crate::aligned::AlignedBuffer;
use crate::aligned::LINE;
pub use job::model::Declaration;

/// Elements that a block aims for: 16 KiB of f32, which leaves fine enough cuts
/// for a model of a million parameters and 10⁸ blocks for one of 4·10¹¹.
pub const BLOCK_ELEMENTS: usize = 4096;

/// A parameter and its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Param {
    /// Unique name.
    pub name: String,
    /// Sizes of the dimensions; empty for a scalar.
    pub shape: Vec<usize>,
    /// First element in the flat buffer, a multiple of 16 (64 bytes).
    pub offset: usize,
    /// Whether weight decay applies.
    pub decay: bool,
    /// Index of the first block among all blocks of the layout.
    first_block: u32,
}

/// The parameters of a model in one flat buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    params: Vec<Param>,
    elements: usize,
    blocks: u32,
}

/// A box of a parameter within a range of the flat buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Index into [`Layout::params`].
    pub param: usize,
    /// Rows along the first dimension; a scalar has one row.
    pub rows: Range<usize>,
    /// The same box as elements of the flat buffer.
    pub elements: Range<usize>,
}

/// A model whose parameters have no layout.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Two parameters of one name.
    #[error("two parameters are named {0:?}: names are identities and must differ")]
    Duplicate(String),
    /// More elements or blocks than can be counted.
    #[error("parameter {name:?} of shape {shape:?} makes the model too large to lay out")]
    TooLarge {
        /// Name of the parameter.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
}

impl Param {
    /// Number of elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Its elements in the flat buffer.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.elements()
    }

    /// Size of the first dimension; 1 for a scalar.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Elements of one row.
    #[must_use]
    pub fn row_elements(&self) -> usize {
        self.shape.iter().skip(1).product()
    }

    /// Elements of a block; the last one may be shorter.
    fn block_elements(&self) -> usize {
        let row = self.row_elements().max(1);
        row * (BLOCK_ELEMENTS / row).max(1)
    }

    fn blocks(&self) -> usize {
        self.elements().div_ceil(self.block_elements())
    }

    /// The elements of its block `index` in the flat buffer.
    fn block(&self, index: usize) -> Range<usize> {
        let (all, size) = (self.range(), self.block_elements());
        all.start + index * size..all.end.min(all.start + (index + 1) * size)
    }
}

impl Layout {
    /// Lays parameters out in the order given.
    ///
    /// # Errors
    /// [`Error`]: a name used twice, or sizes beyond the address space.
    pub fn new(declarations: impl IntoIterator<Item = Declaration>) -> Result<Self, Error> {
        let mut layout = Self { params: Vec::new(), elements: 0, blocks: 0 };
        let mut names = std::collections::HashSet::new();
        for Declaration { name, shape, decay } in declarations {
            if !names.insert(name.clone()) {
                return Err(Error::Duplicate(name));
            }
            if layout.place(&name, &shape, decay).is_none() {
                return Err(Error::TooLarge { name, shape });
            }
        }
        Ok(layout)
    }

    fn place(&mut self, name: &str, shape: &[usize], decay: bool) -> Option<()> {
        let elements = shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size))?;
        let end = self.elements.checked_add(elements)?.checked_next_multiple_of(LINE)?;
        end.checked_mul(size_of::<f32>())?;
        let (name, shape) = (name.to_owned(), shape.to_vec());
        let (offset, first_block) = (self.elements, self.blocks);
        let param = Param { name, shape, offset, decay, first_block };
        self.blocks = self.blocks.checked_add(u32::try_from(param.blocks()).ok()?)?;
        self.elements = end;
        self.params.push(param);
        Some(())
    }

    /// The parameters, in the order of the buffer.
    #[must_use]
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// The parameter of a name.
    #[must_use]
    pub fn param(&self, name: &str) -> Option<&Param> {
        self.params.iter().find(|param| param.name == name)
    }

    /// Length of the flat buffer, padding included.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Number of parameters of the model in the sense of its size: elements
    /// without padding.
    #[must_use]
    pub fn parameter_count(&self) -> usize {
        self.params.iter().map(Param::elements).sum()
    }

    /// Number of norm blocks: the leaves of the norm tree.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// A zeroed buffer of this layout.
    #[must_use]
    pub fn buffer(&self) -> AlignedBuffer {
        AlignedBuffer::zeroed(self.elements)
    }

    /// Cuts the buffer into one contiguous range per rank, as even as block
    /// boundaries allow. The ranges cover `0..elements()` in order; ranks beyond
    /// the number of blocks get empty ones.
    ///
    /// # Panics
    /// When `ranks` is zero.
    #[must_use]
    pub fn cuts(&self, ranks: usize) -> Vec<Range<usize>> {
        self.cut(&(0..self.elements), ranks)
    }

    /// Cuts a range that begins and ends at block boundaries, like [`Self::cuts`].
    ///
    /// # Panics
    /// When `ranks` is zero.
    #[must_use]
    pub fn cut(&self, range: &Range<usize>, ranks: usize) -> Vec<Range<usize>> {
        assert!(ranks > 0, "a mesh has at least one rank");
        // 128 bits: elements times ranks may not fit 64.
        let ideal = |rank| (range.len() as u128 * rank as u128 / ranks as u128) as usize;
        let bound = |rank| match rank {
            0 => range.start,
            rank if rank == ranks => range.end,
            rank => self.nearest_boundary(range.start + ideal(rank)).clamp(range.start, range.end),
        };
        let bounds: Vec<_> = (0..=ranks).map(bound).collect();
        bounds.windows(2).map(|pair| pair[0]..pair[1]).collect()
    }

    /// The boxes of parameters within a range, in the order of the buffer;
    /// padding is in none of them.
    ///
    /// # Panics
    /// When the range cuts a row in two; those of [`Self::cuts`] do not.
    #[must_use]
    pub fn slices(&self, range: &Range<usize>) -> Vec<Slice> {
        let first = self.params.partition_point(|param| param.range().end <= range.start);
        let mut slices = Vec::new();
        for (index, param) in self.params.iter().enumerate().skip(first) {
            if param.offset >= range.end {
                break;
            }
            let elements = intersection(&param.range(), range);
            if elements.is_empty() {
                continue;
            }
            let row = param.row_elements();
            let (from, to) = (elements.start - param.offset, elements.end - param.offset);
            assert!(from % row == 0 && to % row == 0, "{range:?} cuts a row of {}", param.name);
            slices.push(Slice { param: index, rows: from / row..to / row, elements });
        }
        slices
    }

    /// The blocks of a range, as indices over the whole layout.
    ///
    /// # Panics
    /// When the range cuts a block in two; those of [`Self::cuts`] do not.
    #[must_use]
    pub fn blocks_of(&self, range: &Range<usize>) -> Range<u32> {
        self.first_block_from(range.start)..self.first_block_from(range.end)
    }

    /// The elements of a block in the flat buffer.
    ///
    /// # Panics
    /// When there is no such block.
    #[must_use]
    pub fn block(&self, block: u32) -> Range<usize> {
        assert!(block < self.blocks, "block {block} of {}", self.blocks);
        let param = &self.params[self.params.partition_point(|p| p.first_block <= block) - 1];
        param.block((block - param.first_block) as usize)
    }

    /// The first block that starts at or after an element.
    fn first_block_from(&self, element: usize) -> u32 {
        let next = self.params.partition_point(|param| param.offset < element);
        let Some(param) = next.checked_sub(1).map(|index| &self.params[index]) else { return 0 };
        let within = element - param.offset;
        if within >= param.elements() {
            return param.first_block + param.blocks() as u32;
        }
        assert!(within.is_multiple_of(param.block_elements()), "{element} is within a block");
        param.first_block + (within / param.block_elements()) as u32
    }

    /// The block boundary closest to an element, the lower one on a tie. The
    /// padding behind a parameter goes with its last block.
    fn nearest_boundary(&self, element: usize) -> usize {
        let next = self.params.partition_point(|param| param.offset <= element);
        let Some(param) = next.checked_sub(1).map(|index| &self.params[index]) else { return 0 };
        let end = self.params.get(next).map_or(self.elements, |after| after.offset);
        let (size, last) = (param.block_elements(), param.blocks().saturating_sub(1));
        let block = ((element - param.offset) / size).min(last);
        let below = param.offset + block * size;
        let above = if block == last { end } else { below + size };
        if above - element < element - below { above } else { below }
    }
}

fn intersection(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn layout(shapes: &[&[usize]]) -> Layout {
        let declare = |(i, shape): (usize, &&[usize])| Declaration {
            name: format!("p{i}"),
            shape: shape.to_vec(),
            decay: true,
        };
        Layout::new(shapes.iter().enumerate().map(declare)).expect("distinct names")
    }

    #[track_caller]
    fn check(layout: &Layout, ranks: usize) {
        let cuts = layout.cuts(ranks);
        assert_eq!(cuts.len(), ranks);
        assert_eq!((cuts[0].start, cuts[ranks - 1].end), (0, layout.elements()));
        assert!(cuts.windows(2).all(|pair| pair[0].end == pair[1].start), "{cuts:?}");
        // Every row of every parameter is in exactly one box, in order.
        let mut rows = vec![0; layout.params().len()];
        for slice in cuts.iter().flat_map(|cut| layout.slices(cut)) {
            let param = &layout.params()[slice.param];
            assert_eq!(slice.rows.start, rows[slice.param], "{cuts:?}");
            rows[slice.param] = slice.rows.end;
            assert_eq!(
                slice.elements,
                param.offset + slice.rows.start * param.row_elements()
                    ..param.offset + slice.rows.end * param.row_elements()
            );
        }
        for (param, rows) in layout.params().iter().zip(rows) {
            assert_eq!(rows, if param.elements() == 0 { 0 } else { param.rows() });
        }
        // Every block is in exactly one cut, in order.
        let mut next = 0;
        for cut in &cuts {
            let blocks = layout.blocks_of(cut);
            assert_eq!(blocks.start, next);
            next = blocks.end;
            for block in blocks {
                let block = layout.block(block);
                assert!(cut.start <= block.start && block.end <= cut.end && !block.is_empty());
            }
        }
        assert_eq!(next, layout.blocks());
    }

    #[test]
    fn parameters_are_aligned_and_padding_is_nobodys() {
        let layout = layout(&[&[3, 5], &[], &[0, 7], &[17], &[2, 2, 4]]);
        let offsets: Vec<_> = layout.params().iter().map(|p| p.offset).collect();
        assert_eq!(offsets, [0, 16, 32, 32, 64]);
        assert_eq!((layout.elements(), layout.parameter_count(), layout.blocks()), (80, 49, 4));
        check(&layout, 1);
    }

    #[test]
    fn cuts_are_even_up_to_a_block() {
        let layout = layout(&[&[256, 128], &[512, 128], &[128], &[128, 512], &[256, 128]]);
        for ranks in 1..=64 {
            check(&layout, ranks);
            for cut in layout.cuts(ranks) {
                let (length, even) = (cut.len() as i64, (layout.elements() / ranks) as i64);
                assert!((length - even).abs() <= BLOCK_ELEMENTS as i64, "{ranks} ranks: {cut:?}");
            }
        }
        assert_eq!(layout.param("p2").map(|p| p.offset), Some(256 * 128 + 512 * 128));
        assert_eq!(layout.param("p9"), None);
    }

    #[test]
    fn long_rows_stay_whole() {
        check(&layout(&[&[3, 10_000], &[5, 4095], &[7, 4097]]), 4);
    }

    proptest! {
        #[test]
        fn every_cut_is_made_of_boxes_and_blocks(
            shapes in prop::collection::vec(prop::collection::vec(0usize..90, 0..3), 0..12),
            ranks in 1usize..40,
        ) {
            check(&layout(&shapes.iter().map(Vec::as_slice).collect::<Vec<_>>()), ranks);
        }
    }

    #[test]
    fn models_without_a_layout_are_refused() {
        let declare = |name: &str, shape: &[usize]| Declaration {
            name: name.into(),
            shape: shape.into(),
            decay: false,
        };
        let twice = Layout::new([declare("w", &[2]), declare("w", &[2])]);
        assert_eq!(twice, Err(Error::Duplicate("w".into())));
        let huge = Layout::new([declare("w", &[usize::MAX, 2])]);
        assert!(matches!(huge, Err(Error::TooLarge { .. })));
        let many = Layout::new([declare("w", &[usize::MAX / 8])]);
        assert!(matches!(many, Err(Error::TooLarge { .. })), "blocks are counted in 32 bits");
    }
}
