//! The contract between the training step and whatever moves its tensors.

use std::{ops::Range, time::Instant};

use job::{Token, shares::Shares};

use super::{Buffer, Counter, Dtype, Error, Job, Partition, View, ViewMut, splits::evenly};

/// How an element of the result is made from one of each rank.
///
/// Floating-point sums of the host backends are taken in rank order; `bf16` and
/// `f16` are summed as `f32` and rounded once. A NaN of any rank is in the
/// result. Integer sums wrap around.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// Their sum.
    Sum,
    /// The largest.
    Max,
    /// The smallest.
    Min,
    /// Their sum divided by the number of ranks, of floating-point types only.
    Mean,
}

/// The collectives of one generation, from the point of view of one rank.
///
/// Every rank of the mesh calls the same operations in the same order, with the
/// same types and sizes where not said otherwise. Each call has a deadline, and
/// the group can be aborted from another thread (GN-2): either ends the call
/// with an error, after which the communicator refuses every further operation.
/// Errors name ranks as the mesh of the generation numbers them, also in a
/// sub-communicator.
///
/// Calls block until their result can be used; work that shall go on meanwhile
/// is given to [`start`](#method.start). On a GPU "can be used" is meant in
/// the order of the framework's stream.
pub trait Communicator: Send {
    /// The token that every frame carries (GEN-1).
    fn token(&self) -> Token;

