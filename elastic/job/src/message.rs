//! Messages between processes. Between agents they travel in the control lane,
//! between an agent and its worker over their socket pair.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::{
    Generation, NodeId, Step, StoreId, WorkerId,
    admission::TokenChange,
    plan::{Plan, Seal},
    reforming::Pulse,
    report::{
        Digests, FinalReport, NodeReport, Progress, ResumeTiming, SaveFailed, Sealed, ShardSaved,
    },
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
        /// What the leader wrote into the checkpoint folder last (LG-3).
        pulse: Option<Pulse>,
    },
    /// To everybody, from a node that no quorum has answered for as long as
    /// re-forming waits.
    Orphan {
        /// From whom it hears the same.
        reaches: Vec<NodeId>,
    },
    /// From the leader, to a process start that the group went on without: it may
    /// not hear so from the log any more.
    Fenced {
        /// The process start.
        boot: u64,
        /// Why.
        cause: String,
        /// Whether starting again is useless.
        refused: bool,
    },
    /// To the leader: a node is to leave.
    Drain(NodeId),
    /// To the leader: other tokens are to open the gate.
    Tokens(TokenChange),
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
        /// Where it accepts tensor connections; port 0 is any free one.
        bind: SocketAddr,
        /// Under which address the other workers reach that port.
        advertise: std::net::IpAddr,
        /// Whether its tensors may go through memory that it shares with others.
        shares_memory: bool,
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
        /// What has to be equal on all nodes.
        digests: Digests,
    },
    /// Who knocked at its tensor port and was not let in, since it began (SEC-1).
    TurnedAway {
        /// Not the protocol, another job, a wrong key.
        strangers: u64,
        /// Of an older generation.
        stale: u64,
        /// Silent for too long.
        late: u64,
        /// Too many at once.
        crowded: u64,
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
