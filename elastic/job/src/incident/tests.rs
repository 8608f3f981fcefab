//! Where the time goes (OBS-1).

use proptest::prelude::*;

use super::*;
use crate::{
    Era, Incarnation, JobId, WorkerId,
    command::Command,
    plan::{Member, Purpose, Stop, WorkerRef},
    shares::Shares,
    spec::{JobSpec, Sharding},
    state::{JobState, Phase},
};

fn job() -> JobState {
    let spec = JobSpec {
        job: JobId(uuid::Uuid::nil()),
        config: String::new(),
        config_digest: [0; 32],
        min_nodes: 1,
        max_nodes: 4,
        micro_batches: Some(1),
        total_steps: Step(100),
        sharding: Sharding::Replicated,
        parallel: Default::default(),
        max_failures: 5,
        max_preemptions: 1_000,
        exact: true,
        checkpoints: true,
        keep_latest_k: 0,
        authority: String::new(),
        join_secret: String::new(),
    };
    let mut state = JobState::found(spec, Era(1), Timestamp(0));
    state.apply(Command::Admit {
        node: NodeId::new("n1").expect("a good name"),
        store: crate::StoreId(uuid::Uuid::nil()),
        boot: 1,
        address: ([127, 0, 0, 1], 1).into(),
        slots: 1,
        at: Timestamp(0),
    });
    state
}

/// The next plan; without members the job waits.
fn plan(state: &JobState, waits: bool, failure: bool, reached: u64, times: [u64; 3]) -> Command {
    let worker = WorkerRef {
        node: NodeId::new("n1").expect("a good name"),
        incarnation: Incarnation(1),
        worker: WorkerId(1),
    };
    let member = Member { worker, slot: 0, address: ([127, 0, 0, 1], 2).into() };
    let [last_step, noticed, at] = times.map(Timestamp);
    Command::Plan(Plan {
        era: Era(1),
        generation: state.generation().next(),
        members: if waits { Vec::new() } else { vec![member] },
        shares: (!waits).then(|| Shares::even(1, 1)),
        key: [0; 32],
        stop: Stop::Now,
        purpose: Purpose::Train,
        reason: "because".into(),
        failure,
        reached: Step(reached),
        last_step,
        noticed,
        at,
    })
}

fn seal(state: &JobState, restore: u64, at: u64) -> Command {
    let restore = Restore::Live {
        step: Step(restore),
        sources: Vec::new(),
        receivers: Vec::new(),
        verdict: None,
    };
    let generation = state.generation();
    Command::Seal(Seal { generation, restore, reason: String::new(), at: Timestamp(at) })
}

fn resume(state: &JobState, step: u64, at: u64, micros: [u64; 4]) -> Command {
    let [stop_micros, rebuild_micros, restore_micros, step_micros] = micros;
    let generation = state.generation();
    let timing =
        ResumeTiming { generation, stop_micros, rebuild_micros, restore_micros, step_micros };
    Command::Resume { generation, step: Step(step), timing, at: Timestamp(at) }
}

/// The kinds that are not zero, after each of the commands.
#[track_caller]
fn check(state: &JobState, expected: &[(&str, u64)]) {
    let kinds = state.incidents.accounting().kinds();
    let spent: Vec<(&str, u64)> = kinds.into_iter().filter(|(_, micros)| *micros > 0).collect();
    assert_eq!(spent, expected);
}

#[test]
fn obs_1_each_part_of_an_incident_has_its_kind() {
    let mut state = job();
    state.apply(plan(&state, false, false, 0, [0, 100, 100]));
    state.apply(seal(&state, 0, 150));
    check(&state, &[("startup", 150)]);
    state.apply(resume(&state, 1, 1_000, [0; 4]));
    check(&state, &[("startup", 1_000)]);
    // Steps until 5000, the loss noticed at 5300, planned at 5310.
    state.apply(plan(&state, false, true, 40, [5_000, 5_300, 5_310]));
    state.apply(seal(&state, 38, 5_350));
    state.apply(resume(&state, 39, 5_650, [0, 20, 30, 100]));
    check(
        &state,
        &[
            ("startup", 1_000),
            ("productive", 3_900),
            ("detect", 300),
            ("agree", 160),
            ("abort", 40),
            ("rebuild", 20),
            ("restore", 30),
            ("redo", 200),
        ],
    );
    let incident = state.incidents().last().expect("one incident");
    assert_eq!((incident.steps_redone, incident.restore), (2, Some(Step(38))));
    assert_eq!((incident.from, incident.to), (Generation(1), Generation(2)));
    // Below `min_nodes` for a second.
    state.apply(plan(&state, true, true, 60, [6_000, 6_000, 6_000]));
    state.apply(plan(&state, false, false, 0, [6_000, 7_000, 7_000]));
    check(
        &state,
        &[
            ("startup", 1_000),
            ("productive", 4_250),
            ("detect", 300),
            ("agree", 160),
            ("abort", 40),
            ("rebuild", 20),
            ("restore", 30),
            ("redo", 200),
            ("wait_for_nodes", 1_000),
        ],
    );
    assert_eq!(state.incidents().len(), 2, "waiting and going on are one incident");
}