    /// This rank, `0..size()`.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// Every rank's bytes, in rank order; the result depends on every rank,
    /// which makes it the vote of a step (ST-2). Sizes may differ, up to `limit`
    /// bytes each.
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
        buffer: ViewMut,
        splits: &[Range<usize>],
        deadline: Instant,
    ) -> Result<(), Error>;

    /// Reduces the ranks' `input`s, which have one length: this rank gets
    /// elements `splits[rank]` of the result in `out`. Splits are disjoint, in
    /// order, and may be empty.
    ///
    /// # Errors
    /// [`Error`].
    fn reduce_scatter(
        &mut self,
        how: Reduce,
        input: View,
        splits: &[Range<usize>],
        out: ViewMut,
        deadline: Instant,
    ) -> Result<(), Error>;

    /// Reduces the ranks' buffers into every one of them.
    ///
    /// # Errors
    /// [`Error`].
    fn all_reduce(&mut self, how: Reduce, buffer: ViewMut, deadline: Instant) -> Result<(), Error>;

    /// Reduces the ranks' buffers into that of `root`; the others keep theirs.
    ///
    /// # Errors
    /// [`Error`].
    fn reduce(
        &mut self,
        how: Reduce,
        root: usize,
        mut buffer: ViewMut,
        deadline: Instant,
    ) -> Result<(), Error> {
        let (length, rank) = (buffer.len(), self.rank());
        let end = |at| if at < root { 0 } else { length };
        let splits: Vec<_> = (0..self.size())
            .map(|at| if at == root { 0..length } else { end(at)..end(at) })
            .collect();
        let mut result = Buffer::ordinary(buffer.dtype(), if rank == root { length } else { 0 });
        self.reduce_scatter(how, buffer.as_view(), &splits, result.view_mut(), deadline)?;
        if rank == root {
            copy(result.view(), buffer.reborrow())?;
        }
        Ok(())
    }

    /// `root`'s buffer on every rank.
    ///
    /// # Errors
    /// [`Error`].
    fn broadcast(&mut self, root: usize, buffer: ViewMut, deadline: Instant) -> Result<(), Error>;

    /// Sends elements `send_splits[r]` of `send` to each rank r and fills
    /// `receive_splits[r]` of `receive` with what r sends here. Lengths may differ
    /// from pair to pair; the two sides of a pair agree. The receiving splits are
    /// disjoint and in order.
    ///
    /// # Errors
    /// [`Error`].
    fn all_to_all(
        &mut self,
        send: View,
        send_splits: &[Range<usize>],
        receive: ViewMut,
        receive_splits: &[Range<usize>],
        deadline: Instant,
    ) -> Result<(), Error>;

    /// Every rank's `own` to `root`, which gets that of rank r in `splits[r]` of
    /// `out`. On other ranks `splits` and `out` are not looked at.
    ///
    /// # Errors
    /// [`Error`].
    fn gather(
        &mut self,
        root: usize,
        own: View,
        splits: &[Range<usize>],
        out: ViewMut,
        deadline: Instant,
    ) -> Result<(), Error> {
        let nothing = vec![0..0; self.size()];
        let mut to = nothing.clone();
        if let Some(to) = to.get_mut(root) {
            *to = 0..own.len();
        }
        let splits = if self.rank() == root { splits } else { &nothing };
        self.all_to_all(own, &to, out, splits, deadline)
    }

    /// Elements `splits[r]` of `root`'s `all` to each rank r, in `out`. On other
    /// ranks `all` and `splits` are not looked at.
    ///
    /// # Errors
    /// [`Error`].
    fn scatter(
        &mut self,
        root: usize,
        all: View,
        splits: &[Range<usize>],
        out: ViewMut,
        deadline: Instant,
    ) -> Result<(), Error> {
        let nothing = vec![0..0; self.size()];
        let mut from = nothing.clone();
        let length = out.len();
        for (rank, from) in from.iter_mut().enumerate().skip(root) {
            *from = if rank == root { 0..length } else { length..length };
        }
        let splits = if self.rank() == root { splits } else { &nothing };
        self.all_to_all(all, splits, out, &from, deadline)
    }

    /// Sends elements to another rank, which receives as many: in the order of
    /// sending for each pair, whatever other operations lie in between. Returns
    /// when the buffer may be written again. It may wait for the receiver to
    /// enter some operation, but never for its matching [`Self::receive`]: two
    /// ranks that send to each other first do not wait for each other.
    ///
    /// # Errors
    /// [`Error`]; [`Error::Refused`] for this rank itself.
    fn send(&mut self, to: usize, elements: View, deadline: Instant) -> Result<(), Error>;

    /// The next elements that another rank sends to this one: exactly as many as
    /// the buffer has.
    ///
    /// # Errors
    /// [`Error`]; [`Error::Refused`] for this rank itself.
    fn receive(&mut self, from: usize, buffer: ViewMut, deadline: Instant) -> Result<(), Error>;

    /// The sum over all micro-batches in tree order (TRAJ-1), scattered: this
    /// rank gets elements `splits[rank]` of the sum in `out`. `pieces[i]` is the
    /// partial sum of node `shares.pieces(rank)[i]`, each as long as the whole.
    /// All are `f32`.
    ///
    /// # Errors
    /// [`Error`].
    fn reduce_scatter_tree(
        &mut self,
        shares: &Shares,
        pieces: &[View],
        splits: &[Range<usize>],
        out: ViewMut,
        deadline: Instant,
    ) -> Result<(), Error>;

    /// [`Self::reduce_scatter_tree`] with the whole sum on every rank.
    ///
    /// # Errors
    /// [`Error`].
    fn all_reduce_tree(
        &mut self,
        shares: &Shares,
        pieces: &[View],
        out: ViewMut,
        deadline: Instant,
    ) -> Result<(), Error>;

    /// One wave of strided micro-batches: of the R ranks, rank r brings leaf
    /// `sum.next() + r`, as long as the whole, or nothing where there is no such
    /// micro-batch. The leaves are `f32`, or `bf16` where that is the wire
    /// format of all. This rank adds elements `splits[rank]` of each, in order of
    /// the micro-batches, to `sum`, which is the tree sum after the last wave
    /// (TRAJ-1) for any number of ranks and micro-batches.
    ///
    /// # Errors
    /// [`Error`].
    fn reduce_scatter_wave(
        &mut self,
        leaf: Option<View>,
        splits: &[Range<usize>],
        sum: &mut Counter,
        deadline: Instant,
    ) -> Result<(), Error>;

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// [`Error`].
    fn barrier(&mut self, deadline: Instant) -> Result<(), Error>;

    /// The sub-communicators of this rank, one for each partition, all made
    /// together; every rank passes the same partitions ([`super::groups()`]
    /// computes those of a mesh). They share the token and the abort handle and
    /// may be used from different threads.
    ///
    /// # Errors
    /// [`Error`].
    fn split(
        &mut self,
        partitions: &[Partition],
        deadline: Instant,
    ) -> Result<Vec<Box<dyn Communicator>>, Error>;

    /// Memory from which this communicator's operations copy nothing, if its
    /// backend has such; sizes may differ from rank to rank.
    ///
    /// # Errors
    /// [`Error`].
    fn allocate(
        &mut self,
        dtype: Dtype,
        elements: usize,
        deadline: Instant,
    ) -> Result<Buffer, Error>;

    /// Queues work behind all calls made so far; later calls come after it. It
    /// may run before this returns; [`super::Overlapped`] has a thread for it.
    /// [`start`](#method.start) is the form to use.
    fn enqueue(&mut self, job: Job);
}

impl dyn Communicator + '_ {
    /// Splits of `length` elements as even as possible over the ranks, cut at
    /// cache lines.
    #[must_use]
    pub fn even_splits(&self, length: usize) -> Vec<Range<usize>> {
        evenly(length, self.size(), None)
    }
}

fn copy(from: View, to: ViewMut) -> Result<(), Error> {
    to.host()?.copy_from_slice(from.host()?);
    Ok(())
}
