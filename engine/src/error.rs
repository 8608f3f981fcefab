//! What an [`Engine`](crate::Engine) refuses, and why.

use std::path::PathBuf;

use job::{Step, Token, plan::Shard};

use crate::{ballot, config, data, layout, model};

/// Why an operation of the engine failed. The state is what it was before,
/// unless the variant says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration cannot run.
    #[error(transparent)]
    Config(#[from] config::Error),
    /// The model's parameters have no layout.
    #[error(transparent)]
    Layout(#[from] layout::Error),
    /// More than the machine has.
    #[error(
        "the model needs at least {} MiB of memory per rank, this machine has {} MiB: \
         choose a smaller model",
        needed >> 20, available >> 20
    )]
    Memory {
        /// Bytes.
        needed: u64,
        /// Bytes of memory and swap.
        available: u64,
    },
    /// The forward or backward pass.
    #[error(transparent)]
    Model(#[from] model::Error),
    /// The vote of a step.
    #[error(transparent)]
    Vote(#[from] ballot::Error),
    /// A collective: the generation is over for this rank.
    #[error(transparent)]
    Collective(#[from] transport::collective::Error),
    /// The training or validation data.
    #[error(transparent)]
    Data(#[from] data::batch::Error),
    /// A token file.
    #[error(transparent)]
    Tokens(#[from] data::tokens::Error),
    /// The data ledger (DATA-1).
    #[error(transparent)]
    Ledger(#[from] data::ledger::Error),
    /// Data made for a larger vocabulary.
    #[error(
        "{} has a vocabulary of {given} tokens, model.vocab_size is {vocab_size}: choose a model \
         that knows them all",
        file.display()
    )]
    Vocabulary {
        /// The token file.
        file: PathBuf,
        /// Its vocabulary.
        given: u64,
        /// The model's.
        vocab_size: u64,
    },
    /// The checkpoint's files.
    #[error(transparent)]
    Checkpoint(#[from] dcp::Error),
    /// The checkpoint is whole, but of another model or run.
    #[error("checkpoint {folder}: {detail}")]
    Mismatch {
        /// The checkpoint.
        folder: String,
        /// What differs: the key, what it is, what it should be.
        detail: String,
    },
    /// No state yet (HEAL-1): initialize, load or sync first.
    #[error(
        "this rank has no training state: initialize it, load a checkpoint or sync from a peer"
    )]
    Fresh,
    /// The call needs a generation.
    #[error("this rank has entered no generation")]
    NotEntered,
    /// A place that is not in the mesh, or a mesh for another global batch (DATA-2).
    #[error(
        "rank {rank} of {ranks} for {given} micro-batches does not fit: the global batch has \
         {expected} micro-batches at every degree"
    )]
    Place {
        /// The rank.
        rank: usize,
        /// Ranks of the mesh.
        ranks: usize,
        /// Micro-batches of the shares.
        given: u32,
        /// Micro-batches of the configuration.
        expected: u32,
    },
    /// The communicator is not the one of the generation entered.
    #[error(
        "entered generation {entered} as rank {rank} of {ranks}, the communicator is of {given}"
    )]
    OtherMesh {
        /// The generation entered.
        entered: Token,
        /// This rank in it.
        rank: usize,
        /// Ranks in it.
        ranks: usize,
        /// The communicator's token, rank and size.
        given: String,
    },
    /// The call needs a prepared gradient, or needs none (ST-1).
    #[error("{call} needs the rank to be {needed} at step {step}")]
    Position {
        /// The call.
        call: &'static str,
        /// The position that it needs.
        needed: &'static str,
        /// The rank's step.
        step: Step,
    },
    /// A verdict on another step than the prepared one (ST-3).
    #[error("the verdict is on step {given}, the prepared gradient is for step {prepared}")]
    OtherStep {
        /// The step prepared.
        prepared: Step,
        /// The step of the verdict.
        given: Step,
    },
    /// The rank does not hold what its place in the mesh needs.
    #[error(
        "this rank holds shard {}/{} of the state, cut into {} stages first, its place needs {}/{} and {}: \
         sync or load first",
        held.index, held.of, held.stages, needed.index, needed.of, needed.stages
    )]
    Shard {
        /// What it holds.
        held: Shard,
        /// What it needs.
        needed: Shard,
    },
    /// The sources of a sync do not make a state.
    #[error("the sources of a sync are not the shards of one state: {0}")]
    Sources(String),
    /// Other validation losses than those of the batches.
    #[error(
        "{given} validation losses arrived for {expected} batches, or one twice: a rank's \
         validation file is another one"
    )]
    Validation {
        /// Losses that arrived.
        given: usize,
        /// Batches.
        expected: u64,
    },
    /// Text is made of bytes.
    #[error("text needs a model with 256 tokens, one per byte; this one has {vocab_size}")]
    NotBytes {
        /// The model's.
        vocab_size: usize,
    },
    /// Bytes that arrived are not those that the donor sent: the rank is fresh now.
    #[error("the state received from rank {donor} has another digest than the donor's")]
    Corrupt {
        /// The rank that sent it.
        donor: usize,
    },
}

impl Error {
    /// The peer that this error accuses, if there is one.
    #[must_use]
    pub fn peer(&self) -> Option<usize> {
        match self {
            Self::Collective(error) => error.peer(),
            Self::Corrupt { donor } => Some(*donor),
            _ => None,
        }
    }

    /// Whether the caller asked for it, by the abort poll or the abort handle.
    #[must_use]
    pub fn is_abort(&self) -> bool {
        use transport::collective::Error as Collective;
        matches!(
            self,
            Self::Model(model::Error::Aborted) | Self::Collective(Collective::Aborted { .. })
        )
    }
}
