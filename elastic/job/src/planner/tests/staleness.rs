//! Commands that come late, twice, or from a leader that is none any more, and
//! reports of process starts that are gone (ID-2, GEN-1).

use super::*;
use crate::plan::{Plan, Seal};

/// A command of generation 1's time reaches a state that has gone on.
#[test]
fn gen_1_commands_of_a_deposed_leader_change_nothing() {
    let mut world = World::training(3, |_| ());
    world.checkpoint(10);
    let plan = world.state.plan.clone().expect("planned");
    let seal = world.state.seal.clone().expect("sealed");
    let resume = Command::Resume {
        generation: Generation(1),
        step: Step(1),
        timing: ResumeTiming::default(),
        at: world.view.clock,
    };
    let incarnation = world.state.nodes[&id(3)].incarnation;
    let (node, at) = (id(3), world.view.clock);
    let evict = Command::Evict { node: node.clone(), incarnation, cause: "late".into(), at };
    let leave = Command::Leave { node, incarnation, at };
    world.start(3);
    world.follow();
    world.seal_members(|_| Position::Open(Step(12)));
    world.follow();
    let skipped =
        Plan { generation: Generation(4), members: Vec::new(), shares: None, ..plan.clone() };
    let gone = Plan { generation: Generation(3), ..plan.clone() };
    let era = Plan {
        era: Era(0),
        generation: Generation(3),
        members: Vec::new(),
        shares: None,
        ..plan.clone()
    };
    let unknown = Seal {
        restore: Restore::Checkpoint { step: Step(5) },
        generation: Generation(2),
        ..seal.clone()
    };
    let stale = [
        Command::Plan(plan),
        Command::Plan(skipped),
        Command::Plan(gone),
        Command::Plan(era),
        Command::Seal(seal),
        Command::Seal(unknown),
        resume,
        evict,
        leave,
        Command::Retire { step: Step(9) },
        Command::Distrust { step: Step(9), why: "old".into() },
        Command::Stopped { at },
        Command::Start { at },
    ];
    for command in stale {
        let mut state = world.state.clone();
        let events = state.apply(command.clone());
        assert!(events.is_empty(), "{command:?}: {events:?}");
        assert_eq!(state, world.state, "{command:?}");
    }
}

#[test]
fn id_2_reports_count_only_from_the_process_start_that_owns_the_worker() {
    let mut world = World::training(2, |_| ());
    world.kill_worker(2);
    world.follow();
    world.seal_members(|_| Position::Open(Step(10)));
    // A report of n1 by a process start that the group does not know: its worker 1
    // is another process, and so its answer does not count.
    world.report(1).boot = 1001;
    world.report(1).store = StoreId(uuid::Uuid::from_u128(77));
    check(&mut world, &["... waiting for 1 of 1 ranks to stop"]);
}

#[test]
fn a_fenced_process_start_is_never_admitted_again() {
    let mut world = World::training(2, |_| ());
    let heard = world.view.heard[&id(2)].clone();
    world.report(1).dead_peers = vec![(id(2), 2)];
    world.follow();
    world.report(1).dead_peers.clear();
    world.view.heard.insert(id(2), heard);
    check(&mut world, &["... waiting for 1 of 1 ranks to stop"]);
    world.start(2);
    let decision = world.act();
    assert_eq!(lines(&decision)[0], "admit n2");
    assert_eq!(world.state.nodes[&id(2)].incarnation, Incarnation(3));
}

#[test]
fn the_replicated_state_survives_its_snapshot() {
    use crate::replicated::StateMachine as _;
    let mut world = World::training(3, |_| ());
    world.checkpoint(10);
    world.kill_worker(2);
    world.follow();
    let restored = JobState::restore(&world.state.snapshot()).expect("a snapshot");
    assert_eq!(restored, world.state);
    assert!(JobState::restore(&world.state.snapshot()[1..]).is_err());
}

#[test]
fn gn_5_what_a_later_seal_went_back_behind_is_not_official() {
    let mut state = World::training(1, |_| ()).state;
    let link = |generation, restore| crate::state::ChainLink {
        era: Era(1),
        generation: Generation(generation),
        restore: Step(restore),
    };
    state.chain = vec![link(1, 0), link(2, 8), link(3, 4), link(5, 6)];
    let check = |generation, official: std::ops::Range<u64>| {
        for step in 0..20 {
            let is = state.is_official(Era(1), Generation(generation), Step(step));
            assert_eq!(is, official.contains(&step), "step {step} of generation {generation}");
        }
        assert!(!state.is_official(Era(2), Generation(generation), Step(4)));
    };
    check(1, 0..5);
    // Nothing of it is left: not even where it began.
    check(2, 0..0);
    check(3, 4..7);
    check(4, 0..0);
    check(5, 6..20);
}

#[test]
fn gn_5_a_seal_never_goes_behind_a_committed_checkpoint() {
    let mut world = World::training(2, |spec| spec.sharding = Sharding::Zero1);
    world.checkpoint(5);
    world.kill_worker(2);
    world.follow();
    world.seal_members(|_| Position::Fresh);
    world.view.verified.insert(Step(5), Ok(()));
    let decided = world.decide();
    // Meanwhile the save of step 10 is complete.
    world.checkpoint(10);
    assert!(decided.commands.iter().all(|command| world.state.apply(command.clone()).is_empty()));
    check(&mut world, &["verify 10", "... verifying the checkpoint of step 10"]);
}
