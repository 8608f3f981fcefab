//! The training state S_s of one rank: weights, moments, and how far they are.
//!
//! Every rank has address space for all weights, of which it fills what it
//! computes with. What it *holds*, and may donate or save, is its [`Shard`]:
//! master weights and both moments of a [`Portion`] of the flat buffer. Weights
//! outside it are copies that a gather renews, bucket by bucket.

use std::{ops::Range, sync::Arc};

use job::{Step, plan::Shard};
use serde::{Deserialize, Serialize};

use crate::{
    config::Config,
    digest::LossChain,
    ffi::Replica,
    layout::{AlignedBuffer, Layout},
    placement::{Placement, Portion},
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
    placement: Placement,
    replica: Replica,
    shard: Shard,
    held: Portion,
    exp_avg: AlignedBuffer,
    exp_avg_sq: AlignedBuffer,
    progress: Option<Progress>,
    /// The buckets of the shard's stage, and whether the weights of all of each
    /// belong to `progress`.
    buckets: Vec<(Range<usize>, bool)>,
}

/// The mutable parts of a shard: all weights, and the packed moments.
pub(crate) struct Parts<'a> {
    pub(crate) weights: &'a mut [f32],
    pub(crate) exp_avg: &'a mut [f32],
    pub(crate) exp_avg_sq: &'a mut [f32],
}

impl State {
    /// Memory for the weights and nothing in it: fresh (HEAL-1).
    pub(crate) fn fresh(replica: Replica, layout: Arc<Layout>, placement: Placement) -> Self {
        Self {
            layout,
            placement,
            replica,
            shard: Shard::WHOLE,
            held: Portion::default(),
            exp_avg: AlignedBuffer::zeroed(0),
            exp_avg_sq: AlignedBuffer::zeroed(0),
            progress: None,
            buckets: Vec::new(),
        }
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
    pub(crate) fn held(&self) -> &Portion {
        &self.held
    }

    /// The first moments, packed.
    pub(crate) fn exp_avg(&self) -> &[f32] {
        &self.exp_avg
    }

    /// The second moments, packed.
    pub(crate) fn exp_avg_sq(&self) -> &[f32] {
        &self.exp_avg_sq
    }

    /// The buckets of the shard's stage, and whether each is current as a whole.
    pub(crate) fn buckets(&self) -> &[(Range<usize>, bool)] {
        &self.buckets
    }

    /// The initial state: a function of the seed alone (TRAJ-1), of the shard
    /// alone.
    pub(crate) fn initialize(&mut self, config: &Config, shard: Shard) {
        self.begin(shard);
        let layout = Arc::clone(&self.layout);
        for range in self.held.ranges() {
            for slice in layout.slices(range) {
                let param = &layout.params()[slice.param];
                let stream = Stream::parameter(config.training.seed, &param.name);
                let first = (slice.elements.start - param.offset) as u64;
                let out = &mut self.replica.weights_mut()[slice.elements];
                match initial(&param.name, config.model.dim) {
                    Initial::Ones => out.fill(1.0),
                    Initial::Normal => stream.fill_normal(first, 0.0, 1.0, out),
                    Initial::Truncated { std, bound } => {
                        stream.fill_truncated_normal(first, 0.0, std, (-bound, bound), out);
                    }
                }
            }
        }
        self.complete(Progress::default());
    }

    /// Makes room for a shard, with zero moments. The state is fresh until
    /// [`Self::complete`]: what is half written is nobody's truth (HEAL-1).
    pub(crate) fn begin(&mut self, shard: Shard) {
        self.progress = None;
        self.held = self.placement.portion(shard);
        self.exp_avg = AlignedBuffer::zeroed(self.held.len());
        self.exp_avg_sq = AlignedBuffer::zeroed(self.held.len());
        self.settle(shard);
    }

    /// The shard is written, and belongs to `progress`.
    pub(crate) fn complete(&mut self, progress: Progress) {
        self.progress = Some(progress);
        self.forget_gathered();
    }

    /// Takes the shard, complete, out of separate packed buffers.
    pub(crate) fn replace(
        &mut self,
        shard: Shard,
        weights: &[f32],
        moments: [AlignedBuffer; 2],
        progress: Progress,
    ) {
        self.held = self.placement.portion(shard);
        for (range, packed) in self.held.pieces() {
            self.replica.weights_mut()[range].copy_from_slice(&weights[packed]);
        }
        [self.exp_avg, self.exp_avg_sq] = moments;
        self.settle(shard);
        self.complete(progress);
    }

    /// All weights, to write.
    pub(crate) fn weights_mut(&mut self) -> &mut [f32] {
        self.replica.weights_mut()
    }

    /// All weights and the moments of the elements held, to write.
    pub(crate) fn parts(&mut self) -> Parts<'_> {
        Parts {
            weights: self.replica.weights_mut(),
            exp_avg: &mut self.exp_avg,
            exp_avg_sq: &mut self.exp_avg_sq,
        }
    }

    /// The weights of a bucket are renewed.
    pub(crate) fn set_gathered(&mut self, bucket: usize) {
        self.buckets[bucket].1 = true;
    }

    /// The shard was moved on to `progress`.
    pub(crate) fn advance(&mut self, progress: Progress) {
        self.progress = Some(progress);
        self.forget_gathered();
    }

    /// The weights outside the shard are to be gathered again.
    pub(crate) fn forget_gathered(&mut self) {
        for ((bucket, gathered), held) in self.buckets.iter_mut().zip(self.held.ranges()) {
            *gathered = bucket == held;
        }
    }

    /// Gives the memory of a bucket's weights outside the shard back.
    pub(crate) fn release(&mut self, bucket: usize) {
        let (range, gathered) = &mut self.buckets[bucket];
        let held = &self.held.ranges()[bucket];
        if range != held {
            *gathered = false;
            self.replica.release(range.start..held.start);
            self.replica.release(held.end..range.end);
        }
    }

    /// Gives up what is not in `shard`. False when it is not all held.
    pub(crate) fn narrow(&mut self, shard: Shard) -> bool {
        if shard == self.shard {
            return true;
        }
        let to = self.placement.portion(shard);
        let places: Option<Vec<Range<usize>>> = to
            .ranges()
            .iter()
            .map(|range| match range.is_empty() {
                true => Some(0..0),
                false => self.held.packed(range),
            })
            .collect();
        let Some(places) = places else { return false };
        let copy = |from: &AlignedBuffer| {
            let mut buffer = AlignedBuffer::zeroed(to.len());
            for ((_, packed), place) in to.pieces().zip(&places) {
                buffer[packed].copy_from_slice(&from[place.clone()]);
            }
            buffer
        };
        (self.exp_avg, self.exp_avg_sq) = (copy(&self.exp_avg), copy(&self.exp_avg_sq));
        self.held = to;
        self.settle(shard);
        self.forget_gathered();
        true
    }

    /// Takes the place of a shard, and gives the memory of weights back that it
    /// has no use for.
    fn settle(&mut self, shard: Shard) {
        self.shard = shard;
        let cuts = shard.of / shard.stages;
        let buckets = self.placement.buckets(shard.stages, shard.index / cuts);
        let mut at = 0;
        for bucket in buckets.iter().chain([&(self.layout.elements()..self.layout.elements())]) {
            if at < bucket.start {
                self.replica.release(at..bucket.start);
            }
            at = bucket.end.max(at);
        }
        self.buckets = buckets.into_iter().map(|bucket| (bucket, false)).collect();
    }
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
