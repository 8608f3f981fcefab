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
    link::{Incoming, Link},
    outgoing::Outgoing,
    shm::Segment,
    sink::Sink,
};

const GONE: PollFlags = PollFlags::RDHUP.union(PollFlags::HUP).union(PollFlags::ERR);

/// Looks for work in shared memory before a rank sleeps. With a processor for
/// each rank of the machine a peer is at work meanwhile; otherwise it waits for
/// ours.
const SPINS: u32 = 2000;

/// How long the others may take to answer that the mesh is over.
const ECHO: std::time::Duration = std::time::Duration::from_millis(50);

/// The connections of one rank, by peer; none to itself.
#[derive(Debug)]
pub(super) struct Wire {
    pub(super) peers: Vec<Option<(TcpStream, Link)>>,
    /// The ranks as errors name them.
    pub(super) names: Vec<usize>,
    pub(super) abort: AbortHandle,
    /// What this rank shares with those of its machine.
    pub(super) segment: Option<Segment>,
    /// Whether there are processors enough to wait for each other awake.
    pub(super) spins: bool,
}

/// One exchange: what each peer is still to get, and to give.
struct Exchange<'a, 'b, S> {
    op: Op,
    outgoing: &'a mut [Outgoing<'b>],
    incoming: &'a mut [Incoming],
    sink: &'a mut S,
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
        let expects = |rank| if sink.expects(rank) { Incoming::Header } else { Incoming::Done };
        let mut incoming: Vec<_> = (0..self.peers.len()).map(expects).collect();
        for (rank, (stream, link)) in self.links() {
            link.begin(op, &mut outgoing[rank]);
            link.send(stream, &mut outgoing[rank], incoming[rank])?;
            // What a faster peer sent earlier may lie here already.
            link.deliver(&mut incoming[rank], sink)?;
        }
        let mut exchange = Exchange { op, outgoing: &mut outgoing, incoming: &mut incoming, sink };
        let mut ready = Vec::with_capacity(self.peers.len());
        let remote = self.peers.iter().flatten().any(|(_, link)| !link.has_rings());
        let mut idle = 0;
        loop {
            self.abort.check()?;
            let moved = self.pump(&mut exchange)?;
            let computing = exchange.sink.work() | self.unpack(&mut exchange)?;
            if exchange.waiting_for().next().is_none() && !computing {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let waiting_for = exchange.waiting_for().map(|rank| self.names[rank]).collect();
                return Err(Error::Deadline { op: exchange.op.name(), waiting_for });
            }
            if moved {
                idle = 0;
            }
            if moved || computing {
                if remote {
                    self.wait(&mut exchange, &Timespec::default(), &mut ready)?;
                    self.serve(&mut exchange, &ready)?;
                }
                continue;
            }
            if self.segment.is_some() && self.spins && idle < SPINS {
                idle += 1;
                std::hint::spin_loop();
                continue;
            }
            self.drowse();
            // Once more, now that peers know that they have to wake this rank.
            let woken = match self.pump(&mut exchange) {
                Ok(false) => self.wait(&mut exchange, &timespec(left), &mut ready),
                other => {
                    ready.clear();
                    other.map(drop)
                }
            };
            self.rouse();
            woken?;
            self.serve(&mut exchange, &ready)?;
        }
    }

    /// Whether a peer or this group is known to have failed.
    pub(super) fn check_alive(&mut self) -> Result<(), Error> {
        self.abort.check()?;
        for (_, (stream, link)) in self.links() {
            let mut set = [PollFd::new(&*stream, PollFlags::RDHUP)];
            match poll(&mut set, Some(&Timespec::default())) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => link.hung_up(stream, Incoming::Done)?,
                Err(errno) => return Err(Error::system("poll", errno)),
            }
        }
        Ok(())
    }

    /// Of several ranks that are waited for, some wait for one of the others
    /// themselves. Those have just been told that this mesh is over and say
    /// something; a rank that stands still does not, and stays in the list.
    pub(super) fn keep_silent(&mut self, waiting_for: &mut Vec<usize>) {
        let until = Instant::now() + ECHO;
        let mut silent = waiting_for.clone();
        while silent.len() > 1 {
            let left = until.saturating_duration_since(Instant::now());
            let of = |name: &usize| self.names.iter().position(|other| other == name);
            let streams: Vec<_> = silent
                .iter()
                .filter_map(|name| Some((*name, &self.peers[of(name)?].as_ref()?.0)))
                .collect();
            let events = PollFlags::IN | PollFlags::RDHUP;
            let mut set: Vec<_> =
                streams.iter().map(|(_, stream)| PollFd::new(*stream, events)).collect();
            if left.is_zero() || poll(&mut set, Some(&timespec(left))) == Ok(0) {
                break;
            }
            let spoke = streams.iter().zip(&set).filter(|(_, polled)| !polled.revents().is_empty());
            let spoke: Vec<_> = spoke.map(|((name, _), _)| *name).collect();
            silent.retain(|name| !spoke.contains(name));
        }
        if !silent.is_empty() {
            *waiting_for = silent;
        }
    }

    /// Moves what the rings have room and bytes for; whether anything moved.
    fn pump<S: Sink>(&mut self, exchange: &mut Exchange<S>) -> Result<bool, Error> {
        if self.segment.is_none() {
            return Ok(false);
        }
        let mut moved = false;
        for (rank, (_, link)) in self.links() {
            let (out, incoming) = (&mut exchange.outgoing[rank], &mut exchange.incoming[rank]);
            moved |= link.pump(out, incoming, exchange.sink)?;
        }
        Ok(moved)
    }

    /// Does what the connections are ready for.
    fn serve<S: Sink>(
        &mut self,
        exchange: &mut Exchange<S>,
        ready: &[(usize, PollFlags)],
    ) -> Result<(), Error> {
        let Exchange { outgoing, incoming, sink, .. } = exchange;
        for &(rank, events) in ready {
            self.abort.check()?;
            let Some((stream, link)) = &mut self.peers[rank] else { continue };
            if events.contains(PollFlags::IN) {
                link.receive(stream, &mut incoming[rank], *sink)?;
            } else if events.intersects(GONE) {
                link.hung_up(stream, incoming[rank])?;
            }
            if events.contains(PollFlags::OUT) {
                link.send(stream, &mut outgoing[rank], incoming[rank])?;
            }
        }
        Ok(())
    }

    /// Moves what was read ahead to where there is room by now: no event of a
    /// socket will ask for it. Says whether anything moved.
    fn unpack<S: Sink>(&mut self, exchange: &mut Exchange<S>) -> Result<bool, Error> {
        let mut moved = false;
        for (rank, (_, link)) in self.links() {
            let before = exchange.incoming[rank];
            link.deliver(&mut exchange.incoming[rank], exchange.sink)?;
            moved |= exchange.incoming[rank] != before;
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

    fn drowse(&self) {
        if let Some(segment) = &self.segment {
            segment.drowse();
        }
    }

    fn rouse(&self) {
        if let Some(segment) = &self.segment {
            segment.rouse();
        }
    }

    /// Waits until something can be done, and says for which peers.
    fn wait<S: Sink>(
        &mut self,
        exchange: &mut Exchange<S>,
        timeout: &Timespec,
        ready: &mut Vec<(usize, PollFlags)>,
    ) -> Result<(), Error> {
        let mut set = Vec::with_capacity(self.peers.len() + 1);
        let mut ranks = Vec::with_capacity(self.peers.len());
        set.push(PollFd::new(&self.abort, PollFlags::IN));
        if let Some(segment) = &self.segment {
            set.push(PollFd::new(segment.bell(), PollFlags::IN));
        }
        let first = set.len();
        for (rank, peer) in self.peers.iter_mut().enumerate() {
            let Some((stream, link)) = peer else { continue };
            let events =
                link.interest(&exchange.outgoing[rank], exchange.incoming[rank], exchange.sink);
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
        for (&(rank, wanted), polled) in ranks.iter().zip(&set[first..]) {
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

impl<S> Exchange<'_, '_, S> {
    fn waiting_for(&self) -> impl Iterator<Item = usize> {
        (0..self.outgoing.len())
            .filter(|&rank| self.incoming[rank] != Incoming::Done || !self.outgoing[rank].is_done())
    }
}

pub(super) fn timespec(left: std::time::Duration) -> Timespec {
    // Rounded up, so as not to wake just before the deadline.
    let left = left + std::time::Duration::from_micros(50);
    Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
}
