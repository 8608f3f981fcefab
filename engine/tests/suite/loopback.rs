//! Ranks as threads of one process. Every operation is built from one
//! primitive, "everybody's bytes to everybody", and sums by the sequential
//! reference of the reduction tree: an oracle, not a transport.

use std::{
    collections::HashMap,
    ops::Range,
    sync::{Arc, Condvar, Mutex},
    thread,
    time::Instant,
};

use engine::gradient;
use job::{Token, shares::Shares};
use transport::collective::{
    Buffer, Communicator, Counter, Dtype, Error, Job, Partition, Reduce, View, ViewMut,
};

/// One rank of a mesh in memory.
pub(crate) struct Loopback {
    token: Token,
    rank: usize,
    meeting: Arc<Meeting>,
    /// Meshes split off so far.
    children: usize,
    /// The broadcast of this number from now on arrives with a bit flipped.
    pub(crate) flip: Option<usize>,
}

/// Where ranks meet: all bring bytes, all take everybody's.
struct Meeting {
    state: Mutex<Round>,
    changed: Condvar,
    size: usize,
    /// Of the groups split off, by the number of the split and their first rank.
    children: Mutex<HashMap<(usize, usize), Arc<Meeting>>>,
}

#[derive(Default)]
struct Round {
    /// Sent from one rank to another and not yet received.
    sent: HashMap<(usize, usize), Vec<Vec<u8>>>,
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
    let meeting = Meeting::of(ranks);
    thread::scope(|scope| {
        let spawn = |rank| {
            let meeting = Arc::clone(&meeting);
            let mut comm = Loopback { token, rank, meeting, children: 0, flip: None };
            let run = &run;
            scope.spawn(move || run(&mut comm))
        };
        let threads: Vec<_> = (0..ranks).map(spawn).collect();
        threads.into_iter().map(|t| t.join().expect("a rank panicked")).collect()
    })
}

impl Meeting {
    fn of(size: usize) -> Arc<Self> {
        let round = Round { brought: vec![None; size], ..Round::default() };
        let (state, changed, children) = (Mutex::new(round), Condvar::new(), Mutex::default());
        Arc::new(Self { state, changed, size, children })
    }
}

