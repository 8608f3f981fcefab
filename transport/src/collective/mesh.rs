//! The collectives of a mesh whose ranks are connected pair by pair over TCP.

use std::{
    fmt,
    net::{IpAddr, SocketAddr, TcpStream},
    ops::Range,
    time::Instant,
};

use job::{Token, shares::Shares};

use super::{
    AbortHandle, Buffer, Communicator, Counter, Dtype, Error, Job, Partition, Reduce, View,
    ViewMut,
    arguments::{
        check_leaf, check_limit, check_output, check_pieces, check_rank, check_splits, check_tails,
    },
    direct::Local,
    exchange::Wire,
    frame::{Notice, Op},
    handshake::Key,
    kernels,
    link::{Link, Party},
    listener::Lingering,
    outgoing::Outgoing,
    recorder::{Recorder, State},
    reduce::{Combine, Fold, Pieces, TreeSum, Wave, segments},
    sink::{Gathered, Sink, Slots, expect},
    splits::{bytes_of, cut, evenly},
};

/// Sums of at most this many bytes go to every rank in one exchange instead of
/// two: below it, latency costs more than bytes.
const SMALL: usize = 16 << 10;

/// The communicator of one generation over TCP, made by
/// [`super::Listener::connect`].
///
/// Dropping it after its last operation tells the peers that this rank has
/// finished; a process that dies says nothing, which is how they tell.
pub struct HostMesh {
    token: Token,
    rank: usize,
    pub(super) wire: Wire,
    recorder: Recorder,
    // The first error, which is the answer to every later call.
    root: Option<Error>,
    // Set while an operation runs, and left set by a panic.
    running: bool,
    arrived: Vec<u64>,
    pub(super) lingering: Lingering,
    pub(super) origin: Origin,
    // Where all ranks are on one machine.
    pub(super) local: Option<Local>,
}

/// What a mesh was made from, for the meshes that are split off it.
pub(super) struct Origin {
    pub(super) key: Key,
    pub(super) addresses: Vec<SocketAddr>,
    pub(super) bind: IpAddr,
    /// The ranks as the generation's mesh numbers them, in errors.
    pub(super) names: Vec<usize>,
    pub(super) shares_memory: bool,
    /// Meshes split off so far.
    pub(super) children: u64,
}

impl HostMesh {
    /// Streams are authenticated, non-blocking, and by rank; none to itself.
    pub(super) fn new(
        token: Token,
        rank: usize,
        streams: Vec<Option<TcpStream>>,
        abort: AbortHandle,
        lingering: Lingering,
        origin: Origin,
    ) -> Self {
        let names = &origin.names;
        let size = names.iter().max().map_or(0, |name| name + 1);
        let link =
            |peer| Link::new(Party { token, own: names[rank], peer: names[peer], at: peer, size });
        let peers = streams
            .into_iter()
            .enumerate()
            .map(|(peer, stream)| Some((stream?, link(peer))))
            .collect();
        Self {
            token,
            rank,
            wire: Wire { peers, abort, names: names.clone(), segment: None, spins: false },
            recorder: Recorder::default(),
            root: None,
            running: false,
            arrived: Vec::new(),
            lingering,
            origin,
            local: None,
        }
    }

    /// The last operations, readable from any thread.
    #[must_use]
    pub fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    /// Ends as a killed process does: without a word.
    #[cfg(test)]
    pub(super) fn die(mut self) {
        self.running = true;
    }

    /// Whether this rank shares memory with that one.
    #[must_use]
    pub fn shares_memory_with(&self, rank: usize) -> bool {
        let peer = self.wire.peers.get(rank).and_then(Option::as_ref);
        peer.is_some_and(|(_, link)| link.has_rings())
    }

    /// The connections, to be cut from outside.
    #[cfg(test)]
    pub(super) fn streams(&self) -> Vec<TcpStream> {
        let streams = self.wire.peers.iter().flatten();
        streams.map(|(stream, _)| stream.try_clone().unwrap()).collect()
    }

    /// Runs one operation: after an error, this is the mesh's last.
    pub(super) fn operate<T>(
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
        match result {
            Ok(done) => {
                self.recorder.end(State::Done);
                Ok(done)
            }
            Err(mut error) => {
                self.give_up(&error);
                if let Error::Deadline { waiting_for, .. } = &mut error {
                    self.wire.keep_silent(waiting_for);
                    self.root = Some(error.clone());
                }
                self.recorder.end(State::Failed(error.to_string()));
                Err(error)
            }
        }
    }

