//! Losses, deaths and broken links (LS-2), and waiting below `min_nodes`.

use super::*;
use crate::trust::Trust;

#[test]
fn a_lost_worker_ends_its_generation_at_once() {
    let mut world = World::training(3, |_| ());
    world.kill_worker(2);
    check(&mut world, &["plan 2 [n1 n3] now (failure): lost worker 1002 of node n2 (killed)"]);
    let plan = world.state.plan.as_ref().expect("planned");
    assert_eq!(plan.reached, Step(10));
}

#[test]
fn ls_2_a_certain_death_needs_the_leader_or_two_others() {
    let dead = |world: &mut World, by: u64| world.report(by).dead_peers = vec![(id(3), 3)];
    let evicted = "evict n3: its process is gone: connection reset, reconnect refused";
    let planned = "plan 2 [n1 n2 n4] now (failure): lost node n3 (its process is gone: \
                   connection reset, reconnect refused)";
    let mut world = World::training(4, |_| ());
    dead(&mut world, 2);
    check(&mut world, &[]);
    dead(&mut world, 4);
    check(&mut world, &[evicted, planned]);
    let mut world = World::training(4, |_| ());
    dead(&mut world, 1);
    check(&mut world, &[evicted, planned]);
    // An accusation of an older process start says nothing of the newer one.
    let mut world = World::training(4, |_| ());
    world.report(1).dead_peers = vec![(id(3), 103)];
    check(&mut world, &[]);
}

#[test]
fn ls_2_silence_is_a_suspicion_that_only_a_punctual_leader_has() {
    let mut world = World::training(3, |_| ());
    let heard = world.view.now;
    let silent = |world: &mut World, millis: u64| {
        world.pass(millis);
        world.view.heard.get_mut(&id(2)).expect("heard").at = heard;
        world.view.heard.get_mut(&id(1)).expect("heard").at = heard;
    };
    silent(&mut world, 800);
    check(&mut world, &[]);
    silent(&mut world, 1);
    world.view.late = true;
    check(&mut world, &[]);
    world.view.late = false;
    check(
        &mut world,
        &[
            "evict n2: silent for 801 ms (limit 800 ms)",
            "plan 2 [n1 n3] now (failure): lost node n2 (silent for 801 ms (limit 800 ms))",
        ],
    );
}

#[test]
fn a_new_leader_keeps_whom_it_has_not_heard_until_it_suspects_them() {
    let mut world = World::training(4, |_| ());
    world.view.leader_since = world.view.now;
    world.view.heard.retain(|name, _| *name == id(1) || *name == id(4));
    world.report(1).dead_peers = vec![(id(2), 2)];
    check(
        &mut world,
        &[
            "evict n2: its process is gone: connection reset, reconnect refused",
            "plan 2 [n1 n3 n4] now (failure): lost node n2 (its process is gone: connection reset, \
         reconnect refused)",
        ],
    );
    world.pass(801);
    check(
        &mut world,
        &[
            "evict n3: silent for 801 ms (limit 800 ms)",
            "plan 3 [n1 n4] now (failure): lost node n3 (silent for 801 ms (limit 800 ms))",
        ],
    );
}

#[test]
fn an_agent_that_starts_again_takes_its_own_place() {
    let mut world = World::training(2, |_| ());
    world.start(2);
    check(
        &mut world,
        &["admit n2", "plan 2 [n1] now (failure): lost node n2 (its agent started again)"],
    );
    // Its first beat went with the old standing: it is not silent.
    world.view.evicted_at = world.view.now;
    world.view.heard.remove(&id(2));
    check(&mut world, &["... waiting for 1 of 1 ranks to stop"]);
}

#[test]
fn a_name_with_another_store_waits_until_its_owner_is_gone() {
    let mut world = World::training(2, |_| ());
    let owner = world.view.heard[&id(2)].clone();
    world.view.leader_since = world.view.now;
    world.start(2);
    world.report(2).store = StoreId(uuid::Uuid::from_u128(77));
    check(&mut world, &[]);
    world.view.heard.insert(id(2), owner);
    check(&mut world, &[]);
}

