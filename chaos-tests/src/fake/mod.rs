//! A trainer whose state is a few thousand numbers (TRAJ-1).
//!
//! It does what training does as far as faults can tell: a gradient per
//! micro-batch that depends on weights, seed and step, the sum in tree order over
//! the mesh, a vote whose verdict every rank checks, moments, a chain of losses,
//! sharded checkpoints and live transfer. A wrong weight anywhere changes every
//! digest after it. Time passes by sleeping, so many ranks fit on few cores.
//!
//! `ELASTIC_FAKE_MICROS` is the time that a micro-batch takes,
//! `ELASTIC_FAKE_LOAD_MICROS` the time until a checkpoint is read,
//! `ELASTIC_FAKE_SAVE_MICROS` what it takes to write a share of one,
//! `ELASTIC_FAKE_PROCESSOR` the kind of processor that is played, and [`TRAPS`] names
//! where to die.

mod arithmetic;
mod checkpoint;
mod traps;

use std::{
    fs,
    path::Path,
    thread::sleep,
    time::{Duration, Instant},
};

use actors::worker::{Applied, Factory, Settings, Snapshot, Start, Trainer, TrainerError};
use elastic::config::{Config, schema::AsyncMode};
use job::{
    Step, Token, codec,
    plan::{Shard, Source},
    report::{Digests, FinalReport},
    shares::Shares,
    spec::Sharding,
    tokens::{HEADER_BYTES, TRAIN_FILE},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use transport::collective::{Communicator, View, ViewMut};

pub use arithmetic::State;
use arithmetic::{Hash, Sum, hash};
pub use traps::{Point, TRAPS};

/// Environment variable with the time of a micro-batch in microseconds.
pub const MICROS: &str = "ELASTIC_FAKE_MICROS";

/// Environment variable with the time before a checkpoint is read in microseconds.
pub const LOAD_MICROS: &str = "ELASTIC_FAKE_LOAD_MICROS";
/// Environment variable that names the kind of processor that is played.
pub const PROCESSOR: &str = "ELASTIC_FAKE_PROCESSOR";
/// Environment variable with the time of writing a checkpoint in microseconds.
pub const SAVE_MICROS: &str = "ELASTIC_FAKE_SAVE_MICROS";

/// Builds the trainer of a `fake-worker` process.
#[derive(Clone, Copy, Debug, Default)]
pub struct FakeFactory;

impl Factory for FakeFactory {
    fn build(self, start: &Start) -> Result<(Box<dyn Trainer>, Settings), String> {
        let config: Config = serde_json::from_str(&start.config)
            .map_err(|error| format!("the job's configuration does not fit: {error}"))?;
        if config.sharding() != Sharding::Replicated {
            return Err("the fake trainer keeps whole replicas: parallelism.sharding = none".into());
        }
        let timeouts = config.timeouts().map_err(|error| error.to_string())?;
        let settings = Settings {
            digests: digests(&config.training.dataset_path),
            checkpoint_interval: config.checkpoint.interval,
            checkpoint_async: config.checkpoint.async_mode == AsyncMode::Async,
            validation_freq: 0,
            step: timeouts.step,
            connect: timeouts.connect,
            grace: timeouts.budget * 4,
        };
        let trainer = FakeTrainer {
            seed: config.training.seed,
            micro_batch: duration(MICROS)?,
            loading: duration(LOAD_MICROS)?,
            save: duration(SAVE_MICROS)?,
            state: None,
            prepared: None,
            place: None,
            loss: f32::NAN,
        };
        Ok((Box::new(trainer), settings))
    }
}

/// The dataset's digest as the engine takes it, and that of a processor.
fn digests(dataset: &str) -> Digests {
    let mut header = fs::read(Path::new(dataset).join(TRAIN_FILE)).unwrap_or_default();
    header.truncate(HEADER_BYTES);
    let processor = std::env::var(PROCESSOR).unwrap_or_default();
    Digests { dataset: Sha256::digest(header).into(), arithmetic: Sha256::digest(processor).into() }
}

/// One rank.
#[derive(Debug)]
struct FakeTrainer {
    seed: u64,
    micro_batch: Duration,
    loading: Duration,
    save: Duration,
    state: Option<State>,
    prepared: Option<Sum>,
    place: Option<(u32, Shares)>,
    loss: f32,
}

/// What a rank brings to the vote on a step.
#[derive(Serialize, Deserialize)]
struct Ballot {
    step: u64,
    micro_batches: (u32, u32),
    sum: Hash,
}

/// What all ranks conclude from the ballots.
#[derive(Serialize, Deserialize)]
struct Verdict {
    step: u64,
    loss: f32,
}

impl FakeTrainer {
    fn state(&self) -> Result<&State, TrainerError> {
        self.state.as_ref().ok_or_else(|| fatal("there is no state to train"))
    }

    fn place(&self) -> Result<(u32, Shares), TrainerError> {
        self.place.clone().ok_or_else(|| fatal("no generation was entered"))
    }
}

fn duration(variable: &str) -> Result<Duration, String> {
    let micros = std::env::var(variable).unwrap_or_else(|_| "0".into());
    let number = micros.parse().map_err(|_| format!("{variable}={micros} is no number"))?;
    Ok(Duration::from_micros(number))
}

fn fatal(why: impl Into<String>) -> TrainerError {
    TrainerError::Fatal(why.into())
}

impl Trainer for FakeTrainer {
    fn position(&self) -> Option<Step> {
        self.state.as_ref().map(|state| Step(state.step))
    }

    fn shard(&self) -> Shard {
        Point::Sealing.pass();
        Shard::WHOLE
    }

    fn initialize(&mut self) -> Result<(), TrainerError> {
        self.state = Some(State::initial(self.seed));
        Ok(())
    }

    fn enter(&mut self, _: Token, rank: u32, _: u32, shares: &Shares) -> Result<(), TrainerError> {
        self.prepared = None;
        self.place = Some((rank, shares.clone()));
        Ok(())
    }

    fn prepare(
        &mut self,
        mesh: &mut dyn Communicator,
        abort: &dyn Fn() -> bool,
        deadline: Instant,
    ) -> Result<Vec<u8>, TrainerError> {
        let (rank, shares) = self.place()?;
        let state = self.state()?;
        let own = shares.of(rank as usize);
        let mut leaves = Vec::with_capacity(own.len());
        for micro_batch in own.clone() {
            sleep(self.micro_batch);
            Point::Open.pass();
            if abort() {
                return Err(TrainerError::Aborted);
            }
            leaves.push(state.gradient(self.seed, micro_batch));
        }
        let pieces: Vec<Vec<f32>> = shares
            .pieces(rank as usize)
            .into_iter()
            .map(|node| arithmetic::partial(node, shares.total(), own.start, &leaves))
            .collect();
        let pieces: Vec<View> = pieces.iter().map(View::from).collect();
        let mut sum = Sum::empty();
        mesh.all_reduce_tree(&shares, &pieces, ViewMut::of(sum.as_mut()), deadline)?;
        let ballot =
            Ballot { step: state.step, micro_batches: (own.start, own.end), sum: sum.digest() };
        self.prepared = Some(sum);
        Ok(codec::encode(&ballot))
    }

    fn tally(&self, ballots: &[Vec<u8>]) -> Result<Vec<u8>, TrainerError> {
        Point::Prepared.pass();
        let (_, shares) = self.place()?;
        let sum = self.prepared.as_ref().ok_or_else(|| fatal("nothing is prepared"))?;
        let step = self.state()?.step;
        let mut next = 0;
        for (rank, ballot) in ballots.iter().enumerate() {
            let ballot: Ballot = codec::decode(ballot).map_err(|error| fatal(error.to_string()))?;
            // DATA-2: every micro-batch once, in rank order.
            if ballot.step != step || ballot.micro_batches.0 != next || ballot.sum != sum.digest() {
                return Err(fatal(format!(
                    "rank {rank} votes on step {} with micro-batches {:?} and another sum than \
                     this rank on step {step} from micro-batch {next} on",
                    ballot.step, ballot.micro_batches
                )));
            }
            next = ballot.micro_batches.1;
        }
        if next != shares.total() {
            return Err(fatal(format!("{next} of {} micro-batches were computed", shares.total())));
        }
        Ok(codec::encode(&Verdict { step, loss: sum.loss(shares.total()) }))
    }

    fn apply(&mut self, verdict: &[u8]) -> Result<Applied, TrainerError> {
        let Verdict { step, loss } =
            codec::decode(verdict).map_err(|error| fatal(error.to_string()))?;
        let (_, shares) = self.place()?;
        let sum = self.prepared.take().ok_or_else(|| fatal("nothing is prepared"))?;
        let state = self.state.as_mut().ok_or_else(|| fatal("there is no state to train"))?;
        if step != state.step {
            return Err(fatal(format!("a verdict on step {step} for the state of {}", state.step)));
        }
        let grad_norm = state.apply(&sum, shares.total());
        self.loss = loss;
        let tokens = u64::from(shares.total());
        Ok(Applied { step: Step(state.step), loss, grad_norm, learning_rate: State::RATE, tokens })
    }

    fn discard(&mut self) {
        self.prepared = None;
    }

    fn sync(
        &mut self,
        mesh: &mut dyn Communicator,
        sources: &[Source],
        receivers: &[u32],
        deadline: Instant,
    ) -> Result<(), TrainerError> {
        self.prepared = None;
        if receivers.is_empty() {
            return Ok(());
        }
        match receivers.contains(&(mesh.rank() as u32)) {
            true => Point::Growing.pass(),
            false => Point::Giving.pass(),
        }
        let donor = sources.first().ok_or_else(|| fatal("the seal names no source"))?.rank as usize;
        let mut bytes = match (&self.state, mesh.rank() == donor) {
            (Some(state), true) => codec::encode(state),
            (None, true) => return Err(fatal("this rank is a source without state")),
            (_, false) => vec![0; State::encoded_len()],
        };
        let mut digest = hash(&bytes);
        mesh.broadcast(donor, ViewMut::of(&mut bytes), deadline)?;
        mesh.broadcast(donor, ViewMut::of(&mut digest), deadline)?;
        if hash(&bytes) != digest {
            return Err(fatal(format!("the state from rank {donor} arrived damaged")));
        }
        if receivers.contains(&(mesh.rank() as u32)) {
            let state = codec::decode(&bytes).map_err(|error| fatal(error.to_string()))?;
            self.state = Some(state);
        } else if self.state.as_ref().is_some_and(|own| codec::encode(own) != bytes) {
            return Err(fatal(format!(
                "this rank and rank {donor} hold different states (TRAJ-1)"
            )));
        }
        Ok(())
    }

    fn load(&mut self, folder: &Path) -> Result<Step, TrainerError> {
        self.prepared = None;
        sleep(self.loading);
        Point::Loading.pass();
        let state = checkpoint::load(folder)?;
        let step = Step(state.step);
        self.state = Some(state);
        Ok(step)
    }

    fn snapshot(&mut self) -> Result<Box<dyn Snapshot>, TrainerError> {
        let (_, shares) = self.place()?;
        let state = self.state()?.clone();
        Ok(Box::new(checkpoint::Copied { state, ranks: shares.ranks() as u64, time: self.save }))
    }

    fn validate(
        &mut self,
        mesh: &mut dyn Communicator,
        _: &dyn Fn() -> bool,
        _: Instant,
    ) -> Result<Option<f64>, TrainerError> {
        Ok((mesh.rank() == 0).then_some(f64::from(self.loss)))
    }

    fn finish(
        &mut self,
        mesh: &mut dyn Communicator,
        _: &dyn Fn() -> bool,
        deadline: Instant,
    ) -> Result<FinalReport, TrainerError> {
        let state = self.state()?;
        let mut weights = Sha256::new();
        weights.update(State::bytes(&state.weights));
        let own = codec::encode(state);
        // TRAJ-1: every replica, not only the one that reports.
        for (rank, theirs) in mesh.all_gather_bytes(&hash(&own), 32, deadline)?.iter().enumerate() {
            if theirs[..] != hash(&own) {
                return Err(fatal(format!("rank {rank} ended with another state (TRAJ-1)")));
            }
        }
        Ok(FinalReport {
            step: Step(state.step),
            loss: self.loss,
            validation_loss: None,
            weights_sha256: hex::encode(weights.finalize()),
            state_sha256: hex::encode(hash(&own)),
            loss_sha256: hex::encode(state.losses),
            sample: String::new(),
        })
    }
}
