//! The engine behind the actors' trait.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use actors::worker::{Applied, Settings, Snapshot, Start, Trainer, TrainerError};
use elastic::config::Config;
use engine::Engine;
use job::{
    Step, Token,
    mesh::Parallel,
    plan::{Shard, Source},
    report::{Digests, FinalReport},
    shares::Shares,
};
use transport::collective::Communicator;

use crate::{
    dataset,
    settings::{engine_config, pace},
};

/// What the sample at the end looks like.
const SAMPLE_PROMPT: &[u8] = b"ROMEO:\n";
const SAMPLE_TOKENS: usize = 240;
const SAMPLE_TEMPERATURE: f64 = 0.8;

/// An engine, once the global batch is known.
pub(crate) struct EngineTrainer {
    config: Config,
    /// What is asked of the mesh, as the job was founded with.
    parallel: Parallel,
    engine: Option<Engine>,
    /// The data ledger of this process (DATA-1).
    ledger: PathBuf,
    last: Option<Applied>,
}

/// Builds the trainer, and the engine as far as the global batch is known.
pub(crate) fn build(start: &Start) -> Result<(EngineTrainer, Settings), String> {
    let config: Config = serde_json::from_str(&start.config)
        .map_err(|error| format!("the job's configuration does not fit this worker: {error}"))?;
    let dataset = dataset::check(&config)?;
    let arithmetic = engine::arithmetic_digest().map_err(|error| error.to_string())?;
    let settings = pace(&config, Digests { dataset, arithmetic })?;
    let folder = start.dump_folder.join("nodes").join(start.node.as_str()).join("ledger");
    std::fs::create_dir_all(&folder)
        .map_err(|error| format!("cannot create {}: {error}", folder.display()))?;
    let ledger = folder.join(format!("{}.jsonl", std::process::id()));
    let parallel = start.spec.parallel;
    let mut trainer = EngineTrainer { config, parallel, engine: None, ledger, last: None };
    if let Some(micro_batches) = start.spec.micro_batches {
        trainer.engine = Some(trainer.new_engine(micro_batches)?);
    }
    Ok((trainer, settings))
}

impl EngineTrainer {
    fn new_engine(&self, micro_batches: u32) -> Result<Engine, String> {
        let mut config = engine_config(&self.config, micro_batches)?;
        config.parallelism.mesh = self.parallel;
        let mut engine = Engine::new(config).map_err(|error| error.to_string())?;
        engine.keep_ledger(&unused(&self.ledger)).map_err(|error| error.to_string())?;
        Ok(engine)
    }

    fn engine(&mut self) -> Result<&mut Engine, TrainerError> {
        self.engine.as_mut().ok_or_else(|| TrainerError::Fatal("no generation was entered".into()))
    }

    fn validation_batches(&self) -> Option<u64> {
        u64::try_from(self.config.validation.steps).ok()
    }
}

/// Process ids come again.
fn unused(path: &Path) -> PathBuf {
    (0..)
        .map(|n| match n {
            0 => path.to_path_buf(),
            n => path.with_extension(format!("{n}.jsonl")),
        })
        .find(|path| !path.exists())
        .unwrap_or_else(|| path.to_path_buf())
}

fn failed(error: engine::Error) -> TrainerError {
    match error {
        engine::Error::Collective(error) => TrainerError::Collective(error),
        engine::Error::Model(engine::model::Error::Aborted) => TrainerError::Aborted,
        engine::Error::Checkpoint(error) if error.is_damage() => {
            TrainerError::Damaged(error.to_string())
        }
        error => TrainerError::Fatal(error.to_string()),
    }
}

impl Trainer for EngineTrainer {
    fn position(&self) -> Option<Step> {
        self.engine.as_ref()?.position()
    }

    fn shard(&self) -> Shard {
        self.engine.as_ref().and_then(Engine::shard).unwrap_or(Shard::WHOLE)
    }

    fn initialize(&mut self) -> Result<(), TrainerError> {
        self.engine()?.initialize();
        Ok(())
    }

    fn enter(
        &mut self,
        token: Token,
        rank: u32,
        stages: u32,
        shares: &Shares,
    ) -> Result<(), TrainerError> {
        if self.engine.is_none() {
            let engine = self.new_engine(shares.total()).map_err(TrainerError::Fatal)?;
            self.engine = Some(engine);
        }
        self.engine()?.enter(token, rank as usize, stages, shares).map_err(failed)
    }

