//! GEN-1, ME-1: a rank of an old generation that was stopped wakes up in a newer
//! one, during a save and during a step. Nothing it does is visible.

use std::{fs, time::Duration};

use chaos_tests::harness::{Run, Setup, wall_clock};
use nix::sys::signal::Signal::{SIGCONT, SIGSTOP};

use crate::{LIMIT, fake, quiet};

const SOON: Duration = Duration::from_secs(30);

/// How long the writing of a share takes: long enough to be stopped in.
const SAVE: &str = "300000";

/// The stage folders of saves that are under way.
fn stages(run: &Run) -> Vec<String> {
    let entries = fs::read_dir(run.folder().join("checkpoint")).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with(".stage-")).collect()
}

/// When the stopped one wakes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wakes {
    InASave,
    InAStep,
}

/// Stops a node in the middle of a save: its agent first, so that nobody ends the
/// worker meanwhile. When the group has gone on without it, the worker wakes.
#[track_caller]
fn check(name: &'static str, wakes: Wakes) {
    let expected = quiet();
    let mut run = Run::start(Setup {
        environment: vec![(chaos_tests::fake::SAVE_MICROS, SAVE.into())],
        arguments: vec!["--checkpoint.keep_latest_k=0".into()],
        ..fake(name, 4, 20)
    });
    run.settle();
    let leader = run.wait("leader", SOON, Run::leader);
    let victim = (1..=4).map(|node| format!("n{node}")).find(|node| *node != leader);
    let victim = victim.expect("four nodes");
    let (agent, worker) = (run.agent(&victim).expect("runs"), run.worker(&victim).expect("runs"));
    let old = run.wait("a save", SOON, |run| stages(run).first().cloned());
    assert!(agent.signal(SIGSTOP) & worker.signal(SIGSTOP), "{victim} runs");
    let stopped = wall_clock();
    let generation = run.history().generation();
    let others: Vec<String> =
        (1..=4).map(|node| format!("n{node}")).filter(|node| *node != victim).collect();
    run.wait("steps without it", SOON, |run| {
        let history = run.history();
        history.steps_of(&others, stopped).any(|line| line.generation > generation).then_some(())
    });
    let during = match wakes {
        Wakes::InASave => run.wait("a save without it", SOON, |run| {
            stages(run).into_iter().find(|stage| *stage != old)
        }),
        Wakes::InAStep => {
            let at = run.step();
            run.wait_step(at + 1, SOON);
            format!("step {}", run.step())
        }
    };
    let woken = wall_clock();
    assert!(worker.signal(SIGCONT), "the stopped worker is still there");
    // It is free to write and to speak for longer than its lease and a step.
    std::thread::sleep(Duration::from_secs(2));
    let history = run.history();
    let sleeper = [victim.clone()];
    let steps = history.steps_of(&sleeper, woken);
    let visible: Vec<_> = steps.filter(|line| line.generation <= generation).collect();
    assert!(visible.is_empty(), "GEN-1: {visible:?}");
    let committed = history.of("checkpoint_committed").any(|line| line["stage"] == old.as_str());
    assert!(agent.signal(SIGCONT), "the stopped agent is still there");
    run.settle();
    let digests = run.finish(LIMIT);
    let history = run.history();
    let checkpoints = history.checkpoints();
    eprintln!(
        "{name}: {victim} stopped in the save {old} (committed: {committed}), woken in {during}, \
         {} steps redone, checkpoints {checkpoints:?}, {:.1} s",
        history.redone(),
        run.age()
    );
    assert!(!committed, "a save without one of its shares was committed");
    crate::bad_input::verify(&run, &checkpoints);
    assert_eq!(&digests, expected, "{name}");
}

#[test]
fn gen_1_a_sleeper_that_wakes_in_a_save_is_not_seen() {
    check("wake-in-save", Wakes::InASave);
}

#[test]
fn gen_1_a_sleeper_that_wakes_in_a_step_is_not_seen() {
    check("wake-in-step", Wakes::InAStep);
}