    fn give_up(&mut self, error: &Error) {
        self.root = Some(error.clone());
        let heard = self.wire.peers.iter().flatten().find_map(|(_, link)| link.heard());
        let reporter = self.origin.names[self.rank];
        let first_hand = || Notice { error: error.clone(), reporter };
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

    /// Another rank than this one.
    fn check_other(&self, rank: usize) -> Result<(), Error> {
        check_rank(rank, self.size())?;
        if rank == self.rank {
            return Err(Error::refused(format!("rank {rank} is this rank itself")));
        }
        Ok(())
    }

    /// Every rank's bytes, within an operation.
    pub(super) fn gather_all(
        &mut self,
        op: Op,
        own: &[u8],
        limit: usize,
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, Error> {
        check_limit(own.len(), limit)?;
        let outgoing = self.to_all(|_| vec![own]);
        let mut gathered = Gathered::new(self.size(), self.rank, own, limit);
        self.exchange(op, outgoing, &mut gathered, deadline)?;
        Ok(gathered.parts)
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

    /// Sends each rank its split of all pieces and combines what comes for this
    /// one's. Splits may overlap; they and the pieces are in bytes.
    fn reduce_pieces(
        &mut self,
        op: Op,
        pieces: &[&[u8]],
        counts: impl Iterator<Item = usize>,
        splits: &[Range<usize>],
        combine: impl Combine,
        deadline: Instant,
    ) -> Result<(), Error> {
        let outgoing = self.to_all(|rank| {
            let segments = segments(splits[rank].clone());
            segments
                .flat_map(|segment| pieces.iter().map(move |piece| &piece[segment.clone()]))
                .collect()
        });
        let own = pieces.iter().map(|piece| &piece[splits[self.rank].clone()]).collect();
        let mut arrived = std::mem::take(&mut self.arrived);
        let mut sink = Pieces::new(combine, self.rank, own, counts, &mut arrived);
        let result = self.exchange(op, outgoing, &mut sink, deadline);
        self.arrived = arrived;
        result
    }

    /// The tree sum of each rank's split, at that rank.
    fn reduce_tree(
        &mut self,
        op: Op,
        shares: &Shares,
        pieces: &[View],
        splits: &[Range<usize>],
        out: &mut [f32],
        deadline: Instant,
    ) -> Result<(), Error> {
        let pieces: Vec<_> = pieces.iter().map(|piece| piece.host()).collect::<Result<_, _>>()?;
        let splits: Vec<_> = splits.iter().map(|split| bytes_of(Dtype::F32, split)).collect();
        let counts = (0..shares.ranks()).map(|rank| shares.pieces(rank).len());
        let sum = TreeSum::new(shares, out)?;
        self.reduce_pieces(op, &pieces, counts, &splits, sum, deadline)
    }

    /// Each rank's split of the ranks' buffers reduced, where it lies at that rank.
    fn reduce_in_place(
        &mut self,
        op: Op,
        how: Reduce,
        dtype: Dtype,
        buffer: &mut [u8],
        splits: &[Range<usize>],
        deadline: Instant,
    ) -> Result<(), Error> {
        let mut outgoing = self.nothing();
        let mut own: &mut [u8] = &mut [];
        for (rank, split) in cut(buffer, splits).into_iter().enumerate() {
            if rank == self.rank {
                own = split;
            } else {
                outgoing[rank] = Outgoing::frame(vec![split]);
            }
        }
        let counts = (0..self.size()).map(|rank| usize::from(rank != self.rank));
        let fold = Fold { how, dtype, out: own, own: Some(self.rank) };
        let mut arrived = std::mem::take(&mut self.arrived);
        let mut sink = Pieces::new(fold, self.rank, Vec::new(), counts, &mut arrived);
        let result = self.exchange(op, outgoing, &mut sink, deadline);
        self.arrived = arrived;
        result
    }

    /// Each rank's split reduced, at that rank.
    fn reduce_fold(
        &mut self,
        op: Op,
        input: &[u8],
        splits: &[Range<usize>],
        fold: Fold,
        deadline: Instant,
    ) -> Result<(), Error> {
        let counts = std::iter::repeat_n(1, self.size());
        self.reduce_pieces(op, &[input], counts, splits, fold, deadline)
    }
}

impl Communicator for HostMesh {
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
        const OP: Op = Op::AllGatherBytes;
        self.operate(OP, |mesh| mesh.gather_all(OP, own, limit, deadline))
    }

    fn all_gather(
        &mut self,
        buffer: ViewMut,
        splits: &[Range<usize>],
        deadline: Instant,
    ) -> Result<(), Error> {
        self.operate(Op::AllGather, |mesh| {
            check_splits(splits, mesh.size(), buffer.len())?;
            let dtype = buffer.dtype();
            let splits: Vec<_> = splits.iter().map(|split| bytes_of(dtype, split)).collect();
            mesh.fill(Op::AllGather, buffer.host()?, &splits, deadline)
        })
    }

    fn reduce_scatter(
        &mut self,
        how: Reduce,
        input: View,
        splits: &[Range<usize>],
        out: ViewMut,
        deadline: Instant,
    ) -> Result<(), Error> {
        self.operate(Op::ReduceScatter, |mesh| {
            let dtype = input.dtype();
            kernels::check(how, dtype)?;
            check_splits(splits, mesh.size(), input.len())?;
            check_output(&out, dtype, splits[mesh.rank].len())?;
            let splits: Vec<_> = splits.iter().map(|split| bytes_of(dtype, split)).collect();
            let fold = Fold { how, dtype, out: out.host()?, own: None };
            mesh.reduce_fold(Op::ReduceScatter, input.host()?, &splits, fold, deadline)
        })
    }

    fn all_reduce(&mut self, how: Reduce, buffer: ViewMut, deadline: Instant) -> Result<(), Error> {
        const OP: Op = Op::AllReduce;
        self.operate(OP, |mesh| {
            let (size, dtype) = (mesh.size(), buffer.dtype());
            kernels::check(how, dtype)?;
            let buffer = buffer.host()?;
            if buffer.len() <= SMALL {
                let input = buffer.to_vec();
                let splits = vec![0..buffer.len(); size];
                let fold = Fold { how, dtype, out: buffer, own: None };
                return mesh.reduce_fold(OP, &input, &splits, fold, deadline);
            }
            let splits = evenly(buffer.len() / dtype.size(), size, None);
            let splits: Vec<_> = splits.iter().map(|split| bytes_of(dtype, split)).collect();
            if let Some(operands) = mesh.operands(OP, buffer, deadline)? {
                let own = splits[mesh.rank].clone();
                return mesh.reduce_directly(OP, (how, dtype), &operands, own, deadline);
            }
            mesh.reduce_in_place(OP, how, dtype, buffer, &splits, deadline)?;
            mesh.fill(OP, buffer, &splits, deadline)
        })
    }

    fn broadcast(&mut self, root: usize, buffer: ViewMut, deadline: Instant) -> Result<(), Error> {
        self.operate(Op::Broadcast, |mesh| {
            check_rank(root, mesh.size())?;
            mesh.broadcast_from(root, buffer.host()?, deadline)
        })
    }

    fn all_to_all(
        &mut self,
        send: View,
        send_splits: &[Range<usize>],
        receive: ViewMut,
        receive_splits: &[Range<usize>],
        deadline: Instant,
    ) -> Result<(), Error> {
        self.operate(Op::AllToAll, |mesh| {
            let (size, own) = (mesh.size(), mesh.rank);
            check_tails(send_splits, size, send.len())?;
            check_splits(receive_splits, size, receive.len())?;
            if send_splits[own].len() != receive_splits[own].len() {
                return Err(Error::refused("the part for this rank itself has two sizes"));
            }
            let (to, from) = (send.dtype(), receive.dtype());
            let (send, receive) = (send.host()?, receive.host()?);
            let parts: Vec<_> =
                send_splits.iter().map(|split| &send[bytes_of(to, split)]).collect();
            let splits: Vec<_> = receive_splits.iter().map(|split| bytes_of(from, split)).collect();
            let mut slots = Slots::none(size);
            for (rank, slot) in cut(receive, &splits).into_iter().enumerate() {
                if rank == own {
                    slot.copy_from_slice(parts[rank]);
                } else {
                    slots.set(rank, slot);
                }
            }
            let outgoing = mesh.to_all(|rank| vec![parts[rank]]);
            mesh.exchange(Op::AllToAll, outgoing, &mut slots, deadline)
        })
    }

    fn send(&mut self, to: usize, elements: View, deadline: Instant) -> Result<(), Error> {
        self.operate(Op::Send, |mesh| {
            mesh.check_other(to)?;
            let mut outgoing = mesh.nothing();
            outgoing[to] = Outgoing::frame(vec![elements.host()?]);
            mesh.exchange(Op::Send, outgoing, &mut Slots::none(mesh.size()), deadline)
        })
    }

    fn receive(&mut self, from: usize, buffer: ViewMut, deadline: Instant) -> Result<(), Error> {
        self.operate(Op::Send, |mesh| {
            mesh.check_other(from)?;
            let buffer = buffer.host()?;
            let waiting = mesh.wire.peers[from].as_mut().and_then(|(_, link)| link.parcels().pop());
            if let Some(parcel) = waiting {
                expect(parcel.len() as u64, buffer.len())
                    .map_err(|detail| Error::Protocol { rank: mesh.origin.names[from], detail })?;
                buffer.copy_from_slice(&parcel);
                return Ok(());
            }
            let mut slots = Slots::none(mesh.size());
            slots.set(from, buffer);
            mesh.exchange(Op::Send, mesh.nothing(), &mut slots, deadline)
        })
    }

    fn reduce_scatter_tree(
        &mut self,
        shares: &Shares,
        pieces: &[View],
        splits: &[Range<usize>],
        out: ViewMut,
        deadline: Instant,
    ) -> Result<(), Error> {
        self.operate(Op::ReduceScatterTree, |mesh| {
            // A rank without a share has no piece to know the whole length by.
            let end = splits.last().map_or(0, |split| split.end);
            let length = pieces.first().map_or(end, |piece| piece.len());
            check_splits(splits, mesh.size(), length)?;
            check_pieces(shares, mesh.rank, mesh.size(), pieces, length)?;
            check_output(&out, Dtype::F32, splits[mesh.rank].len())?;
            mesh.reduce_tree(Op::ReduceScatterTree, shares, pieces, splits, out.typed()?, deadline)
        })
    }

    fn all_reduce_tree(
        &mut self,
        shares: &Shares,
        pieces: &[View],
        out: ViewMut,
        deadline: Instant,
    ) -> Result<(), Error> {
        const OP: Op = Op::AllReduceTree;
        self.operate(OP, |mesh| {
            let (size, length) = (mesh.size(), out.len());
            check_pieces(shares, mesh.rank, size, pieces, length)?;
            let out = out.typed::<f32>()?;
            if size_of_val(out) <= SMALL {
                let splits = vec![0..length; size];
                return mesh.reduce_tree(OP, shares, pieces, &splits, out, deadline);
            }
            let splits = evenly(length, size, None);
            let own = splits[mesh.rank].clone();
            mesh.reduce_tree(OP, shares, pieces, &splits, &mut out[own], deadline)?;
            let splits: Vec<_> = splits.iter().map(|split| bytes_of(Dtype::F32, split)).collect();
            mesh.fill(OP, bytemuck::cast_slice_mut(out), &splits, deadline)
        })
    }

    fn reduce_scatter_wave(
        &mut self,
        leaf: Option<View>,
        splits: &[Range<usize>],
        sum: &mut Counter,
        deadline: Instant,
    ) -> Result<(), Error> {
        self.operate(Op::ReduceScatterWave, |mesh| {
            let (size, rank) = (mesh.size(), mesh.rank);
            let leaves = check_leaf(leaf.as_ref(), splits, sum, rank, size)?;
            let dtype = leaf.map_or(Dtype::F32, |leaf| leaf.dtype());
            let in_bytes: Vec<_> = splits.iter().map(|split| bytes_of(dtype, split)).collect();
            let pieces: Vec<_> = leaf.iter().map(|leaf| leaf.host()).collect::<Result<_, _>>()?;
            let counts = (0..size).map(|rank| usize::from(rank < leaves));
            sum.begin(leaves as u32)?;
            let wave = Wave { dtype, sum };
            mesh.reduce_pieces(Op::ReduceScatterWave, &pieces, counts, &in_bytes, wave, deadline)?;
            sum.end(leaves as u32);
            Ok(())
        })
    }

    fn barrier(&mut self, deadline: Instant) -> Result<(), Error> {
        const OP: Op = Op::Barrier;
        self.operate(OP, |mesh| mesh.gather_all(OP, &[], 0, deadline)).map(drop)
    }

    fn split(
        &mut self,
        partitions: &[Partition],
        deadline: Instant,
    ) -> Result<Vec<Box<dyn Communicator>>, Error> {
        self.operate(Op::Split, |mesh| mesh.split_off(partitions, deadline))
    }

    fn allocate(
        &mut self,
        dtype: Dtype,
        elements: usize,
        deadline: Instant,
    ) -> Result<Buffer, Error> {
        self.operate(Op::Allocate, |mesh| mesh.allocate_shared(dtype, elements, deadline))
    }

    fn enqueue(&mut self, job: Job) {
        job(self);
    }
}

impl Drop for HostMesh {
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

impl fmt::Debug for HostMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { token, rank, root, .. } = self;
        write!(f, "HostMesh({token}, rank {rank} of {}, root {root:?})", self.size())
    }
}
