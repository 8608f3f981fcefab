//! Ranks as threads of one process. Every operation is built from one
//! primitive, "everybody's bytes to everybody", and sums by the sequential
//! reference of the reduction tree: an oracle, not a transport.

use std::{
    ops::Range,
    sync::{Arc, Condvar, Mutex},
    thread,
    time::Instant,
};

use engine::gradient;
use job::{Token, shares::Shares};
use transport::collective::{Communicator, Error};

/// One rank of a mesh in memory.
pub(crate) struct Loopback {
    token: Token,
    rank: usize,
    meeting: Arc<Meeting>,
    /// The broadcast of this number from now on arrives with a bit flipped.
    pub(crate) flip: Option<usize>,
}

/// Where ranks meet: all bring bytes, all take everybody's.
struct Meeting {
    state: Mutex<Round>,
    changed: Condvar,
    size: usize,
}

#[derive(Default)]
struct Round {
    brought: Vec<Option<Vec<u8>>>,
    everybody: Arc<Vec<Vec<u8>>>,
    number: u64,
}

/// Runs one thread per rank and returns what they return, in rank order.
pub(crate) fn mesh<T: Send>(
    token: Token,
    ranks: usize,
    run: impl Fn(&mut Loopback) -> T + Sync,
) -> Vec<T> {
    let round = Round { brought: vec![None; ranks], ..Round::default() };
    let meeting =
        Arc::new(Meeting { state: Mutex::new(round), changed: Condvar::new(), size: ranks });
    thread::scope(|scope| {
        let spawn = |rank| {
            let mut comm = Loopback { token, rank, meeting: Arc::clone(&meeting), flip: None };
            let run = &run;
            scope.spawn(move || run(&mut comm))
        };
        let threads: Vec<_> = (0..ranks).map(spawn).collect();
        threads.into_iter().map(|t| t.join().expect("a rank panicked")).collect()
    })
}

impl Loopback {
    fn meet(&self, bytes: Vec<u8>, deadline: Instant) -> Result<Arc<Vec<Vec<u8>>>, Error> {
        let mut round = self.meeting.state.lock().expect("no rank panicked");
        let number = round.number;
        round.brought[self.rank] = Some(bytes);
        if round.brought.iter().all(Option::is_some) {
            let all = round.brought.iter_mut().filter_map(Option::take).collect();
            round.everybody = Arc::new(all);
            round.number += 1;
            self.meeting.changed.notify_all();
        }
        while round.number == number {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let missing = |(rank, bytes): (usize, &Option<_>)| bytes.is_none().then_some(rank);
                let waiting_for = round.brought.iter().enumerate().filter_map(missing).collect();
                return Err(Error::Deadline { op: "meet", waiting_for });
            }
            let waited = self.meeting.changed.wait_timeout(round, left);
            round = waited.expect("no rank panicked").0;
        }
        Ok(Arc::clone(&round.everybody))
    }
}

impl Communicator for Loopback {
    fn token(&self) -> Token {
        self.token
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.meeting.size
    }

    fn all_gather_bytes(
        &mut self,
        own: &[u8],
        _limit: usize,
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, Error> {
        Ok(self.meet(own.to_vec(), deadline)?.to_vec())
    }

    fn all_gather(
        &mut self,
        buffer: &mut [f32],
        splits: &[Range<usize>],
        deadline: Instant,
    ) -> Result<(), Error> {
        let all = self.meet(bytes(&buffer[splits[self.rank].clone()]), deadline)?;
        for (split, bytes) in splits.iter().zip(all.iter()) {
            buffer[split.clone()].copy_from_slice(&floats(bytes));
        }
        Ok(())
    }

    fn reduce_scatter_tree(
        &mut self,
        shares: &Shares,
        pieces: &[&[f32]],
        splits: &[Range<usize>],
        out: &mut [f32],
        deadline: Instant,
    ) -> Result<(), Error> {
        let length = splits.last().map_or(0, |split| split.end);
        let mut whole = vec![0.0; length];
        self.all_reduce_tree(shares, pieces, &mut whole, deadline)?;
        out.copy_from_slice(&whole[splits[self.rank].clone()]);
        Ok(())
    }

    fn all_reduce_tree(
        &mut self,
        shares: &Shares,
        pieces: &[&[f32]],
        out: &mut [f32],
        deadline: Instant,
    ) -> Result<(), Error> {
        let all = self.meet(bytes(&pieces.concat()), deadline)?;
        let all: Vec<Vec<f32>> = all.iter().map(|bytes| floats(bytes)).collect();
        let mut nodes = Vec::new();
        for (rank, values) in all.iter().enumerate() {
            nodes.extend(shares.pieces(rank).into_iter().zip(values.chunks_exact(out.len())));
        }
        gradient::combine(shares.total(), &nodes, out).expect("the pieces cover the tree");
        Ok(())
    }

    fn broadcast(
        &mut self,
        root: usize,
        buffer: &mut [u8],
        deadline: Instant,
    ) -> Result<(), Error> {
        let own = if self.rank == root { buffer.to_vec() } else { Vec::new() };
        buffer.copy_from_slice(&self.meet(own, deadline)?[root]);
        self.flip = match (self.flip, buffer.first_mut()) {
            (Some(0), Some(byte)) => {
                *byte ^= 1;
                None
            }
            (left, _) => left.map(|left| left.saturating_sub(1)),
        };
        Ok(())
    }

    fn barrier(&mut self, deadline: Instant) -> Result<(), Error> {
        self.meet(Vec::new(), deadline).map(drop)
    }
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}