    fn prepare(
        &mut self,
        mesh: &mut dyn Communicator,
        abort: &dyn Fn() -> bool,
        deadline: Instant,
    ) -> Result<Vec<u8>, TrainerError> {
        self.engine()?.prepare(mesh, abort, deadline).map_err(failed)
    }

    fn tally(&self, ballots: &[Vec<u8>]) -> Result<Vec<u8>, TrainerError> {
        let engine = self.engine.as_ref();
        let engine = engine.ok_or_else(|| TrainerError::Fatal("nothing is prepared".into()))?;
        engine.tally(ballots).map_err(failed)
    }

    fn apply(&mut self, verdict: &[u8]) -> Result<Applied, TrainerError> {
        let report = self.engine()?.apply(verdict).map_err(failed)?;
        if report.update_skipped {
            tracing::warn!(
                step = report.step.0,
                loss = report.loss,
                "no update: nothing finite to apply"
            );
        }
        let applied = Applied {
            step: report.step,
            loss: report.loss,
            grad_norm: report.grad_norm as f32,
            learning_rate: report.lr as f32,
            tokens: report.tokens,
        };
        self.last = Some(applied);
        Ok(applied)
    }

    fn discard(&mut self) {
        if let Some(engine) = &mut self.engine {
            engine.discard();
        }
    }

    fn sync(
        &mut self,
        mesh: &mut dyn Communicator,
        sources: &[Source],
        receivers: &[u32],
        deadline: Instant,
    ) -> Result<(), TrainerError> {
        self.engine()?.sync(mesh, sources, receivers, deadline).map_err(failed)
    }

    fn load(&mut self, checkpoint: &Path) -> Result<Step, TrainerError> {
        self.engine()?.load(checkpoint).map_err(failed)
    }

    fn snapshot(&mut self) -> Result<Box<dyn Snapshot>, TrainerError> {
        let snapshot = self.engine()?.snapshot(None).map_err(failed)?;
        Ok(Box::new(Copied(snapshot)))
    }

    fn validate(
        &mut self,
        mesh: &mut dyn Communicator,
        abort: &dyn Fn() -> bool,
        deadline: Instant,
    ) -> Result<Option<f64>, TrainerError> {
        let batches = self.validation_batches();
        let rank = mesh.rank();
        let loss = self.engine()?.evaluate(mesh, batches, abort, deadline).map_err(failed)?;
        Ok((rank == 0).then_some(loss))
    }

    fn finish(
        &mut self,
        mesh: &mut dyn Communicator,
        abort: &dyn Fn() -> bool,
        deadline: Instant,
    ) -> Result<FinalReport, TrainerError> {
        let validation_loss = match self.config.validation.enable {
            true => self.validate(mesh, abort, deadline)?,
            false => None,
        };
        let (first, last) = (mesh.rank() == 0, self.last);
        let seed = self.config.training.seed;
        let engine = self.engine()?;
        let digests = engine.digests(mesh, deadline).map_err(failed)?;
        let speaks = engine.config().model.vocab_size == 256;
        if speaks {
            // Text needs the whole model.
            engine.gather(mesh, deadline).map_err(failed)?;
        }
        let mut report = FinalReport {
            step: engine.position().unwrap_or_default(),
            loss: last.map_or(f32::NAN, |last| last.loss),
            validation_loss,
            weights_sha256: String::new(),
            state_sha256: String::new(),
            loss_sha256: String::new(),
            sample: String::new(),
        };
        if first {
            report.weights_sha256 = hex::encode(digests.weights_sha256);
            report.state_sha256 = hex::encode(digests.state_sha256);
            report.loss_sha256 = hex::encode(digests.loss_sha256);
            if speaks {
                let text = engine.generate(SAMPLE_PROMPT, SAMPLE_TOKENS, SAMPLE_TEMPERATURE, seed);
                let mut sample = SAMPLE_PROMPT.to_vec();
                sample.extend(text.map_err(failed)?);
                report.sample = String::from_utf8_lossy(&sample).into_owned();
            }
        }
        Ok(report)
    }
}

struct Copied(engine::Snapshot);

impl Snapshot for Copied {
    fn write(self: Box<Self>, stage: &Path, _: u32) -> Result<dcp::ShardIndex, String> {
        self.0.write(stage).map_err(|error| error.to_string())
    }
}
