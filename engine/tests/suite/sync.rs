//! The live recovery tier: who lacks state gets that of the common step
//! (STEP-1, HEAL-1), and the trajectory goes on (TRAJ-1).

use std::time::{Duration, Instant};

use engine::{
    Config, Digests, Engine,
    config::{Parallel, Parallelism, Sharding},
};
use job::{
    Step,
    plan::{Shard, Source},
    shares::Shares,
};
use transport::collective::{Communicator, Solo};

use crate::{
    loopback::{Loopback, mesh},
    support::{config, dataset, deadline, enter, place, step, token},
    trajectory::{STEPS, quiet},
};

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
        engine.enter(comm.token(), rank, 1, &shares).unwrap();
        assert_eq!(engine.position().is_some(), rank < 2);
        assert!(!engine.is_prepared(), "an old gradient is dropped (GN-3)");
        let sources = match config.sharding {
            Sharding::Replicated => vec![Source { rank: 1, shard: Shard::WHOLE }],
            _ => (0..2)
                .map(|index| Source { rank: index, shard: Shard { index, of: 2, stages: 1 } })
                .collect(),
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

/// `from` ranks train three steps. Then so many go on as `to` says (the others
/// are gone or new), with state from whoever holds it.
#[track_caller]
fn migrated(config: &Config, from: usize, survivors: &[usize], to: usize) -> Digests {
    let engines = mesh(token(1), from, |comm| {
        let mut engine = enter(config, comm);
        engine.initialize();
        for _ in 0..3 {
            step(&mut engine, comm);
        }
        engine.prepare(comm, &|| false, deadline()).unwrap();
        std::sync::Mutex::new(Some(engine))
    });
    let held: Vec<Shard> = survivors
        .iter()
        .map(|old| engines[*old].lock().unwrap().as_ref().unwrap().shard().unwrap())
        .collect();
    let source = |index| {
        let shard = Shard { index, ..held[0] };
        let rank = held.iter().position(|other| *other == shard).expect("a complete state") as u32;
        Source { rank, shard }
    };
    let sources: Vec<Source> = (0..held[0].of).map(source).collect();
    let receivers: Vec<u32> = (survivors.len() as u32..to as u32).collect();
    let digests = mesh(token(2), to, |comm| {
        let old = survivors.get(comm.rank());
        let old = old.and_then(|old| engines[*old].lock().unwrap().take());
        let mut engine = old.unwrap_or_else(|| Engine::new(config.clone()).unwrap());
        place(&mut engine, comm);
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
fn every_sharding_and_pipeline_moves_live_to_another_mesh() {
    // HEAL-1, TRAJ-1
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let mut plain = config(folder.path());
    plain.model.n_layers = 4;
    let expected = quiet(&plain, 1).0;
    let with = |sharding, stages, shards| {
        let mesh = Parallel { stages, layers: 4, shards, ..Parallel::default() };
        let parallelism = Parallelism { mesh, ..Parallelism::default() };
        Config { sharding, parallelism, ..plain.clone() }
    };
    let check = |config: &Config, from, survivors: &[usize], to| {
        let digests = migrated(config, from, survivors, to);
        assert_eq!(digests, expected, "{:?} {from} {survivors:?} {to}", config.sharding);
    };
    let all = |count: usize| (0..count).collect::<Vec<_>>();
    for sharding in [Sharding::Zero2, Sharding::Zero3] {
        check(&with(sharding, 1, 0), 2, &all(2), 3);
        check(&with(sharding, 1, 0), 3, &[2, 0, 1], 3);
        // Two replicas of two shards: what is lost is held by the other replica.
        check(&with(sharding, 1, 2), 4, &[0, 3], 2);
        check(&with(sharding, 2, 0), 4, &all(4), 2 + 4);
    }
    let pipeline = with(Sharding::Replicated, 2, 0);
    check(&pipeline, 2, &all(2), 4);
    check(&pipeline, 4, &[1, 2], 2);
    // No pipeline can be formed: one rank goes on with both stages.
    check(&with(Sharding::Replicated, 4, 0), 4, &all(4), 8);
    let deep = with(Sharding::Zero1, 4, 0);
    check(&deep, 4, &[3, 2, 1, 0], 4);
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
        engine.enter(comm.token(), comm.rank(), 1, &Shares::even(5, 2)).unwrap();
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
    let source = |rank, index| Source { rank, shard: Shard { index, of: 2, stages: 1 } };
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
            engine.enter(token(0), 0, 1, &Shares::even(5, 1)).unwrap();
            step(&mut engine, &mut Solo::new(token(0)));
            engine.enter(comm.token(), 0, 1, &Shares::even(5, 2)).unwrap();
        }
        let sync = |engine: &mut Engine, comm: &mut Loopback, sources: &[Source]| {
            let deadline = Instant::now() + Duration::from_millis(500);
            engine.sync(comm, sources, &[7], deadline).map_err(|error| error.to_string())
        };
        let half = [Source { rank: 0, shard: Shard { index: 0, of: 2, stages: 1 } }];
        assert!(sync(&mut engine, comm, &half).unwrap_err().contains("1 of 2 shards"));
        assert!(sync(&mut engine, comm, &[]).is_err());
        sync(&mut engine, comm, &[Source { rank: 0, shard: Shard::WHOLE }])
    });
    for (me, other, step) in [(0, 1, 0), (1, 0, 1)] {
        let error = errors[me].as_ref().unwrap_err();
        let expected = format!("rank {other} is at Progress {{ step: Step({step})");
        assert!(error.contains(&expected), "{error}");
    }
}

#[test]
fn state_that_arrives_damaged_is_nobodys() {
    // HEAL-1
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let config = config(folder.path());
    // Progress, weights, first moments, second moments, digest.
    for broadcast in 1..5 {
        let outcomes = mesh(token(1), 2, |comm| {
            let mut engine = enter(&config, comm);
            if comm.rank() == 0 {
                engine.initialize();
            } else {
                comm.flip = Some(broadcast);
            }
            let sources = [Source { rank: 0, shard: Shard::WHOLE }];
            let synced = engine.sync(comm, &sources, &[1], deadline());
            (synced.map_err(|error| error.peer()), engine.position())
        });
        assert_eq!(outcomes, [(Ok(()), Some(Step(0))), (Err(Some(0)), None)], "{broadcast}");
    }
}
