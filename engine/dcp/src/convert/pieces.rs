//! A tensor in pieces that follow each other in C order, so that a conversion
//! of any size runs in a few MiB of memory.

use crate::region::Region;

use super::{Error, Progress, Source, Tensor};

/// Bytes of a piece, unless a single row of elements has more.
const PIECE: u64 = 8 << 20;

/// A stream of pieces from a source, with progress over all of them.
pub(super) struct Pieces<'a> {
    source: &'a dyn Source,
    progress: Progress<'a>,
    buffer: Vec<u8>,
    done: u64,
    total: u64,
}

impl<'a> Pieces<'a> {
    pub(super) fn new(source: &'a dyn Source, tensors: &[Tensor], progress: Progress<'a>) -> Self {
        let total = tensors.iter().map(Tensor::bytes).sum();
        Self { source, progress, buffer: Vec::new(), done: 0, total }
    }

    /// Gives the elements of a region of a tensor to `sink`, in order.
    pub(super) fn stream(
        &mut self,
        tensor: &Tensor,
        region: &Region,
        mut sink: impl FnMut(&[u8]) -> Result<(), crate::Error>,
    ) -> Result<(), Error> {
        let item = tensor.dtype.size() as u64;
        for piece in split(region, item, PIECE) {
            self.buffer.resize((piece.elements() * item) as usize, 0);
            self.source.read(tensor, &piece, &mut self.buffer)?;
            sink(&self.buffer)?;
            self.done += self.buffer.len() as u64;
            (self.progress)(self.done, self.total);
        }
        Ok(())
    }
}

/// Boxes of at most `limit` bytes that follow each other in the C order of
/// `region`.
pub(super) fn split(region: &Region, item: u64, limit: u64) -> Vec<Region> {
    let bytes = region.elements() * item;
    let along = region.sizes.iter().position(|&size| size > 1);
    let (Some(along), true) = (along, bytes > limit) else { return vec![region.clone()] };
    let size = region.sizes[along];
    let rows = (limit / (bytes / size)).max(1);
    let part = |at: u64| {
        let mut part = region.clone();
        part.offsets[along] += at;
        part.sizes[along] = rows.min(size - at);
        split(&part, item, limit)
    };
    (0..size).step_by(rows as usize).flat_map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(sizes: &[u64], limit: u64, expected: &[&str]) {
        let pieces = split(&Region::whole(sizes), 2, limit);
        assert_eq!(pieces.iter().map(ToString::to_string).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn pieces_follow_each_other() {
        check(&[], 1, &["[]"]);
        check(&[0, 5], 4, &["[0..0, 0..5]"]);
        check(&[5], 4, &["[0..2]", "[2..4]", "[4..5]"]);
        check(&[3, 2], 8, &["[0..2, 0..2]", "[2..3, 0..2]"]);
        check(&[2, 3], 4, &["[0..1, 0..2]", "[0..1, 2..3]", "[1..2, 0..2]", "[1..2, 2..3]"]);
        check(&[1, 1, 2], 1, &["[0..1, 0..1, 0..1]", "[0..1, 0..1, 1..2]"]);
    }
}
