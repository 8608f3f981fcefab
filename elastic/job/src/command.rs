//! What the leader proposes and what then is a fact.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::{
    Era, Generation, Incarnation, NodeId, Step, StoreId,
    admission::TokenChange,
    plan::{Plan, Seal, Timestamp},
    reforming::Reforming,
    report::{Digests, FinalReport, ResumeTiming},
};

/// Why a node that was told to leave is gone.
pub const LEFT: &str = "it left";

/// An imperative: valid or refused by [`crate::state::JobState::apply`].
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Command {
    /// Take a process start of a node into the group.
    Admit {
        /// Its name.
        node: NodeId,
        /// Its store.
        store: StoreId,
        /// Its process start.
        boot: u64,
        /// Where it listens.
        address: SocketAddr,
        /// Device slots.
        slots: u32,
        /// When.
        at: Timestamp,
    },
    /// Declare an incarnation gone: it is fenced from now on.
    Evict {
        /// Its name.
        node: NodeId,
        /// The incarnation.
        incarnation: Incarnation,
        /// Why, for people.
        cause: String,
        /// When.
        at: Timestamp,
    },
    /// What all nodes have to agree in: that of the first mesh.
    RecordDigests {
        /// What most of its members have.
        digests: Digests,
        /// When.
        at: Timestamp,
    },
    /// A node does not fit the job: it is fenced, and starting it again is useless.
    Refuse {
        /// Its name.
        node: NodeId,
        /// The incarnation.
        incarnation: Incarnation,
        /// What does not fit, with both values.
        cause: String,
        /// When.
        at: Timestamp,
    },
    /// A node computes other bits than the others, and the job does not ask for
    /// the same ones.
    Tolerate {
        /// Its name.
        node: NodeId,
        /// The incarnation.
        incarnation: Incarnation,
        /// What differs, with both values.
        cause: String,
        /// When.
        at: Timestamp,
    },
    /// A node comes and goes: it stands by for a while (LS-2).
    HoldBack {
        /// Its name.
        node: NodeId,
        /// The incarnation.
        incarnation: Incarnation,
        /// Stays in a row that were too short.
        stays: u32,
        /// For how long, in microseconds.
        pause_micros: u64,
        /// When.
        at: Timestamp,
    },
    /// Whether the group may be formed again without a person's word (LG-3).
    SetReforming(Reforming),
    /// Which tokens open the gate.
    ChangeTokens(TokenChange),
    /// A node leaves by its own wish: the next plan goes without it.
    Leave {
        /// Its name.
        node: NodeId,
        /// The incarnation.
        incarnation: Incarnation,
        /// When.
        at: Timestamp,
    },
    /// Begin the next generation (GN-1).
    Plan(Plan),
    /// Complete it (GN-3).
    Seal(Seal),
    /// The first step after a seal committed.
    Resume {
        /// The generation.
        generation: Generation,
        /// The first step applied in it.
        step: Step,
        /// The slowest rank's phases.
        timing: ResumeTiming,
        /// When.
        at: Timestamp,
    },
    /// Every shard of a checkpoint is durable and digested (LG-2).
    CommitCheckpoint {
        /// Era in which the save began.
        era: Era,
        /// Generation in which the save began.
        generation: Generation,
        /// Its step.
        step: Step,
        /// Its stage folder's name.
        stage: String,
        /// Digests of its files, opaque here.
        files: Vec<u8>,
        /// How long the slowest rank's training was held up, in microseconds.
        stall_micros: u64,
        /// When.
        at: Timestamp,
    },
    /// A checkpoint may be deleted.
    Retire {
        /// Its step.
        step: Step,
    },
    /// A committed checkpoint turned out damaged when it was to be loaded.
    Distrust {
        /// Its step.
        step: Step,
        /// What is wrong with it.
        why: String,
    },
    /// Save and stop, to be resumed later.
    StopJob {
        /// When.
        at: Timestamp,
    },
    /// The save of a stopping job is done.
    Stopped {
        /// When.
        at: Timestamp,
    },
    /// The stopped job is started again.
    Start {
        /// When.
        at: Timestamp,
    },
    /// The last step is applied and saved (ST-4).
    Finish {
        /// What came out.
        report: FinalReport,
        /// When.
        at: Timestamp,
    },
    /// The job cannot go on.
    Fail {
        /// Why, for people.
        why: String,
        /// Whether trying again is useless.
        final_: bool,
        /// When.
        at: Timestamp,
    },
}

