//! The way in for everyone else in the process.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::Instant;

use job::codec;
use job::replicated::StateMachine;
use job::voters::Change;
use serde::{Deserialize, Serialize};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast, oneshot, watch};

use super::Founding;
use super::error::{ChangeError, ProposeError, ReadError, StepError};
use super::member::Input;
use super::wire;

/// The largest command, encoded: some thousand nodes in one plan.
pub(super) const MOST_COMMAND_BYTES: usize = 4 << 20;

/// Names one proposal over all its attempts: proposing again under the same
/// ticket applies the command at most once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Ticket {
    /// Random, one per proposing process.
    pub client: u64,
    /// Counts from 1. One that stays behind hundreds of later ones of its client
    /// is forgotten, and then refused as unknown.
    pub seq: u64,
}

/// The tickets of this process.
#[derive(Clone)]
pub(super) struct Tickets {
    client: u64,
    next: Arc<AtomicU64>,
}

impl Default for Tickets {
    fn default() -> Self {
        Self::of(uuid::Uuid::new_v4().as_u64_pair().0)
    }
}

impl Tickets {
    /// The tickets of the proposer `client`.
    pub(super) fn of(client: u64) -> Self {
        Self { client, next: Arc::new(AtomicU64::new(1)) }
    }

    pub(super) fn next(&self) -> Ticket {
        Ticket { client: self.client, seq: self.next.fetch_add(1, Ordering::Relaxed) }
    }
}

/// A command that is committed and applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proposed<E> {
    /// Its place in the log; for a duplicate, the place of the later attempt.
    pub index: u64,
    /// What became true; empty for a duplicate.
    pub events: Vec<E>,
    /// An earlier attempt with the same ticket had been applied.
    pub duplicate: bool,
}

/// One step of the replicated state, as [`Handle::applied`] tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Applied<E> {
    /// The command at `index` was applied.
    Events {
        /// Its place in the log.
        index: u64,
        /// What became true.
        events: Vec<E>,
    },
    /// The member was far behind and took a whole state at `index`: look at
    /// [`Handle::state`], for events are missing.
    Restored {
        /// The last entry in the state.
        index: u64,
    },
}

/// Hears every entry that a member applies. One that is too slow is told how
/// many it missed; one of a member that has ended is closed.
pub type AppliedReceiver<S> = broadcast::Receiver<Arc<Applied<<S as StateMachine>::Event>>>;

/// The replicated state as of one applied entry.
#[derive(Clone, Debug)]
pub struct Snapshot<S> {
    /// The state.
    pub state: S,
    /// The last entry in it.
    pub applied: u64,
}

/// What a member is at present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It leads.
    Leader,
    /// It asks for votes.
    Candidate,
    /// It votes and follows.
    Follower,
    /// It receives the log and has no vote.
    Learner,
    /// It is not (yet, or any more) a member of the configuration.
    Outsider,
}

/// The member as seen from outside. A watcher wakes for everything but
/// `last_contact`, which is current whenever it is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// Own Raft id.
    pub id: u64,
    /// Own role.
    pub role: Role,
    /// The leader of the term, if known.
    pub leader: Option<u64>,
    /// Raft term.
    pub term: u64,
    /// Members with a vote, ascending.
    pub voters: Vec<u64>,
    /// Members without a vote, ascending.
    pub learners: Vec<u64>,
    /// Last entry in the state.
    pub applied: u64,
    /// Last entry known to be committed.
    pub committed: u64,
    /// When a member was last heard of.
    pub last_contact: BTreeMap<u64, Instant>,
    /// Why the member ended by itself, such as a full disk.
    pub failure: Option<Arc<str>>,
}

/// Access to a running member. Clones share it; it ends with the last of them
/// or by [`Handle::stop`].
pub struct Handle<S: StateMachine> {
    inner: Arc<Inner<S>>,
}

pub(super) struct Inner<S: StateMachine> {
    pub(super) id: u64,
    /// Tells the member's thread to end.
    pub(super) stop: Arc<AtomicBool>,
    /// KiB of the inbox that are free.
    pub(super) room: Arc<Semaphore>,
    pub(super) tickets: Tickets,
    pub(super) founding: Founding,
    pub(super) inbox: SyncSender<Input<S>>,
    pub(super) state: watch::Receiver<Arc<Snapshot<S>>>,
    pub(super) status: watch::Receiver<Status>,
    pub(super) applied: broadcast::WeakSender<Arc<Applied<S::Event>>>,
}

impl<S: StateMachine> Drop for Inner<S> {
    fn drop(&mut self) {
        self.end();
    }
}

impl<S: StateMachine> Inner<S> {
    fn end(&self) {
        self.stop.store(true, Ordering::Release);
        // A full inbox is looked at soon, and the flag with it.
        drop(self.inbox.try_send(Input::Wake));
    }
}

impl<S: StateMachine> Clone for Handle<S> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

impl<S: StateMachine> std::fmt::Debug for Handle<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle").field("id", &self.inner.id).finish_non_exhaustive()
    }
}

impl<S: StateMachine> Handle<S> {
    pub(super) fn new(inner: Inner<S>) -> Self {
        Self { inner: Arc::new(inner) }
    }

