//! The contract between the training step and whatever moves its tensors.

use std::{ops::Range, time::Instant};

use job::{Token, shares::Shares};

use super::Error;

/// The collectives of one generation, from the point of view of one rank.
///
/// Every rank of the mesh calls the same operations in the same order. Each
/// call has a deadline, and the group can be aborted from another thread
/// (GN-2): either ends the call with an error, after which the communicator
/// refuses every further operation.
pub trait Communicator: Send {
    /// The token that every frame carries (GEN-1).
    fn token(&self) -> Token;

    /// This rank, `0..size()`.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// Every rank's bytes, in rank order; the result depends on every rank
    /// (ST-2). Sizes may differ, up to `limit` bytes each.
    ///
    /// # Errors
    /// [`Error`]; a peer that sends more than `limit` is a protocol error.
    fn all_gather_bytes(
        &mut self,
        own: &[u8],
        limit: usize,
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, Error>;

    /// Fills `buffer` on every rank: rank `r` owns `splits[r]`, which it has
    /// already written. Splits are disjoint, in order, and may be empty.
    ///
    /// # Errors
    /// [`Error`].
    fn all_gather(
        &mut self,
        buffer: &mut [f32],
        splits: &[Range<usize>],
        deadline: Instant,
    ) -> Result<(), Error>;

    /// The sum over all micro-batches in tree order (TRAJ-1), scattered: this
    /// rank gets elements `splits[rank]` of the sum in `out`. `pieces[i]` is the
    /// partial sum of node `shares.pieces(rank)[i]`, each as long as the whole.
    ///
    /// # Errors
    /// [`Error`].
    fn reduce_scatter_tree(
        &mut self,
        shares: &Shares,
        pieces: &[&[f32]],
        splits: &[Range<usize>],
        out: &mut [f32],
        deadline: Instant,
    ) -> Result<(), Error>;

    /// [`Self::reduce_scatter_tree`] with the whole sum on every rank.
    ///
    /// # Errors
    /// [`Error`].
    fn all_reduce_tree(
        &mut self,
        shares: &Shares,
        pieces: &[&[f32]],
        out: &mut [f32],
        deadline: Instant,
    ) -> Result<(), Error>;

    /// `root`'s buffer on every rank.
    ///
    /// # Errors
    /// [`Error`].
    fn broadcast(&mut self, root: usize, buffer: &mut [u8], deadline: Instant)
    -> Result<(), Error>;

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// [`Error`].
    fn barrier(&mut self, deadline: Instant) -> Result<(), Error>;
}