#[test]
fn live_1_below_min_nodes_the_job_waits_holding_its_state() {
    let mut world = World::training(2, |spec| spec.min_nodes = 2);
    world.step(20);
    world.kill_worker(2);
    let waiting = "... waiting for nodes: 1 of at least 2 are ready";
    check(&mut world, &["plan 2 [] now (failure): lost worker 1002 of node n2 (killed)", waiting]);
    check(&mut world, &[waiting]);
    world.pass(60_000);
    check(&mut world, &[waiting]);
    world.worker(2).state = WorkerState::Ready;
    world.view.quiet_since = world.view.now;
    check(&mut world, &["... waiting for starting nodes"]);
    world.pass(100);
    check(&mut world, &["plan 3 [n1 n2] now: 2 ranks are ready"]);
    world.seal_members(|number| match number {
        1 => Position::Prepared(Step(20)),
        _ => Position::Fresh,
    });
    check(
        &mut world,
        &["seal 3 live 20 from [0] to [1]: 1 of 2 ranks hold step 20; \
         a member of generation 1 stopped"],
    );
}

#[test]
fn a_broken_link_between_live_ranks_ends_the_generation() {
    let mut world = World::training(3, |_| ());
    world.view.accused_since = Some(world.view.now);
    world.worker(1).accuses = Some((Generation(1), 2));
    world.pass(299);
    check(&mut world, &[]);
    world.pass(1);
    let plan = "plan 2 [n1 n2 n3] now (failure): a tensor connection broke between live ranks";
    check(&mut world, &[plan]);
}

#[test]
fn ls_2_a_link_that_stays_broken_costs_the_worse_linked_end() {
    let broken = |accusations: &[(u64, u32)], failures: u32, expected: &str| {
        let mut world = World::training(4, |_| ());
        world.state.failures_in_a_row = failures;
        for (by, rank) in accusations {
            world.worker(*by).accuses = Some((Generation(1), *rank));
        }
        world.view.accused_since = Some(world.view.now);
        world.pass(300);
        let decision = world.decide();
        assert_eq!(lines(&decision)[0], expected);
    };
    let replan = "plan 2 [n1 n2 n3 n4] now (failure): a tensor connection broke between live ranks";
    let evict = |node: &str| {
        format!("evict {node}: its tensor connections broke in 2 generations in a row")
    };
    broken(&[(1, 1), (2, 0)], 1, replan);
    broken(&[(1, 1), (2, 0)], 2, &evict("n2"));
    broken(&[(4, 0), (3, 0)], 2, &evict("n1"));
    broken(&[(4, 2)], 2, &evict("n4"));
    // Nobody knows whose connection it was.
    broken(&[(4, u32::MAX)], 2, replan);
    broken(&[(4, 3)], 2, replan);
}

#[test]
fn ls_2_of_halves_without_a_link_one_goes_as_a_whole_and_stays_apart() {
    let mut world = World::training(4, |_| ());
    let halves = |world: &mut World| {
        let generation = world.state.generation();
        for (by, rank) in [(1, 2), (2, 2), (3, 0), (4, 0)] {
            world.worker(by).accuses = Some((generation, rank));
        }
        world.view.accused_since = Some(world.view.now);
        world.pass(300);
    };
    world.state.failures_in_a_row = 2;
    halves(&mut world);
    let cause = "its tensor connections broke in 2 generations in a row";
    let (third, fourth) = (format!("evict n3: {cause}"), format!("evict n4: {cause}"));
    check(&mut world, &[&third, &fourth]);
    world.view.trust = [3, 4].map(|node| (id(node), Trust::Apart)).into();
    for node in [3, 4] {
        world.join(node);
        world.report(node).boot += 100;
    }
    let plan = "plan 2 [n1 n2] now (failure): lost node n3 (its agent started again); node n4 \
                (its agent started again)";
    check(&mut world, &["admit n3", "admit n4", plan]);
    world.seal_members(|_| Position::Open(Step(10)));
    world.follow();
    world.step(20);
    world.pass(3_000);
    world.follow();
    assert_eq!(world.state.generation(), Generation(2), "they stand by");
    // Tried again, and nobody is patient with them.
    world.view.trust = [3, 4].map(|node| (id(node), Trust::OnProbation)).into();
    check(&mut world, &["plan 3 [n1 n2 n3 n4] at the boundary: n3, n4 joins"]);
    world.seal_members(|_| Position::Open(Step(20)));
    world.follow();
    halves(&mut world);
    check(
        &mut world,
        &[
            "evict n3: its tensor connections broke again",
            "evict n4: its tensor connections broke again",
        ],
    );
}

