//! How a buffer is divided among ranks.

use std::ops::Range;

use super::Dtype;

/// Elements that cuts of a sum are rounded to: a cache line.
const LINE: usize = 16;

/// A buffer's splits, which are disjoint and in order.
pub(super) fn cut<'a>(buffer: &'a mut [u8], splits: &[Range<usize>]) -> Vec<&'a mut [u8]> {
    let (mut rest, mut at) = (buffer, 0);
    let next = |split: &Range<usize>| {
        let (_, after) = std::mem::take(&mut rest).split_at_mut(split.start - at);
        let (part, after) = after.split_at_mut(split.len());
        (rest, at) = (after, split.end);
        part
    };
    splits.iter().map(next).collect()
}

/// Splits of whole cache lines as even as possible, none for the rank left out.
pub(super) fn evenly(length: usize, ranks: usize, without: Option<usize>) -> Vec<Range<usize>> {
    let lines = length.div_ceil(LINE);
    let takers = ranks - usize::from(without.is_some());
    let (mut taker, mut at) = (0, 0);
    let next = |rank| {
        let start = at;
        if Some(rank) != without {
            taker += 1;
            at = (lines * taker / takers * LINE).min(length);
        }
        start..at
    };
    (0..ranks).map(next).collect()
}

pub(super) fn bytes_of(dtype: Dtype, elements: &Range<usize>) -> Range<usize> {
    elements.start * dtype.size()..elements.end * dtype.size()
}

#[cfg(test)]
mod tests {
    use super::{super::arguments::check_splits, *};

    #[test]
    fn even_splits_cover_everything_in_whole_lines() {
        for length in [0, 1, 15, 16, 17, 100, 4097] {
            for ranks in 2..7 {
                for without in [None, Some(0), Some(ranks - 1)] {
                    let splits = evenly(length, ranks, without);
                    assert!(check_splits(&splits, ranks, length).is_ok());
                    assert_eq!(splits.iter().map(Range::len).sum::<usize>(), length);
                    assert!(splits.iter().all(|split| split.start % LINE == 0 || split.is_empty()));
                    assert!(without.is_none_or(|rank| splits[rank].is_empty()));
                }
            }
        }
    }

    #[test]
    fn cuts_leave_gaps_out() {
        let mut buffer = [0, 1, 2, 3, 4, 5];
        assert_eq!(cut(&mut buffer, &[1..2, 2..2, 4..6]), [&[1][..], &[], &[4, 5]]);
    }
}
