//! How the ranks of a generation are arranged: pipeline stages × replicas ×
//! shards. Rank = (stage · replicas + replica) · shards + shard: stages outermost,
//! as torchtitan and Megatron have it.
//!
//! Which dimension follows the live nodes is decided here. Data parallelism does,
//! first; only when not one pipeline of the wanted depth can be formed is the
//! model cut into fewer stages. No choice changes the arithmetic (TRAJ-1).

use serde::{Deserialize, Serialize};

use crate::{plan::Shard, spec::Sharding};

/// What is asked of the mesh; the rest follows from the number of ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Parallel {
    /// Pipeline stages (ranks of a pipeline); 0 counts as 1.
    pub stages: u32,
    /// Model chunks of each rank of a pipeline; 0 counts as 1.
    pub chunks: u32,
    /// Blocks of the model; 0 when nobody asked.
    pub layers: u32,
    /// Replicas of the sharded state; 0 derives them from `shards`.
    pub replicas: u32,
    /// Ranks over which state is sharded; 0 means all of a replica's share.
    pub shards: u32,
}

/// A mesh that so many ranks can form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mesh {
    /// Pipeline stages.
    pub stages: u32,
    /// Groups that each hold the whole state of a stage.
    pub replicas: u32,
    /// Ranks of such a group.
    pub shards: u32,
}

/// A rank's coordinates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Pipeline stage.
    pub stage: u32,
    /// Replica.
    pub replica: u32,
    /// Shard within the replica.
    pub shard: u32,
}

impl Parallel {
    /// Stages wanted, at least 1.
    #[must_use]
    pub fn stages(&self) -> u32 {
        self.stages.max(1)
    }

    /// Chunks of the model on each rank of a pipeline, at least 1.
    #[must_use]
    pub fn chunks(&self) -> u32 {
        self.chunks.max(1)
    }

    /// The best mesh of at most `ranks` ranks: as many pipelines of the wanted
    /// depth as there are ranks and micro-batches for, or one shallower pipeline.
    ///
    /// # Panics
    /// When `ranks` is zero.
    #[must_use]
    pub fn fit(&self, sharding: Sharding, ranks: u32, micro_batches: Option<u32>) -> Mesh {
        assert!(ranks > 0, "a mesh has at least one rank");
        let stages = self.stages().min(ranks);
        let most = micro_batches.unwrap_or(u32::MAX).max(1);
        self.over(sharding, stages, (ranks / stages).min(most))
    }

    /// The mesh of `stages` stages and at most `degree` data-parallel ranks: fewer
    /// when a wanted group size does not divide it.
    #[must_use]
    pub fn over(&self, sharding: Sharding, stages: u32, degree: u32) -> Mesh {
        let grouped = sharding.cuts_gradients();
        let (replicas, shards) = match (grouped, self.shards, self.replicas) {
            (false, ..) if sharding.is_sharded() => (1, degree),
            (false, ..) => (degree, 1),
            (true, 0, 0 | 1) => (1, degree),
            (true, 0, replicas) => match degree / replicas {
                0 => (degree, 1),
                shards => (replicas, shards),
            },
            (true, shards, _) => match degree / shards {
                0 => (1, degree),
                replicas => (replicas, shards),
            },
        };
        Mesh { stages, replicas, shards }
    }

    /// What is impossible about it, in one line with the nearest possible value.
    ///
    /// # Errors
    /// That line.
    pub fn check(&self, sharding: Sharding) -> Result<(), String> {
        let (stages, chunks, layers) = (self.stages(), self.chunks(), self.layers);
        let parts = u64::from(stages) * u64::from(chunks);
        if parts > u64::from(layers.max(1)) && parts > 1 {
            return Err(format!(
                "{stages} pipeline stages of {chunks} chunks need {parts} blocks, the model has \
                 {layers}: at most {} stages are possible",
                (layers / chunks).max(1)
            ));
        }
        if !sharding.cuts_gradients() && (self.shards > 1 || self.replicas > 1) {
            return Err(
                "replicated groups of shards need parallelism.sharding = zero2 or zero3, which \
                 cut gradients within a group"
                    .into(),
            );
        }
        Ok(())
    }
}