impl Loopback {
    /// Everybody's bytes of a slice, reduced one element after the other.
    fn reduced(&self, how: Reduce, input: View, deadline: Instant) -> Result<Vec<u8>, Error> {
        assert_eq!(input.dtype(), Dtype::F32, "the oracle reduces f32 only");
        let all = self.meet(input.host()?.to_vec(), deadline)?;
        let all: Vec<Vec<f32>> = all.iter().map(|bytes| floats(bytes)).collect();
        let ranks = self.meeting.size as f32;
        let reduce = |at: usize| {
            let values = all.iter().map(|values| values[at]);
            match how {
                Reduce::Sum => values.reduce(|a, b| a + b),
                Reduce::Mean => values.reduce(|a, b| a + b).map(|sum| sum / ranks),
                Reduce::Max => values.reduce(f32::max),
                Reduce::Min => values.reduce(f32::min),
            }
        };
        let values: Vec<f32> = (0..input.len()).filter_map(reduce).collect();
        Ok(bytes(&values))
    }

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
        buffer: ViewMut,
        splits: &[Range<usize>],
        deadline: Instant,
    ) -> Result<(), Error> {
        let size = buffer.dtype().size();
        let buffer = buffer.host()?;
        let part = |split: &Range<usize>| split.start * size..split.end * size;
        let all = self.meet(buffer[part(&splits[self.rank])].to_vec(), deadline)?;
        for (split, bytes) in splits.iter().zip(all.iter()) {
            buffer[part(split)].copy_from_slice(bytes);
        }
        Ok(())
    }

    fn reduce_scatter(
        &mut self,
        how: Reduce,
        input: View,
        splits: &[Range<usize>],
        out: ViewMut,
        deadline: Instant,
    ) -> Result<(), Error> {
        let whole = self.reduced(how, input, deadline)?;
        let own = &splits[self.rank];
        out.host()?.copy_from_slice(&whole[4 * own.start..4 * own.end]);
        Ok(())
    }

    fn all_reduce(&mut self, how: Reduce, buffer: ViewMut, deadline: Instant) -> Result<(), Error> {
        let whole = self.reduced(how, buffer.as_view(), deadline)?;
        buffer.host()?.copy_from_slice(&whole);
        Ok(())
    }

    fn all_to_all(
        &mut self,
        send: View,
        send_splits: &[Range<usize>],
        receive: ViewMut,
        receive_splits: &[Range<usize>],
        deadline: Instant,
    ) -> Result<(), Error> {
        let mut parts = Vec::new();
        for split in send_splits {
            let part = send.slice(split.clone()).host()?;
            parts.extend((part.len() as u64).to_le_bytes());
            parts.extend(part);
        }
        let all = self.meet(parts, deadline)?;
        let size = receive.dtype().size();
        let receive = receive.host()?;
        for (mut rest, split) in all.iter().map(Vec::as_slice).zip(receive_splits) {
            for to in 0..self.meeting.size {
                let (length, after) = rest.split_first_chunk().expect("a length");
                let (part, after) = after.split_at(u64::from_le_bytes(*length) as usize);
                if to == self.rank {
                    receive[split.start * size..split.end * size].copy_from_slice(part);
                }
                rest = after;
            }
        }
        Ok(())
    }

    fn send(&mut self, to: usize, elements: View, _: Instant) -> Result<(), Error> {
        let mut round = self.meeting.state.lock().expect("no rank panicked");
        let queue = round.sent.entry((self.rank, to)).or_default();
        queue.push(elements.host()?.to_vec());
        self.meeting.changed.notify_all();
        Ok(())
    }

    fn receive(&mut self, from: usize, buffer: ViewMut, deadline: Instant) -> Result<(), Error> {
        let mut round = self.meeting.state.lock().expect("no rank panicked");
        loop {
            let queue = round.sent.entry((from, self.rank)).or_default();
            if !queue.is_empty() {
                buffer.host()?.copy_from_slice(&queue.remove(0));
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Deadline { op: "receive", waiting_for: vec![from] });
            }
            let waited = self.meeting.changed.wait_timeout(round, left);
            round = waited.expect("no rank panicked").0;
        }
    }

    fn reduce_scatter_tree(
        &mut self,
        shares: &Shares,
        pieces: &[View],
        splits: &[Range<usize>],
        out: ViewMut,
        deadline: Instant,
    ) -> Result<(), Error> {
        let length = splits.last().map_or(0, |split| split.end);
        let mut whole = vec![0.0_f32; length];
        self.all_reduce_tree(shares, pieces, ViewMut::of(&mut whole), deadline)?;
        out.typed::<f32>()?.copy_from_slice(&whole[splits[self.rank].clone()]);
        Ok(())
    }

    fn all_reduce_tree(
        &mut self,
        shares: &Shares,
        pieces: &[View],
        out: ViewMut,
        deadline: Instant,
    ) -> Result<(), Error> {
        let pieces: Vec<&[u8]> = pieces.iter().map(|p| p.host()).collect::<Result<_, _>>()?;
        let all = self.meet(pieces.concat(), deadline)?;
        let all: Vec<Vec<f32>> = all.iter().map(|bytes| floats(bytes)).collect();
        let mut nodes = Vec::new();
        for (rank, values) in all.iter().enumerate() {
            nodes.extend(shares.pieces(rank).into_iter().zip(values.chunks_exact(out.len())));
        }
        gradient::combine(shares.total(), &nodes, out.typed()?).expect("the pieces cover the tree");
        Ok(())
    }

    fn reduce_scatter_wave(
        &mut self,
        leaf: Option<View>,
        splits: &[Range<usize>],
        sum: &mut Counter,
        deadline: Instant,
    ) -> Result<(), Error> {
        let own = leaf.map_or(Ok(&[][..]), View::host)?.to_vec();
        for leaf in self.meet(own, deadline)?.iter().filter(|leaf| !leaf.is_empty()) {
            sum.push(&floats(leaf)[splits[self.rank].clone()])?;
        }
        Ok(())
    }

    fn broadcast(&mut self, root: usize, buffer: ViewMut, deadline: Instant) -> Result<(), Error> {
        let buffer = buffer.host()?;
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

    fn split(
        &mut self,
        partitions: &[Partition],
        _: Instant,
    ) -> Result<Vec<Box<dyn Communicator>>, Error> {
        let child = |partition: &Partition| {
            let number = self.children;
            self.children += 1;
            let group = partition.iter().find(|group| group.contains(&self.rank));
            let group = group.expect("every rank is in a group");
            let mut meetings = self.meeting.children.lock().expect("no rank panicked");
            let meeting = meetings.entry((number, group[0]));
            let meeting = Arc::clone(meeting.or_insert_with(|| Meeting::of(group.len())));
            let rank = group.iter().position(|rank| *rank == self.rank).unwrap_or_default();
            let child = Self { token: self.token, rank, meeting, children: 0, flip: None };
            Box::new(child) as Box<dyn Communicator>
        };
        Ok(partitions.iter().map(child).collect())
    }

    fn allocate(&mut self, dtype: Dtype, elements: usize, _: Instant) -> Result<Buffer, Error> {
        Ok(Buffer::ordinary(dtype, elements))
    }

    fn enqueue(&mut self, job: Job) {
        job(self);
    }
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}
