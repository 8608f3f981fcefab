//! The collectives of a mesh whose ranks are connected pair by pair over TCP.

use std::{fmt, net::TcpStream, ops::Range, time::Instant};

use job::{Token, shares::Shares};

use super::{
    AbortHandle, Communicator, Error,
    arguments::{check_limit, check_output, check_pieces, check_rank, check_splits},
    exchange::Wire,
    frame::{Notice, Op},
    link::{Link, Outgoing, Party},
    listener::Lingering,
    recorder::{Recorder, State},
    reduce::{TreeSum, segments},
    sink::{Gathered, Sink, Slots},
    splits::{bytes_of, cut, evenly},
};

/// Sums of at most this many elements go to every rank in one exchange instead
/// of two: below it, latency costs more than bytes.
const SMALL: usize = 4096;

/// The communicator of one generation over TCP, made by
/// [`super::Listener::connect`].
///
/// Dropping it after its last operation tells the peers that this rank has
/// finished; a process that dies says nothing, which is how they tell.
pub struct TcpMesh {
    token: Token,
    rank: usize,
    wire: Wire,
    recorder: Recorder,
    // The first error, which is the answer to every later call.
    root: Option<Error>,
    // Set while an operation runs, and left set by a panic.
    running: bool,
    arrived: Vec<f32>,
    lingering: Lingering,
}

impl TcpMesh {
    /// Streams are authenticated, non-blocking, and by rank; none to itself.
    pub(super) fn new(
        token: Token,
        rank: usize,
        streams: Vec<Option<TcpStream>>,
        abort: AbortHandle,
        lingering: Lingering,
    ) -> Self {
        let size = streams.len();
        let link = |peer| Link::new(Party { token, own: rank, peer, size });
        let peers = streams
            .into_iter()
            .enumerate()
            .map(|(peer, stream)| Some((stream?, link(peer))))
            .collect();
        Self {
            token,
            rank,
            wire: Wire { peers, abort },
            recorder: Recorder::default(),
            root: None,
            running: false,
            arrived: Vec::new(),
            lingering,
        }
    }

    /// The last operations, readable from any thread.
    #[must_use]
    pub fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    /// Sends bytes to some ranks and receives from some, all at once, so that
    /// neighbours that send to each other never block each other. A rank occurs
    /// at most once on either side; its counterpart makes the matching call.
    ///
    /// # Errors
    /// [`Error`].
    pub fn send_receive(
        &mut self,
        send: &[(usize, &[u8])],
        receive: &mut [(usize, &mut [u8])],
        deadline: Instant,
    ) -> Result<(), Error> {
        self.operate(Op::SendReceive, |mesh| {
            let size = mesh.size();
            let (mut outgoing, mut seen) = (mesh.nothing(), vec![0_u8; size]);
            let mut slots = Slots::none(size);
            for &(rank, bytes) in send {
                mesh.check_peer(rank, &mut seen, 1)?;
                outgoing[rank] = Outgoing::frame(vec![bytes]);
            }
            for (rank, bytes) in receive {
                mesh.check_peer(*rank, &mut seen, 2)?;
                slots.set(*rank, bytes);
            }
            mesh.exchange(Op::SendReceive, outgoing, &mut slots, deadline)
        })
    }

    /// Sends bytes to one rank.
    ///
    /// # Errors
    /// [`Error`].
    pub fn send(&mut self, to: usize, bytes: &[u8], deadline: Instant) -> Result<(), Error> {
        self.send_receive(&[(to, bytes)], &mut [], deadline)
    }

    /// Receives exactly as many bytes as the buffer has from one rank.
    ///
    /// # Errors
    /// [`Error`].
    pub fn receive(
        &mut self,
        from: usize,
        buffer: &mut [u8],
        deadline: Instant,
    ) -> Result<(), Error> {
        self.send_receive(&[], &mut [(from, buffer)], deadline)
    }

    /// Sends `send[r]` to each rank r and fills `receive[r]` with what r sends
    /// here; sizes may differ, and the two sides of a pair must agree.
    ///
    /// # Errors
    /// [`Error`].
    pub fn all_to_all(
        &mut self,
        send: &[&[u8]],
        receive: &mut [&mut [u8]],
        deadline: Instant,
    ) -> Result<(), Error> {
        self.operate(Op::AllToAll, |mesh| {
            let (size, own) = (mesh.size(), mesh.rank);
            if send.len() != size || receive.len() != size {
                let (to, from) = (send.len(), receive.len());
                return Err(Error::refused(format!("{to} and {from} parts for {size} ranks")));
            }
            if send[own].len() != receive[own].len() {
                return Err(Error::refused("the part for this rank itself has two sizes"));
            }
            receive[own].copy_from_slice(send[own]);
            let outgoing = mesh.to_all(|rank| vec![send[rank]]);
            let mut slots = Slots::none(size);
            for (rank, bytes) in receive.iter_mut().enumerate().filter(|(rank, _)| *rank != own) {
                slots.set(rank, bytes);
            }
            mesh.exchange(Op::AllToAll, outgoing, &mut slots, deadline)
        })
    }

