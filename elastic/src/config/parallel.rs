//! From the keys of the section `parallelism` to what is asked of the mesh.

use job::{
    mesh::Parallel,
    model::{self, Shape},
    pipeline::Schedule,
    spec::Sharding,
};

use super::{
    Config, Field,
    schema::{PipelineSchedule, ShardingMode},
};

impl Config {
    /// The model's shape.
    ///
    /// # Errors
    /// One line that names what is unknown.
    pub fn shape(&self) -> Result<Shape, String> {
        let (name, flavor) = (self.model.name.text(), self.model.flavor.text());
        model::find(&name, &flavor).map_err(|error| error.to_string())
    }

    /// How training state is spread.
    #[must_use]
    pub fn sharding(&self) -> Sharding {
        match self.parallelism.sharding {
            ShardingMode::None => Sharding::Replicated,
            ShardingMode::Zero1 => Sharding::Zero1,
            ShardingMode::Zero2 => Sharding::Zero2,
            ShardingMode::Zero3 | ShardingMode::Hybrid => Sharding::Zero3,
        }
    }

    /// The order of a pipeline's passes.
    #[must_use]
    pub fn schedule(&self) -> Schedule {
        match self.parallelism.pipeline_parallel_schedule {
            PipelineSchedule::GPipe => Schedule::GPipe,
            PipelineSchedule::OneForwardOneBackward => Schedule::OneForwardOneBackward,
            PipelineSchedule::Interleaved => Schedule::Interleaved,
            PipelineSchedule::ZeroBubble => Schedule::ZeroBubble,
        }
    }

    /// What is asked of the mesh. Without a degree of its own, a hybrid group is
    /// as large as a node has workers.
    #[must_use]
    pub fn parallel(&self) -> Parallel {
        let keys = &self.parallelism;
        let degree = |key: i64| u32::try_from(key).unwrap_or(0);
        let stages = keys.pipeline_parallel_degree;
        let layers = self.shape().map_or(0, |shape| shape.n_layers as u32);
        let schedule = self.schedule();
        let chunks = match (schedule, keys.pipeline_parallel_layers_per_stage) {
            (Schedule::Interleaved, Some(each)) if stages > 1 => layers.div_ceil(each * stages),
            _ if stages > 1 => schedule.chunks(),
            _ => 1,
        };
        let mut shards = degree(keys.data_parallel_shard_degree);
        let mut replicas = degree(keys.data_parallel_replicate_degree);
        // A degree of 1 asks for nothing where nothing is cut within groups.
        if !self.sharding().cuts_gradients() && shards <= 1 && replicas <= 1 {
            (replicas, shards) = (0, 0);
        } else if keys.sharding == ShardingMode::Hybrid && shards == 0 && replicas <= 1 {
            shards = self.elastic.nproc_per_node;
        }
        if replicas == 1 {
            replicas = 0;
        }
        Parallel { stages, chunks, layers, replicas, shards }
    }
}
