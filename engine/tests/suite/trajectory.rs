//! The trajectory does not depend on placement (TRAJ-1), whatever happens on
//! the way (STEP-1, HEAL-1).

use crate::{
    loopback::{Loopback, mesh},
    support::{config, dataset, deadline, enter, step, token},
};
use std::time::{Duration, Instant};

use engine::{Config, Digests, Engine, Error, config::Sharding};
use job::{
    Step,
    plan::{Shard, Source},
    shares::Shares,
};
use transport::collective::{Communicator, Solo};

const STEPS: u64 = 8;

/// Digests, validation loss and all losses of a quiet run on `ranks` ranks.
fn quiet(config: &Config, ranks: usize) -> (Digests, f64, Vec<f32>) {
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

/// Two ranks train three steps; the mesh of a second generation has `ranks`
/// ranks, of which the old ones keep their state and the others are fresh.
fn resized(config: &Config, ranks: usize) -> Digests {
    let engines = mesh(token(1), 2, |comm| {
        let mut engine = enter(config, comm);
        engine.initialize();
        for _ in 0..3 {
            step(&mut engine, comm);
        }
        engine.prepare(comm, &|| false, deadline()).unwrap();
        std::sync::Mutex::new(Some(engine))
    });
    let digests = mesh(token(2), ranks, |comm| {
        let rank = comm.rank();
        let old = engines.get(rank).and_then(|engine| engine.lock().unwrap().take());
        let mut engine = old.unwrap_or_else(|| Engine::new(config.clone()).unwrap());
        let shares = Shares::even(config.micro_batches(), comm.size() as u32);
        engine.enter(comm.token(), rank, &shares).unwrap();
        assert_eq!(engine.position().is_some(), rank < 2);
        assert!(!engine.is_prepared(), "an old gradient is dropped (GN-3)");
        let sources = match config.sharding {
            Sharding::Replicated => vec![Source { rank: 1, shard: Shard::WHOLE }],
            Sharding::Zero1 => {
                (0..2).map(|index| Source { rank: index, shard: Shard { index, of: 2 } }).collect()
            }
        };
        let receivers: Vec<u32> = (2..ranks as u32).collect();
        engine.sync(comm, &sources, &receivers, deadline()).unwrap();
        while engine.position() != Some(Step(STEPS)) {
            step(&mut engine, comm);
        }
        engine.digests(comm, deadline()).unwrap()
    });
    assert!(digests.windows(2).all(|pair| pair[0] == pair[1]), "ranks disagree");
    digests[0]
}

#[test]
fn growing_live_changes_no_bit() {
    // HEAL-1
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let replicated = config(folder.path());
    let expected = quiet(&replicated, 1).0;
    let sharded = Config { sharding: Sharding::Zero1, ..replicated.clone() };
    assert_eq!(resized(&replicated, 2), expected);
    assert_eq!(resized(&replicated, 4), expected);
    assert_eq!(resized(&sharded, 2), expected);
    assert_eq!(resized(&sharded, 3), expected);
}

/// Two ranks at step 3. In the second generation, after `change`, they sync
/// from `sources`, and end where a quiet run ends.
#[track_caller]
fn check_sync(
    sharding: Sharding,
    sources: &[Source],
    receivers: &[u32],
    change: impl Fn(usize, &mut Engine) + Sync,
    place: impl Fn(usize) -> usize,
) {
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let config = Config { sharding, ..config(folder.path()) };
    let expected = quiet(&config, 1).0;
    let engines = mesh(token(1), 2, |comm| {
        let mut engine = enter(&config, comm);
        engine.initialize();
        for _ in 0..3 {
            step(&mut engine, comm);
        }
        change(comm.rank(), &mut engine);
        std::sync::Mutex::new(Some(engine))
    });
    let places = [place(0), place(1)];
    let digests = mesh(token(2), 2, |comm| {
        let old = places.iter().position(|&place| place == comm.rank()).unwrap();
        let mut engine = engines[old].lock().unwrap().take().unwrap();
        engine.enter(comm.token(), comm.rank(), &Shares::even(5, 2)).unwrap();
        engine.sync(comm, sources, receivers, deadline()).unwrap();
        while engine.position() != Some(Step(STEPS)) {
            step(&mut engine, comm);
        }
        engine.digests(comm, deadline()).unwrap()
    });
    assert_eq!(digests, [expected; 2]);
}

#[test]
fn ranks_that_changed_places_exchange_their_shards() {
    let source = |rank, index| Source { rank, shard: Shard { index, of: 2 } };
    let unchanged = |_: usize, _: &mut Engine| {};
    let swapped = [source(1, 0), source(0, 1)];
    check_sync(Sharding::Zero1, &swapped, &[], unchanged, |rank| 1 - rank);
    let in_place = [source(0, 0), source(1, 1)];
    check_sync(Sharding::Zero1, &in_place, &[], unchanged, |rank| rank);
    check_sync(Sharding::Zero1, &in_place, &[1], unchanged, |rank| rank);
}

#[test]
fn a_rank_that_fell_behind_receives_the_common_step() {
    // STEP-1
    let fall_behind = |rank: usize, engine: &mut Engine| {
        if rank == 1 {
            engine.initialize();
        }
    };
    let whole = [Source { rank: 0, shard: Shard::WHOLE }];
    check_sync(Sharding::Replicated, &whole, &[1], fall_behind, |rank| rank);
}

#[test]
fn shards_of_different_steps_are_no_state() {
    // STEP-1, HEAL-1
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let config = config(folder.path());
    let errors = mesh(token(1), 2, |comm| {
        let mut engine = enter(&config, comm);
        engine.initialize();
        if comm.rank() == 0 {
            engine.enter(token(0), 0, &Shares::even(5, 1)).unwrap();
            step(&mut engine, &mut Solo::new(token(0)));
            engine.enter(comm.token(), 0, &Shares::even(5, 2)).unwrap();
        }
        let sync = |engine: &mut Engine, comm: &mut Loopback, sources: &[Source]| {
            let deadline = Instant::now() + Duration::from_millis(500);
            engine.sync(comm, sources, &[7], deadline).map_err(|error| error.to_string())
        };
        let half = [Source { rank: 0, shard: Shard { index: 0, of: 2 } }];
        assert!(sync(&mut engine, comm, &half).unwrap_err().contains("1 of 2 shards"));
        assert!(sync(&mut engine, comm, &[]).is_err());
        sync(&mut engine, comm, &[Source { rank: 0, shard: Shard::WHOLE }])
    });
    assert!(errors[0].is_err(), "the donor waits for the rank that refused");
    let error = errors[1].as_ref().unwrap_err();
    assert!(error.contains("rank 0 is at Progress { step: Step(1)"), "{error}");
}

#[test]
fn a_step_is_whole_or_not_at_all() {
    // ST-1, ST-3
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let config = config(folder.path());
    let mut comm = Solo::new(token(1));
    let mut engine = enter(&config, &comm);

    let fresh = engine.prepare(&mut comm, &|| false, deadline());
    assert!(matches!(fresh, Err(Error::Fresh)), "HEAL-1: {fresh:?}");
    engine.initialize();
    let early = engine.tally(&[]).unwrap_err().to_string();
    assert_eq!(early, "tally needs the rank to be prepared at step 0");

    let polls = std::cell::Cell::new(0);
    let abort = || {
        polls.set(polls.get() + 1);
        polls.get() > 9
    };
    let aborted = engine.prepare(&mut comm, &abort, deadline()).unwrap_err();
    assert!(aborted.is_abort() && aborted.peer().is_none());
    assert_eq!((engine.position(), engine.is_prepared()), (Some(Step(0)), false));

    let first = engine.prepare(&mut comm, &|| false, deadline()).unwrap();
    let twice = engine.prepare(&mut comm, &|| false, deadline()).unwrap_err().to_string();
    assert_eq!(twice, "prepare needs the rank to be open at step 0");
    let verdict = engine.tally(std::slice::from_ref(&first)).unwrap();
    engine.discard();
    assert!(engine.apply(&verdict).is_err(), "nothing is prepared");
    let again = engine.prepare(&mut comm, &|| false, deadline()).unwrap();
    assert_eq!(again, first, "an attempt repeats its ballot (GN-5)");
    assert!(engine.tally(&[first.clone(), first]).is_err(), "a rank votes twice");
    assert!(engine.tally(&[vec![0; 7]]).is_err(), "not a ballot");
    assert!(engine.apply(&verdict[1..]).is_err() && engine.is_prepared());
    let report = engine.apply(&verdict).unwrap();
    assert_eq!((report.step, report.tokens, report.update_skipped), (Step(1), 320, false));
    let late = engine.prepare(&mut comm, &|| false, deadline()).map(|_| engine.apply(&verdict));
    let late = late.unwrap().unwrap_err().to_string();
    assert_eq!(late, "the verdict is on step 0, the prepared gradient is for step 1");
}

#[test]
fn a_rank_keeps_to_the_mesh_that_it_entered() {
    // GEN-1, DATA-2
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let config = config(folder.path());
    let mut engine = enter(&config, &Solo::new(token(2)));
    engine.initialize();
    let old = engine.prepare(&mut Solo::new(token(1)), &|| false, deadline());
    assert!(matches!(old, Err(Error::OtherMesh { .. })), "{old:?}");
    let other = engine.enter(token(3), 0, &Shares::even(4, 1)).unwrap_err().to_string();
    assert!(other.contains("5 micro-batches"), "{other}");
    assert!(engine.enter(token(3), 2, &Shares::even(5, 2)).is_err());
}

/// Why an engine does not come to train.
#[track_caller]
fn check_refused(change: impl FnOnce(&mut Config), expected: &str) {
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let mut config = config(folder.path());
    change(&mut config);
    let refused = Engine::new(config)
        .and_then(|mut engine| engine.enter(token(1), 0, &Shares::even(5, 1)))
        .unwrap_err()
        .to_string();
    assert!(refused.contains(expected), "{refused}");
}

#[test]
fn what_cannot_be_trained_is_refused_before_it_starts() {
    let huge = engine::model::registry::find("llama3", "405B").unwrap();
    check_refused(|config| config.model = huge, "needs at least 9289");
    check_refused(|config| config.model.vocab_size = 200, "a vocabulary of 256 tokens");
    check_refused(|config| config.training.seq_len = 30_000, "too few");
    check_refused(|config| config.dataset.push("nowhere"), "nowhere/train.tok");
    check_refused(|config| config.training.global_batch_size = 9, "global_batch_size = 9");
}

#[test]
fn what_is_not_finite_updates_nothing() {
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let mut config = config(folder.path());
    config.optimizer.lr = 1e30;
    config.training.max_norm = f64::INFINITY;
    let mut comm = Solo::new(token(1));
    let mut engine = enter(&config, &comm);
    engine.initialize();
    let reports: Vec<_> = (0..4).map(|_| step(&mut engine, &mut comm)).collect();
    let skipped: Vec<_> = reports.iter().map(|report| report.update_skipped).collect();
    assert_eq!(skipped, [false, true, true, true], "{reports:?}");
    let progress = engine.progress().unwrap();
    assert_eq!((progress.step, progress.updates, progress.tokens), (Step(4), 1, 4 * 320));
}

#[test]
fn generation_repeats_with_its_seed() {
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let config = config(folder.path());
    let mut engine = enter(&config, &Solo::new(token(1)));
    engine.initialize();
    let text = |seed| engine.generate(b"the king ", 40, 1.0, seed).unwrap();
    assert_eq!((text(1).len(), text(1)), (40, text(1)));
    assert_ne!(text(1), text(2));
    assert_eq!(engine.generate(b"", 3, 0.0, 1).unwrap(), engine.generate(b"", 3, 0.0, 2).unwrap());
}
