//! Moves the elements of one band out of the shards that hold them.

use std::borrow::Cow;
use std::sync::atomic::AtomicU64;

use super::convert::convert;
use super::plan::{Part, Plan, count};
use crate::checkpoint::Checkpoint;
use crate::dtype::Dtype;
use crate::error::{Error, SliceError};
use crate::index::Form;
use crate::item::{Edges, Item, piece_of};
use crate::payload::{self, Tensor};
use crate::region::{Layout, Region, Runs};
use crate::storage::Object;
use crate::zip;

/// Where a shard's elements are.
pub(super) struct Source {
    tensor: Tensor,
    layout: Layout,
    /// The elements themselves, when the file holds them in another form.
    decoded: Option<Vec<u8>>,
}

impl Source {
    /// Finds the elements of a shard; they are not read.
    pub(super) fn locate(
        item: Item,
        form: Form,
        dtype: Dtype,
        region: &Region,
        read: &AtomicU64,
    ) -> Result<Self, SliceError> {
        let (tensor, decoded) = match (form, item) {
            (Form::Raw, item) => (Tensor::raw(dtype, &region.sizes, item.len())?, None),
            (_, Item::Slice(slice)) => {
                let edges = Edges::of(&slice)?;
                let tensor = check_tensor(&edges, dtype, &region.sizes)?;
                count(read, edges.read());
                (tensor, None)
            }
            (_, Item::Memory { bytes, stored }) => {
                let tensor = check_tensor(&bytes, dtype, &region.sizes)?;
                count(read, stored);
                (tensor, Some(bytes))
            }
        };
        let layout = match &tensor.scattered {
            None => Layout::packed(region),
            Some(s) => Layout::strided(region, s.first, s.strides.clone()),
        };
        Ok(Self { tensor, layout, decoded })
    }

    /// True when the elements are in C order.
    pub(super) fn is_simple(&self) -> bool {
        self.tensor.scattered.is_none()
    }

    /// Compares the CRC-32 of all bytes.
    pub(super) fn check(&self, crc: u32) -> Result<(), SliceError> {
        Ok(self.tensor.storage.check(crc)?)
    }
}

/// The tensor of an archive, which must be the one that the index promises.
pub(crate) fn check_tensor(
    archive: &dyn Object,
    dtype: Dtype,
    sizes: &[u64],
) -> Result<Tensor, SliceError> {
    let tensor = payload::tensor(archive)?;
    if tensor.dtype == dtype && tensor.sizes == sizes {
        return Ok(tensor);
    }
    let found = format!("a {} tensor of shape {:?}", tensor.dtype, tensor.sizes);
    Err(SliceError::Mismatch { found, expected: format!("{dtype}, {sizes:?}") })
}

/// One band of a target.
pub(super) struct Job<'p> {
    plan: &'p Plan<'p>,
    band: Region,
    memory: &'p mut [u8],
    parts: Vec<(&'p Part<'p>, Region)>,
}

impl<'p> Job<'p> {
    /// `None` for a band without elements.
    pub(super) fn new(plan: &'p Plan<'p>, band: Region, memory: &'p mut [u8]) -> Option<Self> {
        let part = |part: &'p Part<'p>| Some((part, part.chunk.region.intersect(&band)?));
        let parts: Vec<_> = plan.parts.iter().filter_map(part).collect();
        (!parts.is_empty()).then_some(Self { plan, band, memory, parts })
    }

    /// File, and position in it.
    pub(super) fn position(&self) -> (u32, u64) {
        let (part, region) = &self.parts[0];
        let within = part.source().map_or(0, |source| source.layout.first_of(region));
        (part.chunk.place.file, part.chunk.place.offset.saturating_add(within))
    }

    pub(super) fn run(self, checkpoint: &Checkpoint, read: &AtomicU64) -> Result<(), Error> {
        let to = self.plan.layout(&self.band);
        for (part, region) in &self.parts {
            let place = part.chunk.place;
            let item = checkpoint.slice(part.fqn, place)?;
            part.source()
                .and_then(|source| {
                    let runs = Runs::new(region, &source.layout, &to);
                    let way = Way { part, region, source, to: self.plan.dtype, read };
                    way.copy(&item, runs, self.memory)
                })
                .map_err(|source| checkpoint.bad_slice(part.fqn, place, source))?;
        }
        Ok(())
    }
}

/// The way of one shard's part into a band.
struct Way<'a> {
    part: &'a Part<'a>,
    region: &'a Region,
    source: &'a Source,
    to: Dtype,
    read: &'a AtomicU64,
}

