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
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use transport::collective::{Communicator, ViewMut};

use crate::{Engine, Error, layout::AlignedBuffer, placement::Portion, state::Progress};

/// Elements of one broadcast: 4 MiB, which bounds the scratch memory and
/// amortises a round trip.
const PIECE: usize = 1 << 20;

/// Bytes of a [`Standing`], with room to spare.
const STANDING_LIMIT: usize = 1 << 10;

/// What a rank brings to a sync.
#[derive(Serialize, Deserialize)]
struct Standing {
    /// It does not hold what its place needs.
    lacks: bool,
    /// Of the state that it goes on with, or gives.
    progress: Option<Progress>,
}

/// All that hold state hold the same step of the same history.
fn somebody_lacks(own: Option<Progress>, all: &[Vec<u8>]) -> Result<bool, Error> {
    let (mut known, mut lack) = (own, false);
    for (rank, bytes) in all.iter().enumerate() {
        let other: Standing = codec::decode(bytes).map_err(|e| Error::Sources(e.to_string()))?;
        lack |= other.lacks;
        match (known, other.progress) {
            (Some(known), Some(progress)) if known != progress => {
                let text = format!("rank {rank} is at {progress:?}, others at {known:?}");
                return Err(Error::Sources(text));
            }
            (_, progress) => known = known.or(progress),
        }
    }
    Ok(lack)
}

impl Engine {
    /// All ranks of the generation entered call it together, with the sources
    /// of the seal: shards that together are the whole state of one step, each
    /// at a rank that holds it. Afterwards every rank has what its place needs.
    /// `receivers` are the ranks that lack it; when nobody lacks anything, nothing
    /// more is sent than that. A prepared gradient is dropped.
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
        let portions = self.check_sources(sources, comm.size())?;
        let receives = receivers.iter().any(|&rank| rank as usize == comm.rank());
        let lacks = receives || self.shard() != Some(target);
        let progress = if receives { None } else { self.progress() };
        let own = codec::encode(&Standing { lacks, progress });
        let all = comm.all_gather_bytes(&own, STANDING_LIMIT, deadline)?;
        if !somebody_lacks(progress, &all)? {
            return Ok(());
        }
        let mut incoming = Incoming::new(self, target, receives, lacks);
        for (source, portion) in sources.iter().zip(portions) {
            self.transfer(comm, source, &portion, &mut incoming, deadline)?;
        }
        let Some(progress) = incoming.progress else {
            return Err(Error::Sources("there are none".to_owned()));
        };
        if let Some(Buffers { weights, moments }) = incoming.buffers {
            self.state.replace(target, &weights, moments, progress);
        }
        Ok(())
    }

    /// The elements of each source.
    fn check_sources(&self, sources: &[Source], ranks: usize) -> Result<Vec<Portion>, Error> {
        let layout = sources.first().map(|source| (source.shard.of, source.shard.stages));
        let (of, stages) = layout.unwrap_or((0, 1));
        if stages == 0 || !of.is_multiple_of(stages) {
            return Err(Error::Sources(format!("{of} shards of {stages} stages")));
        }
        for (index, source) in sources.iter().enumerate() {
            let expected = Shard { index: index as u32, of, stages };
            if source.shard != expected || source.rank as usize >= ranks {
                return Err(Error::Sources(format!("{source:?} instead of {expected:?}")));
            }
        }
        if sources.is_empty() || sources.len() != of as usize {
            return Err(Error::Sources(format!("{} of {of} shards", sources.len())));
        }
        let me = self.place()?.rank;
        let lacks =
            |source: &&Source| source.rank as usize == me && self.shard() != Some(source.shard);
        if let Some(source) = sources.iter().find(lacks) {
            let held = self.shard();
            return Err(Error::Sources(format!("{source:?} is this rank, which holds {held:?}")));
        }
        Ok(sources.iter().map(|source| self.placement.portion(source.shard)).collect())
    }

    /// One source's progress, weights, moments and digest.
    fn transfer(
        &self,
        comm: &mut dyn Communicator,
        source: &Source,
        portion: &Portion,
        incoming: &mut Incoming,
        deadline: Instant,
    ) -> Result<(), Error> {
        let donor = source.rank as usize;
        let sends = comm.rank() == donor;
        let mut header = codec::encode(&self.progress().unwrap_or_default());
        comm.broadcast(donor, ViewMut::of::<u8>(&mut header), deadline)?;
        incoming.agree(donor, &header)?;

        let mut hash = Sha256::new();
        let mut scratch = Vec::new();
        for part in [Part::Weights, Part::First, Part::Second] {
            for (piece, packed) in portion.pieces().flat_map(cut) {
                scratch.resize(4 * piece.len(), 0);
                if sends {
                    let values = match part {
                        Part::Weights => &self.state.replica().weights()[piece.clone()],
                        Part::First => &self.state.exp_avg()[packed],
                        Part::Second => &self.state.exp_avg_sq()[packed],
                    };
                    write_f32(values, &mut scratch);
                }
                comm.broadcast(donor, ViewMut::of::<u8>(&mut scratch), deadline)?;
                hash.update(&scratch);
                incoming.take(part, &piece, &scratch);
            }
        }
        let digest: [u8; 32] = hash.finalize().into();
        let mut sent = digest;
        comm.broadcast(donor, ViewMut::of::<u8>(&mut sent), deadline)?;
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
    own: Portion,
    /// Of the sources, and of this rank unless it receives.
    progress: Option<Progress>,
    /// None at a rank that holds what it needs.
    buffers: Option<Buffers>,
}

/// Packed, and apart from the state until all of it is there.
struct Buffers {
    weights: AlignedBuffer,
    moments: [AlignedBuffer; 2],
}

impl Incoming {
    fn new(engine: &Engine, target: Shard, receives: bool, lacks: bool) -> Self {
        let own = engine.placement.portion(target);
        let room = || AlignedBuffer::zeroed(own.len());
        let buffers = lacks.then(|| Buffers { weights: room(), moments: [room(), room()] });
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
        let out = match part {
            Part::Weights => &mut buffers.weights,
            Part::First => &mut buffers.moments[0],
            Part::Second => &mut buffers.moments[1],
        };
        for (both, packed) in self.own.within(piece) {
            let from = within(&both, piece);
            read_f32(&bytes[4 * from.start..4 * from.end], &mut out[packed]);
        }
    }
}

/// Pieces of bounded size, and where they lie when packed.
fn cut(
    (range, packed): (Range<usize>, Range<usize>),
) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let end = range.end;
    range.clone().step_by(PIECE).map(move |start| {
        let piece = start..end.min(start + PIECE);
        let at = packed.start + start - range.start;
        (piece.clone(), at..at + piece.len())
    })
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
