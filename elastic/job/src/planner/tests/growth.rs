//! Founding, joining, leaving, and the choice of who trains (GN-1, GR).

use super::*;
use crate::{incident::Incident, plan::Plan};

#[test]
fn founding_waits_for_enough_nodes_and_for_those_that_start() {
    let mut world = World::empty(|spec| spec.min_nodes = 2);
    check(&mut world, &["... waiting for nodes: 0 of at least 2 are ready"]);
    world.join(1);
    check(&mut world, &["admit n1", "... waiting for nodes: 1 of at least 2 are ready"]);
    world.join(2);
    world.start(3);
    check(&mut world, &["admit n2", "admit n3", "... waiting for starting nodes"]);
    world.pass(2_399);
    check(&mut world, &["... waiting for starting nodes"]);
    world.pass(1);
    check(&mut world, &["plan 1 [n1 n2] now: founded with 2 ranks"]);
    check(&mut world, &["... waiting for 2 of 2 ranks to stop"]);
    world.seal_members(|_| Position::Fresh);
    check(&mut world, &["seal 1 initial 0: nothing was ever trained; no generation came before"]);
    check(&mut world, &[]);
}

#[test]
fn founding_begins_soon_when_everybody_is_ready() {
    let mut world = World::empty(|_| ());
    (1..=3).for_each(|number| world.join(number));
    check(&mut world, &["admit n1", "admit n2", "admit n3", "... waiting for starting nodes"]);
    world.pass(100);
    check(&mut world, &["plan 1 [n1 n2 n3] now: founded with 3 ranks"]);
}

#[test]
fn data_2_the_first_degree_freezes_the_global_batch() {
    let mut world = World::training(2, |spec| spec.micro_batches = None);
    assert_eq!(world.state.micro_batches, Some(2));
    world.join(3);
    world.follow();
    world.pass(5_000);
    check(&mut world, &[]);
    world.kill_worker(1);
    world.follow();
    let shares = world.state.plan.as_ref().and_then(|plan| plan.shares.clone()).expect("shares");
    assert_eq!((world.members(), shares.total()), (vec![2, 3], 2));
    // Another batch is no fact, whoever proposes it.
    let plan = world.state.plan.clone().expect("a plan");
    let other = |total| {
        let shares = Some(crate::shares::Shares::even(total, 2));
        Command::Plan(Plan { generation: plan.generation.next(), shares, ..plan.clone() })
    };
    assert!(world.state.clone().apply(other(3)).is_empty());
    assert!(!world.state.clone().apply(other(2)).is_empty());
}

#[test]
fn data_2_whoever_goes_on_from_a_checkpoint_keeps_its_batch() {
    let mut world = World::training(2, |spec| spec.micro_batches = None);
    world.checkpoint(10);
    let checkpoints = world.state.checkpoints.clone();
    let again = |checkpoints| {
        let spec = world.state.spec.clone();
        JobState::found(spec, Era(2), world.view.clock).going_on(checkpoints)
    };
    assert_eq!(again(checkpoints.clone()).micro_batches, Some(2));
    assert_eq!(again(checkpoints.clone()).checkpoints, checkpoints);
    assert_eq!(again(BTreeMap::new()).micro_batches, None, "the first plan freezes it");
}

#[test]
fn a_joiner_is_taken_at_a_step_boundary_once_the_others_are_there() {
    let mut world = World::training(2, |_| ());
    world.join(3);
    world.start(4);
    check(&mut world, &["admit n3", "admit n4", "... waiting for starting nodes"]);
    world.worker(4).state = WorkerState::Ready;
    world.view.quiet_since = world.view.now;
    world.pass(100);
    check(&mut world, &["plan 2 [n1 n2 n3 n4] at the boundary: n3, n4 joins"]);
    world.seal_members(|number| match number {
        1 | 2 => Position::Open(Step(11)),
        _ => Position::Fresh,
    });
    check(
        &mut world,
        &["seal 2 live 11 from [0] to [2, 3] with a verdict: 2 of 4 ranks hold step 11; \
         a member of generation 1 stopped"],
    );
    // Nothing moves before the new mesh has trained.
    world.join(5);
    world.pass(5_000);
    check(&mut world, &["admit n5"]);
    world.step(12);
    check(&mut world, &["resume 2 at 12", "plan 3 [n1 n2 n3 n4 n5] at the boundary: n5 joins"]);
}

#[test]
fn a_leaving_node_goes_at_a_step_boundary_and_then_has_left() {
    let mut world = World::training(3, |_| ());
    world.report(2).leaving = true;
    check(&mut world, &["leave n2", "plan 2 [n1 n3] at the boundary: n2 leaves"]);
    check(&mut world, &["... waiting for 2 of 2 ranks to stop"]);
    world.seal_members(|_| Position::Open(Step(11)));
    let sealed = "seal 2 live 11 from [0] to [] with a verdict: 2 of 2 ranks hold step 11; \
                  a member of generation 1 stopped";
    check(&mut world, &[sealed]);
    check(&mut world, &["evict n2: it left"]);
    check(&mut world, &[]);
}

