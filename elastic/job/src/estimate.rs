//! What a mesh costs, before anything runs on it: memory of a device by kind,
//! bytes of a step by link, the bubble, the checkpoint, what the tree order adds,
//! and the share of the time that is left for training when nodes fail.
//!
//! Memory of state is counted as the engine allocates it. Activations are the
//! tensors that autograd keeps of a block (counted from its operations), per
//! micro-batch in flight; small buffers are left out.

use crate::{
    mesh::{Mesh, split_layers},
    model::Shape,
    pipeline::Schedule,
    shares::Shares,
    spec::Sharding,
};

/// Bytes of an f32.
const F32: f64 = 4.0;

/// A run, as far as its cost depends on it.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// The model.
    pub shape: Shape,
    /// Tokens of a sequence.
    pub seq_len: u32,
    /// Sequences of a micro-batch.
    pub local_batch: u32,
    /// Micro-batches M of a step.
    pub micro_batches: u32,
    /// Bytes of an element of forward and backward: 4, or 2 in bfloat16.
    pub compute_bytes: u32,
    /// How state is spread.
    pub sharding: Sharding,
    /// Order of a pipeline's passes.
    pub schedule: Schedule,
    /// Chunks of the model on each rank of a pipeline.
    pub chunks: u32,
    /// What embedding and head weigh when blocks are dealt, in blocks.
    pub ends: (u32, u32),
    /// Every n-th block recomputes its activations; 0: none.
    pub recompute_every: u32,
    /// Whether ZeRO-3 gives weights up between forward and backward.
    pub reshards: bool,
}

/// Bytes on the device that needs most.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Memory {
    /// Weights, with those of a unit that are gathered only for a while.
    pub weights: f64,
    /// Both moments.
    pub optimizer: f64,
    /// Summed gradient, partial sums of the tree, and one micro-batch's gradient.
    pub gradients: f64,
    /// Kept activations, and the logits of one micro-batch.
    pub activations: f64,
}

/// Bytes that a rank sends in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Gathers of weights.
    pub gather: f64,
    /// Gradients to the ranks over which they are cut, or summed.
    pub reduce: f64,
    /// Sums between replicas of shards.
    pub replicas: f64,
    /// Activations and their gradients between stages.
    pub pipeline: f64,
}

impl Memory {
    /// All of it.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.weights + self.optimizer + self.gradients + self.activations
    }
}

impl Traffic {
    /// All of it.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.gather + self.reduce + self.replicas + self.pipeline
    }
}

/// Accumulation steps of a global batch: `global / (ranks · local)`.
#[must_use]
pub fn accumulation_steps(global: u64, ranks: u64, local: u64) -> u64 {
    global / (ranks * local).max(1)
}

/// Sequences of a step: micro-batches · their size · data-parallel degree.
#[must_use]
pub fn effective_batch(micro_batches: u64, size: u64, degree: u64) -> u64 {
    micro_batches * size * degree
}

/// Bytes of weights, gradients and AdamW's moments in full precision, each rank's
/// part of `ranks`: (4 + 4 + 8) bytes for a parameter.
#[must_use]
pub fn state_bytes(parameters: u64, ranks: u64) -> f64 {
    16.0 * parameters as f64 / ranks.max(1) as f64
}

/// How much the tree order sends, where gradients are summed over replicas, against
/// a ring: the mean number of pieces for the reduce half, one for the other half.
#[must_use]
pub fn tree_cost(micro_batches: u32, ranks: u32) -> f64 {
    if ranks <= 1 {
        return 1.0;
    }
    let shares = Shares::even(micro_batches, ranks);
    let pieces: usize = (0..shares.ranks()).map(|rank| shares.pieces(rank).len()).sum();
    f64::midpoint(pieces as f64 / f64::from(ranks), 1.0)
}

/// The checkpoint interval in seconds that loses least (Young 1974), for saves
/// that cost `save` seconds of training and failures every `mtbf` seconds.
#[must_use]
pub fn best_interval(save: f64, mtbf: f64) -> f64 {
    (2.0 * save * mtbf).sqrt()
}