    /// Ends as a killed process does: without a word.
    #[cfg(test)]
    pub(super) fn die(mut self) {
        self.running = true;
    }

    /// The connections, to be cut from outside.
    #[cfg(test)]
    pub(super) fn streams(&self) -> Vec<TcpStream> {
        let streams = self.wire.peers.iter().flatten();
        streams.map(|(stream, _)| stream.try_clone().unwrap()).collect()
    }

    /// Runs one operation: after an error, this is the mesh's last.
    fn operate<T>(
        &mut self,
        op: Op,
        run: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<T, Error> {
        if let Some(root) = &self.root {
            return Err(root.clone());
        }
        self.recorder.begin(op.name());
        self.running = true;
        let result = run(self);
        self.running = false;
        match &result {
            Ok(_) => self.recorder.end(State::Done),
            Err(error) => {
                self.recorder.end(State::Failed(error.to_string()));
                self.give_up(error);
            }
        }
        result
    }

    fn give_up(&mut self, error: &Error) {
        self.root = Some(error.clone());
        let heard = self.wire.peers.iter().flatten().find_map(|(_, link)| link.heard());
        let first_hand = || Notice { error: error.clone(), reporter: self.rank };
        let notice = heard.cloned().unwrap_or_else(first_hand);
        for (_, (stream, link)) in self.wire.links() {
            link.give_up(stream, &notice);
        }
    }

    pub(super) fn exchange<S: Sink>(
        &mut self,
        op: Op,
        outgoing: Vec<Outgoing>,
        sink: &mut S,
        deadline: Instant,
    ) -> Result<(), Error> {
        self.recorder.count(outgoing.iter().map(|out| out.bytes() as u64).sum());
        self.wire.exchange(op, outgoing, sink, deadline)
    }

    pub(super) fn nothing<'a>(&self) -> Vec<Outgoing<'a>> {
        (0..self.size()).map(|_| Outgoing::nothing()).collect()
    }

    /// A frame for every peer.
    pub(super) fn to_all<'a>(&self, parts: impl Fn(usize) -> Vec<&'a [u8]>) -> Vec<Outgoing<'a>> {
        (0..self.size())
            .map(|rank| match rank == self.rank {
                true => Outgoing::nothing(),
                false => Outgoing::frame(parts(rank)),
            })
            .collect()
    }

    /// Another rank, not seen with this mark before.
    fn check_peer(&self, rank: usize, seen: &mut [u8], mark: u8) -> Result<(), Error> {
        check_rank(rank, self.size())?;
        if rank == self.rank || seen[rank] & mark != 0 {
            return Err(Error::refused(format!("rank {rank} is this rank, or named twice")));
        }
        seen[rank] |= mark;
        Ok(())
    }

    fn gather_bytes(
        &mut self,
        op: Op,
        own: &[u8],
        limit: usize,
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, Error> {
        self.operate(op, |mesh| {
            check_limit(own.len(), limit)?;
            let outgoing = mesh.to_all(|_| vec![own]);
            let mut gathered = Gathered::new(mesh.size(), mesh.rank, own, limit);
            mesh.exchange(op, outgoing, &mut gathered, deadline)?;
            Ok(gathered.parts)
        })
    }

    /// Every rank's split of the buffer, from the rank that owns it.
    fn fill(
        &mut self,
        op: Op,
        buffer: &mut [u8],
        splits: &[Range<usize>],
        deadline: Instant,
    ) -> Result<(), Error> {
        let mut slots = Slots::none(self.size());
        let mut own: &[u8] = &[];
        for (rank, split) in cut(buffer, splits).into_iter().enumerate() {
            if rank == self.rank {
                own = split;
            } else {
                slots.set(rank, split);
            }
        }
        let outgoing = self.to_all(|_| vec![own]);
        self.exchange(op, outgoing, &mut slots, deadline)
    }

    /// The tree sum of each rank's split, at that rank. Splits may overlap.
    fn reduce(
        &mut self,
        op: Op,
        shares: &Shares,
        pieces: &[&[f32]],
        splits: &[Range<usize>],
        out: &mut [f32],
        deadline: Instant,
    ) -> Result<(), Error> {
        let outgoing = self.to_all(|rank| {
            let segments = segments(splits[rank].clone());
            let parts = segments.flat_map(|segment| {
                pieces.iter().map(move |piece| bytemuck::cast_slice(&piece[segment.clone()]))
            });
            parts.collect()
        });
        let own = pieces.iter().map(|piece| &piece[splits[self.rank].clone()]).collect();
        let mut arrived = std::mem::take(&mut self.arrived);
        let result = TreeSum::new(shares, self.rank, own, out, &mut arrived)
            .and_then(|mut sum| self.exchange(op, outgoing, &mut sum, deadline));
        self.arrived = arrived;
        result
    }
}

