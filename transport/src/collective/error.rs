//! Why a collective ended.

/// Why a collective, or the forming of a mesh, ended. The first error of a mesh
/// is its last word: every later call returns the same one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The connection to a peer is gone, or another survivor reports so.
    #[error("rank {rank} is lost: {why}")]
    PeerLost {
        /// The peer at the root of the failure.
        rank: usize,
        /// How it was noticed.
        why: String,
    },

    /// [`super::AbortHandle::abort`] was called, here or on a peer.
    #[error("aborted: {reason}")]
    Aborted {
        /// The reason given.
        reason: String,
    },

    /// The deadline of the call passed.
    #[error("{op} passed its deadline, still waiting for ranks {waiting_for:?}")]
    Deadline {
        /// The operation.
        op: &'static str,
        /// The ranks whose part is missing.
        waiting_for: Vec<usize>,
    },

    /// A peer that holds the key sent something else than it should: another
    /// token, operation, order or size. The ranks do not run the same program.
    #[error("rank {rank} broke the protocol: {detail}")]
    Protocol {
        /// The peer.
        rank: usize,
        /// What was expected and what came.
        detail: String,
    },

    /// The call itself is wrong, or this generation is over; nothing was sent.
    #[error("refused: {what}")]
    Refused {
        /// What is wrong and what would be right.
        what: String,
    },

    /// The operating system refused a resource on this machine.
    #[error("{call} failed on this machine: {why}")]
    System {
        /// The system call.
        call: &'static str,
        /// Its error.
        why: String,
    },
}

impl Error {
    /// The one peer that this error accuses, if there is one.
    #[must_use]
    pub fn peer(&self) -> Option<usize> {
        match self {
            Self::PeerLost { rank, .. } | Self::Protocol { rank, .. } => Some(*rank),
            Self::Deadline { waiting_for, .. } => match waiting_for[..] {
                [rank] => Some(rank),
                _ => None,
            },
            Self::Aborted { .. } | Self::Refused { .. } | Self::System { .. } => None,
        }
    }

    /// All ranks that may be at the root.
    pub(super) fn peers(&self) -> &[usize] {
        match self {
            Self::PeerLost { rank, .. } | Self::Protocol { rank, .. } => std::slice::from_ref(rank),
            Self::Deadline { waiting_for, .. } => waiting_for,
            Self::Aborted { .. } | Self::Refused { .. } | Self::System { .. } => &[],
        }
    }

    pub(super) fn refused(what: impl Into<String>) -> Self {
        Self::Refused { what: what.into() }
    }

    pub(super) fn system(call: &'static str, why: impl std::fmt::Display) -> Self {
        Self::System { call, why: why.to_string() }
    }
}
