//! What the tests of the engine share: a dataset, a small model, and ranks as
//! threads over a communicator that lives in memory.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use engine::{
    Config, Engine, StepReport,
    config::{
        ActivationCheckpoint, Decay, Dtype, LrScheduler, Optimizer, Parallelism, Sharding, Training,
    },
    model::registry,
};
use job::{
    Era, Generation, JobId, Token,
    shares::Shares,
    tokens::{Header, TRAIN_FILE, VALIDATION_FILE, Width},
};
use sha2::{Digest, Sha256};
use transport::collective::Communicator;

/// A token of some generation.
pub(crate) fn token(generation: u64) -> Token {
    Token { job: JobId(Default::default()), era: Era(0), generation: Generation(generation) }
}

/// Far enough for any test.
pub(crate) fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Writes a dataset of `tokens` bytes of made-up words for training and a
/// quarter of that for validation.
pub(crate) fn dataset(folder: &Path, tokens: usize) {
    let words = ["the ", "king ", "and ", "a ", "queen ", "said: ", "go, ", "my lord.\n", "night "];
    let mut state = 1u32;
    let mut text = Vec::new();
    while text.len() < tokens + tokens / 4 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        text.extend_from_slice(words[(state >> 16) as usize % words.len()].as_bytes());
    }
    for (name, bytes) in
        [(TRAIN_FILE, &text[..tokens]), (VALIDATION_FILE, &text[tokens..tokens + tokens / 4])]
    {
        let header = Header {
            width: Width::One,
            vocab_size: 256,
            count: bytes.len() as u64,
            payload_sha256: Sha256::digest(bytes).into(),
        };
        let file = [&header.encode()[..], bytes].concat();
        fs::write(folder.join(name), file).expect("the folder is writable");
    }
}

/// A model of 60 thousand parameters that takes milliseconds per step.
pub(crate) fn config(dataset: &Path) -> Config {
    let shape = registry::find("llama3", "byte-1M").expect("a known flavor");
    Config {
        model: registry::Shape { dim: 32, n_layers: 2, multiple_of: 32, ..shape },
        optimizer: Optimizer { lr: 3e-3, ..Optimizer::default() },
        lr_scheduler: LrScheduler {
            warmup_steps: 3,
            total_steps: None,
            decay_ratio: Some(0.5),
            decay_type: Decay::Linear,
            min_lr_factor: 0.1,
        },
        training: Training {
            seq_len: 32,
            local_batch_size: 2,
            global_batch_size: 10,
            steps: 8,
            max_norm: 1.0,
            seed: 42,
            dtype: Dtype::Float32,
            activation_checkpoint: ActivationCheckpoint::None,
        },
        sharding: Sharding::Replicated,
        parallelism: Parallelism::default(),
        dataset: dataset.to_owned(),
    }
}

/// An engine that has entered the generation of the communicator.
pub(crate) fn enter(config: &Config, comm: &dyn Communicator) -> Engine {
    let mut engine = Engine::new(config.clone()).expect("a sound configuration");
    place(&mut engine, comm);
    engine
}

/// Puts an engine in its place in the generation of the communicator.
pub(crate) fn place(engine: &mut Engine, comm: &dyn Communicator) {
    let config = engine.config();
    let (micro_batches, ranks) = (config.micro_batches(), comm.size() as u32);
    let mesh = config.parallelism.mesh.fit(config.sharding, ranks, None);
    assert_eq!(mesh.ranks(), ranks, "a mesh of all ranks");
    let shares = Shares::even(micro_batches, mesh.degree());
    engine.enter(comm.token(), comm.rank(), mesh.stages, &shares).expect("a place in the mesh");
}

/// One step with its vote.
pub(crate) fn step(engine: &mut Engine, comm: &mut dyn Communicator) -> StepReport {
    let ballot = engine.prepare(comm, &|| false, deadline()).expect("prepared");
    let ballots = comm.all_gather_bytes(&ballot, 1 << 20, deadline()).expect("gathered");
    let verdict = engine.tally(&ballots).expect("a verdict");
    engine.apply(&verdict).expect("applied")
}
