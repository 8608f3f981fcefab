//! The live recovery tier: ranks that hold the state of the common step give it
//! to those that lack it (GN-3, HEAL-1).
//!
//! Each source broadcasts its shard in pieces of bounded size, and a digest of
//! it behind; a receiver is fresh until every digest agreed. Ranks that hold a
//! piece already listen without writing to it.

use std::{ops::Range, time::Instant};

use job::{
    codec,
    plan::{Shard, Source},
    spec::Sharding,
};
use sha2::{Digest, Sha256};
use transport::collective::{Communicator, ViewMut};

use crate::{
    Engine, Error,
    layout::AlignedBuffer,
    state::{Progress, elements},
};

/// Elements of one broadcast: 4 MiB, which bounds the scratch memory and
/// amortises a round trip.
const PIECE: usize = 1 << 20;

impl Engine {
    /// All ranks of the generation entered call it together, with the sources
    /// of the seal: shards that together are the whole state of one step, each
    /// at a rank that holds it. Afterwards every rank has what its place needs.
    /// `receivers` are the ranks that lack it; without any, and with the shards
    /// that this mesh has, nothing is sent. A prepared gradient is dropped.
    ///
    /// # Errors
    /// [`Error::Sources`] before anything is sent; [`Error::Collective`], or
    /// [`Error::Corrupt`] when a digest differs. A rank that held its shard
    /// before still holds it then, a receiver is fresh.
    pub fn sync(
        &mut self,
        comm: &mut dyn Communicator,
        sources: &[Source],
        receivers: &[u32],
        deadline: Instant,
    ) -> Result<(), Error> {
        self.check_mesh(comm)?;
        self.discard();
        let target = self.target();
        let ranges = self.check_sources(sources, comm.size())?;
        if receivers.is_empty() && !self.moves(sources) {
            return Ok(());
        }
        let receives = receivers.iter().any(|&rank| rank as usize == comm.rank());
        let mut incoming = Incoming::new(self, target, receives);
        for (source, range) in sources.iter().zip(ranges) {
            self.transfer(comm, source, &range, &mut incoming, deadline)?;
        }
        let Some(progress) = incoming.progress else {
            return Err(Error::Sources("there are none".to_owned()));
        };
        if let Some(Buffers { weights, moments }) = incoming.buffers {
            self.state.replace(target, &weights, moments, progress);
        }
        Ok(())
    }

    /// Whether shards lie elsewhere than this mesh needs them.
    fn moves(&self, sources: &[Source]) -> bool {
        let of = sources.len() as u32;
        let in_place = |source: &Source| source.shard == Shard { index: source.rank, of };
        self.config.sharding == Sharding::Zero1
            && !(self.target().of == of && sources.iter().all(in_place))
    }

    /// The elements of each source.
    fn check_sources(&self, sources: &[Source], ranks: usize) -> Result<Vec<Range<usize>>, Error> {
        let of = sources.first().map_or(0, |source| source.shard.of);
        for (index, source) in sources.iter().enumerate() {
            let expected = Shard { index: index as u32, of };
            if source.shard != expected || source.rank as usize >= ranks {
                return Err(Error::Sources(format!("{source:?} instead of {expected:?}")));
            }
        }
        if sources.is_empty() || sources.len() != of as usize {
            return Err(Error::Sources(format!("{} of {of} shards", sources.len())));
        }
        let me = self.place()?.0;
        let lacks =
            |source: &&Source| source.rank as usize == me && self.shard() != Some(source.shard);
        if let Some(source) = sources.iter().find(lacks) {
            let held = self.shard();
            return Err(Error::Sources(format!("{source:?} is this rank, which holds {held:?}")));
        }
        Ok(sources.iter().map(|source| elements(&self.layout, source.shard)).collect())
    }

