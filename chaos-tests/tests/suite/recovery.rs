//! Recovery from what is not a clean death: everything at once, damage, silence
//! (CKPT-1, LIVE-1, STEP-1, TRAJ-1).

use std::{
    fs,
    os::unix::fs::FileExt,
    thread::sleep,
    time::{Duration, Instant},
};

use chaos_tests::{
    fake::LOAD_MICROS,
    harness::{Process, Run},
};
use nix::sys::signal::Signal::{SIGCONT, SIGSTOP};

use crate::{LIMIT, fake, quiet};

/// Trains until some steps after a checkpoint, then kills everything.
fn killed_after(run: &mut Run, checkpoints: usize) -> Vec<u64> {
    let saved = run.wait("checkpoint", LIMIT, |run| {
        let saved = run.history().checkpoints();
        // A commit comes before the rename: what is damaged next needs its name.
        let named = run.folder().join(format!("checkpoint/step-{}", saved.last()?)).exists();
        (named && saved.len() >= checkpoints).then_some(saved)
    });
    run.wait_step(saved.last().copied().unwrap_or(0) + 4, LIMIT);
    run.kill_all();
    // One more may have been committed since.
    run.history().checkpoints()
}

#[track_caller]
fn check_restart(name: &'static str, nodes_after: u32) {
    let expected = quiet();
    let mut run = Run::start(fake(name, 4, 10));
    killed_after(&mut run, 1);
    let (at, seals) = (run.step(), run.history().tiers().len());
    run.setup.nodes = nodes_after;
    run.launch();
    let digests = run.finish(LIMIT);
    let history = run.history();
    let (tiers, redone) = (history.tiers(), history.redone());
    eprintln!("{name}: killed at step {at}, {redone} redone, tiers {tiers:?}, {:.1} s", run.age());
    assert!(redone >= 1, "steps after the checkpoint were lost and redone");
    assert_eq!(tiers.get(seals), Some(&"checkpoint"), "{tiers:?}");
    assert_eq!(&digests, expected, "{name}");
}

#[test]
fn step_1_the_death_of_everything_costs_steps_only() {
    check_restart("all-4-4", 4);
    check_restart("all-4-3", 3);
}

/// Flips a bit in a shard of a checkpoint.
#[track_caller]
fn flip(run: &Run, step: u64) {
    let folder = run.folder().join("checkpoint").join(format!("step-{step}"));
    let shard = fs::OpenOptions::new().write(true).read(true).open(folder.join("__0_0.distcp"));
    let shard = shard.unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let middle = shard.metadata().expect("metadata").len() / 2;
    let mut byte = [0];
    shard.read_exact_at(&mut byte, middle).expect("a byte");
    shard.write_all_at(&[byte[0] ^ 1], middle).expect("a flipped bit");
}

#[test]
fn ckpt_1_a_bit_that_flips_after_the_verification_costs_that_checkpoint_only() {
    let expected = quiet();
    let mut run = Run::start(fake("late-damage", 2, 5));
    killed_after(&mut run, 2);
    let seals = run.history().tiers().len();
    // Between the seal, which needs a sound checkpoint, and the load.
    run.setup.environment = vec![(LOAD_MICROS, "500000".into())];
    run.launch();
    let chosen = run.wait("seal from a checkpoint", LIMIT, |run| {
        let history = run.history();
        let seal = history.of("sealed").nth(seals)?.clone();
        (seal["tier"] == "checkpoint").then(|| seal["restore"].as_u64())?
    });
    flip(&run, chosen);
    let digests = run.finish(LIMIT);
    let history = run.history();
    let distrusted = history.of("checkpoint_distrusted").next().expect("the damage is told");
    eprintln!("late-damage: {distrusted}, tiers {:?}", &history.tiers()[seals..]);
    assert_eq!(distrusted["step"], chosen);
    let next = history.of("sealed").nth(seals + 1).expect("another seal");
    assert!(next["restore"].as_u64() < Some(chosen), "{next}");
    let evicted = history
        .of("node_evicted")
        .filter(|line| line["cause"].as_str().is_some_and(|cause| cause.contains("cannot run")));
    assert_eq!(evicted.count(), 0, "damage is nobody's death");
    assert_eq!(&digests, expected);
}

#[test]
fn ckpt_1_a_flipped_bit_is_named_and_the_older_checkpoint_used() {
    let expected = quiet();
    let mut run = Run::start(fake("damage", 2, 5));
    let saved = killed_after(&mut run, 2);
    let newest = *saved.last().expect("a checkpoint was committed");
    flip(&run, newest);
    run.launch();
    let digests = run.finish(LIMIT);
    let history = run.history();
    let distrusted: Vec<_> = history.of("checkpoint_distrusted").cloned().collect();
    eprintln!("damage: step {newest} of {saved:?}: {distrusted:?}");
    assert_eq!(distrusted.first().and_then(|line| line["step"].as_u64()), Some(newest));
    assert_eq!(&digests, expected);
}

/// Stops a process for five seconds; the group must go on without it meanwhile.
#[track_caller]
fn check_freeze(
    name: &'static str,
    victim: fn(&Run) -> Option<Process>,
    noticed: fn(&Run, usize) -> Option<String>,
) {
    let expected = quiet();
    let mut run = Run::start(fake(name, 4, 20));
    run.wait_step(5, LIMIT);
    let process = victim(&run).expect("the victim runs");
    let events = run.history().events.len();
    let started = Instant::now();
    assert!(process.signal(SIGSTOP), "{process:?} is gone");
    let what = run.wait("eviction", Duration::from_secs(5), |run| noticed(run, events));
    let after = started.elapsed();
    let at = run.step();
    run.wait_step(at + 3, Duration::from_secs(5));
    sleep(Duration::from_secs(5).saturating_sub(started.elapsed()));
    // It may have been killed meanwhile.
    let _ = process.signal(SIGCONT);
    run.settle();
    let digests = run.finish(LIMIT);
    eprintln!(
        "{name}: noticed after {:.0} ms: {what}, {:.1} s",
        after.as_secs_f64() * 1e3,
        run.age()
    );
    assert_eq!(&digests, expected, "{name}");
}

#[test]
fn live_1_a_stopped_worker_is_replaced() {
    check_freeze(
        "stop-worker",
        |run| run.worker("n2"),
        |run, from| {
            let history = run.history();
            let failure = |line: &&serde_json::Value| line["failure"] == true;
            let lines = history.events.iter().skip(from).filter(|event| event.kind == "planned");
            lines.map(|event| &event.line).find(failure).map(|line| line["reason"].to_string())
        },
    );
}

#[test]
fn live_1_a_stopped_agent_is_evicted() {
    check_freeze(
        "stop-agent",
        |run| run.agent("n2"),
        |run, from| {
            let history = run.history();
            let mut lines = history.events.iter().skip(from).map(|event| &event.line);
            let evicted = lines.find(|line| line["kind"] == "node_evicted" && line["node"] == "n2");
            evicted.map(|line| line["cause"].to_string())
        },
    );
}
