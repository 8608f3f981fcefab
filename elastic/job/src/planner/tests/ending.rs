//! Checkpoints and how a job ends (LG-2, ST-4).

use super::*;
use crate::report::SaveFailed;

fn save(world: &mut World, number: u64, generation: u64, step: u64, ranks: u32) {
    world.worker(number).saved.push(ShardSaved {
        era: Era(1),
        generation: Generation(generation),
        step: Step(step),
        rank: number as u32 - 1,
        ranks,
        stall_micros: 0,
        index: Vec::new(),
    });
}

fn finish(world: &mut World, number: u64, step: u64) {
    world.worker(number).finished = Some(FinalReport {
        step: Step(step),
        loss: 1.0,
        validation_loss: None,
        weights_sha256: if number == 1 { "abc".into() } else { String::new() },
        state_sha256: String::new(),
        loss_sha256: String::new(),
        sample: String::new(),
    });
}

#[test]
fn ckpt_1_a_checkpoint_needs_every_shard() {
    let mut world = World::training(2, |_| ());
    save(&mut world, 1, 1, 10, 2);
    check(&mut world, &[]);
    save(&mut world, 2, 1, 11, 2);
    check(&mut world, &[]);
    save(&mut world, 2, 1, 10, 2);
    check(&mut world, &["assemble 10 of generation 1 from 2 shards"]);
    world.checkpoint(10);
    check(&mut world, &[]);
    // Something newer is committed: an older save is of no use.
    save(&mut world, 1, 1, 8, 2);
    save(&mut world, 2, 1, 8, 2);
    check(&mut world, &[]);
}

#[test]
fn lg_2_a_save_of_an_older_generation_counts_when_its_step_is_official() {
    let check = |step: u64, expected: &[&str]| {
        let mut world = World::training(2, |_| ());
        save(&mut world, 1, 1, step, 2);
        world.worker(1).saved[0].ranks = 1;
        world.kill_worker(2);
        world.follow();
        world.seal_members(|_| Position::Open(Step(12)));
        let decision = world.act();
        assert_eq!(lines(&decision)[1..], *expected);
    };
    check(12, &["assemble 12 of generation 1 from 1 shards"]);
    check(13, &[]);
    let mut state = World::training(2, |_| ()).state;
    let commit = |generation, step| Command::CommitCheckpoint {
        era: Era(1),
        generation: Generation(generation),
        step: Step(step),
        stage: String::new(),
        files: Vec::new(),
        stall_micros: 0,
        at: Timestamp(0),
    };
    assert!(state.apply(commit(2, 10)).is_empty(), "generation 2 does not exist");
    assert!(!state.apply(commit(1, 10)).is_empty());
}

#[test]
fn old_checkpoints_are_retired() {
    let mut world = World::training(2, |_| ());
    [2, 4, 6, 8].iter().for_each(|step| world.checkpoint(*step));
    check(&mut world, &["retire 2", "retire 4"]);
    let mut world = World::training(2, |spec| spec.keep_latest_k = 0);
    [2, 4, 6, 8].iter().for_each(|step| world.checkpoint(*step));
    check(&mut world, &[]);
}

#[test]
fn st_4_the_end_needs_every_rank_and_the_last_checkpoint() {
    let mut world = World::training(2, |_| ());
    world.step(LAST);
    finish(&mut world, 1, LAST);
    check(&mut world, &[]);
    finish(&mut world, 2, LAST);
    check(&mut world, &[]);
    world.checkpoint(LAST);
    check(&mut world, &["finish at 100"]);
    assert!(matches!(world.state.phase, Phase::Finished(_)));
    check(&mut world, &[]);
}

#[test]
fn st_4_what_was_finished_before_a_restore_does_not_count() {
    let mut world = World::training(3, |spec| {
        spec.checkpoints = false;
        spec.sharding = Sharding::Zero1;
    });
    world.step(LAST);
    finish(&mut world, 1, LAST);
    finish(&mut world, 2, LAST);
    world.kill_worker(3);
    world.follow();
    world.seal_members(|_| Position::Fresh);
    world.follow();
    assert_eq!((world.state.committed, &world.state.phase), (Step(0), &Phase::Running));
    world.step(LAST);
    check(&mut world, &["finish at 100"]);
}