    /// Own Raft id.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.inner.id
    }

    /// What a joiner of this group must start from.
    #[must_use]
    pub fn founding(&self) -> &Founding {
        &self.inner.founding
    }

    /// A ticket for a new proposal of this process.
    #[must_use]
    pub fn ticket(&self) -> Ticket {
        self.inner.tickets.next()
    }

    /// Commits and applies a command; only the leader can.
    ///
    /// # Errors
    /// See [`ProposeError`], which tells what is certain from what is not. To
    /// try again after `Unknown`, keep a [`Handle::ticket`] and use
    /// [`Handle::propose_as`].
    pub async fn propose(&self, command: S::Command) -> Result<Proposed<S::Event>, ProposeError> {
        self.submit(None, &command).await
    }

    /// [`Handle::propose`] on behalf of another process, or once more.
    ///
    /// # Errors
    /// See [`ProposeError`]; a ticket that is under way already is `Busy`.
    pub async fn propose_as(
        &self,
        ticket: Ticket,
        command: S::Command,
    ) -> Result<Proposed<S::Event>, ProposeError> {
        self.submit(Some(ticket), &command).await
    }

    async fn submit(
        &self,
        ticket: Option<Ticket>,
        command: &S::Command,
    ) -> Result<Proposed<S::Event>, ProposeError> {
        let command = codec::encode(command);
        if command.len() > MOST_COMMAND_BYTES {
            let (bytes, limit) = (command.len(), MOST_COMMAND_BYTES);
            return Err(ProposeError::TooLarge { bytes, limit });
        }
        let room = self.room(command.len()).ok_or(ProposeError::Busy)?;
        let (reply, answer) = oneshot::channel();
        self.send(Input::Propose { ticket, command, reply, room }).map_err(|full| match full {
            Refusal::Full => ProposeError::Busy,
            Refusal::Stopped => ProposeError::Stopped,
        })?;
        answer.await.unwrap_or(Err(ProposeError::Unknown))
    }

    /// Passes when a majority has answered this leader in a round begun after
    /// the call, and everything committed before it is applied here: the state
    /// read afterwards is not older than the call (LS-1).
    ///
    /// # Errors
    /// See [`ReadError`].
    pub async fn read_barrier(&self) -> Result<(), ReadError> {
        let (reply, answer) = oneshot::channel();
        self.send(Input::Read(reply)).map_err(|full| match full {
            Refusal::Full => ReadError::Busy,
            Refusal::Stopped => ReadError::Stopped,
        })?;
        answer.await.unwrap_or(Err(ReadError::Stopped))
    }

    /// Changes the membership by one step and waits until it is in force here;
    /// only the leader can. A change that is already in force is Ok.
    ///
    /// # Errors
    /// See [`ChangeError`].
    pub async fn change(&self, change: Change) -> Result<(), ChangeError> {
        let (reply, answer) = oneshot::channel();
        self.send(Input::Change { change, reply }).map_err(|full| match full {
            Refusal::Full => ChangeError::Busy,
            Refusal::Stopped => ChangeError::Stopped,
        })?;
        answer.await.unwrap_or(Err(ChangeError::Unknown))
    }

    /// Takes a message from an authenticated member.
    ///
    /// # Errors
    /// The message is dropped; see [`StepError`].
    pub fn step(&self, bytes: &[u8]) -> Result<(), StepError> {
        let message = wire::decode(bytes, self.inner.id)?;
        let room = self.room(bytes.len()).ok_or(StepError::Busy)?;
        self.send(Input::Step(Box::new(message), room)).map_err(|full| match full {
            Refusal::Full => StepError::Busy,
            Refusal::Stopped => StepError::Stopped,
        })
    }

    /// Tells what became of an [`super::Outbound`] with `snapshot`: whether the
    /// link took all of it.
    pub fn snapshot_sent(&self, to: u64, delivered: bool) {
        self.tell(Input::SnapshotSent { to, delivered });
    }

    /// The process of member `id` is certainly dead (LS-2). If it led, the lease
    /// of its leadership is dropped and the survivors elect at once. Tell every
    /// survivor.
    pub fn leader_died(&self, id: u64) {
        self.tell(Input::LeaderDied(id));
    }

    /// There is a new link to member `id`: what was under way on an older one is
    /// sent again.
    pub fn peer_reachable(&self, id: u64) {
        self.tell(Input::Reachable(id));
    }

    /// The link to member `id` broke.
    pub fn peer_unreachable(&self, id: u64) {
        self.tell(Input::Unreachable(id));
    }

    /// The replicated state, as of the newest applied entry.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<Arc<Snapshot<S>>> {
        self.inner.state.clone()
    }

    /// The member's status; the sender goes away when the member has ended.
    #[must_use]
    pub fn status(&self) -> watch::Receiver<Status> {
        self.inner.status.clone()
    }

    /// Hears every entry applied from now on.
    #[must_use]
    pub fn applied(&self) -> AppliedReceiver<S> {
        match self.inner.applied.upgrade() {
            Some(sender) => sender.subscribe(),
            None => broadcast::channel(1).1,
        }
    }

    /// Ends the member and waits until its store is closed.
    pub async fn stop(&self) {
        self.inner.end();
        let mut status = self.inner.status.clone();
        while status.changed().await.is_ok() {}
    }

    /// For what may be lost: the member repeats it or notices by itself.
    fn tell(&self, input: Input<S>) {
        if let Err(Refusal::Full) = self.send(input) {
            tracing::debug!("the control group is busy, a hint was dropped");
        }
    }

    fn room(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let kib = u32::try_from(bytes / 1024 + 1).ok()?;
        Arc::clone(&self.inner.room).try_acquire_many_owned(kib).ok()
    }

    fn send(&self, input: Input<S>) -> Result<(), Refusal> {
        self.inner.inbox.try_send(input).map_err(|e| match e {
            TrySendError::Full(_) => Refusal::Full,
            TrySendError::Disconnected(_) => Refusal::Stopped,
        })
    }
}

enum Refusal {
    Full,
    Stopped,
}
