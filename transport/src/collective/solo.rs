//! The mesh of one rank.

use std::{ops::Range, time::Instant};

use job::{Token, shares::Shares};

use super::{
    Buffer, Communicator, Counter, Dtype, Error, Job, Partition, Reduce, View, ViewMut,
    arguments::{
        check_leaf, check_limit, check_output, check_pieces, check_rank, check_splits, check_tails,
    },
    groups::place,
    kernels,
    reduce::{Combine, Wave},
    splits::bytes_of,
    tree::Tree,
};

/// The communicator of a mesh of one rank: every operation is local.
#[derive(Debug)]
pub struct Solo(Token);

impl Solo {
    /// The only rank of a generation.
    #[must_use]
    pub fn new(token: Token) -> Self {
        Self(token)
    }
}

impl Communicator for Solo {
    fn token(&self) -> Token {
        self.0
    }

    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn all_gather_bytes(
        &mut self,
        own: &[u8],
        limit: usize,
        _: Instant,
    ) -> Result<Vec<Vec<u8>>, Error> {
        check_limit(own.len(), limit)?;
        Ok(vec![own.to_vec()])
    }

    fn all_gather(
        &mut self,
        buffer: ViewMut,
        splits: &[Range<usize>],
        _: Instant,
    ) -> Result<(), Error> {
        check_splits(splits, 1, buffer.len())
    }

    fn reduce_scatter(
        &mut self,
        how: Reduce,
        input: View,
        splits: &[Range<usize>],
        out: ViewMut,
        _: Instant,
    ) -> Result<(), Error> {
        let dtype = input.dtype();
        kernels::check(how, dtype)?;
        check_splits(splits, 1, input.len())?;
        check_output(&out, dtype, splits[0].len())?;
        let input = input.slice(splits[0].clone()).host()?;
        kernels::reduce(how, dtype, &[input], None, out.host()?);
        Ok(())
    }

    fn all_reduce(&mut self, how: Reduce, buffer: ViewMut, _: Instant) -> Result<(), Error> {
        kernels::check(how, buffer.dtype())
    }

    fn broadcast(&mut self, root: usize, _: ViewMut, _: Instant) -> Result<(), Error> {
        check_rank(root, 1)
    }

    fn all_to_all(
        &mut self,
        send: View,
        send_splits: &[Range<usize>],
        receive: ViewMut,
        receive_splits: &[Range<usize>],
        _: Instant,
    ) -> Result<(), Error> {
        check_tails(send_splits, 1, send.len())?;
        check_splits(receive_splits, 1, receive.len())?;
        let from = &send.host()?[bytes_of(send.dtype(), &send_splits[0])];
        let dtype = receive.dtype();
        let to = &mut receive.host()?[bytes_of(dtype, &receive_splits[0])];
        if from.len() != to.len() {
            return Err(Error::refused("the part for this rank itself has two sizes"));
        }
        to.copy_from_slice(from);
        Ok(())
    }

    fn send(&mut self, _: usize, _: View, _: Instant) -> Result<(), Error> {
        Err(Error::refused("there is no other rank to send to"))
    }

    fn receive(&mut self, _: usize, _: ViewMut, _: Instant) -> Result<(), Error> {
        Err(Error::refused("there is no other rank to receive from"))
    }

    fn reduce_scatter_tree(
        &mut self,
        shares: &Shares,
        pieces: &[View],
        splits: &[Range<usize>],
        out: ViewMut,
        _: Instant,
    ) -> Result<(), Error> {
        let length = pieces.first().map_or(0, |piece| piece.len());
        check_splits(splits, 1, length)?;
        check_pieces(shares, 0, 1, pieces, length)?;
        check_output(&out, Dtype::F32, splits[0].len())?;
        let parts = pieces.iter().map(|piece| piece.slice(splits[0].clone()).typed());
        let pieces: Vec<&[f32]> = parts.collect::<Result<_, _>>()?;
        Tree::new(shares.total(), &shares.pieces(0))?.sum(&pieces, out.typed()?);
        Ok(())
    }

