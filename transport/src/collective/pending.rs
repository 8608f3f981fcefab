//! Operations under way.

use std::sync::mpsc::{self, Receiver, SyncSender};

use super::{Communicator, Error};

/// Work for a communicator, carried out in the order in which it was given.
pub type Job = Box<dyn FnOnce(&mut dyn Communicator) + Send>;

/// The outcome of work that [`start`](trait.Communicator.html#method.start)
/// began. Dropping it does not stop the work.
#[derive(Debug)]
#[must_use = "an error of the work shows only here"]
pub struct Pending<T>(Receiver<Result<T, Error>>);

impl<T> Pending<T> {
    /// Waits until the work has ended. The deadlines of its operations bound
    /// how long that takes.
    ///
    /// # Errors
    /// What the work returned; [`Error::Refused`] when the communicator was
    /// dropped before the work began, or the work panicked.
    pub fn wait(self) -> Result<T, Error> {
        let lost = |_| Error::refused("the communicator was dropped with this work undone");
        self.0.recv().map_err(lost)?
    }

    fn new() -> (SyncSender<Result<T, Error>>, Self) {
        let (sender, receiver) = mpsc::sync_channel(1);
        (sender, Self(receiver))
    }
}

impl dyn Communicator + '_ {
    /// Begins work on this communicator and returns while it goes on. The
    /// closure owns what it works with and hands it back: several may be under
    /// way, and each later call on the communicator comes after them. Every rank
    /// starts the same work in the same place of its program.
    ///
    /// ```
    /// # use std::time::{Duration, Instant};
    /// # use transport::collective::{Communicator, Error, Reduce, ViewMut};
    /// # fn example(comm: &mut dyn Communicator, mut gradient: Vec<f32>) -> Result<Vec<f32>, Error> {
    /// let deadline = Instant::now() + Duration::from_secs(10);
    /// let summing = comm.start(move |comm| {
    ///     comm.all_reduce(Reduce::Sum, ViewMut::of(&mut gradient), deadline)?;
    ///     Ok(gradient)
    /// });
    /// // Something else meanwhile.
    /// summing.wait()
    /// # }
    /// ```
    pub fn start<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut dyn Communicator) -> Result<T, Error> + Send + 'static,
    ) -> Pending<T> {
        let (done, pending) = Pending::new();
        self.enqueue(Box::new(move |comm| {
            // Nobody waits for it any more: then nobody misses the outcome.
            let _ = done.send(work(comm));
        }));
        pending
    }
}