/// The share of the time that is left for training: failures every `mtbf` seconds
/// cost `recovery` and half of `redo` seconds each, and every `interval` seconds a
/// save costs `save`.
#[must_use]
pub fn goodput(mtbf: f64, recovery: f64, redo: f64, save: f64, interval: f64) -> f64 {
    let lost = (recovery + redo / 2.0) / mtbf + save / interval;
    (1.0 - lost).clamp(0.0, 1.0)
}

impl Run {
    /// Bytes of a checkpoint: weights and both moments in f32.
    #[must_use]
    pub fn checkpoint_bytes(&self) -> f64 {
        3.0 * F32 * self.shape.elements() as f64
    }

    /// Whether a lost rank's state is always held by another one, so that nothing
    /// is read from a checkpoint and at most one step is redone.
    #[must_use]
    pub fn survives_live(&self, mesh: Mesh) -> bool {
        mesh.replicas > 1
    }

    /// Passes of a pipeline in a step, a replica's ranks taking turns or not.
    #[must_use]
    pub fn turns(&self, mesh: Mesh) -> u32 {
        self.micro_batches.div_ceil(mesh.degree().max(1))
    }

    /// The share of the time in which ranks of a pipeline wait for each other.
    #[must_use]
    pub fn bubble(&self, mesh: Mesh) -> f64 {
        let chunks = if mesh.stages == 1 { 1 } else { self.chunks };
        self.schedule.timeline(mesh.stages, chunks, self.turns(mesh)).bubble()
    }

    /// Memory of the device that needs most.
    #[must_use]
    pub fn memory(&self, mesh: Mesh) -> Memory {
        let stages = (0..mesh.stages).map(|stage| self.memory_of(mesh, stage));
        stages.max_by(|a, b| a.total().total_cmp(&b.total())).unwrap_or_default()
    }

    fn memory_of(&self, mesh: Mesh, stage: u32) -> Memory {
        let units = self.units(mesh, stage);
        let all: f64 = units.iter().sum();
        let longest = units.iter().copied().fold(0.0, f64::max);
        let held = all / f64::from(mesh.shards);
        // A range of n leaves leaves at most 1 + log₂ n partial sums at once.
        let cuts = self.sharding.cuts_gradients();
        let leaves = if cuts { self.micro_batches / mesh.replicas } else { self.turns(mesh) };
        let sums = f64::from(leaves.max(1).ilog2() + 1);
        let gathered = match self.sharding {
            Sharding::Zero3 if self.reshards => {
                // The head stays from forward to backward.
                held + longest + units.last().copied().unwrap_or(0.0) - units_kept(mesh, longest)
            }
            _ => all,
        };
        let (leaf, partial) = match cuts {
            true => (2.0 * longest, held * sums),
            false => (all, all * sums),
        };
        Memory {
            weights: F32 * gathered.min(all),
            optimizer: 2.0 * F32 * held,
            gradients: F32 * (held + leaf + partial),
            activations: self.activations(mesh, stage),
        }
    }

    /// Elements of each unit of a stage.
    fn units(&self, mesh: Mesh, stage: u32) -> Vec<f64> {
        let Shape { dim, vocab_size, n_layers, .. } = self.shape;
        let (embedding, head) = (vocab_size * dim, vocab_size * dim + dim);
        let block = (self.shape.elements() - embedding - head) / n_layers.max(1);
        let mut units = Vec::new();
        for (part, parts, blocks) in self.parts(mesh, stage) {
            if part == 0 {
                units.push(embedding as f64);
            }
            units.extend(std::iter::repeat_n(block as f64, blocks as usize));
            if part + 1 == parts {
                units.push(head as f64);
            }
        }
        units
    }