impl Mesh {
    /// The mesh of one rank.
    pub const SOLO: Self = Self { stages: 1, replicas: 1, shards: 1 };

    /// Number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.stages * self.degree()
    }

    /// Data-parallel degree: pipelines that compute micro-batches of their own.
    #[must_use]
    pub fn degree(&self) -> u32 {
        self.replicas * self.shards
    }

    /// The coordinates of a rank.
    #[must_use]
    pub fn place(&self, rank: u32) -> Place {
        let (stage, rest) = (rank / self.degree(), rank % self.degree());
        Place { stage, replica: rest / self.shards, shard: rest % self.shards }
    }

    /// The part of the state that a rank holds.
    #[must_use]
    pub fn shard(&self, rank: u32) -> Shard {
        let Place { stage, shard, .. } = self.place(rank);
        let Self { stages, shards, .. } = *self;
        Shard { index: stage * shards + shard, of: stages * shards, stages }
    }

    /// The rank at given coordinates.
    #[must_use]
    pub fn rank(&self, place: Place) -> u32 {
        (place.stage * self.replicas + place.replica) * self.shards + place.shard
    }
}

impl std::fmt::Display for Mesh {
    /// As `pp 2 × dp_replicate 1 × dp_shard 4`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { stages, replicas, shards } = self;
        write!(f, "pp {stages} × dp_replicate {replicas} × dp_shard {shards}")
    }
}

