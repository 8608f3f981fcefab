//! Asynchronous saves: training pays for a copy into memory that exists
//! already, a thread writes it out.
//!
//! A [`Snapshot`] owns one of a few preallocated buffers. Handing it to
//! [`Stager::save`] moves it to the writing thread, and only what the thread has
//! written out becomes free again: no save can overwrite another. When all
//! buffers are taken, the next save waits or is skipped, as [`Policy`] says, so
//! that memory is bounded whatever the disk does.
//!
//! ```
//! use std::sync::mpsc;
//!
//! use dcp::staging::{Event, Options, Stager};
//! use dcp::{Dir, Dtype, Region, write_index};
//! # let scratch = tempfile::tempdir()?;
//! # let stage = Dir::at(&scratch.path().join("stage"))?;
//!
//! let (events, told) = mpsc::channel();
//! let stager = Stager::start(Options::new(1 << 20), move |event| drop(events.send(event)))?;
//! if let Some(mut snapshot) = stager.begin() {
//!     let shape = [3, 2];
//!     let whole = Region::whole(&shape);
//!     snapshot.tensor("w", &["w".into()], Dtype::U8, &shape, &whole, &[1, 2, 3, 4, 5, 6])?;
//!     stager.save(snapshot, &stage, 0); // returns at once
//! }
//! for event in told {
//!     match event {
//!         Event::Progress { .. } => {}
//!         Event::Saved { shards, .. } => {
//!             write_index(&stage, &shards)?;
//!             break;
//!         }
//!         Event::Failed { error, .. } => return Err(error.into()),
//!     }
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod pool;
mod snapshot;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::storage::Dir;
use crate::writer::{ShardIndex, save_watched};
use pool::Pool;

pub use snapshot::Snapshot;

/// What to do when every buffer is still being written out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Wait until one is free.
    #[default]
    Wait,
    /// Do without this save.
    Skip,
}

/// How to stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Bytes of a buffer: those of all tensors of a save on this rank, each
    /// rounded up to 64.
    pub bytes: usize,
    /// Buffers. Two: one is filled while the other is written out.
    pub buffers: usize,
    /// Keep the buffers in memory for good, so that copying never waits for the
    /// swap, as `async_mode = "async_with_pinned_mem"` asks.
    pub lock: bool,
    /// When no buffer is free.
    pub policy: Policy,
    /// Threads that write, each a file.
    pub threads: usize,
}

impl Options {
    /// Two buffers of this size, written by one thread; a third save waits.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self { bytes, buffers: 2, lock: false, policy: Policy::Wait, threads: 1 }
    }
}

/// What happens to the saves. They are written in order, one at a time.
#[derive(Debug)]
pub enum Event {
    /// A part is written.
    Progress {
        /// The number that [`Stager::save`] returned.
        save: u64,
        /// Bytes of elements written.
        written: u64,
        /// Of so many.
        total: u64,
    },
    /// The files are durable; the index is for whoever knows all ranks.
    Saved {
        /// The save.
        save: u64,
        /// What was written.
        shards: Vec<ShardIndex>,
        /// How long it took.
        took: Duration,
    },
    /// The save is incomplete. The next one is tried all the same.
    Failed {
        /// The save.
        save: u64,
        /// Why.
        error: crate::Error,
    },
}

