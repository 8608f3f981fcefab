//! The control group: one state machine, replicated by Raft over the agents.
//!
//! [`Store::open`] takes the node's data directory, [`ControlGroup::start`]
//! makes it a member and returns a [`Handle`]: propose commands, read the state,
//! hear what became true, change who votes. Messages between members are opaque
//! bytes that the caller carries: [`Outbound`] out, [`Handle::step`] in, one
//! ordered stream per direction, from authenticated peers only (SEC-1).
//!
//! What it keeps:
//! - A committed command is applied exactly once, in the same order, by every
//!   member, over any change of leader (proposals carry a [`Ticket`]).
//! - A member that lost its log is a new member (ID-1): the Raft id belongs to
//!   the [`Store`].
//! - [`Handle::read_barrier`] succeeds only after a majority answered a round
//!   that began after the call: a minority can grant nothing (LS-1, GEN-2).
//! - The clock and the messages never wait for the disk: the log is written by
//!   its own thread, with one synced transaction for everything that is queued.
//!
//! Absent on purpose: forwarding of proposals (the caller asks the leader that
//! [`ProposeError::NotLeader`] names) and joint consensus (single steps suffice,
//! `job::voters`). Raft's own types never leave this module.
//!
//! Two threads serve a member: `member` (Raft, the state machine) and `disk`. In a
//! simulated world there are none: the host turns a [`Stepped`] member.

mod bridge;
mod disk;
mod election;
mod error;
mod handle;
mod leadership;
mod log;
mod member;
mod membership;
mod reads;
mod ready;
mod replica;
mod stepped;
mod store;
#[cfg(test)]
mod tests;
mod wire;

use std::time::Duration;

use bytes::Bytes;
use job::JobId;
use job::replicated::StateMachine;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

pub use error::{ChangeError, ProposeError, ReadError, StepError};
pub use handle::{Applied, AppliedReceiver, Handle, Proposed, Role, Snapshot, Status, Ticket};
pub use stepped::{Stepped, VirtualDisk};
pub use store::{Store, StoreError};

/// How a member behaves. The defaults are the ones that recovery targets assume.
#[derive(Clone, Debug)]
pub struct Options {
    /// Raft's clock.
    pub tick: Duration,
    /// Ticks of silence of the leader before an election; the n-th voter by id
    /// waits 2n more, so that no two voters ever time out together.
    pub election_ticks: usize,
    /// Committed entries between two snapshots of the state.
    pub snapshot_every: u64,
    /// Entries kept behind a snapshot, for members that are a little late.
    pub keep_entries: u64,
    /// How long a [`Handle::read_barrier`] waits for a majority.
    pub read_deadline: Duration,
    /// Applied entries that a slow [`Applied`] receiver may be behind.
    pub event_buffer: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            tick: Duration::from_millis(50),
            election_ticks: 10,
            snapshot_every: 512,
            keep_entries: 256,
            read_deadline: Duration::from_secs(1),
            event_buffer: 4096,
        }
    }
}

/// What every member starts from: the same first log entry. Without it a joiner
/// would have no configuration to receive the log into.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Founding {
    /// The job; a store belongs to one.
    pub job: JobId,
    /// Raft id of the first voter.
    pub founder: u64,
    /// Snapshot of the first state ([`StateMachine::snapshot`]).
    pub state: Vec<u8>,
}

/// Bytes for another member.
#[derive(Clone, Debug)]
pub struct Outbound {
    /// Raft id of the receiver.
    pub to: u64,
    /// What the receiver gives to [`Handle::step`].
    pub bytes: Bytes,
    /// Whether it is a whole state: the caller reports its fate by
    /// [`Handle::snapshot_sent`], for nothing else is sent until then.
    pub snapshot: bool,
}

/// Why a member does not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The store refused.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The store is empty and nobody said what the group starts from.
    #[error("node store {0} is empty: found a group or join one first")]
    NotFounded(String),
    /// The store belongs to another job.
    #[error("node store {dir} belongs to job {stored}, not to {wanted}: use another directory")]
    WrongJob {
        /// The data directory.
        dir: String,
        /// Job in the store.
        stored: JobId,
        /// Job of the founding.
        wanted: JobId,
    },
    /// The state that the group starts from, or a snapshot of it, is unusable.
    #[error("cannot restore the replicated state: {0}")]
    State(String),
    /// Raft refused its configuration or log.
    #[error("cannot start the Raft member: {0}")]
    Raft(String),
    /// The system gave no thread.
    #[error("cannot start a thread of the control group: {0}")]
    Thread(std::io::Error),
}

/// A member of the control group; lives as long as a [`Handle`] to it.
#[derive(Debug)]
pub struct ControlGroup;

impl ControlGroup {
    /// Starts the member that owns `store`. A new store takes `founding`; one
    /// that has a log replays it, and `founding`, when given, must be of the
    /// same job. The receiver hears every entry applied from now on, replayed
    /// ones included; more come from [`Handle::applied`].
    ///
    /// # Errors
    /// When the store cannot be read or written, is of another job or empty
    /// without a founding, or holds a state that does not restore.
    pub fn start<S: StateMachine>(
        options: Options,
        mut store: Store,
        founding: Option<Founding>,
        outbound: mpsc::Sender<Outbound>,
    ) -> Result<(Handle<S>, AppliedReceiver<S>), Error> {
        let dir = || store.dir().display().to_string();
        match (store.founding(), founding) {
            (Some(stored), Some(wanted)) if stored.job != wanted.job => {
                return Err(Error::WrongJob { dir: dir(), stored: stored.job, wanted: wanted.job });
            }
            (Some(_), _) => {}
            (None, Some(founding)) => store.found(founding)?,
            (None, None) => return Err(Error::NotFounded(dir())),
        }
        member::start(options, store, outbound)
    }
}
