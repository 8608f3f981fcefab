//! DATA-1: no sample is skipped and none counts twice, as an outsider recomputes
//! it from the ledgers of the real engine and the token file.

use std::{
    path::Path,
    process::{Command, Output},
};

use chaos_tests::harness::{Fault, Random, Run, dataset};

use crate::{LIMIT, quiet_real, real};

/// Replays the ledgers along the official history with the given seed.
fn replay(run: &Run, seed: u64) -> Output {
    let nodes = run.folder().join("nodes");
    let events = std::fs::read_dir(&nodes).expect("nodes").flatten();
    let events = events.map(|node| node.path().join("events.jsonl")).filter(|path| path.exists());
    Command::new("python3")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("oracles/replay.py"))
        .arg(&nodes)
        .arg("--events")
        .args(events)
        .arg("--tokens")
        .arg(dataset().join("train.tok"))
        .args(["--seed", &seed.to_string(), "--seq-len", "64", "--local-batch", "1"])
        .args(["--global-batch", &run.setup.micro_batches.to_string()])
        .args(["--final-step", &run.setup.steps.to_string()])
        .output()
        .expect("python3 starts")
}

#[track_caller]
fn check(run: &Run) {
    let output = replay(run, run.setup.seed);
    let text = String::from_utf8_lossy(&output.stdout);
    eprint!("{text}");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{errors}{}", run.report());
    // The oracle would notice.
    assert_eq!(replay(run, run.setup.seed + 1).status.code(), Some(1), "another order passes");
}

#[test]
fn data_1_kills_skip_and_repeat_no_sample() {
    let expected = quiet_real();
    let mut random = Random::seeded();
    let mut faults = [Fault::Worker, Fault::Agent, Fault::Both, Fault::Leader];
    random.shuffle(&mut faults);
    let mut run = Run::start(real("real-kills", 4));
    run.wait_step(1, LIMIT);
    for fault in faults {
        std::thread::sleep(random.pause(0, 200));
        run.inject(fault, &mut random);
    }
    let digests = run.finish(LIMIT);
    eprintln!("real-kills: {:.1} s, tiers {:?}", run.age(), run.history().tiers_counted());
    check(&run);
    assert_eq!(&digests, expected);
}

#[test]
fn data_1_the_death_of_everything_skips_and_repeats_no_sample() {
    let expected = quiet_real();
    let mut run = Run::start(real("real-all", 3));
    let saved = run.wait("checkpoint", LIMIT, |run| run.history().checkpoints().last().copied());
    run.wait_step(saved + 2, LIMIT);
    run.kill_all();
    run.setup.nodes = 2;
    run.launch();
    let digests = run.finish(LIMIT);
    let history = run.history();
    eprintln!(
        "real-all: {:.1} s, tiers {:?}, {} steps redone",
        run.age(),
        history.tiers(),
        history.redone()
    );
    check(&run);
    assert!(history.redone() >= 1, "steps after the checkpoint were lost and redone");
    assert_eq!(&digests, expected);
}
