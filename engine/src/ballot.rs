//! What the ranks tell each other at the end of a step, and what follows from
//! it (ST-2). A ballot says what one rank's gradient is like; the verdict is a
//! pure function of all ballots, so that every rank reaches the same one, on
//! any mesh (TRAJ-1).

use job::{Step, codec, shares::TreeNode};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{
    layout::Layout,
    optimizer::clip,
    tree::{self, combine},
};

/// One rank's part of the vote of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Ballot {
    /// The step that the gradient is for.
    pub(crate) step: Step,
    /// Sums of squares of the rank's cut of the summed gradient.
    pub(crate) norms: Vec<(TreeNode, f64)>,
    /// Loss sums of the rank's micro-batches.
    pub(crate) losses: Vec<(TreeNode, f32)>,
    /// Target tokens of the rank's micro-batches.
    pub(crate) tokens: u64,
    /// The micro-batches that the rank answers for, and the SHA-256 of the tokens
    /// of each (DATA-1).
    pub(crate) consumed: Vec<(u32, [u8; 32])>,
}

/// The outcome of a vote.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// The step voted on.
    pub step: Step,
    /// Mean loss over the target tokens of the global batch; 0 without any.
    pub loss: f32,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Target tokens of the global batch.
    pub tokens: u64,
    /// SHA-256 over the digests of all micro-batches in order: equal for every
    /// attempt at the step, on any mesh (GN-5).
    pub consumed: [u8; 32],
}

/// Ballots that do not make a vote.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not a ballot, or not a verdict.
    #[error(transparent)]
    Decode(#[from] codec::DecodeError),
    /// A rank votes on another step.
    #[error("rank {rank} votes on step {given}, this is the vote on step {expected}")]
    Step {
        /// The rank.
        rank: usize,
        /// The step of its ballot.
        given: Step,
        /// The step of the vote.
        expected: Step,
    },
    /// The parts do not make a whole.
    #[error("the {what} of all ranks are not those of the whole batch: {source}")]
    Incomplete {
        /// What is incomplete.
        what: &'static str,
        /// Where.
        source: tree::Error,
    },
    /// Other micro-batches than the step has.
    #[error("{given} micro-batches were consumed, the step has 0 to {expected}, each once")]
    MicroBatches {
        /// Micro-batches of the step.
        expected: u32,
        /// Digests in the ballots.
        given: usize,
    },
}

impl Verdict {
    /// The verdict of all ballots. Their parts are joined in the order of what
    /// they are about, whoever sent them. `divisor` is what the losses
    /// were divided by.
    ///
    /// # Errors
    /// [`Error`]: the ranks do not agree on what they vote.
    pub(crate) fn of(
        ballots: &[Vec<u8>],
        step: Step,
        micro_batches: u32,
        divisor: f64,
        layout: &Layout,
    ) -> Result<Self, Error> {
        let decode = |(rank, bytes): (usize, &Vec<u8>)| {
            let ballot: Ballot = codec::decode(bytes)?;
            if ballot.step == step {
                Ok(ballot)
            } else {
                Err(Error::Step { rank, given: ballot.step, expected: step })
            }
        };
        let ballots = ballots.iter().enumerate().map(decode).collect::<Result<Vec<_>, _>>()?;

        let mut consumed: Vec<_> = ballots.iter().flat_map(|b| &b.consumed).collect();
        consumed.sort_unstable();
        if !consumed.iter().map(|(index, _)| *index).eq(0..micro_batches) {
            return Err(Error::MicroBatches { expected: micro_batches, given: consumed.len() });
        }
        let consumed =
            consumed.iter().fold(Sha256::new(), |hash, (_, digest)| hash.chain_update(digest));
        let incomplete = |what| move |source| Error::Incomplete { what, source };
        let losses = in_order(micro_batches, ballots.iter().flat_map(|b| b.losses.iter().copied()));
        let loss = combine(micro_batches, losses, |a, b| a + b).map_err(incomplete("losses"))?;
        let blocks = layout.blocks();
        let norms = in_order(blocks, ballots.iter().flat_map(|b| b.norms.iter().copied()));
        let norm = clip::global_norm(layout, norms).map_err(incomplete("gradient norms"))?;

        let tokens = ballots.iter().fold(0, |sum: u64, b| sum.saturating_add(b.tokens));
        let verdict =
            Self { step, loss: 0.0, grad_norm: 0.0, tokens, consumed: consumed.finalize().into() };
        let Some(scale) = verdict.scale(divisor) else { return Ok(verdict) };
        let loss = loss.unwrap_or(0.0) * scale;
        Ok(Self { loss, grad_norm: norm * f64::from(scale), ..verdict })
    }

    /// What the summed gradient is multiplied by: it was divided by `divisor`
    /// instead of by the number of target tokens, which is known only now. None
    /// without target tokens.
    pub(crate) fn scale(&self, divisor: f64) -> Option<f32> {
        (self.tokens > 0).then(|| (divisor / self.tokens as f64) as f32)
    }

    /// Whether the step updates the weights.
    #[must_use]
    pub fn updates(&self) -> bool {
        self.tokens > 0 && self.is_finite()
    }

    /// Whether loss and gradient are finite.
    #[must_use]
    pub fn is_finite(&self) -> bool {
        self.loss.is_finite() && self.grad_norm.is_finite()
    }

    /// Reads what [`Engine::tally`](crate::Engine::tally) returned.
    ///
    /// # Errors
    /// `Error::Decode`.
    pub fn decode(bytes: &[u8]) -> Result<Self, Error> {
        Ok(codec::decode(bytes)?)
    }
}
/// Partial sums in the order of their leaves.
fn in_order<T>(total: u32, pieces: impl Iterator<Item = (TreeNode, T)>) -> Vec<(TreeNode, T)> {
    let mut pieces: Vec<_> = pieces.collect();
    pieces.sort_by_key(|(node, _)| node.range(total).start);
    pieces
}
