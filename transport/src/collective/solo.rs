//! The mesh of one rank.

use std::{ops::Range, time::Instant};

use job::{Token, shares::Shares};

use super::{
    Communicator, Error,
    arguments::{check_limit, check_output, check_pieces, check_rank, check_splits},
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
        buffer: &mut [f32],
        splits: &[Range<usize>],
        _: Instant,
    ) -> Result<(), Error> {
        check_splits(splits, 1, buffer.len())
    }

    fn reduce_scatter_tree(
        &mut self,
        shares: &Shares,
        pieces: &[&[f32]],
        splits: &[Range<usize>],
        out: &mut [f32],
        _: Instant,
    ) -> Result<(), Error> {
        let length = pieces.first().map_or(0, |piece| piece.len());
        check_splits(splits, 1, length)?;
        check_pieces(shares, 0, 1, pieces, length)?;
        check_output(out.len(), splits[0].len())?;
        let pieces: Vec<_> = pieces.iter().map(|piece| &piece[splits[0].clone()]).collect();
        Tree::new(shares.total(), &shares.pieces(0))?.sum(&pieces, out);
        Ok(())
    }

    fn all_reduce_tree(
        &mut self,
        shares: &Shares,
        pieces: &[&[f32]],
        out: &mut [f32],
        deadline: Instant,
    ) -> Result<(), Error> {
        check_pieces(shares, 0, 1, pieces, out.len())?;
        let whole = 0..out.len();
        self.reduce_scatter_tree(shares, pieces, std::slice::from_ref(&whole), out, deadline)
    }

    fn broadcast(&mut self, root: usize, _: &mut [u8], _: Instant) -> Result<(), Error> {
        check_rank(root, 1)
    }

    fn barrier(&mut self, _: Instant) -> Result<(), Error> {
        Ok(())
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
        let mut out = [0.0; 2];
        solo.all_reduce_tree(&shares, &[&[1.0, -0.0]], &mut out, deadline).unwrap();
        assert_eq!(out.map(f32::to_bits), [1.0_f32, -0.0].map(f32::to_bits));
        assert_eq!(solo.all_gather_bytes(b"x", 1, deadline).unwrap(), [b"x"]);
        assert!(solo.all_gather_bytes(b"xy", 1, deadline).is_err());
        assert!(solo.all_reduce_tree(&shares, &[&[1.0]], &mut out, deadline).is_err());
        assert!(solo.broadcast(1, &mut [], deadline).is_err());
    }
}
