//! One loop that sends to and receives from all peers at once, in the calling
//! thread: whatever the sizes and the order in which peers get ready, nobody
//! waits for anybody in a circle.

use std::{net::TcpStream, time::Instant};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

use super::{
    AbortHandle, Error,
    frame::Op,
    link::{Incoming, Link, Outgoing},
    sink::Sink,
};

const GONE: PollFlags = PollFlags::RDHUP.union(PollFlags::HUP).union(PollFlags::ERR);

/// The connections of one rank, by peer; none to itself.
#[derive(Debug)]
pub(super) struct Wire {
    pub(super) peers: Vec<Option<(TcpStream, Link)>>,
    pub(super) abort: AbortHandle,
}

impl Wire {
    /// Sends each rank its frame, receives what the sink expects, and computes
    /// in between. Ends at the first error of any peer, awaited or not.
    pub(super) fn exchange<S: Sink>(
        &mut self,
        op: Op,
        mut outgoing: Vec<Outgoing>,
        sink: &mut S,
        deadline: Instant,
    ) -> Result<(), Error> {
        let mut incoming: Vec<_> = (0..self.peers.len())
            .map(|rank| if sink.expects(rank) { Incoming::Header } else { Incoming::Done })
            .collect();
        for (rank, (stream, link)) in self.links() {
            link.begin(op, &mut outgoing[rank]);
            link.send(stream, &mut outgoing[rank], incoming[rank])?;
            // What a faster peer sent earlier may lie here already.
            link.deliver(&mut incoming[rank], sink)?;
        }
        let mut ready = Vec::with_capacity(self.peers.len());
        loop {
            self.abort.check()?;
            let computing = sink.work() | self.unpack(&mut incoming, sink)?;
            let unfinished =
                |rank: &usize| incoming[*rank] != Incoming::Done || !outgoing[*rank].is_done();
            let mut waiting_for = (0..self.peers.len()).filter(unfinished).peekable();
            if waiting_for.peek().is_none() && !computing {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Deadline { op: op.name(), waiting_for: waiting_for.collect() });
            }
            let timeout = if computing { Timespec::default() } else { timespec(left) };
            self.wait(&outgoing, &incoming, sink, &timeout, &mut ready)?;
            for &(rank, events) in &ready {
                self.abort.check()?;
                let Some((stream, link)) = &mut self.peers[rank] else { continue };
                if events.contains(PollFlags::IN) {
                    link.receive(stream, &mut incoming[rank], sink)?;
                } else if events.intersects(GONE) {
                    link.hung_up(stream, incoming[rank])?;
                }
                if events.contains(PollFlags::OUT) {
                    link.send(stream, &mut outgoing[rank], incoming[rank])?;
                }
            }
        }
    }

    /// Moves what was read ahead to where there is room by now: no event of a
    /// socket will ask for it. Says whether anything moved.
    fn unpack(&mut self, incoming: &mut [Incoming], sink: &mut impl Sink) -> Result<bool, Error> {
        let mut moved = false;
        for (rank, (_, link)) in self.links() {
            let before = incoming[rank];
            link.deliver(&mut incoming[rank], sink)?;
            moved |= incoming[rank] != before;
        }
        Ok(moved)
    }

    /// Peers from the next rank on, so that not all ranks begin with the same.
    pub(super) fn links(&mut self) -> impl Iterator<Item = (usize, &mut (TcpStream, Link))> {
        let own = self.peers.iter().position(Option::is_none).unwrap_or(0);
        let (before, after) = self.peers.split_at_mut(own);
        let after = after.iter_mut().enumerate().map(move |(at, peer)| (own + at, peer));
        let before = before.iter_mut().enumerate();
        after.chain(before).filter_map(|(rank, peer)| Some((rank, peer.as_mut()?)))
    }

    /// Waits until something can be done, and says for which peers.
    fn wait(
        &self,
        outgoing: &[Outgoing],
        incoming: &[Incoming],
        sink: &mut impl Sink,
        timeout: &Timespec,
        ready: &mut Vec<(usize, PollFlags)>,
    ) -> Result<(), Error> {
        let mut set = Vec::with_capacity(self.peers.len());
        let mut ranks = Vec::with_capacity(self.peers.len());
        set.push(PollFd::new(&self.abort, PollFlags::IN));
        for (rank, peer) in self.peers.iter().enumerate() {
            let Some((stream, link)) = peer else { continue };
            let mut events = PollFlags::empty();
            let reads = match incoming[rank] {
                Incoming::Header => true,
                Incoming::Body(_) => !sink.room(rank).is_empty(),
                Incoming::Done => false,
            };
            events.set(PollFlags::IN, reads);
            events.set(PollFlags::OUT, link.is_sending(&outgoing[rank]));
            events.set(PollFlags::RDHUP, link.is_open());
            // A hang-up is reported unasked: a peer that has hung up and owes
            // nothing would wake this loop forever.
            if !events.is_empty() {
                set.push(PollFd::new(stream, events));
                ranks.push((rank, events));
            }
        }
        ready.clear();
        match poll(&mut set, Some(timeout)) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(()),
            Err(errno) => return Err(Error::system("poll", errno)),
        }
        for (&(rank, wanted), polled) in ranks.iter().zip(&set[1..]) {
            let mut events = polled.revents();
            // What a dead connection has left to say comes by reading.
            if wanted.contains(PollFlags::IN) && events.intersects(GONE) {
                events |= PollFlags::IN;
            }
            if !events.is_empty() {
                ready.push((rank, events));
            }
        }
        Ok(())
    }
}

fn timespec(left: std::time::Duration) -> Timespec {
    // Rounded up, so as not to wake just before the deadline.
    let left = left + std::time::Duration::from_micros(50);
    Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
}