/// Why staging cannot start, or a tensor cannot be staged.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The machine has no such memory.
    #[error("cannot take {bytes} bytes of memory for staging: {source}")]
    Memory {
        /// Bytes of a buffer.
        bytes: usize,
        /// Why.
        source: std::io::Error,
    },
    /// Memory cannot be kept.
    #[error(
        "cannot lock {bytes} bytes of memory for staging: {source}; \
         raise the limit (ulimit -l), or use async without pinned memory"
    )]
    Lock {
        /// Bytes of a buffer.
        bytes: usize,
        /// Why.
        source: std::io::Error,
    },
    /// The thread cannot be started.
    #[error("cannot start the thread that writes checkpoints: {0}")]
    Thread(std::io::Error),
    /// The state is larger than was said.
    #[error("{fqn}: {bytes} bytes do not fit into the {left} that are left of the staging buffer")]
    Full {
        /// The tensor.
        fqn: String,
        /// Its bytes.
        bytes: usize,
        /// Room.
        left: usize,
    },
    /// Bytes that are not those of the region.
    #[error("{fqn}: its region has {expected} bytes, {given} were given")]
    Bytes {
        /// The tensor.
        fqn: String,
        /// Bytes of the region.
        expected: u64,
        /// Bytes given.
        given: usize,
    },
}

/// Stages saves, and writes them in the background. Dropping it waits for the
/// saves that were handed over.
pub struct Stager {
    pool: Arc<Pool>,
    policy: Policy,
    next: AtomicU64,
    jobs: Option<SyncSender<Job>>,
    thread: Option<JoinHandle<()>>,
}

struct Job {
    save: u64,
    snapshot: Snapshot,
    stage: Dir,
    rank: u32,
}

impl Stager {
    /// Takes the memory, and starts the thread. `told` is called on it.
    ///
    /// # Errors
    /// When memory cannot be had or locked.
    pub fn start(
        options: Options,
        told: impl FnMut(Event) + Send + 'static,
    ) -> Result<Self, Error> {
        let buffers = options.buffers.max(1);
        let pool = Arc::new(Pool::new(buffers, options.bytes, options.lock)?);
        // Every job has a buffer: sending never waits.
        let (jobs, queue) = sync_channel(buffers);
        let thread = std::thread::Builder::new()
            .name("checkpoint-writer".to_owned())
            .spawn(move || serve(&queue, options.threads, told))
            .map_err(Error::Thread)?;
        let (jobs, thread) = (Some(jobs), Some(thread));
        Ok(Self { pool, policy: options.policy, next: AtomicU64::new(0), jobs, thread })
    }

    /// A buffer to copy the state into; `None` when this save is skipped.
    #[must_use]
    pub fn begin(&self) -> Option<Snapshot> {
        let buffer = self.pool.take(self.policy == Policy::Wait)?;
        Some(Snapshot::new(buffer, Arc::clone(&self.pool)))
    }

    /// Hands a snapshot to the writing thread, for the files of a rank in a
    /// fresh stage. Returns its number.
    pub fn save(&self, snapshot: Snapshot, stage: &Dir, rank: u32) -> u64 {
        let save = self.next.fetch_add(1, Ordering::Relaxed);
        let job = Job { save, snapshot, stage: stage.clone(), rank };
        if let Some(jobs) = &self.jobs {
            // The thread ends only when the sender is gone, or by a panic of
            // `told`, which the drop then tells.
            let _ = jobs.send(job);
        }
        save
    }

    /// Waits until everything that was handed over is written out.
    pub fn drain(&self) {
        self.pool.wait_all();
    }
}

impl Drop for Stager {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join)
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}

fn serve(queue: &Receiver<Job>, threads: usize, told: impl FnMut(Event) + Send) {
    // Several writing threads tell their progress.
    let told = Mutex::new(told);
    let tell = |event| (told.lock().unwrap_or_else(PoisonError::into_inner))(event);
    for Job { save, snapshot, stage, rank } in queue {
        let started = Instant::now();
        let total = snapshot.bytes();
        let written = AtomicU64::new(0);
        let progress = |bytes| {
            let written = written.fetch_add(bytes, Ordering::Relaxed) + bytes;
            tell(Event::Progress { save, written, total });
        };
        let done = save_watched(&stage, rank, &snapshot.items(), threads, &progress);
        // Free before anyone is told: a listener may begin the next save.
        drop(snapshot);
        tell(match done {
            Ok(shards) => Event::Saved { save, shards, took: started.elapsed() },
            Err(error) => Event::Failed { save, error },
        });
    }
}
