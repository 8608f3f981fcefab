//! A generation: who computes what (`Plan`), and where it goes on from (`Seal`).

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::{Era, Generation, Incarnation, NodeId, Step, WorkerId, shares::Shares};

/// Microseconds since the Unix epoch on the clock of the leader that wrote it:
/// a record for people, never compared with another host's clock.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Timestamp(pub u64);

/// One worker process of one node. An address is a hint, this is who it is (ID-2).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct WorkerRef {
    /// The node.
    pub node: NodeId,
    /// The process start of its agent.
    pub incarnation: Incarnation,
    /// The worker process.
    pub worker: WorkerId,
}

/// A rank of the mesh: position in [`Plan::members`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Member {
    /// Who holds the rank.
    pub worker: WorkerRef,
    /// Device slot on its node.
    pub slot: u32,
    /// Where its tensor listener accepts.
    pub address: SocketAddr,
}

/// How members of the generation before leave their work.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Stop {
    /// At once: somebody is gone, the collectives cannot finish.
    Now,
    /// After the step in progress: nobody is gone, nothing needs redoing.
    AtStepBoundary,
}

/// What a generation does once it is sealed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Purpose {
    /// Train on.
    Train,
    /// Write a checkpoint at the restore step and stop.
    SaveAndStop,
}

/// The committed membership of a generation (GN-1). It names no restore point:
/// survivors can still advance until they stop.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// The era.
    pub era: Era,
    /// One more than the plan before.
    pub generation: Generation,
    /// The ranks, in order. Empty: the job waits for nodes, holding its state.
    pub members: Vec<Member>,
    /// Micro-batches of each pipeline (of each rank, where a pipeline is one); none
    /// when the job waits.
    pub shares: Option<Shares>,
    /// Key of the tensor connections of this generation (SEC-1).
    pub key: [u8; 32],
    /// How the generation before stops.
    pub stop: Stop,
    /// What the generation is for.
    pub purpose: Purpose,
    /// Why it was planned, for people.
    pub reason: String,
    /// Whether a loss caused it, and so counts against the failure budget.
    pub failure: bool,
    /// The newest step that the leader knows to be applied.
    pub reached: Step,
    /// When the leader last heard of a committed step.
    pub last_step: Timestamp,
    /// When the leader noticed the cause.
    pub noticed: Timestamp,
    /// When the leader proposed it.
    pub at: Timestamp,
}

/// A slice `index` of `of` equal slices of the training state: the same number
/// of consecutive slices for each pipeline stage.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Shard {
    /// Which slice.
    pub index: u32,
    /// Of how many.
    pub of: u32,
    /// Stages that the model was cut into first.
    pub stages: u32,
}

impl Shard {
    /// The whole state.
    pub const WHOLE: Self = Self { index: 0, of: 1, stages: 1 };
}

/// Who provides a shard to those that lack it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Source {
    /// Rank in the new mesh.
    pub rank: u32,
    /// The shard that it holds.
    pub shard: Shard,
}

/// Where a generation goes on from (GN-3).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Restore {
    /// From the initial weights: nothing was ever committed.
    Initial,
    /// From the members' own memory.
    Live {
        /// The common committed step.
        step: Step,
        /// Holders of each shard at that step.
        sources: Vec<Source>,
        /// Ranks that lack state and receive it.
        receivers: Vec<u32>,
        /// Verdict of the vote on `step - 1`, for ranks that are prepared for it.
        verdict: Option<Vec<u8>>,
    },
    /// From a committed checkpoint.
    Checkpoint {
        /// Its step.
        step: Step,
    },
}

impl Plan {
    /// Pipeline stages of the mesh.
    #[must_use]
    pub fn stages(&self) -> u32 {
        let pipelines = self.shares.as_ref().map_or(1, Shares::ranks).max(1);
        (self.members.len() / pipelines).max(1) as u32
    }
}

impl Restore {
    /// The step that everybody continues from (STEP-1).
    #[must_use]
    pub fn step(&self) -> Step {
        match self {
            Self::Initial => Step(0),
            Self::Live { step, .. } | Self::Checkpoint { step } => *step,
        }
    }

    /// The tier's name in reports.
    #[must_use]
    pub fn tier(&self) -> &'static str {
        match self {
            Self::Initial => "initial",
            Self::Live { .. } => "live",
            Self::Checkpoint { .. } => "checkpoint",
        }
    }
}

/// The committed restore choice of a generation. Everyone follows the one Seal.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Seal {
    /// The generation that it completes.
    pub generation: Generation,
    /// Where it goes on from.
    pub restore: Restore,
    /// Why, and what shows that the generation before is over (GN-4).
    pub reason: String,
    /// When the leader proposed it.
    pub at: Timestamp,
}
