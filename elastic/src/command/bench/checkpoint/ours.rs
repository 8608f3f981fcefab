//! Our side: the library as any program would use it, with two threads.

use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use dcp::staging::{Event, Options, Stager};
use dcp::writer::{Content, Item, save as save_items};
use dcp::{Checkpoint, Dir, Dtype, Region, Segment, Target, write_index};

/// As many tensors of [rows, 2048].
pub(super) const TENSORS: usize = 64;
pub(super) const COLUMNS: u64 = 2048;
/// Threads that write.
const THREADS: usize = 2;

/// A state of 32-bit floats.
pub(super) struct State {
    pub(super) bytes: Vec<u8>,
    names: Vec<(String, Vec<Segment>)>,
    shape: [u64; 2],
}

impl State {
    /// A state of so many MiB, none of it compressible.
    pub(super) fn new(mebibytes: u64) -> Result<Self, String> {
        let row = TENSORS as u64 * COLUMNS * 4;
        let rows = (mebibytes << 20) / row;
        let length = usize::try_from(rows * row).map_err(|error| error.to_string())?;
        let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
        let mut bytes = vec![0; length];
        for word in bytes.as_chunks_mut::<8>().0 {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            *word = seed.to_le_bytes();
        }
        let name = |n: usize| (format!("t{n:03}"), vec![Segment::Key(format!("t{n:03}"))]);
        Ok(Self { bytes, names: (0..TENSORS).map(name).collect(), shape: [rows, COLUMNS] })
    }

    pub(super) fn rows(&self) -> u64 {
        self.shape[0]
    }

    /// The rows of a rank of every tensor.
    fn items(&self, rank: u64, ranks: u64) -> Vec<Item<'_>> {
        let (start, end) = self.part(rank, ranks);
        let tensors = self.bytes.chunks_exact(self.bytes.len() / TENSORS);
        let own = (start * COLUMNS * 4) as usize..(end * COLUMNS * 4) as usize;
        let mut items = Vec::new();
        for ((fqn, path), tensor) in self.names.iter().zip(tensors) {
            let region = Region::rows(&self.shape, start, end - start);
            let (dtype, shape, bytes) = (Dtype::F32, &self.shape, &tensor[own.clone()]);
            let content = Content::Tensor { dtype, shape, region, bytes };
            items.push(Item { fqn, path, content });
        }
        items
    }

    /// The rows of a rank, as `torch.chunk` cuts them.
    fn part(&self, rank: u64, ranks: u64) -> (u64, u64) {
        let (rows, step) = (self.shape[0], self.shape[0].div_ceil(ranks));
        ((rank * step).min(rows), ((rank + 1) * step).min(rows))
    }
}

/// Seconds to save the state, index and digests included.
pub(super) fn save(state: &State, path: &Path) -> Result<f64, String> {
    let started = Instant::now();
    save_whole(state, path).map_err(|error| error.to_string())?;
    Ok(started.elapsed().as_secs_f64())
}

fn save_whole(state: &State, path: &Path) -> Result<(), dcp::Error> {
    let dir = Dir::at(path)?;
    let shards = save_items(&dir, 0, &state.items(0, 1), THREADS)?;
    write_index(&dir, &shards).map(|_| ())
}

/// Saves the state as so many ranks would; not timed.
pub(super) fn save_ranks(state: &State, path: &Path, ranks: u32) -> Result<(), String> {
    let save = || {
        let dir = Dir::at(path)?;
        let mut shards = Vec::new();
        for rank in 0..ranks {
            shards.extend(save_items(&dir, rank, &state.items(rank.into(), ranks.into()), 1)?);
        }
        write_index(&dir, &shards).map(|_| ())
    };
    save().map_err(|error: dcp::Error| error.to_string())
}

/// Seconds to load the whole state into memory that is there.
pub(super) fn load(state: &State, path: &Path) -> Result<f64, String> {
    reshard(state, path, 1).map(|(seconds, _)| seconds)
}

/// Seconds to load the parts of so many ranks into memory that is there, and
/// how many times the bytes needed were read.
pub(super) fn reshard(state: &State, path: &Path, ranks: u32) -> Result<(f64, f64), String> {
    let mut memory: Vec<Vec<u8>> = (0..ranks)
        .map(|rank| {
            let (start, end) = state.part(rank.into(), ranks.into());
            // Written to, so that its pages are there.
            vec![1; TENSORS * ((end - start) * COLUMNS * 4) as usize]
        })
        .collect();
    let started = Instant::now();
    let load = |memory: &mut [Vec<u8>]| {
        let checkpoint = Checkpoint::open(path)?;
        let mut targets = Vec::new();
        for (rank, memory) in (0..).zip(memory) {
            let (start, end) = state.part(rank, ranks.into());
            let region = Region::rows(&state.shape, start, end - start);
            let own = memory.chunks_exact_mut(((end - start) * COLUMNS * 4) as usize);
            targets.extend(
                state
                    .names
                    .iter()
                    .zip(own)
                    .map(|((fqn, _), own)| Target::new(fqn, region.clone(), own)),
            );
        }
        checkpoint.load(targets)
    };
    let report = load(&mut memory).map_err(|error: dcp::Error| error.to_string())?;
    let seconds = started.elapsed().as_secs_f64();
    Ok((seconds, report.read as f64 / report.needed as f64))
}

/// Saves in the background, in buffers that are taken once.
pub(super) struct Background {
    stager: Stager,
    told: Receiver<Event>,
}

impl Background {
    pub(super) fn start(state: &State) -> Result<Self, String> {
        let (events, told) = channel();
        // What is copied while the last save is being written is not measured
        // here: one buffer is enough.
        let options = Options { buffers: 1, threads: THREADS, ..Options::new(state.bytes.len()) };
        let stager = Stager::start(options, move |event| drop(events.send(event)));
        Ok(Self { stager: stager.map_err(|error| error.to_string())?, told })
    }

    /// Seconds that the caller is held up; the save is complete afterwards.
    pub(super) fn save(&self, state: &State, path: &Path) -> Result<f64, String> {
        let dir = Dir::at(path).map_err(|error| error.to_string())?;
        let started = Instant::now();
        let mut snapshot = self.stager.begin().ok_or("the last save is not over")?;
        for Item { fqn, path, content } in state.items(0, 1) {
            if let Content::Tensor { dtype, shape, region, bytes } = content {
                let copied = snapshot.tensor(fqn, path, dtype, shape, &region, bytes);
                copied.map_err(|error| error.to_string())?;
            }
        }
        self.stager.save(snapshot, &dir, 0);
        let held_up = started.elapsed().as_secs_f64();
        for event in &self.told {
            match event {
                Event::Progress { .. } => {}
                Event::Saved { .. } => return Ok(held_up),
                Event::Failed { error, .. } => return Err(error.to_string()),
            }
        }
        Err("the writing thread ended".to_owned())
    }
}
