//! The training step, from the point of view of one rank (ST-1 to ST-3).
//!
//! ```text
//!            prepare            tally, apply
//! Open(s) ------------> Prepared(s) ------------> Open(s+1)
//!    ^                      |
//!    +------ discard -------+
//! ```
//!
//! Only `prepare` talks to other ranks and only `prepare` can be aborted; the
//! caller holds the vote: it gathers the ballots of all ranks, and no rank
//! applies before its vote succeeded. `apply` has no collective and always
//! finishes.
//!
//! TRAJ-1: what a rank computes depends on its place, what comes out does not.
//! Micro-batches are numbered over the global batch and summed in one tree; how
//! they are driven through the model is in `drive`.

use std::{path::Path, sync::Arc, time::Instant};

use job::{
    Step, Token, codec,
    mesh::Mesh,
    plan::Shard,
    shares::{Shares, TreeNode},
    tokens::TRAIN_FILE,
};
use transport::collective::{Communicator, ViewMut};

use crate::{
    Error,
    ballot::{Ballot, Verdict},
    config::Config,
    data::{
        Ledger, TokenFile,
        batch::{Batches, Sizes},
    },
    drive::{self, Drive, Work},
    ffi::Replica,
    layout::Layout,
    memory,
    optimizer::{AdamW, Schedule, adamw, clip},
    placement::{Placement, Portion},
    seat::Seat,
    state::{self, Progress, State},
};

/// One rank's training engine: its state, and its place in the generation that
/// it has entered.
#[derive(Debug)]
pub struct Engine {
    pub(crate) config: Config,
    pub(crate) layout: Arc<Layout>,
    pub(crate) placement: Placement,
    pub(crate) state: State,
    /// Opened by the first [`Self::enter`]: text is generated without data.
    batches: Option<Batches>,
    ledger: Option<Ledger>,
    adamw: AdamW,
    schedule: Schedule,
    pub(crate) seat: Option<Seat>,
    work: Work,
}

/// What applying a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Steps applied now.
    pub step: Step,
    /// Mean loss over the target tokens.
    pub loss: f32,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Target tokens of the step, over all ranks.
    pub tokens: u64,
    /// No target tokens, or a loss or gradient that is not finite: weights and
    /// moments stayed as they were.
    pub update_skipped: bool,
}

