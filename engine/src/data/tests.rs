//! DATA-1 end to end: a run with deaths and resizes leaves ledgers that an
//! independent program replays, and every way to break the promise is noticed.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use job::{Era, Generation, JobId, Step, Token, shares::Shares, tokens::Width};

use super::{Batches, Ledger, TokenFile, batch::Sizes, tokens::tests::write};

const SIZES: Sizes = Sizes { seq_len: 4, local_batch: 2, global_batch: 8 };
const SEED: u64 = 42;

/// A folder with a token file, ledgers and events.
struct Run {
    folder: tempfile::TempDir,
    batches: Batches,
}

impl Run {
    /// Three generations: two ranks until rank 1 dies within step 5, one rank,
    /// and three ranks that go on from a checkpoint two steps back.
    fn record() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("train.tok");
        let tokens: Vec<u32> = (0..203).map(|i| i * 7 % 256).collect();
        write(&path, Width::One, 256, &tokens);
        let file = TokenFile::open(&path).expect("sound");
        let batches = Batches::new(file, SIZES, SEED).expect("enough text");
        let run = Self { folder, batches };
        run.generation(1, 2, 0..5);
        run.attempt(1, 2, 0, Step(5));
        run.generation(2, 1, 5..8);
        run.generation(3, 3, 6..10);
        let seal = |generation, restore| {
            format!(r#"{{"kind":"sealed","era":0,"generation":{generation},"restore":{restore}}}"#)
        };
        let planned = r#"{"kind":"planned","era":0,"generation":2}"#;
        let finished = r#"{"kind":"job_finished","report":{"step":10}}"#;
        let events = [&seal(1, 0), planned, &seal(2, 5), &seal(2, 5), &seal(3, 6), finished];
        std::fs::write(run.path("events.jsonl"), events.join("\n")).expect("writable");
        run
    }

    fn generation(&self, generation: u64, ranks: u32, steps: std::ops::Range<u64>) {
        for step in steps {
            for rank in 0..ranks as usize {
                self.attempt(generation, ranks, rank, Step(step));
            }
        }
    }

    fn attempt(&self, generation: u64, ranks: u32, rank: usize, step: Step) {
        let path = self.path(&format!("ledgers/{generation}-{rank}-{step}.jsonl"));
        let mut ledger = Ledger::create(&path).expect("created");
        let job = serde_json::from_str("\"00000000-0000-0000-0000-000000000001\"").expect("a uuid");
        let generation = Generation(generation);
        ledger.enter(Token { job: JobId(job), era: Era(0), generation }, rank);
        for micro_batch in Shares::even(self.batches.micro_batches(), ranks).of(rank) {
            self.batches.micro_batch(step, micro_batch, Some(&mut ledger)).expect("read");
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Replaces a text in a file; it has to be there.
    #[track_caller]
    fn edit(&self, name: &str, from: &str, to: &str) {
        let text = std::fs::read_to_string(self.path(name)).expect("readable");
        assert!(text.contains(from), "{name} has no {from:?}: {text}");
        std::fs::write(self.path(name), text.replacen(from, to, 1)).expect("writable");
    }

    fn replay(&self) -> (Option<i32>, String) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../chaos-tests/oracles/replay.py");
        let output = Command::new("python3")
            .arg(script)
            .arg(self.path("ledgers"))
            .arg("--events")
            .arg(self.path("events.jsonl"))
            .arg("--tokens")
            .arg(self.path("train.tok"))
            .args(["--seed", "42", "--seq-len", "4", "--local-batch", "2", "--global-batch", "8"])
            .output()
            .expect("python3 runs");
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8_lossy(&text).into_owned())
    }
}

#[track_caller]
fn check(change: impl FnOnce(&Run), status: i32, part: &str) {
    let run = Run::record();
    change(&run);
    let (code, text) = run.replay();
    assert_eq!(code, Some(status), "{text}");
    assert!(text.contains(part), "{part:?} is not in {text}");
}

#[test]
fn a_run_with_deaths_and_resizes_replays() {
    check(|_| (), 0, "ok: 10 committed steps, 80 samples (epoch of 50), 3 generations, 26 ledgers");
    // The last line of a killed process may be torn.
    let tear = |run: &Run| {
        let path = run.path("ledgers/1-0-5.jsonl");
        let text = std::fs::read_to_string(&path).expect("readable");
        std::fs::write(path, text + "{\"era\":0,").expect("writable");
    };
    check(tear, 0, "ok: 10 committed steps");
}

#[test]
fn every_broken_promise_is_named() {
    let remove = |name| move |run: &Run| std::fs::remove_file(run.path(name)).expect("there");
    check(remove("ledgers/1-1-3.jsonl"), 1, "step 3, committed by generation 0.1: skipped [2, 3]");
    check(remove("ledgers/3-2-9.jsonl"), 1, "step 9, committed by generation 0.3: skipped [3]");
    let copy = |run: &Run| {
        let from = run.path("ledgers/2-0-5.jsonl");
        std::fs::copy(from, run.path("ledgers/copy.jsonl")).expect("copied");
    };
    check(copy, 1, "generation 0.2, step 5: micro-batch 0 was consumed 2 times");
    let edit = |name, from, to| move |run: &Run| run.edit(name, from, to);
    check(edit("ledgers/1-0-0.jsonl", "samples\":[", "samples\":[0,"), 1, "the order says");
    check(edit("ledgers/1-0-5.jsonl", "sha256\":\"", "sha256\":\"0"), 1, "the token file has");
    check(edit("ledgers/1-0-1.jsonl", "micro_batch\":0", "micro_batch\":9"), 1, "no micro-batch 9");
    let unsealed = "the generation was never sealed";
    check(edit("ledgers/1-0-1.jsonl", "generation\":1", "generation\":7"), 1, unsealed);
    check(edit("events.jsonl", "\"restore\":6", "\"restore\":7"), 1, "generation began at step 7");
    check(edit("events.jsonl", "\"step\":10", "\"step\":11"), 1, "step 10, committed by");
}

#[test]
fn bad_input_is_no_verdict() {
    let edit = |name, from, to| move |run: &Run| run.edit(name, from, to);
    check(edit("events.jsonl", "\"restore\":5", "\"restore\":4"), 2, "was sealed at 4 and 5");
    check(edit("events.jsonl", "job_finished", "other"), 2, "give --final-step");
    check(edit("events.jsonl", "\"era\"", "\"x\""), 2, "has no field era");
    check(edit("events.jsonl", "\"restore\":0", "\"restore\":2"), 2, "seals are missing");
    let truncate = |run: &Run| std::fs::write(run.path("train.tok"), "ELASTOK1").expect("written");
    check(truncate, 2, "is not a token file");
}