#[test]
fn a_crash_loop_ends_the_job() {
    let mut world = World::training(2, |spec| spec.max_failures = 2);
    for _ in 0..3 {
        world.kill_worker(2);
        world.follow();
        world.worker(2).state = WorkerState::Ready;
        world.view.quiet_since = world.view.now;
        world.seal_members(|_| Position::Open(Step(10)));
        world.follow();
        if world.members().len() == 1 {
            world.step(11);
            let resumed = world.decide();
            assert!(lines(&resumed)[0].starts_with("resume"), "{resumed:?}");
            world.worker(1).progress = None;
            world.kill_worker(1);
            world.follow();
        }
    }
    let why = "3 failures in a row without a committed step between them \
               (elastic.max_failures = 2)";
    assert_eq!(world.state.phase, Phase::Failed { why: why.into(), final_: true });
}

#[test]
fn preemptions_count_apart_from_failures_and_a_committed_step_forgives_them() {
    let mut world = World::training(4, |spec| (spec.max_failures, spec.max_preemptions) = (1, 2));
    for node in [4, 3] {
        world.report(node).leaving = true;
        world.act();
    }
    assert_eq!((world.state.failures_in_a_row, world.state.preemptions_in_a_row), (0, 2));
    let mut stormy = World { state: world.state.clone(), view: world.view.clone() };
    stormy.report(2).leaving = true;
    stormy.follow();
    let why = "3 nodes left without a committed step between them (elastic.max_preemptions = 2)";
    assert_eq!(stormy.state.phase, Phase::Failed { why: why.into(), final_: true });
    world.seal_members(|_| Position::Open(Step(10)));
    world.follow();
    world.step(11);
    world.act();
    assert_eq!(world.state.preemptions_in_a_row, 0);
}

#[test]
fn a_committed_step_forgives_the_failures_before_it() {
    let mut world = World::training(2, |spec| spec.max_failures = 2);
    world.state.failures_in_a_row = 2;
    world.kill_worker(2);
    let mut failed = World { state: world.state.clone(), view: world.view.clone() };
    failed.follow();
    assert!(matches!(failed.state.phase, Phase::Failed { .. }));
    world.state.failures_in_a_row = 1;
    world.follow();
    world.seal_members(|_| Position::Open(Step(10)));
    world.follow();
    assert_eq!(world.state.failures_in_a_row, 2);
    world.step(11);
    check(&mut world, &["resume 2 at 11"]);
    assert_eq!(world.state.failures_in_a_row, 0);
}

#[test]
fn a_worker_that_cannot_run_fails_the_job_before_training_and_its_node_after() {
    let mut world = World::empty(|_| ());
    world.join(1);
    world.worker(1).state = WorkerState::Fatal("no data".into());
    check(&mut world, &["admit n1", "fail: worker on node n1: no data"]);
    let mut world = World::training(2, |_| ());
    world.worker(2).state = WorkerState::Fatal("no memory".into());
    check(
        &mut world,
        &[
            "evict n2: its worker cannot run: no memory",
            "plan 2 [n1] now (failure): lost node n2 (its worker cannot run: no memory)",
        ],
    );
}

#[test]
fn a_stop_saves_and_stops_and_a_start_goes_on() {
    let mut world = World::training(2, |_| ());
    world.report(2).stop_job = true;
    check(
        &mut world,
        &["stop", "plan 2 [n1 n2] at the boundary to save: the job was told to stop"],
    );
    world.seal_members(|_| Position::Open(Step(11)));
    world.act();
    check(&mut world, &[]);
    // A rank lost meanwhile does not keep the others from saving.
    world.kill_worker(2);
    check(&mut world, &["plan 3 [n1] now to save (failure): lost worker 1002 of node n2 (killed)"]);
    world.seal_members(|_| Position::Open(Step(11)));
    world.act();
    save(&mut world, 1, 3, 11, 1);
    check(&mut world, &["assemble 11 of generation 3 from 1 shards"]);
    world.checkpoint(11);
    check(&mut world, &["stopped"]);
    assert_eq!(world.state.phase, Phase::Stopped);
    check(&mut world, &[]);
    // Node 2, which asked for the stop, is not gone yet.
    world.start(1);
    check(&mut world, &[]);
    world.report(2).stop_job = false;
    let restarted = world.act();
    assert_eq!(lines(&restarted)[..2], ["admit n1", "start"]);
}

#[test]
fn a_stop_with_nothing_to_save_stops_at_once() {
    let mut world = World::empty(|spec| spec.min_nodes = 2);
    world.join(1);
    world.follow();
    world.report(1).stop_job = true;
    check(&mut world, &["stop", "stopped"]);
    let mut world = World::training(2, |spec| spec.checkpoints = false);
    world.report(1).stop_job = true;
    world.follow();
    world.seal_members(|_| Position::Open(Step(11)));
    world.act();
    check(&mut world, &["stopped"]);
}

