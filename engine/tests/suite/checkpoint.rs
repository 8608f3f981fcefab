//! Saving, resharding and resuming (CKPT-1, CKPT-2), and what a checkpoint of
//! something else is refused with.

use std::path::Path;

use crate::{
    loopback::mesh,
    support::{config, dataset, deadline, enter, step, token},
};
use engine::{
    Config, Digests, Engine,
    config::{Parallel, Parallelism, Sharding},
    digest::LossChain,
    model::Shape,
};
use job::{Step, shares::Shares};
use transport::collective::{Communicator, Solo};

/// Trains `steps` steps on `ranks` ranks, saves a checkpoint, and returns its digests.
fn save(config: &Config, ranks: usize, steps: usize, stage: &Path) -> Digests {
    let saved = mesh(token(1), ranks, |comm| {
        let mut engine = enter(config, comm);
        engine.initialize();
        for _ in 0..steps {
            step(&mut engine, comm);
        }
        let snapshot = engine.snapshot(None).unwrap();
        // What happens after the copy is not in the checkpoint.
        let digests = engine.digests(comm, deadline()).unwrap();
        step(&mut engine, comm);
        (snapshot.write(stage).unwrap(), digests)
    });
    let shards: Vec<_> = saved.iter().map(|(shard, _)| shard.clone()).collect();
    dcp::write_metadata(stage, &shards).unwrap();
    saved[0].1
}

/// The digests of what `ranks` ranks load.
fn load(config: &Config, ranks: usize, folder: &Path) -> (Step, Digests) {
    let loaded = mesh(token(2), ranks, |comm| {
        let mut engine = enter(config, comm);
        let step = engine.load(folder).unwrap();
        (step, engine.digests(comm, deadline()).unwrap())
    });
    assert!(loaded.windows(2).all(|pair| pair[0] == pair[1]), "ranks disagree");
    loaded[0]
}

#[test]
fn every_mesh_reads_what_any_mesh_saved() {
    // CKPT-2
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let replicated = config(folder.path());
    let sharded = Config { sharding: Sharding::Zero1, ..replicated.clone() };
    let mesh = Parallel { stages: 2, layers: 2, ..Parallel::default() };
    let full = Config {
        sharding: Sharding::Zero3,
        parallelism: Parallelism { mesh, ..Parallelism::default() },
        ..replicated.clone()
    };
    let all = [&replicated, &sharded, &full];
    let expected = save(&replicated, 1, 3, &folder.path().join("first"));
    for (saver, ranks) in [(&replicated, 3), (&sharded, 2), (&sharded, 4), (&full, 4)] {
        let stage = folder.path().join(format!("{:?}-{ranks}", saver.sharding));
        assert_eq!(save(saver, ranks, 3, &stage), expected);
        dcp::Checkpoint::open(&stage).unwrap().verify().unwrap();
        for loader in all {
            for ranks in [1, 2, 4] {
                assert_eq!(load(loader, ranks, &stage), (Step(3), expected));
            }
        }
    }
}

#[test]
fn a_resumed_run_has_the_bits_of_one_that_never_stopped() {
    // TRAJ-1
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let config = config(folder.path());
    let stage = folder.path().join("stage");
    save(&config, 2, 4, &stage);
    let whole = save(&config, 1, 7, &folder.path().join("whole"));
    let resumed = mesh(token(2), 3, |comm| {
        let mut engine = enter(&config, comm);
        assert_eq!(engine.load(&stage).unwrap(), Step(4));
        for _ in 0..3 {
            step(&mut engine, comm);
        }
        engine.digests(comm, deadline()).unwrap()
    });
    assert_eq!(resumed, [whole; 3]);
}

#[test]
fn a_snapshots_memory_is_used_again() {
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let config = config(folder.path());
    let mut comm = Solo::new(token(1));
    let mut engine = enter(&config, &comm);
    assert!(engine.snapshot(None).is_err(), "HEAL-1: nothing to save");
    engine.initialize();
    let first = engine.snapshot(None).unwrap();
    step(&mut engine, &mut comm);
    let second = engine.snapshot(Some(first)).unwrap();
    assert_eq!((second.step(), second.rank()), (Step(1), 0));
    let stage = folder.path().join("stage");
    let write = std::thread::spawn(move || second.write(&stage).map(|index| (stage, index)));
    let (stage, index) = write.join().unwrap().unwrap();
    dcp::write_metadata(&stage, &[index]).unwrap();
    let mut other = Engine::new(config).unwrap();
    assert_eq!(other.load(&stage).unwrap(), Step(1));
    other.enter(comm.token(), 0, 1, &Shares::even(5, 1)).unwrap();
    let digests = |engine: &mut Engine, comm: &mut dyn Communicator| {
        engine.digests(comm, deadline()).unwrap()
    };
    assert_eq!(digests(&mut other, &mut comm), digests(&mut engine, &mut comm));
}

#[test]
fn a_checkpoint_of_torchtitan_is_resumed() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("dcp/tests/golden/titan_v022");
    let mut config = config(Path::new("unused"));
    config.model = Shape {
        dim: 8,
        n_heads: 2,
        n_kv_heads: 1,
        vocab_size: 16,
        multiple_of: 12,
        ffn_dim_multiplier: Some(0.5),
        ..config.model
    };
    let mut engine = Engine::new(config).unwrap();
    assert_eq!(engine.load(&golden).unwrap(), Step(2));
    let progress = engine.progress().unwrap();
    assert_eq!((progress.updates, progress.tokens), (2, 20));
    assert_eq!(progress.loss_chain, LossChain::default(), "torchtitan keeps none");
    assert!(engine.logits(&[1, 2, 3]).unwrap().iter().all(|logit| logit.is_finite()));
}

/// Loads the checkpoint of the test model into another configuration.
#[track_caller]
fn check(change: impl FnOnce(&mut Config), expected: &str) {
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let mut config = config(folder.path());
    let stage = folder.path().join("stage");
    save(&config, 1, 0, &stage);
    change(&mut config);
    let mut engine = enter(&config, &Solo::new(token(1)));
    engine.initialize();
    let error = engine.load(&stage).unwrap_err().to_string();
    assert!(error.starts_with("checkpoint ") && error.ends_with(expected), "{error}");
    assert_eq!(engine.position(), Some(Step(0)), "the state is untouched");
}

#[test]
fn another_models_checkpoint_is_refused_by_name() {
    check(
        |config| config.model.vocab_size = 300,
        "tok_embeddings.weight is float32 [256, 32], the model needs float32 [300, 32]",
    );
    check(|config| config.model.n_layers = 3, "has no tensor layers.2.attention.wq.weight");
    check(
        |config| config.model.n_layers = 1,
        "has layers.1.attention.wk.weight, which the model does not have",
    );
}

#[test]
fn a_damaged_checkpoint_leaves_no_half_state() {
    // CKPT-1, HEAL-1
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let config = config(folder.path());
    let stage = folder.path().join("stage");
    save(&config, 2, 1, &stage);
    let file = stage.join("__1_0.distcp");
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    let mut engine = enter(&config, &Solo::new(token(1)));
    let error = engine.load(&stage).unwrap_err().to_string();
    assert!(error.contains("__1_0.distcp"), "{error}");
    assert_eq!(engine.position(), None);
    assert!(engine.load(&folder.path().join("nothing")).is_err());
}