    /// Parts of the model on a stage: which, of how many, and their blocks.
    fn parts(&self, mesh: Mesh, stage: u32) -> Vec<(u32, u32, u32)> {
        let chunks = if mesh.stages == 1 { 1 } else { self.chunks };
        let parts = mesh.stages * chunks;
        let split = split_layers(self.shape.n_layers as u32, parts, self.ends.0, self.ends.1);
        let part = |chunk| {
            let part = chunk * mesh.stages + stage;
            (part, parts, split[part as usize].len() as u32)
        };
        (0..chunks).map(part).collect()
    }

    fn activations(&self, mesh: Mesh, stage: u32) -> f64 {
        let tokens = f64::from(self.local_batch) * f64::from(self.seq_len);
        let Shape { dim, n_heads, n_kv_heads, vocab_size, .. } = self.shape;
        let (dim, groups) = (dim as f64, n_kv_heads as f64 / n_heads as f64);
        // Kept of a block: both norms' input and output, query and output of the
        // attention, key and value, and the gate, its silu, the other branch and
        // their product.
        let kept = 6.0 * dim + 2.0 * groups * dim + 4.0 * self.shape.hidden_dim() as f64;
        let each = f64::from(self.compute_bytes) * tokens;
        let parts = self.parts(mesh, stage);
        let blocks: u32 = parts.iter().map(|(.., blocks)| blocks).sum();
        let again = blocks.checked_div(self.recompute_every).unwrap_or(0);
        let flight = match mesh.stages {
            1 => 1,
            _ => self.schedule.timeline(mesh.stages, self.chunks, self.turns(mesh)).kept(stage),
        };
        let flight = f64::from(flight) / parts.len() as f64;
        let blocks = f64::from(blocks - again) * kept + f64::from(again) * dim;
        let working = if again > 0 { kept } else { 0.0 };
        let head = parts.iter().any(|(part, parts, _)| part + 1 == *parts);
        // Logits, their logarithms and their gradient, in f32.
        let logits = if head { 3.0 * F32 * tokens * vocab_size as f64 } else { 0.0 };
        each * (flight * blocks + working) + logits
    }

    /// Bytes that the rank sends most of which is asked most.
    #[must_use]
    pub fn traffic(&self, mesh: Mesh) -> Traffic {
        let stages = (0..mesh.stages).map(|stage| self.traffic_of(mesh, stage));
        stages.max_by(|a, b| a.total().total_cmp(&b.total())).unwrap_or_default()
    }

    fn traffic_of(&self, mesh: Mesh, stage: u32) -> Traffic {
        let all: f64 = F32 * self.units(mesh, stage).iter().sum::<f64>();
        let others = |ranks: u32| f64::from(ranks - 1) / f64::from(ranks);
        let turns = f64::from(self.turns(mesh));
        let (degree, shards, replicas) = (mesh.degree(), mesh.shards, mesh.replicas);
        let mut traffic = Traffic::default();
        match self.sharding {
            Sharding::Replicated => {
                let cost = 2.0 * tree_cost(self.micro_batches, degree);
                traffic.reduce = all * others(degree) * cost;
            }
            Sharding::Zero1 => {
                let pieces = 2.0 * tree_cost(self.micro_batches, degree) - 1.0;
                traffic.reduce = all * others(degree) * pieces;
                traffic.gather = all * others(degree);
            }
            Sharding::Zero2 | Sharding::Zero3 => {
                let gathers = if self.sharding == Sharding::Zero3 && self.reshards {
                    2.0 * turns
                } else {
                    1.0
                };
                traffic.gather = gathers * all * others(shards);
                traffic.reduce = turns * all * others(shards);
                let cost = 2.0 * tree_cost(self.micro_batches, replicas);
                traffic.replicas = all / f64::from(shards) * others(replicas) * cost;
            }
        }
        let hidden = f64::from(self.compute_bytes)
            * f64::from(self.local_batch)
            * f64::from(self.seq_len)
            * self.shape.dim as f64;
        for (part, parts, _) in self.parts(mesh, stage) {
            let boundaries = u32::from(part > 0) + u32::from(part + 1 < parts);
            traffic.pipeline += turns * f64::from(boundaries) * hidden;
        }
        traffic
    }
}