#[test]
fn heal_1_the_last_holder_of_the_state_hands_it_over_before_it_leaves() {
    let mut world = World::training(1, |spec| spec.max_nodes = 1);
    world.join(2);
    world.follow();
    world.pass(5_000);
    check(&mut world, &[]);
    world.report(1).leaving = true;
    check(&mut world, &["leave n1", "plan 2 [n1 n2] at the boundary: n1 leaves"]);
    world.seal_members(|number| match number {
        1 => Position::Open(Step(11)),
        _ => Position::Fresh,
    });
    check(
        &mut world,
        &["seal 2 live 11 from [0] to [1] with a verdict: 1 of 2 ranks hold step 11; \
         a member of generation 1 stopped"],
    );
    check(&mut world, &[]);
    world.step(12);
    check(&mut world, &["resume 2 at 12", "plan 3 [n2] at the boundary: n1 leaves"]);
    world.seal_members(|_| Position::Open(Step(13)));
    world.act();
    check(&mut world, &["evict n1: it left"]);
    assert_eq!(world.state.committed, Step(13));
}

#[test]
fn those_that_train_keep_their_places() {
    let mut world = World::empty(|spec| {
        spec.max_nodes = 2;
        spec.micro_batches = Some(2);
    });
    (2..=3).for_each(|number| world.join(number));
    world.pass(100);
    world.follow();
    world.seal_members(|_| Position::Fresh);
    world.follow();
    world.step(1);
    world.follow();
    // A node whose name comes first stands by.
    world.join(1);
    world.follow();
    world.pass(5_000);
    check(&mut world, &[]);
    world.kill_worker(3);
    check(&mut world, &["plan 2 [n1 n2] now (failure): lost worker 1003 of node n3 (killed)"]);
}

#[test]
fn nodes_with_several_slots_count_once() {
    let mut world = World::empty(|spec| spec.min_nodes = 2);
    world.join(1);
    let mut second = world.worker(1).clone();
    (second.worker, second.slot) = (WorkerId(2), 1);
    world.report(1).slots = 2;
    world.report(1).workers.push(second);
    world.pass(5_000);
    check(&mut world, &["admit n1", "... waiting for nodes: 1 of at least 2 are ready"]);
    world.join(2);
    world.pass(5_000);
    check(&mut world, &["admit n2", "plan 1 [n1 n1 n2] now: founded with 3 ranks"]);
}

#[test]
fn a_lost_pipeline_leaves_every_stage_with_somebody() {
    // Two pipelines of two stages: n1 and n2 hold the first stage, n3 and n4 the second.
    let mut world = World::training(4, |spec| {
        spec.parallel = crate::mesh::Parallel { stages: 2, layers: 4, ..Default::default() };
    });
    let shares = |world: &World| {
        let plan = world.state.plan.as_ref().expect("a plan");
        (plan.stages(), plan.shares.as_ref().map_or(0, crate::shares::Shares::ranks))
    };
    assert_eq!((world.members(), shares(&world)), (vec![1, 2, 3, 4], (2, 2)));
    world.kill_worker(4);
    world.follow();
    assert_eq!((world.members(), shares(&world)), (vec![1, 3], (2, 1)), "n2 stands by");
    let reason = world.state.plan.as_ref().map(|plan| plan.reason.clone()).unwrap_or_default();
    assert!(reason.ends_with("; pp 2 × dp_replicate 1 × dp_shard 1"), "{reason}");
}

#[test]
fn a_pipeline_that_cannot_be_formed_is_split_again() {
    let mut world = World::training(3, |spec| {
        spec.parallel = crate::mesh::Parallel { stages: 3, layers: 4, ..Default::default() };
    });
    world.kill_worker(2);
    world.follow();
    let plan = world.state.plan.as_ref().expect("a plan");
    assert_eq!((world.members(), plan.stages()), (vec![1, 3], 2));
}

/// GR: a failure every 4 s and pauses of 1.5 s; a third rank is worth 1/3.
#[test]
fn growth_has_to_be_worth_its_pause() {
    let mut world = World::training(2, |_| ());
    world.kill_worker(2);
    world.follow();
    let one = world.state.incidents().last().expect("a loss").as_ref().clone();
    let incident = |failure: bool, second: u64, pause: u64| {
        let (noticed, resumed) = (Timestamp(second * 1_000_000), second * 1_000_000 + pause);
        let resumed = Some(Timestamp(resumed));
        std::sync::Arc::new(Incident { failure, noticed, resumed, ..one.clone() })
    };
    let past = [
        incident(true, 1, 500_000),
        incident(false, 3, 1_500_000),
        incident(true, 5, 500_000),
        incident(true, 9, 500_000),
    ];
    let worth = |past: &[_], second: u64, more| {
        crate::planner::growth::worth(past, Timestamp(second * 1_000_000), 2, more)
    };
    assert!(!worth(&past, 10, 1), "1.5 s is more than 1/3 of 4 s");
    assert!(worth(&past, 10, 2), "and less than 1/2 of it");
    assert!(worth(&past, 14, 1), "the failures have become rarer");
    assert!(worth(&past[..2], 10, 1), "one failure says nothing");
    assert!(worth(&[], 10, 1), "nothing is known yet");
}
