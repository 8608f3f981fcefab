//! Identities (ID-1 to ID-3). An address is never an identity: it is a hint of
//! where an identity was last seen.

use std::{fmt, sync::Arc};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The job, for its whole life, over every restart and re-forming.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct JobId(pub Uuid);

/// A user-visible node name, stable over restarts (ID-1): 1 to 63 characters
/// of `a-z A-Z 0-9 - _ .`. Clones share the name: states and plans hold many.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct NodeId(Arc<str>);

/// The data directory of a node (ID-1). A node that lost its directory has a
/// new store, and with it a new Raft identity.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct StoreId(pub Uuid);

/// One process start of a node's agent, assigned by the committed `Admit` (ID-2).
#[derive(
    Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize,
)]
pub struct Incarnation(pub u64);

/// One worker process, unique within the incarnation of its agent.
#[derive(
    Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize,
)]
pub struct WorkerId(pub u64);

/// Grows only by re-forming.
#[derive(
    Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize,
)]
pub struct Era(pub u32);

/// Grows by one with every committed plan of an era.
#[derive(
    Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize,
)]
pub struct Generation(pub u64);

/// Number of optimizer steps applied; state `Step(s)` has consumed steps `0..s`.
#[derive(
    Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize,
)]
pub struct Step(pub u64);

/// Position in the mesh of one generation.
#[derive(
    Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize,
)]
pub struct Rank(pub u32);

/// The fencing token (ID-3), ordered by era, then generation, within one job.
/// It is on every frame, connection key, stage folder and command.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Token {
    /// The job.
    pub job: JobId,
    /// The era.
    pub era: Era,
    /// The generation within the era.
    pub generation: Generation,
}

impl StoreId {
    /// The Raft member that owns this store's log. Never zero, which Raft reserves.
    #[must_use]
    pub fn raft_id(self) -> u64 {
        let (high, low) = self.0.as_u64_pair();
        (high ^ low.rotate_left(32)).max(1)
    }
}

impl NodeId {
    /// Checks and wraps a name.
    ///
    /// # Errors
    /// Names the rule that the name breaks.
    pub fn new(name: impl Into<String>) -> Result<Self, InvalidNodeId> {
        let name = name.into();
        let good = !name.is_empty()
            && name.len() <= 63
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
        if good { Ok(Self(name.into())) } else { Err(InvalidNodeId(name)) }
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A node name outside the rule of [`NodeId`].
#[derive(Debug, thiserror::Error)]
#[error("node id {0:?} must be 1 to 63 characters of letters, digits, '-', '_' or '.'")]
pub struct InvalidNodeId(pub String);

impl TryFrom<String> for NodeId {
    type Error = InvalidNodeId;
    fn try_from(name: String) -> Result<Self, InvalidNodeId> {
        Self::new(name)
    }
}

impl From<NodeId> for String {
    fn from(id: NodeId) -> Self {
        id.0.as_ref().into()
    }
}

impl Step {
    /// The step after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl Generation {
    /// The generation after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

macro_rules! display {
    ($($name:ident),*) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    )*};
}
display!(JobId, NodeId, StoreId, Incarnation, WorkerId, Era, Generation, Step, Rank);

macro_rules! debug_as_display {
    ($($name:ident),*) => {$(
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    )*};
}
debug_as_display!(JobId, NodeId, StoreId, Token);

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.era, self.generation)
    }
}