/// What the gathered unit shares with the own cut.
fn units_kept(mesh: Mesh, unit: f64) -> f64 {
    unit / f64::from(mesh.shards)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::find;

    fn run(sharding: Sharding) -> Run {
        Run {
            shape: find("llama3", "debugmodel").expect("known"),
            seq_len: 256,
            local_batch: 8,
            micro_batches: 16,
            compute_bytes: 4,
            sharding,
            schedule: Schedule::OneForwardOneBackward,
            chunks: 1,
            ends: (1, 1),
            recompute_every: 0,
            reshards: true,
        }
    }

    /// The sums that guides to these tools print.
    #[test]
    fn published_sums() {
        assert_eq!(accumulation_steps(512, 8, 2), 32);
        assert_eq!(effective_batch(16, 2, 4), 128);
        assert_eq!(state_bytes(1_000_000_000, 8), 2e9, "16 GB over 8 ranks");
        assert_eq!(state_bytes(7_000_000_000, 32), 3.5e9, "112 GB over 32 ranks");
    }

    #[test]
    fn the_tree_costs_what_a_ring_does_where_shares_are_aligned() {
        for ranks in [1, 2, 4, 8, 16] {
            assert_eq!(tree_cost(16, ranks), 1.0);
        }
        assert!((tree_cost(16, 3) - 5.0 / 3.0).abs() < 1e-12);
    }

    #[test]
    fn state_falls_with_the_ranks_and_a_unit_stays() {
        let mesh = |shards| Mesh { stages: 1, replicas: 1, shards };
        let of = |shards| run(Sharding::Zero3).memory(mesh(shards));
        assert_eq!(of(4).optimizer, of(1).optimizer / 4.0);
        assert!(of(8).weights < of(2).weights && of(8).gradients < of(2).gradients);
        let unit = 4.0 * 2048.0 * 256.0;
        assert!(of(1024).weights > unit && of(1024).weights < 3.0 * unit);
        let whole = 4.0 * run(Sharding::Zero3).shape.elements() as f64;
        assert_eq!(of(1).weights, whole);
        for sharding in [Sharding::Replicated, Sharding::Zero1, Sharding::Zero2] {
            assert_eq!(run(sharding).memory(mesh(1)).weights, whole);
        }
    }

    #[test]
    fn stages_share_the_model_and_pay_at_the_boundaries() {
        let run = run(Sharding::Replicated);
        let one = Mesh::SOLO;
        let two = Mesh { stages: 2, ..one };
        assert!(run.memory(two).weights < 0.6 * run.memory(one).weights);
        assert_eq!(run.traffic(one).total(), 0.0);
        // One boundary, 16 micro-batches, activations there and gradients back.
        assert_eq!(run.traffic(two).pipeline, 16.0 * 4.0 * 8.0 * 256.0 * 256.0);
        assert_eq!(run.bubble(one), 0.0);
        assert!((run.bubble(two) - 1.0 / 17.0).abs() < 1e-12);
    }

    #[test]
    fn recomputation_and_half_precision_save_activations() {
        let plain = run(Sharding::Replicated);
        let of = |run: &Run| run.memory(Mesh::SOLO).activations;
        assert!(of(&Run { recompute_every: 1, ..plain.clone() }) < 0.5 * of(&plain));
        assert!(of(&Run { compute_bytes: 2, ..plain.clone() }) < of(&plain));
    }

    #[test]
    fn goodput_falls_with_failures() {
        // A failure every hour that costs 2 s, and half a step of 10 s.
        assert!((goodput(3600.0, 2.0, 10.0, 0.0, 600.0) - (1.0 - 7.0 / 3600.0)).abs() < 1e-12);
        assert_eq!(goodput(1.0, 100.0, 0.0, 0.0, 1.0), 0.0);
        assert_eq!(best_interval(2.0, 3600.0), 120.0);
    }
}