#[test]
fn who_does_not_stop_in_time_is_evicted() {
    let mut world = World::training(3, |_| ());
    world.kill_worker(3);
    world.follow();
    world.seal_members(|_| Position::Open(Step(10)));
    world.worker(2).sealed = None;
    world.pass(2_400);
    check(&mut world, &["... waiting for 1 of 2 ranks to stop"]);
    world.pass(1);
    world.view.late = true;
    check(&mut world, &["... waiting for 1 of 2 ranks to stop"]);
    world.view.late = false;
    check(&mut world, &["evict n2: its worker did not seal generation 2 within 2400 ms"]);
    let planned = "plan 3 [n1] now (failure): lost node n2 (its worker did not seal generation 2 \
                   within 2400 ms)";
    check(&mut world, &[planned]);
}

#[test]
fn a_plan_at_a_step_boundary_waits_for_the_step() {
    let mut world = World::training(2, |_| ());
    world.report(2).leaving = true;
    world.follow();
    world.pass(62_400);
    check(&mut world, &["... waiting for 1 of 1 ranks to stop"]);
    world.pass(1);
    check(&mut world, &["evict n1: its worker did not seal generation 2 within 62400 ms"]);
}

#[test]
fn obs_1_what_was_reached_is_what_lives_or_else_what_was_recorded() {
    let reached = |world: &mut World| {
        world.act();
        world.state.plan.as_ref().map(|plan| plan.reached)
    };
    let mut world = World::training(2, |_| ());
    // The job went back behind this record, and knows so.
    world.report(1).recorded = Step(60);
    world.step(12);
    world.kill_worker(2);
    assert_eq!(reached(&mut world), Some(Step(12)));
    let mut world = World::training(2, |_| ());
    world.step(12);
    (1..=2).for_each(|number| world.start(number));
    world.report(2).recorded = Step(12);
    assert_eq!(reached(&mut world), Some(Step(12)));
    assert_eq!(world.state.committed, Step(12));
}

#[test]
fn ls_2_who_comes_and_goes_stands_by_while_the_others_are_enough() {
    let held = Trust::HeldBack { stays: 2, pause: Duration::from_secs(2) };
    let mut world = World::training(2, |_| ());
    world.view.trust = [(id(3), held)].into();
    world.join(3);
    check(&mut world, &["admit n3", "hold n3 back after 2 stays"]);
    world.pass(5_000);
    check(&mut world, &[]);
    assert!(world.state.nodes[&id(3)].held_back);
    // Its time is over.
    world.view.trust.clear();
    check(&mut world, &["plan 2 [n1 n2 n3] at the boundary: n3 joins"]);
    assert!(!world.state.nodes[&id(3)].held_back);
    // Where the others are too few it is taken all the same.
    let mut needed = World::training(2, |spec| spec.min_nodes = 2);
    needed.kill_worker(2);
    needed.follow();
    needed.view.trust = [(id(3), held)].into();
    needed.join(3);
    needed.pass(5_000);
    let decided = needed.act();
    assert!(lines(&decided).iter().any(|line| line.contains("plan 3 [n1 n3]")), "{decided:?}");
}