    fn all_reduce_tree(
        &mut self,
        shares: &Shares,
        pieces: &[View],
        out: ViewMut,
        deadline: Instant,
    ) -> Result<(), Error> {
        check_pieces(shares, 0, 1, pieces, out.len())?;
        let whole = 0..out.len();
        self.reduce_scatter_tree(shares, pieces, std::slice::from_ref(&whole), out, deadline)
    }

    fn reduce_scatter_wave(
        &mut self,
        leaf: Option<View>,
        splits: &[Range<usize>],
        sum: &mut Counter,
        _: Instant,
    ) -> Result<(), Error> {
        check_leaf(leaf.as_ref(), splits, sum, 0, 1)?;
        let Some(leaf) = leaf else { return Ok(()) };
        let own = leaf.slice(splits[0].clone()).host()?;
        sum.begin(1)?;
        Wave { dtype: leaf.dtype(), sum }.combine(0..own.len(), &[own]);
        sum.end(1);
        Ok(())
    }

    fn barrier(&mut self, _: Instant) -> Result<(), Error> {
        Ok(())
    }

    fn split(
        &mut self,
        partitions: &[Partition],
        _: Instant,
    ) -> Result<Vec<Box<dyn Communicator>>, Error> {
        let child = |of| place(of, 0, 1).map(|_| Box::new(Self(self.0)) as Box<dyn Communicator>);
        partitions.iter().map(child).collect()
    }

    fn allocate(&mut self, dtype: Dtype, elements: usize, _: Instant) -> Result<Buffer, Error> {
        Ok(Buffer::ordinary(dtype, elements))
    }

    fn enqueue(&mut self, job: Job) {
        job(self);
    }
}

#[cfg(test)]
mod tests {
    use job::{Era, Generation, JobId};
    use std::time::Duration;

    use super::*;

    #[test]
    fn one_rank_sums_its_own_pieces() {
        let token =
            Token { job: JobId(Default::default()), era: Era(0), generation: Generation(1) };
        let mut solo = Solo::new(token);
        let deadline = Instant::now() + Duration::from_secs(1);
        let shares = Shares::even(3, 1);
        let mut out = [0.0_f32; 2];
        let pieces = [View::of(&[1.0_f32, -0.0])];
        solo.all_reduce_tree(&shares, &pieces, ViewMut::of(&mut out), deadline).unwrap();
        assert_eq!(out.map(f32::to_bits), [1.0_f32, -0.0].map(f32::to_bits));
        assert_eq!(solo.all_gather_bytes(b"x", 1, deadline).unwrap(), [b"x"]);
        assert!(solo.all_gather_bytes(b"xy", 1, deadline).is_err());
        let short = [View::of(&[1.0_f32])];
        assert!(solo.all_reduce_tree(&shares, &short, ViewMut::of(&mut out), deadline).is_err());
        assert!(solo.broadcast(1, ViewMut::of(&mut out), deadline).is_err());
    }

    #[test]
    fn one_rank_is_its_own_groups_and_its_own_waves() {
        let token =
            Token { job: JobId(Default::default()), era: Era(0), generation: Generation(1) };
        let mut solo = Solo::new(token);
        let deadline = Instant::now() + Duration::from_secs(1);
        assert_eq!(solo.split(&[vec![vec![0]]], deadline).unwrap().len(), 1);
        assert!(solo.split(&[vec![vec![1]]], deadline).is_err());
        let mut sum = Counter::new(2, 1);
        let whole = 0..1;
        for leaf in [0.5_f32, 0.25] {
            let (leaf, cuts) = ([leaf], std::slice::from_ref(&whole));
            solo.reduce_scatter_wave(Some(View::of(&leaf)), cuts, &mut sum, deadline).unwrap();
        }
        let mut out = [0.0];
        sum.finish(&mut out).unwrap();
        assert_eq!(out, [0.75]);
        let comm: &mut dyn Communicator = &mut solo;
        let started = comm.start(|comm| Ok(comm.size()));
        assert_eq!(started.wait(), Ok(1));
    }
}
