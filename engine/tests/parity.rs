//! The judge of the arithmetic is PyTorch: the same weights and tokens give the
//! same losses and logits. Needs a Python with torch 2.11, named by
//! `ELASTIC_TEST_PYTHON`, as `make venv` and `make test` arrange.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "suite/support.rs"]
#[allow(dead_code, reason = "shared with the other tests")]
mod support;

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use engine::{
    Config, Engine, StepReport,
    data::{
        TokenFile,
        batch::{Batches, Sizes},
    },
    model::registry,
};
use job::{Step, tokens::TRAIN_FILE};
use serde::Deserialize;
use support::{dataset, deadline, enter, step, token};
use transport::collective::Solo;

const STEPS: u64 = 30;

/// What `reference.py` writes down, a value for each step.
#[derive(Debug, Deserialize)]
struct Reference {
    loss: Vec<f64>,
    grad_norm: Vec<f64>,
    lr: Vec<f64>,
}

/// The byte-level model of a million parameters on 8 sequences of 128 tokens.
fn config(folder: &Path, local_batch_size: usize) -> Config {
    let mut config = support::config(folder);
    config.model = registry::find("llama3", "byte-1M").unwrap();
    config.lr_scheduler.warmup_steps = 5;
    config.training.seq_len = 128;
    config.training.global_batch_size = 8;
    config.training.local_batch_size = local_batch_size;
    config.training.steps = STEPS;
    config
}

/// The files that an oracle is given, and the one that it writes.
struct Files {
    checkpoint: PathBuf,
    config: PathBuf,
    tokens: PathBuf,
    out: PathBuf,
}

impl Files {
    /// In the order of the oracles' arguments.
    fn all(&self) -> [&Path; 4] {
        [&self.checkpoint, &self.config, &self.tokens, &self.out]
    }
}

/// Saves the state of an engine, its configuration and some ids in `folder`.
fn files(folder: &Path, engine: &Engine, ids: &[i64]) -> Files {
    let at = |name: &str| folder.join(name);
    let files = Files {
        checkpoint: at(&format!("step-{}", engine.position().unwrap().0)),
        config: at("config.json"),
        tokens: at("tokens"),
        out: at("out"),
    };
    let shard = engine.snapshot(None).unwrap().write(&files.checkpoint).unwrap();
    dcp::write_metadata(&files.checkpoint, &[shard]).unwrap();
    fs::write(&files.config, serde_json::to_vec(engine.config()).unwrap()).unwrap();
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    fs::write(&files.tokens, bytes).unwrap();
    files
}

/// The ids of every step, `[steps, global batch, seq_len + 1]`.
fn all_ids(config: &Config) -> Vec<i64> {
    let training = &config.training;
    let sizes = Sizes {
        seq_len: training.seq_len,
        local_batch: training.local_batch_size,
        global_batch: training.global_batch_size,
    };
    let tokens = TokenFile::open(&config.dataset.join(TRAIN_FILE)).unwrap();
    let batches = Batches::new(tokens, sizes, training.seed).unwrap();
    (0..STEPS)
        .flat_map(|step| (0..batches.micro_batches()).map(move |m| (Step(step), m)))
        .flat_map(|(step, m)| batches.micro_batch(step, m, None).unwrap().ids)
        .collect()
}

