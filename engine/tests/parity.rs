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
    config::LrScheduler,
    data::{
        TokenFile,
        batch::{Batches, Sizes},
    },
    layout::Declaration,
    model::{MicroBatch, Model, Recompute, registry},
    optimizer::{Schedule, schedule::Options},
    tree::Counter,
};
use job::{Step, tokens::TRAIN_FILE};
use serde::Deserialize;
use support::{dataset, deadline, enter, step, token};
use tch::{Kind, Tensor};
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

/// The ids of every micro-batch, step after step.
fn micro_batches(config: &Config) -> Vec<Vec<i64>> {
    let samples = config.training.local_batch_size * (config.training.seq_len + 1);
    all_ids(config).chunks_exact(samples).map(<[i64]>::to_vec).collect()
}

/// The engine's model in float64, from the weights of a checkpoint, with an
/// optimizer that is the textbook's: what is left of the difference to PyTorch
/// when rounding is out of the way. The loss of every step.
fn train_in_float64(config: &Config, checkpoint: &Path) -> Vec<f64> {
    let checkpoint = dcp::Checkpoint::open(checkpoint).unwrap();
    let load = |param: Declaration| {
        let shape: Vec<u64> = param.shape.iter().map(|&size| size as u64).collect();
        let mut bytes = vec![0; 4 * param.shape.iter().product::<usize>()];
        checkpoint.read(&param.name, &dcp::Region::whole(&shape), &mut bytes).unwrap();
        let size: Vec<i64> = param.shape.iter().map(|&size| size as i64).collect();
        Tensor::from_data_size(&bytes, &size, Kind::Float).to_kind(Kind::Double)
    };
    let mut weights: Vec<Tensor> = config.model.parameters().into_iter().map(load).collect();
    let mut moments: Vec<_> = weights.iter().map(|w| (w.zeros_like(), w.zeros_like())).collect();
    let leaves = weights.iter().map(Tensor::shallow_clone).collect();
    let time = config.training.seq_len;
    let model = Model::new(&config.model, leaves, time, Kind::Double, Recompute::Every(2)).unwrap();

    let (divisor, total) = ((8 * time) as f64, config.micro_batches());
    let all = micro_batches(config);
    let mut losses = Vec::new();
    for (step, batches) in all.chunks_exact(total as usize).enumerate() {
        let mut gradients: Vec<Counter<Tensor>> =
            weights.iter().map(|_| Counter::new(total)).collect();
        let mut loss = 0.0;
        for (index, ids) in (0..).zip(batches) {
            let batch = MicroBatch::new(ids, time, 256).unwrap();
            let mut take = |param: usize, gradient: &Tensor| {
                gradients[param].push(index..index + 1, gradient.copy(), |a, b| a + b);
                Ok(())
            };
            loss += model.forward_backward(&batch, divisor, &|| false, &mut take).unwrap();
        }
        losses.push(loss);
        let gradients: Vec<Tensor> = gradients.iter_mut().map(|sum| sum.pop().unwrap().1).collect();
        let norm = gradients.iter().map(|g| g.square().sum(Kind::Double).double_value(&[]));
        let clip = (config.training.max_norm / (norm.sum::<f64>().sqrt() + 1e-6)).min(1.0);
        let (lr, options) = (learning_rate(config, step as u64), &config.optimizer);
        let correct = |beta: f64| 1.0 - beta.powi(step as i32 + 1);
        for ((w, (m, v)), g) in weights.iter_mut().zip(&mut moments).zip(&gradients) {
            let g = g * clip;
            *m = &*m * options.beta1 + &g * (1.0 - options.beta1);
            *v = &*v * options.beta2 + g.square() * (1.0 - options.beta2);
            let (m, v) = (&*m / correct(options.beta1), &*v / correct(options.beta2));
            let update = m / (v.sqrt() + options.eps) + &*w * options.weight_decay;
            tch::no_grad(|| w.copy_(&(&*w - update * lr)));
        }
    }
    losses
}

fn learning_rate(config: &Config, step: u64) -> f64 {
    let LrScheduler { warmup_steps, decay_ratio, decay_type, min_lr_factor, .. } =
        config.lr_scheduler;
    let total_steps = config.training.steps;
    let options = Options { warmup_steps, total_steps, decay_ratio, decay_type, min_lr_factor };
    Schedule::new(config.optimizer.lr, &options).lr(Step(step))
}

#[track_caller]
fn check_in_float64(local_batch_size: usize) {
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 60_000);
    let config = config(folder.path(), local_batch_size);
    let mut engine = enter(&config, &Solo::new(token(1)));
    engine.initialize();
    let files = files(folder.path(), &engine, &all_ids(&config));
    let double = ["--dtype", "float64"].map(Path::new);
    run("reference.py", files.all().into_iter().chain(double));
    let expected: Reference = serde_json::from_slice(&fs::read(&files.out).unwrap()).unwrap();
    let losses = train_in_float64(&config, &files.checkpoint);
    let pairs = losses.iter().zip(&expected.loss);
    let largest = pairs.fold(0.0, |most: f64, (a, b)| most.max((a / b - 1.0).abs()));
    println!("float64: largest relative difference of {} losses {largest:.1e}", losses.len());
    assert!(losses.len() == 30 && largest <= 1e-9, "{losses:?} {expected:?}");
}

#[test]
fn float64_follows_pytorch_to_nine_digits() {
    check_in_float64(1);
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
