//! What a worker trains, without knowing with what: the engine implements it
//! with libtorch, tests with integers.

use std::{path::Path, time::Instant};

use dcp::ShardIndex;
use job::{
    Step, Token,
    plan::{Shard, Source},
    report::FinalReport,
    shares::Shares,
};
use transport::collective::{self, Communicator};

/// Why a trainer could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum TrainerError {
    /// A collective ended: somebody is gone, or the generation was aborted.
    #[error(transparent)]
    Collective(#[from] collective::Error),
    /// The abort flag was seen between two blocks of compute.
    #[error("aborted between two blocks")]
    Aborted,
    /// The checkpoint to be loaded is damaged: another one may be good (CKPT-1). The
    /// text names the file.
    #[error("{0}")]
    Damaged(String),
    /// Another try would meet the same error.
    #[error("{0}")]
    Fatal(String),
}

/// A step that was applied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Applied {
    /// Steps applied so far.
    pub step: Step,
    /// Mean loss over the step's valid target tokens.
    pub loss: f32,
    /// Global gradient norm before clipping.
    pub grad_norm: f32,
    /// Learning rate.
    pub learning_rate: f32,
    /// Valid target tokens.
    pub tokens: u64,
}

/// A copy of this rank's share of the training state at one step.
pub trait Snapshot: Send {
    /// Writes the share durably into the stage folder. Runs on another thread.
    ///
    /// # Errors
    /// One line that names the file and what failed.
    fn write(self: Box<Self>, stage: &Path, rank: u32) -> Result<ShardIndex, String>;
}

/// The training state of one rank and the steps that advance it (ST-1 to ST-3).
/// Called from the device thread only.
pub trait Trainer {
    /// Steps applied; none when there is no state yet (HEAL-1).
    fn position(&self) -> Option<Step>;

    /// The part of the state that this rank holds.
    fn shard(&self) -> Shard;

    /// Makes the state of step 0.
    ///
    /// # Errors
    /// [`TrainerError::Fatal`].
    fn initialize(&mut self) -> Result<(), TrainerError>;

    /// Takes its place in a mesh of so many pipeline stages, before it gets the
    /// state for it. The shares are those of the mesh's pipelines.
    ///
    /// # Errors
    /// [`TrainerError::Fatal`].
    fn enter(
        &mut self,
        token: Token,
        rank: u32,
        stages: u32,
        shares: &Shares,
    ) -> Result<(), TrainerError>;

    /// Computes this rank's micro-batches and exchanges gradients: from
    /// `Open(s)` to `Prepared(s)`. Returns the ballot for the vote on `s`. On an
    /// error the state is that of `Open(s)`.
    ///
    /// # Errors
    /// [`TrainerError`].
    fn prepare(
        &mut self,
        mesh: &mut dyn Communicator,
        abort: &dyn Fn() -> bool,
        deadline: Instant,
    ) -> Result<Vec<u8>, TrainerError>;

    /// The verdict on a step from all ballots in rank order; the same on every
    /// rank.
    ///
    /// # Errors
    /// [`TrainerError::Fatal`] on ballots that do not belong together.
    fn tally(&self, ballots: &[Vec<u8>]) -> Result<Vec<u8>, TrainerError>;

    /// From `Prepared(s)` to `Open(s+1)`, without a collective.
    ///
    /// # Errors
    /// [`TrainerError::Fatal`].
    fn apply(&mut self, verdict: &[u8]) -> Result<Applied, TrainerError>;

    /// From `Prepared(s)` back to `Open(s)`.
    fn discard(&mut self);

    /// Gives state to the receivers, and in a sharded layout to everybody, over
    /// a new mesh. Every rank of the mesh calls it.
    ///
    /// # Errors
    /// [`TrainerError`].
    fn sync(
        &mut self,
        mesh: &mut dyn Communicator,
        sources: &[Source],
        receivers: &[u32],
        deadline: Instant,
    ) -> Result<(), TrainerError>;

    /// Replaces the state by a checkpoint's, as much as its place needs.
    ///
    /// # Errors
    /// [`TrainerError::Damaged`] and [`TrainerError::Fatal`], naming the tensor or file.
    fn load(&mut self, checkpoint: &Path) -> Result<Step, TrainerError>;

    /// Copies this rank's share of the state for a checkpoint.
    ///
    /// # Errors
    /// [`TrainerError::Fatal`].
    fn snapshot(&mut self) -> Result<Box<dyn Snapshot>, TrainerError>;

    /// Loss over the validation split; every rank calls it, rank 0 knows.
    ///
    /// # Errors
    /// [`TrainerError`].
    fn validate(
        &mut self,
        mesh: &mut dyn Communicator,
        abort: &dyn Fn() -> bool,
        deadline: Instant,
    ) -> Result<Option<f64>, TrainerError>;

    /// The final figures; every rank calls it, and only rank 0's report has
    /// digests.
    ///
    /// # Errors
    /// [`TrainerError`].
    fn finish(
        &mut self,
        mesh: &mut dyn Communicator,
        abort: &dyn Fn() -> bool,
        deadline: Instant,
    ) -> Result<FinalReport, TrainerError>;
}
