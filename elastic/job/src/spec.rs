//! What is fixed when a job is founded.

use serde::{Deserialize, Serialize};

use crate::{JobId, Step, mesh::Parallel};

/// How parameters and optimizer state are spread over the data-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sharding {
    /// Every rank holds everything.
    Replicated,
    /// Every rank holds all weights and its own cut of the optimizer state and
    /// of the fp32 master weights (ZeRO-1).
    Zero1,
    /// And sums its own cut of the gradient alone (ZeRO-2).
    Zero2,
    /// And holds other weights only while it computes with them (ZeRO-3).
    Zero3,
}

impl Sharding {
    /// Whether a rank holds less than everything.
    #[must_use]
    pub fn is_sharded(self) -> bool {
        self != Self::Replicated
    }

    /// Whether gradients are cut as they are computed, unit by unit, so that
    /// micro-batches are dealt to the ranks in turn.
    #[must_use]
    pub fn cuts_gradients(self) -> bool {
        matches!(self, Self::Zero2 | Self::Zero3)
    }
}

/// The frozen facts of a job: part of the founding state, the same on every
/// node for ever.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSpec {
    /// Identity of the job.
    pub job: JobId,
    /// The full configuration as JSON, handed to every node and worker.
    pub config: String,
    /// SHA-256 over the keys that define the trajectory.
    pub config_digest: [u8; 32],
    /// Fewest nodes that train; below it the job waits.
    pub min_nodes: u32,
    /// Most nodes that train; further ones stand by.
    pub max_nodes: u32,
    /// Configured global batch in micro-batches; `None` takes the data-parallel
    /// degree of the first plan and freezes it (DATA-2).
    pub micro_batches: Option<u32>,
    /// The step after which the job is finished.
    pub total_steps: Step,
    /// Spread of the training state.
    pub sharding: Sharding,
    /// What is asked of the mesh.
    pub parallel: Parallel,
    /// Incidents without a committed step between them before the job fails.
    pub max_failures: u32,
    /// Nodes that leave, preempted or drained, without a committed step between them
    /// before the job fails.
    pub max_preemptions: u32,
    /// Whether all nodes have to compute the same bits (TRAJ-1): one that does not
    /// is refused; otherwise it only is recorded.
    pub exact: bool,
    /// Whether checkpoints are saved.
    pub checkpoints: bool,
    /// Committed checkpoints to keep; 0 keeps all.
    pub keep_latest_k: u32,
    /// The job's certificate authority, key included, as PEM: joining works
    /// after the founder is gone (CG).
    pub authority: String,
    /// What a joiner has to prove that it knows.
    pub join_secret: String,
}
