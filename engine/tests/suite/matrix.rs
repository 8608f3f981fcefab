//! The equivalence matrix (TRAJ-1): every sharding × pipeline × schedule × kept
//! or recomputed activations ends with the bits of one process. A part of it runs
//! always, the whole with
//!
//! ```console
//! $ ELASTIC_MATRIX=whole cargo test --release -p engine --test suite matrix
//! ```

use engine::{
    Config,
    config::{
        ActivationCheckpoint, Dtype, Parallel, Parallelism, PipelineSchedule, Reshard, Sharding,
    },
};

use crate::{
    support::{config, dataset},
    trajectory::quiet,
};

const SCHEDULES: [PipelineSchedule; 4] = [
    PipelineSchedule::OneForwardOneBackward,
    PipelineSchedule::GPipe,
    PipelineSchedule::Interleaved,
    PipelineSchedule::ZeroBubble,
];

/// One cell: a sharding with (replicas) × (shards), stages, schedule and what is
/// recomputed.
#[derive(Clone, Copy, Debug)]
struct Cell {
    sharding: Sharding,
    replicas: u32,
    degree: u32,
    stages: u32,
    schedule: PipelineSchedule,
    recompute: ActivationCheckpoint,
}

impl Cell {
    fn config(self, plain: &Config) -> Config {
        let Self { sharding, replicas, stages, schedule, .. } = self;
        let chunks = if stages > 1 { schedule.chunks() } else { 1 };
        let mesh = Parallel { stages, chunks, layers: 4, replicas, ..Parallel::default() };
        let mut config = plain.clone();
        config.sharding = sharding;
        config.parallelism = Parallelism { mesh, schedule, ..Parallelism::default() };
        config.training.activation_checkpoint = self.recompute;
        config
    }

    fn ranks(self) -> usize {
        (self.stages * self.degree) as usize
    }
}

fn cells() -> Vec<Cell> {
    let kinds = [
        (Sharding::Replicated, 0),
        (Sharding::Zero1, 0),
        (Sharding::Zero2, 0),
        (Sharding::Zero3, 0),
        (Sharding::Zero3, 2),
    ];
    let recomputes = [
        ActivationCheckpoint::None,
        ActivationCheckpoint::Selective(2),
        ActivationCheckpoint::Full,
    ];
    let mut cells = Vec::new();
    for (sharding, replicas) in kinds {
        for degree in [1, 2, 3, 4] {
            for stages in [1, 2, 4] {
                for schedule in SCHEDULES {
                    for recompute in recomputes {
                        let parts = stages * if stages > 1 { schedule.chunks() } else { 1 };
                        let even = replicas == 0 || degree % replicas == 0;
                        let said = stages == 1 && schedule != SCHEDULES[0];
                        if parts <= 4 && even && !said {
                            cells.push(Cell {
                                sharding,
                                replicas,
                                degree,
                                stages,
                                schedule,
                                recompute,
                            });
                        }
                    }
                }
            }
        }
    }
    cells
}

#[test]
fn every_mesh_gives_the_bits_of_one_process() {
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let mut plain = config(folder.path());
    plain.model.n_layers = 4;
    let expected = quiet(&plain, 1);
    let whole = std::env::var("ELASTIC_MATRIX").is_ok_and(|which| which == "whole");
    // A stride that shares no factor with the sizes meets every value of each.
    let every = if whole { 1 } else { 11 };
    let mut compared = 0;
    for cell in cells().into_iter().step_by(every) {
        assert_eq!(quiet(&cell.config(&plain), cell.ranks()), expected, "{cell:?}");
        compared += 1;
    }
    println!("{compared} of {} meshes have the bits of one process", cells().len());
    assert!(compared >= 15);
}

#[test]
fn weights_that_stay_and_half_precision_change_nothing_between_meshes() {
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let mut plain = config(folder.path());
    plain.model.n_layers = 4;
    plain.training.dtype = Dtype::Bfloat16;
    let expected = quiet(&plain, 1);
    for reshard in [Reshard::Default, Reshard::Always, Reshard::Never] {
        for stages in [1, 2] {
            let cell = Cell {
                sharding: Sharding::Zero3,
                replicas: 0,
                degree: 2,
                stages,
                schedule: SCHEDULES[0],
                recompute: ActivationCheckpoint::None,
            };
            let mut config = cell.config(&plain);
            config.parallelism.reshard_after_forward = reshard;
            assert_eq!(quiet(&config, cell.ranks()), expected, "{reshard:?} {stages}");
        }
    }
}
