//! What a node tells the leader, again with every beat until the committed
//! state reflects it: a new leader needs no memory of the old one.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::{
    Era, Generation, Incarnation, NodeId, Step, StoreId, WorkerId,
    plan::{Shard, WorkerRef},
};

/// Position of a rank (ST-1).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Position {
    /// No state at all (HEAL-1).
    Fresh,
    /// Has the state of this step.
    Open(Step),
    /// Has the state of this step and its own complete gradient for it.
    Prepared(Step),
}

impl Position {
    /// The step whose state the rank has.
    #[must_use]
    pub fn step(self) -> Option<Step> {
        match self {
            Self::Fresh => None,
            Self::Open(step) | Self::Prepared(step) => Some(step),
        }
    }
}

/// A worker that stopped for a plan says where it stands (GN-2). It never acts
/// in an older generation again.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Sealed {
    /// The plan that it answers.
    pub generation: Generation,
    /// Where it stands.
    pub position: Position,
    /// The generation in which it got there; none when fresh.
    pub lineage: Option<(Era, Generation)>,
    /// Verdict of the vote that led to an open position.
    pub verdict: Option<Vec<u8>>,
    /// The part of the state that it holds.
    pub shard: Shard,
}

/// A rank's share of a checkpoint is durable.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ShardSaved {
    /// Era in which the save began.
    pub era: Era,
    /// Generation in which the save began.
    pub generation: Generation,
    /// The step.
    pub step: Step,
    /// The rank that wrote it.
    pub rank: u32,
    /// Number of ranks that save together.
    pub ranks: u32,
    /// How long training was held up for it, in microseconds.
    pub stall_micros: u64,
    /// The index of its file, opaque here.
    pub index: Vec<u8>,
}

/// A rank's share of a checkpoint could not be written: that save will never be
/// complete, and training goes on.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SaveFailed {
    /// Era in which the save began.
    pub era: Era,
    /// Generation in which the save began.
    pub generation: Generation,
    /// The step.
    pub step: Step,
    /// The rank.
    pub rank: u32,
    /// Number of ranks that save together.
    pub ranks: u32,
    /// Why, for people.
    pub why: String,
}

/// A worker's latest step.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Progress {
    /// Generation in which it was applied.
    pub generation: Generation,
    /// Steps applied so far.
    pub step: Step,
    /// Loss of the step, mean over valid target tokens.
    pub loss: f32,
    /// Global gradient norm before clipping.
    pub grad_norm: f32,
    /// Learning rate.
    pub learning_rate: f32,
    /// Target tokens of the step, over all ranks.
    pub tokens: u64,
    /// Wall time of the step in microseconds.
    pub micros: u64,
}

/// How the first step after a seal came about, in microseconds from the plan's
/// arrival at this worker.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct ResumeTiming {
    /// Generation.
    pub generation: Generation,
    /// Stopping the old work.
    pub stop_micros: u64,
    /// Building the communicators.
    pub rebuild_micros: u64,
    /// Restoring state.
    pub restore_micros: u64,
    /// The first step.
    pub step_micros: u64,
}

/// What the last rank standing reports at the end of the job.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct FinalReport {
    /// Steps applied.
    pub step: Step,
    /// Training loss of the last step.
    pub loss: f32,
    /// Loss over the validation split, when there is one.
    pub validation_loss: Option<f64>,
    /// Digest of the weights.
    pub weights_sha256: String,
    /// Digest of the weights, moments and step.
    pub state_sha256: String,
    /// Chain over the losses.
    pub loss_sha256: String,
    /// A sample of generated text.
    pub sample: String,
}

/// Life of a worker process as its agent sees it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum WorkerState {
    /// The process exists and builds its model.
    Starting,
    /// It can take part in a plan.
    Ready,
    /// It cannot go on and is not gone yet (LS-4); the text says why.
    Dying(String),
    /// It is gone; the text says why.
    Lost(String),
    /// It met an error that another try would meet again.
    Fatal(String),
}

/// One worker of a node.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct WorkerReport {
    /// The process.
    pub worker: WorkerId,
    /// Device slot.
    pub slot: u32,
    /// Operating system's id, for people.
    pub pid: u32,
    /// Life.
    pub state: WorkerState,
    /// Where its tensor listener accepts, once ready.
    pub address: Option<SocketAddr>,
    /// Answer to the newest plan.
    pub sealed: Option<Sealed>,
    /// Newest step.
    pub progress: Option<Progress>,
    /// How its newest generation resumed.
    pub resumed: Option<ResumeTiming>,
    /// Durable shards not yet committed.
    pub saved: Vec<ShardSaved>,
    /// A peer whose tensor connection broke under it, by generation and rank.
    pub accuses: Option<(Generation, u32)>,
    /// The newest save in which it failed.
    pub save_failed: Option<SaveFailed>,
    /// Why it could not load the checkpoint from which that generation goes on: the
    /// file was damaged since it was verified.
    pub unloadable: Option<(Generation, String)>,
    /// At the end: what it computed.
    pub finished: Option<FinalReport>,
}

/// One node's beat.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct NodeReport {
    /// The node.
    pub node: NodeId,
    /// Its store.
    pub store: StoreId,
    /// A random number for this process start, until it has an incarnation.
    pub boot: u64,
    /// Its incarnation, once admitted.
    pub incarnation: Option<Incarnation>,
    /// Where its control endpoint listens.
    pub address: SocketAddr,
    /// Number of device slots.
    pub slots: u32,
    /// It was told to leave (a signal, a notice, `elastic drain`).
    pub leaving: bool,
    /// It was told to stop the job (`elastic stop`).
    pub stop_job: bool,
    /// The newest step in this node's records, of any process start: what was
    /// lost when everything died.
    pub recorded: Step,
    /// Nodes whose connection was reset and whose port refuses (LS-2).
    pub dead_peers: Vec<(NodeId, u64)>,
    /// Its workers.
    pub workers: Vec<WorkerReport>,
}

impl NodeReport {
    /// Names one of the node's workers.
    #[must_use]
    pub fn worker_ref(&self, worker: WorkerId) -> Option<WorkerRef> {
        Some(WorkerRef { node: self.node.clone(), incarnation: self.incarnation?, worker })
    }
}