impl Engine {
    /// An engine without state (HEAL-1).
    ///
    /// # Errors
    /// [`Error::Config`], or [`Error::Memory`] when the model does not fit.
    pub fn new(config: Config) -> Result<Self, Error> {
        config.validate()?;
        let layout = Arc::new(Layout::new(config.model.parameters())?);
        memory::check(&config, layout.elements())?;
        let replica = Replica::new(&config, &layout)?;
        let units = units(&layout, &replica);
        let (sharding, parallel) = (config.sharding, &config.parallelism);
        let ends = (parallel.first_stage_less_layers, parallel.last_stage_less_layers);
        let placement = Placement::new(Arc::clone(&layout), units, sharding, &parallel.mesh, ends);
        Ok(Self {
            state: State::fresh(replica, Arc::clone(&layout), placement.clone()),
            adamw: config.optimizer.adamw(),
            schedule: config.schedule(),
            batches: None,
            ledger: None,
            seat: None,
            work: Work::empty(),
            placement,
            layout,
            config,
        })
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Where the parameters lie, and how their buffer is cut.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Steps applied; none while the rank is fresh.
    #[must_use]
    pub fn position(&self) -> Option<Step> {
        self.state.progress().map(|progress| progress.step)
    }

    /// Whether a complete gradient for the step after [`Self::position`] is
    /// ready to be applied (ST-1).
    #[must_use]
    pub fn is_prepared(&self) -> bool {
        self.work.prepared
    }

    /// How far the state is; none while the rank is fresh.
    #[must_use]
    pub fn progress(&self) -> Option<Progress> {
        self.state.progress()
    }

    /// The part of the training state that this rank holds; none while fresh.
    #[must_use]
    pub fn shard(&self) -> Option<Shard> {
        self.state.progress().map(|_| self.state.shard())
    }

    /// Whether this rank could continue the job alone.
    #[must_use]
    pub fn is_complete_replica(&self) -> bool {
        self.shard() == Some(Shard::WHOLE)
    }

    /// Writes down from now on which samples this rank reads (DATA-1), in a
    /// file of this process that must not exist yet.
    ///
    /// # Errors
    /// [`Error::Data`] when the file cannot be made.
    pub fn keep_ledger(&mut self, path: &Path) -> Result<(), Error> {
        let mut ledger = Ledger::create(path)?;
        if let Some(seat) = &self.seat {
            ledger.enter(seat.token, seat.rank);
        }
        self.ledger = Some(ledger);
        Ok(())
    }

    /// Makes the state of step 0: a function of the configuration (TRAJ-1).
    pub fn initialize(&mut self) {
        self.work.prepared = false;
        let shard = self.target();
        self.state.initialize(&self.config, shard);
    }

    /// Takes a place in a new generation: rank `rank` of a mesh of `stages`
    /// pipeline stages, over whose pipelines the micro-batches are shared. What
    /// was prepared in the one before is dropped (GN-3: apply it first where the
    /// seal says so).
    ///
    /// The first time, opens and checks the training data.
    ///
    /// # Errors
    /// [`Error::Place`] when the shares are not of this configuration's global
    /// batch or the rank is not in the mesh; [`Error::Tokens`], [`Error::Data`] or
    /// [`Error::Vocabulary`] when the data does not suit.
    pub fn enter(
        &mut self,
        token: Token,
        rank: usize,
        stages: u32,
        shares: &Shares,
    ) -> Result<(), Error> {
        let (expected, given) = (self.config.micro_batches(), shares.total());
        let (sharding, parallel) = (self.config.sharding, &self.config.parallelism);
        let degree = shares.ranks() as u32;
        let mesh = parallel.mesh.over(sharding, stages.max(1), degree);
        let ranks = mesh.ranks() as usize;
        if given != expected || rank >= ranks || mesh.degree() != degree {
            return Err(Error::Place { rank, ranks, given, expected });
        }
        if self.batches.is_none() {
            let tokens = open_tokens(&self.config, TRAIN_FILE)?;
            let seed = self.config.training.seed;
            self.batches = Some(Batches::new(tokens, sizes(&self.config), seed)?);
        }
        self.work.prepared = false;
        // A gather that broke off ended at some ranks and not at others: in a
        // new generation either all gather or none does.
        self.state.forget_gathered();
        if let Some(ledger) = &mut self.ledger {
            ledger.enter(token, rank);
        }
        let (placement, schedule) = (&self.placement, parallel.schedule);
        self.seat = Some(Seat::new(token, rank, mesh, given, sharding, placement, schedule));
        Ok(())
    }

    /// Open(s) to Prepared(s): computes this rank's micro-batches, sums the
    /// gradients of all, and returns this rank's ballot for the vote. `abort`
    /// is polled at block boundaries.
    ///
    /// # Errors
    /// Any error leaves the rank Open(s) (a dropped gradient is recomputed).
    /// [`Error::Collective`] ends the generation for this rank.
    pub fn prepare(
        &mut self,
        comm: &mut dyn Communicator,
        abort: &dyn Fn() -> bool,
        deadline: Instant,
    ) -> Result<Vec<u8>, Error> {
        let step = self.open("prepare")?;
        self.check_mesh(comm)?;
        self.settle()?;
        let (Some(seat), Some(batches)) = (&mut self.seat, &self.batches) else {
            return Err(Error::NotEntered);
        };
        seat.connect(comm, deadline)?;
        let drive = Drive {
            config: &self.config,
            layout: &self.layout,
            placement: &self.placement,
            state: &mut self.state,
            work: &mut self.work,
            seat,
            batches,
            ledger: self.ledger.as_mut(),
            comm,
            abort,
            deadline,
        };
        let ballot = drive.run(step)?;
        let norms = self.norms()?;
        self.work.prepared = true;
        Ok(codec::encode(&Ballot { norms, ..ballot }))
    }

    /// The verdict on the step that is prepared here: a pure function of the
    /// ballots of all ranks, in rank order.
    ///
    /// # Errors
    /// [`Error::Vote`] when the ballots contradict each other.
    pub fn tally(&self, ballots: &[Vec<u8>]) -> Result<Vec<u8>, Error> {
        let step = self.prepared("tally")?.step;
        let (micro_batches, divisor) = (self.config.micro_batches(), self.config.divisor());
        let verdict = Verdict::of(ballots, step, micro_batches, divisor, &self.layout)?;
        Ok(codec::encode(&verdict))
    }

    /// Prepared(s) to Open(s+1), by the verdict of [`Self::tally`].
    ///
    /// # Errors
    /// When nothing is prepared or the verdict is on another step; never
    /// halfway.
    pub fn apply(&mut self, verdict: &[u8]) -> Result<StepReport, Error> {
        let Progress { step, updates, tokens, mut loss_chain } = self.prepared("apply")?;
        let verdict = Verdict::decode(verdict)?;
        if verdict.step != step {
            return Err(Error::OtherStep { prepared: step, given: verdict.step });
        }
        let lr = self.schedule.lr(step);
        let scale = verdict.scale(self.config.divisor()).filter(|_| verdict.updates());
        if let Some(scale) = scale {
            let clip = clip::coefficient(verdict.grad_norm, self.config.training.max_norm);
            let number = updates + 1;
            self.update(adamw::Update { lr, number, scale, clip, decay: true });
        }
        loss_chain.append(verdict.loss);
        self.work.prepared = false;
        self.state.advance(Progress {
            step: step.next(),
            updates: updates + u64::from(scale.is_some()),
            tokens: tokens.saturating_add(verdict.tokens),
            loss_chain,
        });
        Ok(StepReport {
            step: step.next(),
            loss: verdict.loss,
            grad_norm: verdict.grad_norm,
            lr,
            tokens: verdict.tokens,
            update_skipped: scale.is_none(),
        })
    }

    /// Prepared(s) to Open(s): drops the gradient.
    pub fn discard(&mut self) {
        self.work.prepared = false;
    }

    /// Renews the weights of the whole model: all ranks call it together. Without
    /// effect where they are current.
    ///
    /// # Errors
    /// [`Error::Collective`]; the shard itself is untouched.
    pub fn gather(&mut self, comm: &mut dyn Communicator, deadline: Instant) -> Result<(), Error> {
        self.check_mesh(comm)?;
        self.progress().ok_or(Error::Fresh)?;
        self.settle()?;
        let seat = self.seat.as_mut().ok_or(Error::NotEntered)?;
        seat.connect(comm, deadline)?;
        for bucket in 0..self.state.buckets().len() {
            let data = seat.data(comm);
            drive::gather(&mut self.state, &self.layout, data, bucket, deadline)?;
        }
        let Mesh { stages, .. } = seat.mesh;
        if stages > 1 {
            for stage in 0..stages {
                let root = (stage * seat.mesh.degree()) as usize;
                for bucket in self.placement.buckets(stages, stage) {
                    let values = ViewMut::of(&mut self.state.weights_mut()[bucket]);
                    comm.broadcast(root, values, deadline)?;
                }
            }
        }
        Ok(())
    }

    /// The shard that this rank's place asks for: all of it before it has one.
    pub(crate) fn target(&self) -> Shard {
        match &self.seat {
            Some(seat) => seat.mesh.shard(seat.rank as u32),
            None => Shard::WHOLE,
        }
    }

    pub(crate) fn check_mesh(&self, comm: &dyn Communicator) -> Result<(), Error> {
        let seat = self.seat.as_ref().ok_or(Error::NotEntered)?;
        let (rank, ranks) = (seat.rank, seat.mesh.ranks() as usize);
        if (comm.token(), comm.rank(), comm.size()) == (seat.token, rank, ranks) {
            return Ok(());
        }
        let given = format!("{}, rank {} of {}", comm.token(), comm.rank(), comm.size());
        Err(Error::OtherMesh { entered: seat.token, rank, ranks, given })
    }

    /// The learning rate with which the step after `step` steps is applied.
    pub(crate) fn lr(&self, step: Step) -> f64 {
        self.schedule.lr(step)
    }

    /// This rank's place in the generation entered.
    pub(crate) fn place(&self) -> Result<&Seat, Error> {
        self.seat.as_ref().ok_or(Error::NotEntered)
    }

    /// The part of the elements held for which this rank speaks, of all that hold
    /// them: with all ranks' parts everything is said once.
    pub(crate) fn spoken_for(&self) -> Result<Portion, Error> {
        let Seat { mesh, place, .. } = self.place()?;
        Ok(self.placement.cut(self.state.held(), place.replica, mesh.replicas))
    }

    /// The step of an open rank.
    fn open(&self, call: &'static str) -> Result<Step, Error> {
        let step = self.position().ok_or(Error::Fresh)?;
        if self.work.prepared {
            return Err(Error::Position { call, needed: "open", step });
        }
        Ok(step)
    }

    fn prepared(&self, call: &'static str) -> Result<Progress, Error> {
        let progress = self.progress().ok_or(Error::Fresh)?;
        if !self.work.prepared {
            return Err(Error::Position { call, needed: "prepared", step: progress.step });
        }
        Ok(progress)
    }

    /// Gives up what the rank's place no longer asks for.
    pub(crate) fn settle(&mut self) -> Result<(), Error> {
        let needed = self.target();
        if self.state.narrow(needed) {
            return Ok(());
        }
        Err(Error::Shard { held: self.state.shard(), needed })
    }

    /// The sums of squares of what this rank speaks for.
    fn norms(&self) -> Result<Vec<(TreeNode, f64)>, Error> {
        let held = self.state.held();
        let mut norms = Vec::new();
        for range in self.spoken_for()?.ranges() {
            for (range, packed) in held.within(range) {
                norms.extend(clip::norm_partials(
                    &self.layout,
                    &range,
                    &self.work.gradient[packed],
                ));
            }
        }
        Ok(norms)
    }

    /// Updates the elements held, run by run of equal weight decay.
    fn update(&mut self, update: adamw::Update) {
        let held = self.state.held().clone();
        let state::Parts { weights, exp_avg, exp_avg_sq } = self.state.parts();
        for (range, packed) in held.pieces() {
            for slice in self.layout.slices(&range) {
                let decay = self.layout.params()[slice.param].decay;
                let start = packed.start + slice.elements.start - range.start;
                let at = start..start + slice.elements.len();
                self.adamw.apply(
                    adamw::Update { decay, ..update },
                    &mut weights[slice.elements],
                    &mut exp_avg[at.clone()],
                    &mut exp_avg_sq[at.clone()],
                    &self.work.gradient[at],
                );
            }
        }
    }
}

/// The elements of each unit of the model.
fn units(layout: &Layout, replica: &Replica) -> Vec<std::ops::Range<usize>> {
    let model = replica.model();
    let start = |unit: usize| match model.unit_parameters(unit).start {
        first if unit < model.units() => layout.params()[first].offset,
        _ => layout.elements(),
    };
    let end =
        |unit: usize| if unit + 1 < model.units() { start(unit + 1) } else { layout.elements() };
    (0..model.units()).map(|unit| start(unit)..end(unit)).collect()
}

/// Opens a token file of the dataset whose tokens the model knows.
pub(crate) fn open_tokens(config: &Config, name: &str) -> Result<TokenFile, Error> {
    let file = TokenFile::open(&config.dataset.join(name))?;
    let (given, vocab_size) = (file.header().vocab_size, config.model.vocab_size as u64);
    if given > vocab_size {
        return Err(Error::Vocabulary { file: file.path().to_owned(), given, vocab_size });
    }
    Ok(file)
}

pub(crate) fn sizes(config: &Config) -> Sizes {
    let training = &config.training;
    Sizes {
        seq_len: training.seq_len,
        local_batch: training.local_batch_size,
        global_batch: training.global_batch_size,
    }
}