    /// One source's progress, weights, moments and digest.
    fn transfer(
        &self,
        comm: &mut dyn Communicator,
        source: &Source,
        range: &Range<usize>,
        incoming: &mut Incoming,
        deadline: Instant,
    ) -> Result<(), Error> {
        let donor = source.rank as usize;
        let sends = comm.rank() == donor;
        let mut header = codec::encode(&self.progress().unwrap_or_default());
        comm.broadcast(donor, ViewMut::of(&mut header), deadline)?;
        incoming.agree(donor, &header)?;

        let mut hash = Sha256::new();
        let mut scratch = Vec::new();
        let held = self.state.held();
        for part in [Part::Weights, Part::First, Part::Second] {
            for piece in pieces(range) {
                scratch.resize(4 * piece.len(), 0);
                if sends {
                    let values = match part {
                        Part::Weights => &self.state.replica().weights()[piece.clone()],
                        Part::First => &self.state.exp_avg()[within(&piece, &held)],
                        Part::Second => &self.state.exp_avg_sq()[within(&piece, &held)],
                    };
                    write_f32(values, &mut scratch);
                }
                comm.broadcast(donor, ViewMut::of(&mut scratch), deadline)?;
                hash.update(&scratch);
                incoming.take(part, &piece, &scratch);
            }
        }
        let digest: [u8; 32] = hash.finalize().into();
        let mut sent = digest;
        comm.broadcast(donor, ViewMut::of(&mut sent), deadline)?;
        if sent == digest { Ok(()) } else { Err(Error::Corrupt { donor }) }
    }
}

/// What a broadcast carries.
#[derive(Clone, Copy)]
enum Part {
    Weights,
    First,
    Second,
}

/// What has arrived so far.
struct Incoming {
    own: Range<usize>,
    /// Of the sources, and of this rank unless it receives.
    progress: Option<Progress>,
    /// None at a rank that holds what it needs.
    buffers: Option<Buffers>,
}

/// Apart from the state until all of it is there.
struct Buffers {
    weights: AlignedBuffer,
    moments: [AlignedBuffer; 2],
}

impl Incoming {
    fn new(engine: &Engine, target: Shard, receives: bool) -> Self {
        let own = elements(&engine.layout, target);
        // Weights that wait for a gather come along: afterwards either all
        // ranks wait for one or none does.
        let state = &engine.state;
        let complete = !receives && engine.shard() == Some(target) && state.is_gathered();
        let buffers = (!complete).then(|| Buffers {
            weights: engine.layout.buffer(),
            moments: [AlignedBuffer::zeroed(own.len()), AlignedBuffer::zeroed(own.len())],
        });
        let progress = if receives { None } else { engine.progress() };
        Self { own, progress, buffers }
    }

    /// All that hold state hold the same step of the same history.
    fn agree(&mut self, donor: usize, header: &[u8]) -> Result<(), Error> {
        let progress = codec::decode(header).map_err(|e| Error::Sources(e.to_string()))?;
        let known = self.progress.replace(progress);
        match known {
            Some(known) if known != progress => {
                Err(Error::Sources(format!("rank {donor} is at {progress:?}, others at {known:?}")))
            }
            _ => Ok(()),
        }
    }

    fn take(&mut self, part: Part, piece: &Range<usize>, bytes: &[u8]) {
        let Some(buffers) = &mut self.buffers else { return };
        if let Part::Weights = part {
            return read_f32(bytes, &mut buffers.weights[piece.clone()]);
        }
        let moment = match part {
            Part::First => &mut buffers.moments[0],
            _ => &mut buffers.moments[1],
        };
        let both = piece.start.max(self.own.start)..piece.end.min(self.own.end);
        if !both.is_empty() {
            let from = within(&both, piece);
            read_f32(&bytes[4 * from.start..4 * from.end], &mut moment[within(&both, &self.own)]);
        }
    }
}

fn pieces(range: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.clone().step_by(PIECE).map(move |start| start..end.min(start + PIECE))
}

/// `inner` counted from the start of `outer`.
fn within(inner: &Range<usize>, outer: &Range<usize>) -> Range<usize> {
    inner.start - outer.start..inner.end - outer.start
}

fn write_f32(values: &[f32], bytes: &mut [u8]) {
    for (value, out) in values.iter().zip(bytes.as_chunks_mut::<4>().0) {
        *out = value.to_le_bytes();
    }
}

fn read_f32(bytes: &[u8], values: &mut [f32]) {
    for (value, from) in values.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *value = f32::from_le_bytes(*from);
    }
}
