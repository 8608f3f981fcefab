//! Where a generation goes on from (GN-3), and what shows that the one before is
//! over (GN-4).

use super::*;
use Position::{Fresh, Open, Prepared};

const STOPPED: &str = "a member of generation 1 stopped";

/// Three members trained in generation 1; one more died. They stand as given.
#[track_caller]
fn stand(positions: [Position; 3], expected: &str) {
    let mut world = World::training(4, |_| ());
    world.kill_worker(4);
    world.follow();
    world.seal_members(|number| positions[number as usize - 1]);
    let decision = world.act();
    assert_eq!(lines(&decision), [format!("seal 2 {expected}; {STOPPED}")]);
}

#[test]
fn step_1_all_go_on_from_the_newest_step_that_anybody_applied() {
    let (open, prepared) = (|step| Open(Step(step)), |step| Prepared(Step(step)));
    stand([open(12); 3], "live 12 from [0] to [] with a verdict: 3 of 3 ranks hold step 12");
    stand(
        [prepared(11), open(12), prepared(11)],
        "live 12 from [0] to [] with a verdict: 3 of 3 ranks hold step 12",
    );
    // Nobody applied: the gradients are dropped.
    stand([prepared(11); 3], "live 11 from [0] to []: 3 of 3 ranks hold step 11");
    stand(
        [open(11), prepared(11), open(11)],
        "live 11 from [0] to [] with a verdict: 3 of 3 ranks hold step 11",
    );
    stand(
        [Fresh, open(12), Fresh],
        "live 12 from [1] to [0, 2] with a verdict: 1 of 3 ranks hold step 12",
    );
    // A rank without the gradient of the step receives it.
    stand(
        [open(11), open(12), open(12)],
        "live 12 from [1] to [0] with a verdict: 2 of 3 ranks hold step 12",
    );
    stand(
        [prepared(10), open(12), open(12)],
        "live 12 from [1] to [0] with a verdict: 2 of 3 ranks hold step 12",
    );
}

#[test]
fn heal_1_fresh_ranks_never_donate() {
    let only = "neither memory nor a checkpoint holds a later state";
    stand([Fresh; 3], &format!("initial 0: {only}"));
}

#[test]
fn heal_1_only_states_on_the_official_history_donate() {
    let check = |lineage: (u32, u64), step: u64, expected: &str| {
        let mut world = World::training(4, |_| ());
        // Generation 2 went on from step 12, and now ends as well.
        world.kill_worker(4);
        world.follow();
        world.seal_members(|_| Open(Step(12)));
        world.follow();
        world.step(13);
        world.follow();
        world.kill_worker(3);
        world.follow();
        world.seal_members(|_| Open(Step(12)));
        let lineage = Some((Era(lineage.0), Generation(lineage.1)));
        let stray = world.worker(2).sealed.clone().expect("sealed");
        world.answer(2, Sealed { position: Open(Step(step)), lineage, ..stray });
        let line = lines(&world.act())[0].clone();
        assert!(line.starts_with(expected), "{line}");
    };
    check((1, 2), 13, "seal 3 live 13 from [1] to [0]");
    check((1, 1), 12, "seal 3 live 12 from [0] to [] ");
    // Applied in generation 1 after generation 2 had gone on from step 12.
    check((1, 1), 13, "seal 3 live 12 from [0] to [1]");
    check((1, 1), 14, "seal 3 live 12 from [0] to [1]");
    // Of another era, of a generation that was never sealed.
    check((0, 2), 13, "seal 3 live 12 from [0] to [1]");
    check((1, 3), 13, "seal 3 live 12 from [0] to [1]");
}

#[test]
fn gn_3_a_gradient_is_applied_only_if_its_generation_committed_the_step() {
    let mut world = World::training(4, |_| ());
    world.kill_worker(4);
    world.follow();
    world.seal_members(|_| Open(Step(12)));
    world.follow();
    world.kill_worker(3);
    world.follow();
    // Generation 2 committed step 13; this rank prepared it in generation 1.
    world.seal_members(|_| Open(Step(13)));
    let stray = world.worker(2).sealed.clone().expect("sealed");
    let lineage = Some((Era(1), Generation(1)));
    world.answer(2, Sealed { position: Prepared(Step(12)), lineage, ..stray });
    let line = lines(&world.act())[0].clone();
    assert!(line.starts_with("seal 3 live 13 from [0] to [1] with a verdict"), "{line}");
}

/// Two members hold shards; the world has checkpoints of steps 5 and 10.
fn sharded(shards: [(Position, u32, u32); 2]) -> World {
    let mut world = World::training(3, |spec| spec.sharding = Sharding::Zero1);
    world.checkpoint(5);
    world.checkpoint(10);
    world.kill_worker(3);
    world.follow();
    world.seal_members(|_| Fresh);
    for (number, (position, index, of)) in (1..).zip(shards) {
        world.answer(
            number,
            Sealed {
                generation: Generation(2),
                position,
                lineage: Some((Era(1), Generation(1))),
                verdict: matches!(position, Open(_)).then(|| vec![7]),
                shard: Shard { index, of, stages: 1 },
            },
        );
    }
    world
}