#[test]
fn obs_1_a_job_that_fails_while_it_recovers_did_not_produce() {
    let mut state = job();
    state.apply(plan(&state, false, false, 0, [0; 3]));
    state.apply(seal(&state, 0, 0));
    state.apply(resume(&state, 1, 100, [0; 4]));
    state.apply(plan(&state, false, true, 1, [100, 100, 100]));
    state.apply(Command::Fail { why: "enough".into(), final_: true, at: Timestamp(250) });
    check(&state, &[("startup", 100), ("abort", 150)]);
}

#[test]
fn a_leader_whose_clock_is_behind_takes_no_time_back() {
    let mut state = job();
    state.apply(plan(&state, false, false, 0, [0, 500, 500]));
    state.apply(seal(&state, 0, 400));
    state.apply(resume(&state, 1, 450, [u64::MAX; 4]));
    check(&state, &[("startup", 500)]);
}

#[derive(Clone, Debug)]
enum Next {
    Plan { waits: bool, failure: bool, ago: [u64; 2] },
    Seal { back: u64 },
    Resume { micros: [u64; 4] },
    Save { stall: u64 },
    Stop,
    Start,
}

fn next() -> impl Strategy<Value = Next> {
    let any_micros = prop_oneof![0..2_000_u64, Just(u64::MAX)];
    prop_oneof![
        3 => (any::<bool>(), any::<bool>(), [0..5_000_u64, 0..5_000_u64])
            .prop_map(|(waits, failure, ago)| Next::Plan { waits, failure, ago }),
        4 => (0..5_u64).prop_map(|back| Next::Seal { back }),
        4 => prop::array::uniform4(any_micros.clone()).prop_map(|micros| Next::Resume { micros }),
        2 => any_micros.prop_map(|stall| Next::Save { stall }),
        1 => Just(Next::Stop),
        1 => Just(Next::Start),
    ]
}

proptest! {
    /// OBS-1: whatever happens in whatever order, every microsecond between
    /// founding and the last fact belongs to exactly one kind.
    #[test]
    fn obs_1_the_kinds_sum_to_the_wall_time(
        steps in prop::collection::vec((next(), 0..3_000_u64, any::<bool>()), 1..60),
    ) {
        let mut state = job();
        let (mut now, mut newest) = (0, 0);
        for (next, passed, skewed) in steps {
            now += passed;
            // Another leader, another clock.
            let at = if skewed { now.saturating_sub(1_500) } else { now };
            let restored = |back: u64, state: &JobState| state.committed.0.saturating_sub(back);
            let save = |state: &JobState, step: u64, stall_micros| Command::CommitCheckpoint {
                era: Era(1),
                generation: state.generation(),
                step: Step(step),
                stage: String::new(),
                files: Vec::new(),
                stall_micros,
                at: Timestamp(at),
            };
            let command = match next {
                Next::Plan { waits, failure, ago } => {
                    newest += 3;
                    let [last, noticed] = ago.map(|ago| at.saturating_sub(ago));
                    plan(&state, waits, failure, newest, [last.min(noticed), noticed, at])
                }
                Next::Seal { back } => seal(&state, restored(back, &state), at),
                Next::Resume { micros } => resume(&state, state.committed.0 + 1, at, micros),
                Next::Save { stall } => save(&state, state.committed.0 + 1, stall),
                Next::Stop => Command::StopJob { at: Timestamp(at) },
                Next::Start => Command::Start { at: Timestamp(at) },
            };
            state.apply(command);
            if state.phase == Phase::Stopping {
                state.apply(Command::Stopped { at: Timestamp(at) });
            }
        }
        state.apply(Command::Start { at: Timestamp(now) });
        state.apply(Command::Fail { why: String::new(), final_: true, at: Timestamp(now) });
        prop_assert_eq!(state.incidents.accounting().total(), now);
    }
}