/// A fact, in the order in which it became one.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Event {
    /// A process start of a node is a member.
    NodeAdmitted {
        /// Its name.
        node: NodeId,
        /// Its incarnation.
        incarnation: Incarnation,
        /// Where it listens.
        address: SocketAddr,
        /// When.
        at: Timestamp,
    },
    /// An incarnation is gone.
    NodeEvicted {
        /// Its name.
        node: NodeId,
        /// The incarnation.
        incarnation: Incarnation,
        /// Why.
        cause: String,
        /// When.
        at: Timestamp,
    },
    /// What all nodes have to agree in is known.
    DigestsRecorded {
        /// Of the dataset, in hex.
        dataset: String,
        /// Of a canned training step, in hex.
        arithmetic: String,
        /// When.
        at: Timestamp,
    },
    /// An incarnation does not fit the job and is gone.
    NodeRefused {
        /// Its name.
        node: NodeId,
        /// The incarnation.
        incarnation: Incarnation,
        /// What does not fit.
        cause: String,
        /// When.
        at: Timestamp,
    },
    /// A node computes other bits than the others.
    NodeTolerated {
        /// Its name.
        node: NodeId,
        /// The incarnation.
        incarnation: Incarnation,
        /// What differs.
        cause: String,
        /// When.
        at: Timestamp,
    },
    /// Whether the group may be formed again without a person's word changed.
    ReformingSet(Reforming),
    /// A token opens the gate from now on.
    TokenAdded {
        /// Its id.
        id: String,
        /// When it expires.
        expires: Option<Timestamp>,
    },
    /// A token opens the gate no more.
    TokenRevoked {
        /// Its id.
        id: String,
    },
    /// A node that comes and goes stands by for a while.
    NodeHeldBack {
        /// Its name.
        node: NodeId,
        /// The incarnation.
        incarnation: Incarnation,
        /// Stays in a row that were too short.
        stays: u32,
        /// For how long, in microseconds.
        pause_micros: u64,
        /// When.
        at: Timestamp,
    },
    /// A node is about to leave.
    NodeLeaving {
        /// Its name.
        node: NodeId,
        /// The incarnation.
        incarnation: Incarnation,
        /// When.
        at: Timestamp,
    },
    /// A generation began.
    Planned {
        /// The era.
        era: Era,
        /// The generation.
        generation: Generation,
        /// Nodes of its ranks, in rank order.
        mesh: Vec<NodeId>,
        /// Micro-batches of each rank.
        shares: Vec<u32>,
        /// Why.
        reason: String,
        /// Whether a loss caused it.
        failure: bool,
        /// When the cause was noticed.
        noticed: Timestamp,
        /// When.
        at: Timestamp,
    },
    /// A generation knows where it goes on from.
    Sealed {
        /// The era.
        era: Era,
        /// The generation.
        generation: Generation,
        /// The restore step.
        restore: Step,
        /// The tier.
        tier: String,
        /// Why.
        reason: String,
        /// When.
        at: Timestamp,
    },
    /// The first step after a seal committed.
    Resumed {
        /// The era.
        era: Era,
        /// The generation.
        generation: Generation,
        /// The first step applied in it.
        step: Step,
        /// Phases.
        timing: ResumeTiming,
        /// When.
        at: Timestamp,
    },
    /// A checkpoint exists.
    CheckpointCommitted {
        /// Its step.
        step: Step,
        /// Its stage folder's name.
        stage: String,
        /// When.
        at: Timestamp,
    },
    /// A checkpoint may be deleted.
    CheckpointRetired {
        /// Its step.
        step: Step,
    },
    /// A checkpoint is damaged.
    CheckpointDistrusted {
        /// Its step.
        step: Step,
        /// What is wrong with it.
        why: String,
    },
    /// The job is stopping.
    JobStopping {
        /// When.
        at: Timestamp,
    },
    /// The job stopped with a checkpoint.
    JobStopped {
        /// When.
        at: Timestamp,
    },
    /// A stopped job goes on.
    JobStarted {
        /// When.
        at: Timestamp,
    },
    /// The job is finished.
    JobFinished {
        /// What came out.
        report: FinalReport,
        /// When.
        at: Timestamp,
    },
    /// The job failed.
    JobFailed {
        /// Why.
        why: String,
        /// Whether trying again is useless.
        final_: bool,
        /// When.
        at: Timestamp,
    },
}
