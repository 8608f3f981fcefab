//! The training state S_s of one rank: weights, moments, and how far they are.
//!
//! Every rank has memory for all weights, which it computes with. What it
//! *holds*, and may donate or save, is its [`Shard`]: master weights and both
//! moments of one cut of the flat buffer ([`Layout::cuts`]). A replica holds
//! the whole. Weights outside the shard are copies that the next gather renews.

use std::{ops::Range, sync::Arc};

use job::{Step, plan::Shard};
use serde::{Deserialize, Serialize};

use crate::{
    config::Config,
    digest::LossChain,
    ffi::Replica,
    layout::{AlignedBuffer, Layout},
    model,
    random::Stream,
};

/// How far the state is; part of the state, and saved with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps applied.
    pub step: Step,
    /// Optimizer updates applied: steps without those that were skipped.
    pub updates: u64,
    /// Target tokens of all steps applied.
    pub tokens: u64,
    /// Chained digest of the losses of all steps applied.
    pub loss_chain: LossChain,
}

#[derive(Debug)]
pub(crate) struct State {
    layout: Arc<Layout>,
    replica: Replica,
    shard: Shard,
    held: Range<usize>,
    exp_avg: AlignedBuffer,
    exp_avg_sq: AlignedBuffer,
    progress: Option<Progress>,
    gathered: bool,
}

/// The mutable parts of a shard, all of the same elements.
pub(crate) struct Parts<'a> {
    pub(crate) weights: &'a mut [f32],
    pub(crate) exp_avg: &'a mut [f32],
    pub(crate) exp_avg_sq: &'a mut [f32],
}

impl State {
    /// Memory for the weights and nothing in it: fresh (HEAL-1).
    pub(crate) fn fresh(config: &Config, layout: Arc<Layout>) -> Result<Self, model::Error> {
        let replica = Replica::new(config, &layout)?;
        let (exp_avg, exp_avg_sq) = (AlignedBuffer::zeroed(0), AlignedBuffer::zeroed(0));
        let (shard, held) = (Shard::WHOLE, 0..0);
        Ok(Self {
            layout,
            replica,
            shard,
            held,
            exp_avg,
            exp_avg_sq,
            progress: None,
            gathered: false,
        })
    }

    pub(crate) fn replica(&self) -> &Replica {
        &self.replica
    }

    /// None while fresh.
    pub(crate) fn progress(&self) -> Option<Progress> {
        self.progress
    }

    /// The shard held; of no meaning while fresh.
    pub(crate) fn shard(&self) -> Shard {
        self.shard
    }

    /// The elements of [`Self::shard`].
    pub(crate) fn held(&self) -> Range<usize> {
        self.held.clone()
    }

    pub(crate) fn exp_avg(&self) -> &[f32] {
        &self.exp_avg
    }

    pub(crate) fn exp_avg_sq(&self) -> &[f32] {
        &self.exp_avg_sq
    }

    /// Whether the weights outside the shard belong to [`Self::progress`].
    pub(crate) fn is_gathered(&self) -> bool {
        self.gathered
    }

    /// The initial state: a function of the seed alone (TRAJ-1).
    pub(crate) fn initialize(&mut self, config: &Config, shard: Shard) {
        self.begin(shard);
        let layout = Arc::clone(&self.layout);
        for param in layout.params() {
            let stream = Stream::parameter(config.training.seed, &param.name);
            let out = &mut self.replica.weights_mut()[param.range()];
            match initial(&param.name, config.model.dim) {
                Initial::Ones => out.fill(1.0),
                Initial::Normal => stream.fill_normal(0, 0.0, 1.0, out),
                Initial::Truncated { std, bound } => {
                    stream.fill_truncated_normal(0, 0.0, std, (-bound, bound), out);
                }
            }
        }
        self.complete(Progress::default());
    }

    /// Makes room for a shard, with zero moments. The state is fresh until
    /// [`Self::complete`]: what is half written is nobody's truth (HEAL-1).
    pub(crate) fn begin(&mut self, shard: Shard) {
        self.progress = None;
        self.gathered = false;
        self.shard = shard;
        self.held = elements(&self.layout, shard);
        self.exp_avg = AlignedBuffer::zeroed(self.held.len());
        self.exp_avg_sq = AlignedBuffer::zeroed(self.held.len());
    }

    /// The state of the shard, and all weights, are written and belong to `progress`.
    pub(crate) fn complete(&mut self, progress: Progress) {
        self.progress = Some(progress);
        self.gathered = true;
    }

