//! A member without threads, clock or disk of its own: its host turns it. Raft,
//! the state machine and the [`Handle`] are those of a running job, so a host
//! that draws time, disks and links from one seed (a simulated world) runs the
//! very code that thousands of machines do, the same way twice.

use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use job::StoreId;
use job::replicated::StateMachine;
use tokio::sync::mpsc;

use super::disk::LogWriter;
use super::handle::{AppliedReceiver, Handle, Tickets};
use super::member::{self, Input, Made, Member, Parts};
use super::store::{Loaded, Write};
use super::{Error, Founding, Options, Outbound};

/// Messages that a turn may leave for others; more are lost, as on a full link.
const OUTBOX: usize = 4096;

/// A disk in memory. It outlives the member, and at a crash it loses what it had
/// not made durable: clones are the same disk.
#[derive(Clone, Debug)]
pub struct VirtualDisk {
    store: StoreId,
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    founding: Option<Founding>,
    content: Loaded,
    queue: Vec<(u64, Write)>,
    durable: u64,
}

/// A member that its host turns.
pub struct Stepped<S: StateMachine> {
    member: Member<S>,
    inputs: Receiver<Input<S>>,
    outbox: mpsc::Receiver<Outbound>,
    /// What virtual time counts from.
    epoch: Instant,
    failure: Option<String>,
}

impl VirtualDisk {
    /// An empty disk with this identity.
    #[must_use]
    pub fn new(store: StoreId) -> Self {
        Self { store, inner: Arc::default() }
    }

    /// Its identity; its Raft id is the member's (ID-1).
    #[must_use]
    pub fn id(&self) -> StoreId {
        self.store
    }

    /// What the member on it started from; none on an empty disk.
    #[must_use]
    pub fn founding(&self) -> Option<Founding> {
        self.lock().founding.clone()
    }

    /// Writes that are not durable yet.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.lock().queue.len()
    }

    /// Makes the oldest `count` queued writes durable: a sync ended.
    pub fn sync(&self, count: usize) {
        let mut inner = self.lock();
        let count = count.min(inner.queue.len());
        let writes: Vec<(u64, Write)> = inner.queue.drain(..count).collect();
        for (number, write) in writes {
            inner.content.apply(write);
            inner.durable = inner.durable.max(number);
        }
    }

    /// The machine stops: of the queued writes the oldest `kept` reached the disk
    /// without anybody having heard so, the others are lost. Each is whole or not
    /// there at all, as in [`super::Store`].
    pub fn crash(&self, kept: usize) {
        self.sync(kept);
        let mut inner = self.lock();
        inner.queue.clear();
        inner.durable = 0;
    }

    fn found(&self, founding: Founding) {
        let mut inner = self.lock();
        inner.content = Loaded::first(&founding);
        inner.founding = Some(founding);
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LogWriter for VirtualDisk {
    fn write(&self, number: u64, write: Write, _: bool) -> Result<(), String> {
        self.lock().queue.push((number, write));
        Ok(())
    }

    fn flush(&self) -> Result<(), String> {
        self.sync(usize::MAX);
        Ok(())
    }

    fn durable(&self) -> Result<u64, String> {
        Ok(self.lock().durable)
    }
}

impl<S: StateMachine> Stepped<S> {
    /// Makes the member that owns `disk`, at virtual time `now`. An empty disk
    /// takes `founding`. `client` numbers its proposals: another one for each
    /// process start.
    ///
    /// # Errors
    /// When the disk is empty without a founding, or holds what does not restore.
    pub fn start(
        options: Options,
        disk: &VirtualDisk,
        founding: Option<Founding>,
        client: u64,
        now: Duration,
    ) -> Result<(Self, Handle<S>, AppliedReceiver<S>), Error> {
        if let (None, Some(founding)) = (disk.founding(), founding) {
            disk.found(founding);
        }
        let id = disk.id();
        let founding = disk.founding().ok_or_else(|| Error::NotFounded(id.to_string()))?;
        let loaded = disk.lock().content.clone();
        let (outbound, outbox) = mpsc::channel(OUTBOX);
        let id = id.raft_id();
        let tickets = Tickets::of(client);
        let parts = Parts { id, options, founding, loaded, tickets, outbound };
        let epoch = Instant::now();
        let writer = disk.clone();
        let Made { member, inputs, handle, applied } =
            member::make(parts, epoch + now, |_| Ok(Box::new(writer)))?;
        Ok((Self { member, inputs, outbox, epoch, failure: None }, handle, applied))
    }

    /// One turn at virtual time `now`: what came in through the handle, what the
    /// clock and the disk did, and all that follows. Returns when time itself
    /// next matters.
    ///
    /// # Errors
    /// The member has failed for good; the text says why.
    pub fn turn(&mut self, now: Duration) -> Result<Duration, String> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let at = self.epoch + now;
        let (member, inputs) = (&mut self.member, &self.inputs);
        let turned = member::guard(|| {
            for input in inputs.try_iter() {
                member.handle(input);
            }
            member.pass(at);
            member.look(at)
        });
        match turned {
            Ok(next) => Ok(next.saturating_duration_since(self.epoch)),
            Err(why) => {
                self.failure = Some(why.clone());
                Err(why)
            }
        }
    }

    /// Takes the messages for other members.
    pub fn outbound(&mut self) -> Vec<Outbound> {
        std::iter::from_fn(|| self.outbox.try_recv().ok()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;
    use crate::control_group::tests::Journal;

    fn ready<T>(future: impl Future<Output = T>) -> Poll<T> {
        pin!(future).poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn what_was_not_synced_is_lost_and_the_rest_is_there_again() {
        let disk = VirtualDisk::new(StoreId(uuid::Uuid::from_u128(7)));
        let founding = Founding {
            job: job::JobId(uuid::Uuid::nil()),
            founder: disk.id().raft_id(),
            state: Journal(Vec::new()).snapshot(),
        };
        let start = |founding, client, now| {
            Stepped::<Journal>::start(Options::default(), &disk, founding, client, now)
                .expect("starts")
        };
        let ms = Duration::from_millis;
        let (mut member, handle, _applied) = start(Some(founding), 1, ms(0));
        let mut now = 0;
        let mut turns = |member: &mut Stepped<Journal>, count: u64, syncs: bool| {
            for _ in 0..count {
                now += 10;
                member.turn(ms(now)).expect("turns");
                if syncs {
                    disk.sync(usize::MAX);
                }
            }
        };
        turns(&mut member, 10, true);
        assert_eq!(handle.status().borrow().role, crate::control_group::Role::Leader);
        let mut kept = Box::pin(handle.propose(1));
        assert!(ready(kept.as_mut()).is_pending());
        turns(&mut member, 3, true);
        assert!(matches!(ready(kept.as_mut()), Poll::Ready(Ok(_))));
        let mut lost = Box::pin(handle.propose(2));
        assert!(ready(lost.as_mut()).is_pending());
        turns(&mut member, 3, false);
        assert!(ready(lost.as_mut()).is_pending(), "nothing is committed before it is durable");
        drop(lost);
        drop(kept);
        drop((member, handle));
        disk.crash(0);
        let (mut member, handle, _applied) = start(None, 2, ms(1_000));
        for at in 0..10 {
            member.turn(ms(1_000 + at * 10)).expect("turns");
            disk.sync(usize::MAX);
        }
        assert_eq!(handle.state().borrow().state, Journal(vec![1]));
    }
}