/// Runs an oracle; what it prints.
#[track_caller]
fn run<I: AsRef<OsStr>>(oracle: &str, arguments: impl IntoIterator<Item = I>) -> String {
    let python = std::env::var_os("ELASTIC_TEST_PYTHON").unwrap_or_else(|| {
        panic!(
            "ELASTIC_TEST_PYTHON names no Python with torch 2.11: run `make venv`, then `make test`"
        )
    });
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../chaos-tests/oracles").join(oracle);
    let output = Command::new(python)
        .arg(script)
        .args(arguments)
        // The wheel brings its own libtorch.
        .env_remove("LD_LIBRARY_PATH")
        .output()
        .unwrap();
    assert!(output.status.success(), "{oracle}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Trains 30 steps here and there; the losses differ by at most `tolerance`,
/// relative.
#[track_caller]
fn check(local_batch_size: usize, tolerance: f64) {
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 60_000);
    let config = config(folder.path(), local_batch_size);
    let mut comm = Solo::new(token(1));
    let mut engine = enter(&config, &comm);
    engine.initialize();
    let files = files(folder.path(), &engine, &all_ids(&config));
    run("reference.py", files.all());
    let expected: Reference = serde_json::from_slice(&fs::read(&files.out).unwrap()).unwrap();
    let begin = Instant::now();
    let reports: Vec<StepReport> = (0..STEPS).map(|_| step(&mut engine, &mut comm)).collect();
    let speed = STEPS as f64 * 8.0 * 128.0 / begin.elapsed().as_secs_f64();

    let largest = |difference: &dyn Fn(usize, &StepReport) -> f64| {
        reports.iter().enumerate().map(|(s, r)| difference(s, r)).fold(0.0, f64::max)
    };
    let loss = largest(&|s, r| (f64::from(r.loss) / expected.loss[s] - 1.0).abs());
    let norm = largest(&|s, r| (r.grad_norm / expected.grad_norm[s] - 1.0).abs());
    let lr = largest(&|s, r| (r.lr - expected.lr[s]).abs());
    println!(
        "{} micro-batches: loss {} -> {}, largest relative difference {loss:.1e}, of norms \
         {norm:.1e}; {speed:.0} tokens/s on one thread",
        config.micro_batches(),
        reports[0].loss,
        reports[29].loss,
    );
    assert!(loss <= tolerance, "losses differ by {loss:e}: {reports:?} {expected:?}");
    assert!(norm <= 100.0 * tolerance, "norms differ by {norm:e}: {reports:?} {expected:?}");
    assert!(lr < 1e-15, "{reports:?} {expected:?}");
}

#[test]
fn one_micro_batch_follows_pytorch() {
    check(8, 1e-6);
}

#[test]
fn eight_micro_batches_follow_pytorch() {
    check(1, 1e-5);
}

#[test]
fn pytorch_computes_our_logits_from_our_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 60_000);
    let config = config(folder.path(), 4);
    let mut comm = Solo::new(token(1));
    let mut engine = enter(&config, &comm);
    engine.initialize();
    for _ in 0..5 {
        step(&mut engine, &mut comm);
    }
    let ids: Vec<i64> = b"O Romeo, Romeo! wherefore art thou".iter().map(|&b| b.into()).collect();
    let files = files(folder.path(), &engine, &ids);
    run("logits.py", files.all());
    let bytes = fs::read(&files.out).unwrap();
    let expected: Vec<f32> =
        bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let logits = engine.logits(&ids).unwrap();
    assert_eq!((logits.len(), expected.len()), (34 * 256, 34 * 256));
    let largest = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let difference =
        logits.iter().zip(&expected).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
    println!("logits up to {largest}, largest difference {difference:e}");
    assert!(difference <= 1e-5 * largest, "{difference} of {largest}");
}

#[test]
fn pytorch_finds_our_digests_in_our_checkpoint() {
    // TRAJ-1, CKPT-2
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 60_000);
    let config = config(folder.path(), 4);
    let mut comm = Solo::new(token(1));
    let mut engine = enter(&config, &comm);
    engine.initialize();
    for _ in 0..2 {
        step(&mut engine, &mut comm);
    }
    let files = files(folder.path(), &engine, &[]);
    let digests = engine.digests(&mut comm, deadline()).unwrap();
    let [weights, state, loss] =
        [digests.weights_sha256, digests.state_sha256, digests.loss_sha256].map(hex::encode);
    let checkpoint = files.checkpoint.display().to_string();
    let options = [&checkpoint, "--weights", &weights, "--state", &state, "--loss", &loss];
    println!("{}", run("digest.py", options));
}