    /// Takes the shard, complete, out of separate buffers: `exp_avg` and
    /// `exp_avg_sq` are of the shard, `weights` is everything.
    pub(crate) fn replace(
        &mut self,
        shard: Shard,
        weights: &[f32],
        moments: [AlignedBuffer; 2],
        progress: Progress,
    ) {
        self.replica.weights_mut().copy_from_slice(weights);
        [self.exp_avg, self.exp_avg_sq] = moments;
        self.shard = shard;
        self.held = elements(&self.layout, shard);
        self.complete(progress);
    }

    /// All weights, to write.
    pub(crate) fn weights_mut(&mut self) -> &mut [f32] {
        self.replica.weights_mut()
    }

    /// The elements held, to write.
    pub(crate) fn parts(&mut self) -> Parts<'_> {
        Parts {
            weights: &mut self.replica.weights_mut()[self.held.clone()],
            exp_avg: &mut self.exp_avg,
            exp_avg_sq: &mut self.exp_avg_sq,
        }
    }

    /// The weights outside the shard are renewed.
    pub(crate) fn set_gathered(&mut self) {
        self.gathered = true;
    }

    /// The shard was moved on to `progress`.
    pub(crate) fn advance(&mut self, progress: Progress) {
        self.progress = Some(progress);
        self.forget_gathered();
    }

    /// The weights outside the shard are to be gathered again.
    pub(crate) fn forget_gathered(&mut self) {
        self.gathered = self.held == (0..self.layout.elements());
    }

    /// Gives up what is not in `shard`. False when it is not all held.
    pub(crate) fn narrow(&mut self, shard: Shard) -> bool {
        let to = elements(&self.layout, shard);
        if to.start < self.held.start || to.end > self.held.end {
            return false;
        }
        if to != self.held {
            let cut = to.start - self.held.start..to.end - self.held.start;
            let copy = |from: &AlignedBuffer| {
                let mut buffer = AlignedBuffer::zeroed(cut.len());
                buffer.copy_from_slice(&from[cut.clone()]);
                buffer
            };
            (self.exp_avg, self.exp_avg_sq) = (copy(&self.exp_avg), copy(&self.exp_avg_sq));
            self.held = to;
        }
        self.shard = shard;
        true
    }
}

/// The elements of a shard in the flat buffer.
///
/// # Panics
/// When there is no such shard: `index` is below `of`.
pub(crate) fn elements(layout: &Layout, shard: Shard) -> Range<usize> {
    layout.cuts(shard.of as usize)[shard.index as usize].clone()
}

/// How a parameter starts.
#[derive(Debug, PartialEq)]
enum Initial {
    Ones,
    Normal,
    Truncated { std: f64, bound: f64 },
}

/// torchtitan's initial values for `llama3`: matrices truncated at ±2 (not at
/// two deviations), those that write into the residual stream smaller with
/// depth, the output at three deviations of dim^-1/2.
fn initial(name: &str, dim: usize) -> Initial {
    let matrix = |std| Initial::Truncated { std, bound: 2.0 };
    let mut path = name.split('.');
    match (path.next(), path.next(), path.next(), path.next()) {
        (Some("tok_embeddings"), ..) => Initial::Normal,
        (Some("output"), ..) => {
            let std = 1.0 / (dim as f64).sqrt();
            Initial::Truncated { std, bound: 3.0 * std }
        }
        (.., Some("wq" | "wk" | "wv" | "w1")) => matrix(0.02),
        (_, Some(layer), _, Some("wo" | "w2" | "w3")) => {
            let depth = layer.parse::<u32>().map_or(1, |layer| layer + 1);
            matrix(0.02 / (2.0 * f64::from(depth)).sqrt())
        }
        _ => Initial::Ones,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(name: &str, expected: Initial) {
        assert_eq!(initial(name, 64), expected, "{name}");
    }

    #[test]
    fn parameters_start_as_torchtitans_do() {
        let matrix = |std| Initial::Truncated { std, bound: 2.0 };
        check("tok_embeddings.weight", Initial::Normal);
        check("layers.3.attention.wq.weight", matrix(0.02));
        check("layers.0.attention.wo.weight", matrix(0.02 / 2.0_f64.sqrt()));
        check("layers.11.feed_forward.w1.weight", matrix(0.02));
        check("layers.7.feed_forward.w3.weight", matrix(0.005));
        check("layers.7.attention_norm.weight", Initial::Ones);
        check("norm.weight", Initial::Ones);
        check("output.weight", Initial::Truncated { std: 0.125, bound: 0.375 });
    }
}