#[test]
fn below_min_nodes_a_stop_saves_what_is_left() {
    let mut world = World::training(2, |spec| spec.min_nodes = 2);
    world.kill_worker(2);
    world.follow();
    assert!(world.members().is_empty(), "one of two waits");
    world.report(1).stop_job = true;
    world.worker(1).sealed = Some(Sealed {
        generation: world.state.generation(),
        position: Position::Open(Step(10)),
        lineage: Some((Era(1), Generation(1))),
        verdict: None,
        shard: Shard::WHOLE,
    });
    check(&mut world, &["stop", "plan 3 [n1] now to save: the job was told to stop"]);
    world.seal_members(|_| Position::Open(Step(10)));
    world.follow();
    assert_eq!(world.state.seal.as_ref().map(|seal| seal.restore.step()), Some(Step(10)));
    save(&mut world, 1, 3, 10, 1);
    check(&mut world, &["assemble 10 of generation 3 from 1 shards"]);
    world.checkpoint(10);
    check(&mut world, &["stopped"]);
}

#[test]
fn below_min_nodes_a_stop_does_not_wait_for_what_nobody_holds() {
    let mut world = World::training(2, |spec| spec.min_nodes = 2);
    world.kill_worker(1);
    world.kill_worker(2);
    world.follow();
    for number in [1, 2] {
        world.worker(number).state = WorkerState::Ready;
    }
    world.report(1).stop_job = true;
    check(&mut world, &["stop", "stopped"]);
}

#[test]
fn the_last_nodes_that_leave_save_the_job() {
    let mut world = World::training(2, |_| ());
    world.report(1).leaving = true;
    world.report(2).leaving = true;
    check(
        &mut world,
        &[
            "leave n1",
            "leave n2",
            "stop",
            "plan 2 [n1 n2] at the boundary to save: the job was told to stop",
        ],
    );
    world.seal_members(|_| Position::Open(Step(11)));
    world.act();
    save(&mut world, 1, 2, 11, 2);
    save(&mut world, 2, 2, 11, 2);
    check(&mut world, &["assemble 11 of generation 2 from 2 shards"]);
    world.checkpoint(11);
    check(&mut world, &["stopped"]);
}

#[test]
fn who_leaves_after_another_saves_what_it_took_over() {
    let mut world = World::training(2, |_| ());
    world.report(1).leaving = true;
    check(&mut world, &["leave n1", "plan 2 [n2] at the boundary: n1 leaves"]);
    world.report(2).leaving = true;
    check(&mut world, &["leave n2", "stop", "... waiting for 1 of 1 ranks to stop"]);
    world.seal_members(|_| Position::Open(Step(11)));
    world.follow();
    world.step(12);
    world.follow();
    assert_eq!(world.state.plan.as_ref().map(|plan| plan.purpose), Some(Purpose::SaveAndStop));
    let generation = world.state.generation().0;
    world.seal_members(|_| Position::Open(Step(12)));
    world.follow();
    let ranks = world.members();
    for number in &ranks {
        save(&mut world, *number, generation, 12, ranks.len() as u32);
    }
    world.follow();
    world.checkpoint(12);
    world.follow();
    assert_eq!(world.state.phase, Phase::Stopped);
}

#[test]
fn a_node_that_arrives_keeps_the_job_going() {
    let mut world = World::training(1, |_| ());
    world.report(1).leaving = true;
    world.join(2);
    check(&mut world, &["leave n1", "admit n2", "plan 2 [n1 n2] at the boundary: n1 leaves"]);
    assert_eq!(world.state.phase, Phase::Running);
}

#[test]
fn lg_2_a_failed_save_is_discarded_when_nobody_writes_any_more() {
    let mut world = World::training(3, |_| ());
    let fail = |world: &mut World, number: u64, step: u64| {
        world.worker(number).save_failed = Some(SaveFailed {
            era: Era(1),
            generation: Generation(1),
            step: Step(step),
            rank: number as u32 - 1,
            ranks: 3,
            why: "disk full".into(),
        });
    };
    save(&mut world, 1, 1, 10, 3);
    fail(&mut world, 2, 10);
    check(&mut world, &[]);
    save(&mut world, 3, 1, 10, 3);
    check(&mut world, &["discard 10 of generation 1"]);
    // Of the last one all have to answer too before the job gives up.
    world.step(LAST);
    fail(&mut world, 1, LAST);
    fail(&mut world, 2, LAST);
    check(&mut world, &[]);
    save(&mut world, 3, 1, LAST, 3);
    check(
        &mut world,
        &[
            "fail: the last checkpoint, of step 100, was not saved: disk full",
            "discard 100 of generation 1",
        ],
    );
}
