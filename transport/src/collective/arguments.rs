//! What callers pass, checked before anything is sent.

use std::ops::Range;

use job::shares::Shares;

use super::Error;

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

pub(super) fn check_output(has: usize, needs: usize) -> Result<(), Error> {
    if has == needs {
        return Ok(());
    }
    Err(Error::refused(format!("the output has {has} elements, this rank's split has {needs}")))
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
    pieces: &[&[f32]],
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
    match pieces.iter().find(|piece| piece.len() != length) {
        None => Ok(()),
        Some(piece) => {
            Err(Error::refused(format!("a piece has {} elements instead of {length}", piece.len())))
        }
    }
}