impl Communicator for TcpMesh {
    fn token(&self) -> Token {
        self.token
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.wire.peers.len()
    }

    fn all_gather_bytes(
        &mut self,
        own: &[u8],
        limit: usize,
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, Error> {
        self.gather_bytes(Op::AllGatherBytes, own, limit, deadline)
    }

    fn all_gather(
        &mut self,
        buffer: &mut [f32],
        splits: &[Range<usize>],
        deadline: Instant,
    ) -> Result<(), Error> {
        self.operate(Op::AllGather, |mesh| {
            check_splits(splits, mesh.size(), buffer.len())?;
            let splits: Vec<_> = splits.iter().map(bytes_of).collect();
            mesh.fill(Op::AllGather, bytemuck::cast_slice_mut(buffer), &splits, deadline)
        })
    }

    fn reduce_scatter_tree(
        &mut self,
        shares: &Shares,
        pieces: &[&[f32]],
        splits: &[Range<usize>],
        out: &mut [f32],
        deadline: Instant,
    ) -> Result<(), Error> {
        self.operate(Op::ReduceScatterTree, |mesh| {
            // A rank without a share has no piece to know the whole length by.
            let end = splits.last().map_or(0, |split| split.end);
            let length = pieces.first().map_or(end, |piece| piece.len());
            check_splits(splits, mesh.size(), length)?;
            check_pieces(shares, mesh.rank, mesh.size(), pieces, length)?;
            check_output(out.len(), splits[mesh.rank].len())?;
            mesh.reduce(Op::ReduceScatterTree, shares, pieces, splits, out, deadline)
        })
    }

    fn all_reduce_tree(
        &mut self,
        shares: &Shares,
        pieces: &[&[f32]],
        out: &mut [f32],
        deadline: Instant,
    ) -> Result<(), Error> {
        const OP: Op = Op::AllReduceTree;
        self.operate(OP, |mesh| {
            let (size, length) = (mesh.size(), out.len());
            check_pieces(shares, mesh.rank, size, pieces, length)?;
            if length <= SMALL {
                let splits = vec![0..length; size];
                return mesh.reduce(OP, shares, pieces, &splits, out, deadline);
            }
            let splits = evenly(length, size, None);
            let own = splits[mesh.rank].clone();
            mesh.reduce(OP, shares, pieces, &splits, &mut out[own], deadline)?;
            let splits: Vec<_> = splits.iter().map(bytes_of).collect();
            mesh.fill(OP, bytemuck::cast_slice_mut(out), &splits, deadline)
        })
    }

    fn broadcast(
        &mut self,
        root: usize,
        buffer: &mut [u8],
        deadline: Instant,
    ) -> Result<(), Error> {
        self.operate(Op::Broadcast, |mesh| {
            check_rank(root, mesh.size())?;
            mesh.broadcast_from(root, buffer, deadline)
        })
    }

    fn barrier(&mut self, deadline: Instant) -> Result<(), Error> {
        self.gather_bytes(Op::Barrier, &[], 0, deadline).map(drop)
    }
}

impl Drop for TcpMesh {
    fn drop(&mut self) {
        if self.running {
            return;
        }
        match self.wire.abort.check() {
            Ok(()) if self.root.is_none() => {
                for (_, (stream, link)) in self.wire.links() {
                    link.farewell(stream);
                }
                return;
            }
            Err(aborted) if self.root.is_none() => self.give_up(&aborted),
            _ => {}
        }
        // A peer may wait for the rest of a frame that will not come, or still
        // have our notice before it. It must not take us for the dead one.
        let peers = self.wire.peers.drain(..).flatten();
        self.lingering.keep(peers.map(|(stream, _)| stream));
    }
}

impl fmt::Debug for TcpMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { token, rank, root, .. } = self;
        write!(f, "TcpMesh({token}, rank {rank} of {}, root {root:?})", self.size())
    }
}
