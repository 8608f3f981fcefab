//! What callers pass, checked before anything is sent.

use std::ops::Range;

use job::shares::Shares;

use super::{Counter, Dtype, Error, View, ViewMut};

pub(super) fn check_limit(bytes: usize, limit: usize) -> Result<(), Error> {
    if bytes <= limit {
        return Ok(());
    }
    Err(Error::refused(format!("{bytes} bytes to gather are over the limit of {limit}")))
}

pub(super) fn check_rank(rank: usize, size: usize) -> Result<(), Error> {
    if rank < size {
        return Ok(());
    }
    Err(Error::refused(format!("rank {rank} is not one of the {size} ranks")))
}

/// The output of a rank that gets so many elements of this type.
pub(super) fn check_output(out: &ViewMut, dtype: Dtype, needs: usize) -> Result<(), Error> {
    if (out.dtype(), out.len()) == (dtype, needs) {
        return Ok(());
    }
    let (has, of) = (out.len(), out.dtype());
    Err(Error::refused(format!("the output has {has} {of}, this rank's split has {needs} {dtype}")))
}

/// Splits of what is only read, one for each rank: they may overlap.
pub(super) fn check_tails(
    splits: &[Range<usize>],
    size: usize,
    length: usize,
) -> Result<(), Error> {
    if splits.len() != size {
        return Err(Error::refused(format!("{} splits for {size} ranks", splits.len())));
    }
    match splits.iter().find(|split| split.start > split.end || split.end > length) {
        None => Ok(()),
        Some(split) => Err(Error::refused(format!("split {split:?} leaves the {length} elements"))),
    }
}

/// What one rank brings to a wave; how many ranks bring a leaf.
pub(super) fn check_leaf(
    leaf: Option<&View>,
    splits: &[Range<usize>],
    sum: &Counter,
    rank: usize,
    size: usize,
) -> Result<usize, Error> {
    let leaves = size.min((sum.total() - sum.next()) as usize);
    if leaf.is_some() != (rank < leaves) {
        let (next, total) = (sum.next(), sum.total());
        return Err(Error::refused(format!(
            "rank {rank} brings {} to the wave of {leaves} leaves from {next} of {total}",
            if leaf.is_some() { "a leaf" } else { "no leaf" },
        )));
    }
    if let Some(leaf) = leaf
        && !matches!(leaf.dtype(), Dtype::F32 | Dtype::Bf16)
    {
        return Err(Error::refused(format!("a leaf of {}; leaves are f32 or bf16", leaf.dtype())));
    }
    let end = splits.last().map_or(0, |split| split.end);
    check_splits(splits, size, leaf.map_or(end, View::len))?;
    if splits[rank].len() != sum.len() {
        let (has, needs) = (sum.len(), splits[rank].len());
        return Err(Error::refused(format!("a sum of {has} elements for a split of {needs}")));
    }
    Ok(leaves)
}

/// Disjoint, in order, within the buffer, one for each rank.
pub(super) fn check_splits(
    splits: &[Range<usize>],
    size: usize,
    length: usize,
) -> Result<(), Error> {
    let mut at = 0;
    for (rank, split) in splits.iter().enumerate() {
        if split.start < at || split.end < split.start || split.end > length {
            return Err(Error::refused(format!(
                "split {split:?} of rank {rank} overlaps or leaves the {length} elements"
            )));
        }
        at = split.end;
    }
    if splits.len() == size {
        return Ok(());
    }
    Err(Error::refused(format!("{} splits for {size} ranks", splits.len())))
}

/// One piece of `length` elements for each node of this rank's share.
pub(super) fn check_pieces(
    shares: &Shares,
    rank: usize,
    size: usize,
    pieces: &[View],
    length: usize,
) -> Result<(), Error> {
    if shares.ranks() != size {
        return Err(Error::refused(format!("shares of {} ranks for {size}", shares.ranks())));
    }
    let nodes = shares.pieces(rank).len();
    if pieces.len() != nodes {
        return Err(Error::refused(format!(
            "{} pieces for the {nodes} nodes of rank {rank}'s share",
            pieces.len()
        )));
    }
    let fits = |piece: &&View| (piece.dtype(), piece.len()) != (Dtype::F32, length);
    match pieces.iter().find(fits) {
        None => Ok(()),
        Some(piece) => {
            let (has, of) = (piece.len(), piece.dtype());
            Err(Error::refused(format!("a piece has {has} {of} instead of {length} f32")))
        }
    }
}
