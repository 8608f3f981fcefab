//! The trajectory does not depend on placement (TRAJ-1).

use engine::{Config, Digests, config::Sharding};
use job::Step;

use crate::{
    loopback::mesh,
    support::{config, dataset, deadline, enter, step, token},
};

pub(crate) const STEPS: u64 = 8;

/// Digests, validation loss and all losses of a quiet run on `ranks` ranks.
pub(crate) fn quiet(config: &Config, ranks: usize) -> (Digests, f64, Vec<f32>) {
    let runs = mesh(token(1), ranks, |comm| {
        let mut engine = enter(config, comm);
        engine.initialize();
        let losses = (0..STEPS).map(|_| step(&mut engine, comm).loss).collect::<Vec<_>>();
        let digests = engine.digests(comm, deadline()).unwrap();
        let validation = engine.evaluate(comm, None, &|| false, deadline()).unwrap();
        assert_eq!(engine.position(), Some(Step(STEPS)));
        (digests, validation, losses)
    });
    assert!(runs.windows(2).all(|pair| pair[0] == pair[1]), "ranks disagree: {runs:?}");
    runs.into_iter().next().unwrap()
}

#[test]
fn every_degree_and_sharding_gives_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let replicated = config(folder.path());
    let expected = quiet(&replicated, 1);
    let losses = &expected.2;
    assert!(losses[0] > 5.0 && losses[7] < losses[0] - 0.5, "it learns: {losses:?}");
    let sharded = Config { sharding: Sharding::Zero1, ..replicated.clone() };
    for ranks in [2, 3, 4, 7] {
        assert_eq!(quiet(&replicated, ranks), expected, "replicated over {ranks}");
    }
    for ranks in [1, 2, 3, 4, 7] {
        assert_eq!(quiet(&sharded, ranks), expected, "ZeRO-1 over {ranks}");
    }
}

#[test]
fn recomputation_changes_no_bit() {
    use engine::config::ActivationCheckpoint;
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let keeping = config(folder.path());
    let mut recomputing = keeping.clone();
    recomputing.training.activation_checkpoint = ActivationCheckpoint::Full;
    assert_eq!(quiet(&keeping, 1), quiet(&recomputing, 2));
}

#[test]
fn half_precision_has_the_same_bits_at_every_degree() {
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let exact = config(folder.path());
    let mut half = exact.clone();
    half.training.dtype = engine::config::Dtype::Bfloat16;
    let expected = quiet(&half, 1);
    assert_eq!(quiet(&half, 3), expected);
    assert_ne!(quiet(&exact, 1), expected);
}