#[test]
fn a_live_restore_needs_every_shard_of_one_layout() {
    let check = |shards, expected: &str| {
        let line = lines(&sharded(shards).act())[0].clone();
        assert!(line.starts_with(expected), "{line}");
    };
    let (open, prepared) = (Open(Step(12)), Prepared(Step(11)));
    check([(open, 0, 2), (open, 1, 2)], "seal 2 live 12 from [0, 1] to [] with a verdict");
    check([(open, 1, 2), (prepared, 0, 2)], "seal 2 live 12 from [1, 0] to [] with a verdict");
    check([(prepared, 0, 2), (prepared, 1, 2)], "seal 2 live 11 from [0, 1] to []:");
    check([(open, 0, 3), (open, 1, 3)], "verify 10");
    check([(open, 0, 2), (open, 0, 2)], "verify 10");
    check([(open, 1, 3), (open, 0, 1)], "seal 2 live 12 from [1] to []");
    check([(open, 0, 2), (Open(Step(11)), 1, 2)], "verify 10");
    // The newest step is incomplete, an older one is not.
    check([(open, 0, 2), (Open(Step(11)), 0, 1)], "seal 2 live 11 from [1] to [0]");
    // A checkpoint is newer.
    check([(Open(Step(9)), 0, 2), (Open(Step(9)), 1, 2)], "verify 10");
}

#[test]
fn ckpt_1_a_checkpoint_is_verified_a_bad_one_distrusted_and_an_older_one_used() {
    let lost = (Open(Step(12)), 0, 2);
    let mut world = sharded([lost, lost]);
    check(&mut world, &["verify 10", "... verifying the checkpoint of step 10"]);
    world.view.verified.insert(Step(10), Err("its file is torn".into()));
    check(&mut world, &["distrust 10: its file is torn"]);
    check(&mut world, &["verify 5", "... verifying the checkpoint of step 5"]);
    world.view.verified.insert(Step(5), Ok(()));
    let mut bad = sharded([lost, lost]);
    check(
        &mut world,
        &[&format!(
            "seal 2 checkpoint 5: the ranks' memory does not hold a complete newer state; {STOPPED}"
        )],
    );
    for step in [5, 10] {
        bad.view.verified.insert(Step(step), Err("gone".into()));
    }
    check(&mut bad, &["distrust 10: gone"]);
    check(&mut bad, &["distrust 5: gone"]);
    check(
        &mut bad,
        &[&format!(
            "seal 2 initial 0: neither memory nor a checkpoint holds a later state; {STOPPED}"
        )],
    );
}

#[test]
fn ckpt_1_a_checkpoint_that_cannot_be_loaded_any_more_is_chosen_again() {
    let lost = (Open(Step(12)), 0, 2);
    let mut world = sharded([lost, lost]);
    world.view.verified.insert(Step(10), Ok(()));
    world.act();
    world.worker(2).unloadable = Some((Generation(1), "of an earlier generation".into()));
    check(&mut world, &[]);
    world.worker(2).unloadable = Some((Generation(2), "shard torn".into()));
    check(
        &mut world,
        &[
            "plan 3 [n1 n2] now (failure): node n2 could not load the checkpoint of step 10: shard torn",
        ],
    );
}

/// Both members of generation 1 are gone; a fresh node alone is to go on.
fn orphaned(gone: impl FnOnce(&mut World)) -> World {
    let mut world = World::training(2, |_| ());
    world.join(3);
    world.follow();
    world.view.me = id(3);
    gone(&mut world);
    world.follow();
    assert_eq!(world.members(), [3]);
    world.seal_members(|_| Fresh);
    world
}

#[test]
fn gn_4_without_a_member_of_the_generation_before_its_leases_are_waited_out() {
    let waiting = "... waiting for the leases of the generation before to end";
    let mut world = orphaned(|world| {
        world.report(3).dead_peers = vec![(id(1), 1), (id(2), 2)];
    });
    check(&mut world, &[waiting]);
    world.pass(700);
    check(&mut world, &[waiting]);
    world.pass(1);
    check(
        &mut world,
        &["seal 2 initial 0: neither memory nor a checkpoint holds a later state; \
         all leases of generation 1 ended"],
    );
    // A leader that has just begun knows of no lease that the old one gave.
    let mut world = orphaned(|world| {
        world.report(3).dead_peers = vec![(id(1), 1), (id(2), 2)];
    });
    world.pass(600);
    world.view.leader_since = world.view.now;
    world.pass(200);
    check(&mut world, &[waiting]);
}

#[test]
fn gn_4_a_reaped_member_is_proof() {
    let reap = |tell: fn(&mut World), expected: &str| {
        let mut world = orphaned(|world| {
            world.report(3).dead_peers = vec![(id(2), 2)];
            world.kill_worker(1);
        });
        tell(&mut world);
        let line = lines(&world.act())[0].clone();
        assert!(line.ends_with(expected), "{line}");
    };
    let waiting = "waiting for the leases of the generation before to end";
    let reaped = "node n1 reaped its worker 1";
    reap(|_| (), reaped);
    // The agent forgot it, and has a younger one.
    reap(|world| drop(world.report(1).workers.remove(0)), reaped);
    // Another process start knows nothing of it.
    reap(|world| world.report(1).incarnation = Some(Incarnation(99)), waiting);
    // A report from before the worker existed.
    reap(|world| world.report(1).workers.clear(), waiting);
    // It hangs but exists.
    reap(|world| world.report(1).workers[0].state = WorkerState::Ready, waiting);
}