impl Way<'_> {
    fn copy(&self, file: &dyn Object, runs: Runs, into: &mut [u8]) -> Result<(), SliceError> {
        let (tensor, from) = (&self.source.tensor, self.part.dtype);
        let (item, out) = (from.size(), self.to.size());
        let storage = tensor.at..tensor.at + tensor.storage.size;
        let span = self.source.layout.span(self.region);
        let mut crc = Some(crc32fast::Hasher::new()).filter(|_| runs.is_one_in_from());
        let first = span.start * item as u64;
        let mut bytes = match &self.source.decoded {
            Some(decoded) => Bytes::Memory { bytes: decoded.into(), start: 0 },
            None if self.source.is_simple() => {
                let end = tensor.at + span.end * item as u64;
                Bytes::File(Window::new(file, end, &runs, item, self.read))
            }
            None => {
                // Rearranged: all that is needed at once, instead of by element.
                let mut held = vec![0; ((span.end - span.start) as usize) * item];
                read(file, tensor.at + first, &mut held, self.read)?;
                Bytes::Memory { bytes: held.into(), start: tensor.at + first }
            }
        };
        if let (false, Some(all)) = (self.source.is_simple(), bytes.all(&storage)) {
            self.part.note(0, all.len() as u64, crc32fast::hash(all));
            crc = None;
        }
        let at_once = piece_of(file);
        let mut scratch = vec![0; if from == self.to { 0 } else { at_once }];
        let length = runs.len as usize;
        for (at, to) in runs {
            let (mut at, to) = (tensor.at + at * item as u64, to as usize * out);
            for into in into[to..to + length * out].chunks_mut(at_once / item * out) {
                let piece = into.len() / out * item;
                let raw = if from == self.to { &mut into[..] } else { &mut scratch[..piece] };
                bytes.read(at, raw)?;
                if let Some(crc) = &mut crc {
                    crc.update(raw);
                }
                if tensor.conjugate {
                    raw.chunks_exact_mut(item).for_each(|element| element[item - 1] ^= 0x80);
                }
                if from != self.to {
                    convert(from, &scratch[..piece], self.to, into);
                }
                at += piece as u64;
            }
        }
        if let Some(crc) = crc {
            let bytes = self.region.elements() * item as u64;
            self.part.note(first, bytes, crc.finalize());
        }
        Ok(())
    }
}

fn read(
    from: &dyn Object,
    at: u64,
    into: &mut [u8],
    counter: &AtomicU64,
) -> Result<(), SliceError> {
    count(counter, into.len());
    from.read_at(at, into).map_err(|error| SliceError::Zip(zip::Error::Io(error)))
}

/// Where the bytes of a shard come from, by their position in the archive.
enum Bytes<'a> {
    Memory { bytes: Cow<'a, [u8]>, start: u64 },
    File(Window<'a>),
}

impl Bytes<'_> {
    fn read(&mut self, at: u64, into: &mut [u8]) -> Result<(), SliceError> {
        match self {
            Self::Memory { bytes, start } => {
                let skip = (at - *start) as usize;
                into.copy_from_slice(&bytes[skip..skip + into.len()]);
                Ok(())
            }
            Self::File(window) => window.read(at, into),
        }
    }

    /// The whole storage, when it is in memory.
    fn all(&self, storage: &std::ops::Range<u64>) -> Option<&[u8]> {
        let Self::Memory { bytes, start } = self else { return None };
        let begin = storage.start.checked_sub(*start)? as usize;
        bytes.get(begin..begin + (storage.end - storage.start) as usize)
    }
}

/// Ascending reads through a buffer, when they are short and close together.
struct Window<'a> {
    file: &'a dyn Object,
    counter: &'a AtomicU64,
    end: u64,
    start: u64,
    bytes: Vec<u8>,
    /// Bytes to read ahead; none at all when zero.
    ahead: usize,
}

impl<'a> Window<'a> {
    fn new(
        file: &'a dyn Object,
        end: u64,
        runs: &Runs,
        item: usize,
        counter: &'a AtomicU64,
    ) -> Self {
        let (length, item) = (runs.len * item as u64, item as u64);
        // Reading a gap costs its bytes, skipping it costs a request.
        let close = runs.gap().is_some_and(|gap| {
            let gap = gap * item;
            gap <= length / 16 || gap <= file.request_cost()
        });
        let at_once = piece_of(file);
        let ahead = if close && length < at_once as u64 { at_once } else { 0 };
        Self { file, counter, end, start: 0, bytes: Vec::new(), ahead }
    }

    fn read(&mut self, at: u64, into: &mut [u8]) -> Result<(), SliceError> {
        if self.ahead == 0 {
            return read(self.file, at, into, self.counter);
        }
        let held = self.start + self.bytes.len() as u64;
        if at < self.start || at + into.len() as u64 > held {
            let ahead = self.ahead.max(into.len()) as u64;
            self.bytes.resize(ahead.min(self.end - at) as usize, 0);
            self.start = at;
            read(self.file, at, &mut self.bytes, self.counter)?;
        }
        let skip = (at - self.start) as usize;
        into.copy_from_slice(&self.bytes[skip..skip + into.len()]);
        Ok(())
    }
}