/// The blocks of each of `parts` consecutive parts of a model, as even as
/// possible when the embedding counts as `first` blocks and the head as `last`
/// (torchtitan's `…_less_layers`). Parts that are left over get one more, from
/// the first on. Every part has a block while there are enough.
///
/// # Panics
/// When `parts` is zero.
#[must_use]
pub fn split_layers(layers: u32, parts: u32, first: u32, last: u32) -> Vec<std::ops::Range<u32>> {
    assert!(parts > 0, "a model has at least one part");
    let weight = layers + first + last;
    let (base, more) = (weight / parts, weight % parts);
    let mut sizes: Vec<u32> = (0..parts).map(|part| base + u32::from(part < more)).collect();
    let end = sizes.len() - 1;
    sizes[0] = sizes[0].saturating_sub(first);
    sizes[end] = sizes[end].saturating_sub(last);
    // Where a weight took a part's last block, the largest part gives one.
    while layers >= parts
        && let Some(empty) = sizes.iter().position(|size| *size == 0)
        && let Some(largest) = (0..sizes.len()).max_by_key(|part| sizes[*part])
    {
        sizes[empty] += 1;
        sizes[largest] -= 1;
    }
    // What the subtraction could not take from an empty end goes from the largest.
    while sizes.iter().sum::<u32>() > layers
        && let Some(largest) = (0..sizes.len()).max_by_key(|part| sizes[*part])
    {
        sizes[largest] -= 1;
    }
    let mut at = 0;
    let range = |size: u32| {
        at += size;
        at - size..at
    };
    sizes.into_iter().map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(parallel: Parallel, sharding: Sharding, ranks: u32, most: u32, expected: [u32; 3]) {
        let Mesh { stages, replicas, shards } = parallel.fit(sharding, ranks, Some(most));
        assert_eq!([stages, replicas, shards], expected, "{ranks} ranks, {most} micro-batches");
    }

    #[test]
    fn data_parallelism_gives_way_first_and_pipelines_are_split_again_last() {
        let pp = |stages| Parallel { stages, layers: 12, ..Default::default() };
        let none = Sharding::Replicated;
        check(pp(0), none, 5, 100, [1, 5, 1]);
        check(pp(1), none, 5, 3, [1, 3, 1]);
        check(pp(2), none, 8, 100, [2, 4, 1]);
        check(pp(2), none, 7, 100, [2, 3, 1]);
        check(pp(4), none, 7, 100, [4, 1, 1]);
        check(pp(4), none, 3, 100, [3, 1, 1]);
        check(pp(4), none, 1, 100, [1, 1, 1]);
        check(pp(2), Sharding::Zero3, 8, 3, [2, 1, 3]);
    }

    #[test]
    fn hybrid_groups_keep_their_size_while_one_can_be_formed() {
        let shard = |shards| Parallel { shards, ..Default::default() };
        let replicate = |replicas| Parallel { replicas, ..Default::default() };
        check(shard(2), Sharding::Zero3, 8, 100, [1, 4, 2]);
        check(shard(2), Sharding::Zero3, 7, 100, [1, 3, 2]);
        check(shard(4), Sharding::Zero3, 3, 100, [1, 1, 3]);
        check(replicate(2), Sharding::Zero3, 8, 100, [1, 2, 4]);
        check(replicate(2), Sharding::Zero3, 5, 100, [1, 2, 2]);
        check(replicate(4), Sharding::Zero3, 3, 100, [1, 3, 1]);
        check(shard(2), Sharding::Replicated, 8, 100, [1, 8, 1]);
    }

    #[test]
    fn a_rank_has_one_place() {
        let mesh = Mesh { stages: 3, replicas: 2, shards: 4 };
        assert_eq!(mesh.ranks(), 24);
        for rank in 0..24 {
            assert_eq!(mesh.rank(mesh.place(rank)), rank);
        }
        assert_eq!(mesh.place(13), Place { stage: 1, replica: 1, shard: 1 });
        assert_eq!(mesh.to_string(), "pp 3 × dp_replicate 2 × dp_shard 4");
    }

    /// The world of the published sums: DP = world / (TP · PP), here without TP.
    #[test]
    fn data_parallel_degree_is_the_world_over_the_stages() {
        for (world, stages) in [(8, 2), (8, 1), (64, 8), (4, 4)] {
            let parallel = Parallel { stages, layers: 96, ..Default::default() };
            let mesh = parallel.fit(Sharding::Replicated, world, None);
            assert_eq!(mesh.degree(), world / stages);
        }
    }

    #[test]
    fn layers_are_split_as_evenly_as_weights_allow() {
        #[track_caller]
        fn check(layers: u32, parts: u32, first: u32, last: u32, expected: &[u32]) {
            let split = split_layers(layers, parts, first, last);
            assert_eq!(split.iter().map(|part| part.len() as u32).collect::<Vec<_>>(), expected);
            assert_eq!(split.first().map(|part| part.start), Some(0));
            assert_eq!(split.last().map(|part| part.end), Some(layers));
            assert!(split.windows(2).all(|pair| pair[0].end == pair[1].start), "{split:?}");
        }
        // 12 layers over 4 stages are 0–2, 3–5, 6–8, 9–11.
        check(12, 4, 0, 0, &[3, 3, 3, 3]);
        check(12, 4, 1, 1, &[3, 4, 3, 2]);
        check(6, 2, 1, 1, &[3, 3]);
        check(6, 4, 1, 1, &[1, 2, 2, 1]);
        check(2, 2, 1, 1, &[1, 1]);
        check(4, 4, 1, 1, &[1, 1, 1, 1]);
        check(3, 1, 1, 1, &[3]);
        for layers in 1..40 {
            for parts in 1..=layers {
                let split = split_layers(layers, parts, 1, 1);
                assert!(split.iter().all(|part| !part.is_empty()), "{layers} over {parts}");
                assert_eq!(split.last().map(|part| part.end), Some(layers));
            }
        }
    }

    #[test]
    fn the_impossible_is_refused_with_the_nearest_possible() {
        let too_deep = Parallel { stages: 4, chunks: 2, layers: 6, ..Default::default() };
        assert_eq!(
            too_deep.check(Sharding::Replicated).unwrap_err(),
            "4 pipeline stages of 2 chunks need 8 blocks, the model has 6: at most 3 stages are \
             possible"
        );
        let groups = Parallel { shards: 2, ..Default::default() };
        assert!(groups.check(Sharding::Replicated).is_err());
        assert_eq!(groups.check(Sharding::Zero3), Ok(()));
    }
}
