//! Operations that go on while their caller does something else.

use std::{
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{self, Receiver, SyncSender},
    },
    thread::JoinHandle,
    time::Instant,
};

use job::{Token, shares::Shares};

use super::{Buffer, Communicator, Counter, Dtype, Error, Job, Partition, Reduce, View, ViewMut};

/// Jobs that wait behind the one under way; whoever gives one more waits too.
const WAITING: usize = 64;

/// A communicator with a thread of its own for what is [started](#method.start)
/// on it. Called operations run in the calling thread, after all that was
/// started before. Dropping it waits for what was started; the deadlines of the
/// operations, or an abort, bound how long.
pub struct Overlapped<C> {
    inner: Arc<Mutex<C>>,
    jobs: Option<SyncSender<Job>>,
    // One message for each job that has ended.
    ended: Receiver<()>,
    under_way: usize,
    thread: Option<JoinHandle<()>>,
    token: Token,
    rank: usize,
    size: usize,
}

impl<C: Communicator + 'static> Overlapped<C> {
    /// Starts the thread.
    ///
    /// # Errors
    /// [`Error::System`] when there can be no more threads.
    pub fn new(inner: C) -> Result<Self, Error> {
        let (token, rank, size) = (inner.token(), inner.rank(), inner.size());
        let inner = Arc::new(Mutex::new(inner));
        let (jobs, todo) = mpsc::sync_channel::<Job>(WAITING);
        let (done, ended) = mpsc::channel();
        let theirs = Arc::clone(&inner);
        let work = move || {
            for job in todo {
                // A panic in a job is its caller's to see, in what it waits for.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    job(&mut *lock(&theirs));
                }));
                if done.send(()).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("mesh-jobs".into())
            .spawn(work)
            .map_err(|why| Error::system("spawn", why))?;
        let (jobs, thread) = (Some(jobs), Some(thread));
        Ok(Self { inner, jobs, ended, under_way: 0, thread, token, rank, size })
    }

    /// The communicator, once all that was started has ended.
    fn settled(&mut self) -> MutexGuard<'_, C> {
        while self.under_way > 0 && self.ended.recv().is_ok() {
            self.under_way -= 1;
        }
        lock(&self.inner)
    }
}

impl<C> Drop for Overlapped<C> {
    fn drop(&mut self) {
        // ME-1: nothing of this communicator runs afterwards.
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn lock<C>(inner: &Mutex<C>) -> MutexGuard<'_, C> {
    // A job that panicked left a communicator that failed or goes on.
    inner.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<C: Communicator + 'static> Communicator for Overlapped<C> {
    fn token(&self) -> Token {
        self.token
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn all_gather_bytes(
        &mut self,
        own: &[u8],
        limit: usize,
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, Error> {
        self.settled().all_gather_bytes(own, limit, deadline)
    }

    fn all_gather(
        &mut self,
        buffer: ViewMut,
        splits: &[Range<usize>],
        deadline: Instant,
    ) -> Result<(), Error> {
        self.settled().all_gather(buffer, splits, deadline)
    }

    fn reduce_scatter(
        &mut self,
        how: Reduce,
        input: View,
        splits: &[Range<usize>],
        out: ViewMut,
        deadline: Instant,
    ) -> Result<(), Error> {
        self.settled().reduce_scatter(how, input, splits, out, deadline)
    }

    fn all_reduce(&mut self, how: Reduce, buffer: ViewMut, deadline: Instant) -> Result<(), Error> {
        self.settled().all_reduce(how, buffer, deadline)
    }

    fn reduce(
        &mut self,
        how: Reduce,
        root: usize,
        buffer: ViewMut,
        deadline: Instant,
    ) -> Result<(), Error> {
        self.settled().reduce(how, root, buffer, deadline)
    }

    fn broadcast(&mut self, root: usize, buffer: ViewMut, deadline: Instant) -> Result<(), Error> {
        self.settled().broadcast(root, buffer, deadline)
    }

    fn all_to_all(
        &mut self,
        send: View,
        send_splits: &[Range<usize>],
        receive: ViewMut,
        receive_splits: &[Range<usize>],
        deadline: Instant,
    ) -> Result<(), Error> {
        self.settled().all_to_all(send, send_splits, receive, receive_splits, deadline)
    }

    fn send(&mut self, to: usize, elements: View, deadline: Instant) -> Result<(), Error> {
        self.settled().send(to, elements, deadline)
    }

    fn receive(&mut self, from: usize, buffer: ViewMut, deadline: Instant) -> Result<(), Error> {
        self.settled().receive(from, buffer, deadline)
    }

    fn reduce_scatter_tree(
        &mut self,
        shares: &Shares,
        pieces: &[View],
        splits: &[Range<usize>],
        out: ViewMut,
        deadline: Instant,
    ) -> Result<(), Error> {
        self.settled().reduce_scatter_tree(shares, pieces, splits, out, deadline)
    }

    fn all_reduce_tree(
        &mut self,
        shares: &Shares,
        pieces: &[View],
        out: ViewMut,
        deadline: Instant,
    ) -> Result<(), Error> {
        self.settled().all_reduce_tree(shares, pieces, out, deadline)
    }

    fn reduce_scatter_wave(
        &mut self,
        leaf: Option<View>,
        splits: &[Range<usize>],
        sum: &mut Counter,
        deadline: Instant,
    ) -> Result<(), Error> {
        self.settled().reduce_scatter_wave(leaf, splits, sum, deadline)
    }

    fn barrier(&mut self, deadline: Instant) -> Result<(), Error> {
        self.settled().barrier(deadline)
    }

    fn split(
        &mut self,
        partitions: &[Partition],
        deadline: Instant,
    ) -> Result<Vec<Box<dyn Communicator>>, Error> {
        self.settled().split(partitions, deadline)
    }

    fn allocate(
        &mut self,
        dtype: Dtype,
        elements: usize,
        deadline: Instant,
    ) -> Result<Buffer, Error> {
        self.settled().allocate(dtype, elements, deadline)
    }

    fn enqueue(&mut self, job: Job) {
        // The thread ends after this value only, so that it takes the job.
        if self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok()) {
            self.under_way += 1;
        }
    }
}
