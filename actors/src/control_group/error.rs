//! Why something was not done, and who must act: each says what is certain and
//! what is not.

use job::voters::Change;

/// Why a proposal was not, or may not have been, committed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// Certainly not committed: ask the leader.
    #[error("this member does not lead the control group, {}", name(*leader))]
    NotLeader {
        /// Raft id of the leader, if one is known.
        leader: Option<u64>,
    },
    /// The leader changed or stopped meanwhile. Propose again with the same ticket.
    #[error("the outcome of the proposal is unknown: propose it again with the same ticket")]
    Unknown,
    /// Certainly not committed: too much is under way, or leadership is being
    /// handed over. Try again.
    #[error("the control group is busy: try again")]
    Busy,
    /// Certainly not committed, and never will be.
    #[error("the command has {bytes} bytes, the limit is {limit}")]
    TooLarge {
        /// Encoded size.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// Certainly not committed: the member ended; [`super::Status::failure`] says why.
    #[error("this member of the control group has stopped")]
    Stopped,
}

/// Why a read barrier did not pass.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// Ask the leader.
    #[error("this member does not lead the control group, {}", name(*leader))]
    NotLeader {
        /// Raft id of the leader, if one is known.
        leader: Option<u64>,
    },
    /// No majority answered before the deadline.
    #[error("no majority of the control group answered in time")]
    NoMajority,
    /// Too much is under way.
    #[error("the control group is busy: try again")]
    Busy,
    /// The member ended.
    #[error("this member of the control group has stopped")]
    Stopped,
}

/// Why a membership change was not, or may not have been, made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// Ask the leader.
    #[error("this member does not lead the control group, {}", name(*leader))]
    NotLeader {
        /// Raft id of the leader, if one is known.
        leader: Option<u64>,
    },
    /// Another change is under way, or this leader is new: try again.
    #[error("another membership change is under way: try again")]
    Busy,
    /// The learner has not caught up.
    #[error("learner {id} lacks {behind} entries, or does not answer: promote it later")]
    NotReady {
        /// The learner.
        id: u64,
        /// Entries that it is not known to have.
        behind: u64,
    },
    /// The leader gives up leadership before it gives up its vote: ask `to`.
    #[error("leadership is being handed to member {to}: ask it for the change")]
    Transferring {
        /// The next leader.
        to: u64,
    },
    /// The change makes no sense, or would leave no majority that answers.
    #[error("{change:?} is refused: {reason}")]
    Refused {
        /// What was asked.
        change: Change,
        /// Why not.
        reason: &'static str,
    },
    /// The leader changed meanwhile: look at the membership and ask again.
    #[error("the outcome of the membership change is unknown: look at the status")]
    Unknown,
    /// The member ended.
    #[error("this member of the control group has stopped")]
    Stopped,
}

/// Why a message was dropped. Raft sends again what matters.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StepError {
    /// Longer than any message of this version.
    #[error("message of {bytes} bytes, the limit is {limit}")]
    TooLarge {
        /// Its size.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// Not a message that one member sends another.
    #[error("malformed message: {0}")]
    Malformed(String),
    /// For another member, such as one that had this address earlier.
    #[error("message is for member {to}")]
    Misrouted {
        /// The receiver it names.
        to: u64,
    },
    /// The member has no room.
    #[error("the control group is busy, the message is dropped")]
    Busy,
    /// The member ended.
    #[error("this member of the control group has stopped")]
    Stopped,
}

fn name(leader: Option<u64>) -> String {
    match leader {
        Some(id) => format!("member {id} does"),
        None => "no leader is known".to_owned(),
    }
}
