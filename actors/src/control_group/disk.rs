//! The thread that makes the log durable. Whatever queued up while the last
//! transaction synced becomes the next transaction, so throughput grows with
//! load and the latency of a lone command is one sync.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use raft::eraftpb::HardState;

use super::store::{Store, Write};

/// Writes queued before the member waits for the disk. Raft's own windows are
/// far smaller; this only bounds memory while a disk hangs.
const QUEUE: usize = 4096;

/// Most writes in one transaction.
const BATCH: usize = 512;

/// A commit index that nothing took along is written after this: what a node knew
/// to be a fact it knows again after all were killed, when nobody could tell it.
pub(super) const LINGER: Duration = Duration::from_millis(50);

/// Where a member writes its log. Writes become durable in order, a little later.
pub(super) trait LogWriter: Send {
    /// Queues a write of the Ready `number`. Without `sync` nothing waits for it.
    fn write(&self, number: u64, write: Write, sync: bool) -> Result<(), String>;

    /// Waits until all that was queued is durable.
    fn flush(&self) -> Result<(), String>;

    /// Number of the last Ready that is durable.
    fn durable(&self) -> Result<u64, String>;
}

/// The member's end of the thread.
pub(super) struct Disk {
    queue: Option<SyncSender<Job>>,
    progress: Arc<Progress>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Progress {
    /// Number of the last Ready that is durable.
    durable: AtomicU64,
    failure: OnceLock<String>,
}

enum Job {
    Write {
        /// Of the Ready it belongs to.
        number: u64,
        write: Box<Write>,
        /// Whether anything may be acknowledged only when this is on disk. A
        /// commit index alone is learned anew after a crash: it waits for a free
        /// ride, though not for long.
        sync: bool,
    },
    Flush(SyncSender<()>),
}

impl Disk {
    /// Starts the thread; `wake` is called after each progress.
    pub(super) fn start(store: Store, wake: impl Fn() + Send + 'static) -> std::io::Result<Self> {
        let (queue, jobs) = sync_channel(QUEUE);
        let progress = Arc::new(Progress::default());
        let shared = Arc::clone(&progress);
        let thread = std::thread::Builder::new().name("elastic-log".into()).spawn(move || {
            if let Err(error) = run(&store, &jobs, &shared, &wake) {
                // The first failure is the cause; there is no second.
                let _ = shared.failure.set(error);
            }
            drop(jobs);
            wake();
        })?;
        Ok(Self { queue: Some(queue), progress, thread: Some(thread) })
    }

    fn send(&self, job: Job) -> Result<(), String> {
        let queue = self.queue.as_ref().ok_or_else(|| self.failure())?;
        queue.send(job).map_err(|_| self.failure())
    }

    fn failure(&self) -> String {
        self.progress.failure.get().cloned().unwrap_or_else(|| "the log thread ended".into())
    }
}

impl LogWriter for Disk {
    fn write(&self, number: u64, write: Write, sync: bool) -> Result<(), String> {
        self.send(Job::Write { number, write: Box::new(write), sync })
    }

    fn flush(&self) -> Result<(), String> {
        let (done, wait) = sync_channel(1);
        self.send(Job::Flush(done))?;
        wait.recv().map_err(|_| self.failure())
    }

    fn durable(&self) -> Result<u64, String> {
        match self.progress.failure.get() {
            Some(failure) => Err(failure.clone()),
            None => Ok(self.progress.durable.load(Ordering::Acquire)),
        }
    }
}

impl Drop for Disk {
    /// Ends the thread after what is queued, and with it the lock of the store.
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported as the end of the queue.
            let _ = thread.join();
        }
    }
}

fn run(
    store: &Store,
    jobs: &Receiver<Job>,
    progress: &Progress,
    wake: &impl Fn(),
) -> Result<(), String> {
    // Hard states that only raise the commit index wait here for a free ride.
    let mut lazy: Option<HardState> = None;
    let store_lazy = |lazy: Option<HardState>| match lazy {
        Some(hs) => store.write(&[of_hard_state(hs)]).map_err(|e| e.to_string()),
        None => Ok(()),
    };
    loop {
        let patience = if lazy.is_some() { LINGER } else { Duration::MAX };
        let first = match jobs.recv_timeout(patience) {
            Ok(first) => first,
            Err(RecvTimeoutError::Timeout) => {
                store_lazy(lazy.take())?;
                continue;
            }
            Err(RecvTimeoutError::Disconnected) => return store_lazy(lazy),
        };
        let mut writes = Vec::new();
        let (mut last, mut must_sync, mut flushed) = (0, false, Vec::new());
        for job in std::iter::once(first).chain(jobs.try_iter().take(BATCH)) {
            match job {
                Job::Write { number, write, sync } => {
                    must_sync |= sync;
                    last = last.max(number);
                    match *write {
                        Write { hard_state: Some(hs), .. } if !sync => lazy = Some(hs),
                        write => {
                            // An older commit index must not overwrite a newer one.
                            if write.hard_state.is_some() {
                                lazy = None;
                            }
                            writes.push(write);
                        }
                    }
                }
                Job::Flush(done) => flushed.push(done),
            }
        }
        if must_sync {
            writes.extend(lazy.take().map(of_hard_state));
            store.write(&writes).map_err(|e| e.to_string())?;
        }
        progress.durable.fetch_max(last, Ordering::AcqRel);
        for done in flushed {
            // The member gave up waiting only if it ended.
            let _ = done.send(());
        }
        wake();
    }
}

fn of_hard_state(hard_state: HardState) -> Write {
    Write { hard_state: Some(hard_state), ..Write::default() }
}
