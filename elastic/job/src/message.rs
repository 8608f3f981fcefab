//! Messages between processes. Between agents they travel in the control lane,
//! between an agent and its worker over their socket pair.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::{
    Generation, NodeId, Step, StoreId, WorkerId,
    plan::{Plan, Seal},
    report::{FinalReport, NodeReport, Progress, ResumeTiming, SaveFailed, Sealed, ShardSaved},
    spec::JobSpec,
};

/// Between agents.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum AgentMessage {
    /// To the leader.
    Beat {
        /// When it was sent, on the sender's own clock: leases run from it (LS-1).
        sent_micros: u64,
        /// The node's state.
        report: NodeReport,
    },
    /// From the leader, after a quorum round that began after the beat arrived.
    Answer {
        /// The beat's own time.
        sent_micros: u64,
    },
    /// From the leader, to a process start that the group went on without: it may
    /// not hear so from the log any more.
    Fenced {
        /// The process start.
        boot: u64,
        /// Why.
        cause: String,
    },
    /// To the leader: a node is to leave.
    Drain(NodeId),
}

/// What a joining node is told.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Welcome {
    /// The founding snapshot that seeds its Raft log.
    pub founding: Vec<u8>,
    /// Where the known nodes listen.
    pub peers: Vec<(StoreId, SocketAddr)>,
}

/// From an agent to its worker.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum ToWorker {
    /// The first message: everything that it needs to build its model.
    Start {
        /// The job; its micro-batches are those frozen by the first plan, if there
        /// was one.
        spec: Box<JobSpec>,
        /// The configuration as JSON, this node's own keys included.
        config: String,
        /// Its node.
        node: NodeId,
        /// Its identity.
        worker: WorkerId,
        /// Its device slot.
        slot: u32,
        /// Folder of this job's outputs.
        dump_folder: String,
        /// Folder of the checkpoints.
        checkpoint_folder: String,
        /// Interface for tensor connections.
        bind: std::net::IpAddr,
    },
    /// It may vote and apply until then, on the clock that counts suspended time.
    Lease {
        /// The deadline in microseconds.
        until_micros: u64,
    },
    /// Stop as the plan says and report where you stand.
    Plan {
        /// The plan.
        plan: Box<Plan>,
        /// Its rank; none when the plan goes without it.
        rank: Option<u32>,
    },
    /// Go on from here.
    Seal {
        /// The choice.
        seal: Box<Seal>,
    },
    /// The job is over: end.
    End,
}

/// From a worker to its agent.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum FromWorker {
    /// Its model is built; it can take part.
    Ready {
        /// Where its tensor listener accepts.
        address: SocketAddr,
    },
    /// It lives (LS-3: a worker whose runtime hangs goes silent).
    Beat,
    /// Answer to a plan.
    Sealed(Sealed),
    /// A peer's connection broke.
    Accuses {
        /// In this generation.
        generation: Generation,
        /// The peer's rank.
        rank: u32,
        /// What was seen.
        why: String,
    },
    /// State is restored and communicators stand: steps follow.
    Restored(ResumeTiming),
    /// A step was applied.
    Step(Progress),
    /// The first step of a generation was applied.
    Resumed(ResumeTiming),
    /// Its share of a checkpoint is durable.
    Saved(ShardSaved),
    /// Its share of a checkpoint could not be written; training goes on.
    SaveFailed(SaveFailed),
    /// The checkpoint of the seal is damaged.
    Unloadable {
        /// Sealed generation.
        generation: Generation,
        /// The damage, which names the file.
        why: String,
    },
    /// A validation pass.
    Validated {
        /// After this step.
        step: Step,
        /// Mean loss over the validation split.
        loss: f64,
    },
    /// The last step is applied; rank 0 adds the final figures.
    Finished(FinalReport),
    /// An error that another try would meet again.
    Fatal(String),
}
