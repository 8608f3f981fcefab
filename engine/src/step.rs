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
//! Micro-batches are numbered over the global batch and summed in one tree.

use std::{ops::Range, path::Path, sync::Arc, time::Instant};

use job::{Step, Token, codec, plan::Shard, shares::Shares, spec::Sharding, tokens::TRAIN_FILE};
use transport::collective::{Communicator, View, ViewMut};

use crate::{
    Error,
    ballot::{Ballot, Verdict},
    config::Config,
    data::{
        Ledger, TokenFile,
        batch::{Batches, Sizes},
    },
    gradient::TreeAccumulator,
    layout::{AlignedBuffer, Layout},
    memory,
    model::MicroBatch,
    optimizer::{AdamW, Schedule, adamw, clip},
    state::{self, Progress, State},
    tree,
};

/// One rank's training engine: its state, and its place in the generation that
/// it has entered.
#[derive(Debug)]
pub struct Engine {
    pub(crate) config: Config,
    pub(crate) layout: Arc<Layout>,
    pub(crate) state: State,
    /// Opened by the first [`Self::enter`]: text is generated without data.
    batches: Option<Batches>,
    ledger: Option<Ledger>,
    adamw: AdamW,
    schedule: Schedule,
    seat: Option<Seat>,
    work: Work,
}

/// A rank's place in a generation.
#[derive(Debug)]
struct Seat {
    token: Token,
    rank: usize,
    shares: Shares,
}

/// Buffers of the size of the model, kept from step to step.
#[derive(Debug)]
struct Work {
    leaf: AlignedBuffer,
    accumulator: TreeAccumulator,
    /// The summed gradient of the elements that this rank updates.
    gradient: AlignedBuffer,
    prepared: bool,
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
        let work = Work {
            leaf: layout.buffer(),
            accumulator: TreeAccumulator::new(0..0, config.micro_batches(), layout.elements()),
            gradient: AlignedBuffer::zeroed(0),
            prepared: false,
        };
        Ok(Self {
            state: State::fresh(&config, Arc::clone(&layout))?,
            adamw: config.optimizer.adamw(),
            schedule: config.schedule(),
            batches: None,
            ledger: None,
            seat: None,
            work,
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

    /// Takes a place in a new generation: rank `rank` of `shares.ranks()`. What
    /// was prepared in the one before is dropped (GN-3: apply it first where
    /// the seal says so).
    ///
    /// The first time, opens and checks the training data.
    ///
    /// # Errors
    /// [`Error::Place`] when the shares are not of this configuration's global
    /// batch or the rank is not in them; [`Error::Tokens`], [`Error::Data`] or
    /// [`Error::Vocabulary`] when the data does not suit.
    pub fn enter(&mut self, token: Token, rank: usize, shares: &Shares) -> Result<(), Error> {
        let (expected, given) = (self.config.micro_batches(), shares.total());
        if given != expected || rank >= shares.ranks() {
            return Err(Error::Place { rank, ranks: shares.ranks(), given, expected });
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
        self.seat = Some(Seat { token, rank, shares: shares.clone() });
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
        self.gather(comm, deadline)?;
        let ballot = self.accumulate(step, abort)?;
        self.exchange(comm, deadline)?;
        let norms = clip::norm_partials(&self.layout, &self.norm_cut(), self.norm_gradient());
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
        let (micro_batches, divisor) = (self.config.micro_batches(), self.divisor());
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
        let scale = verdict.scale(self.divisor()).filter(|_| verdict.updates());
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

    /// Renews the weights outside this rank's shard: sharded ranks call it
    /// together. Without effect where they are current.
    ///
    /// # Errors
    /// [`Error::Collective`]; the shard itself is untouched.
    pub fn gather(&mut self, comm: &mut dyn Communicator, deadline: Instant) -> Result<(), Error> {
        self.check_mesh(comm)?;
        self.progress().ok_or(Error::Fresh)?;
        if self.state.is_gathered() {
            return Ok(());
        }
        self.settle()?;
        let cuts = self.layout.cuts(comm.size());
        comm.all_gather(ViewMut::of(self.state.weights_mut()), &cuts, deadline)?;
        self.state.set_gathered();
        Ok(())
    }

    /// The shard that this rank's place asks for: all of it before it has one.
    pub(crate) fn target(&self) -> Shard {
        match (&self.seat, self.config.sharding) {
            (Some(seat), Sharding::Zero1) => {
                Shard { index: seat.rank as u32, of: seat.shares.ranks() as u32 }
            }
            _ => Shard::WHOLE,
        }
    }

    pub(crate) fn check_mesh(&self, comm: &dyn Communicator) -> Result<(), Error> {
        let seat = self.seat.as_ref().ok_or(Error::NotEntered)?;
        let (rank, ranks) = (seat.rank, seat.shares.ranks());
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

    /// This rank and the number of ranks of the generation entered.
    pub(crate) fn place(&self) -> Result<(usize, usize), Error> {
        let seat = self.seat.as_ref().ok_or(Error::NotEntered)?;
        Ok((seat.rank, seat.shares.ranks()))
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
    fn settle(&mut self) -> Result<(), Error> {
        let needed = self.target();
        if self.state.narrow(needed) {
            return Ok(());
        }
        Err(Error::Shard { held: self.state.shard(), needed })
    }

    /// What losses are divided by before the backward pass: near the number of
    /// target tokens, which is known only when all micro-batches are read.
    fn divisor(&self) -> f64 {
        let training = &self.config.training;
        training.global_batch_size as f64 * training.seq_len as f64
    }

    /// Forward and backward of this rank's micro-batches, in index order. The
    /// ballot has no norms yet.
    fn accumulate(&mut self, step: Step, abort: &dyn Fn() -> bool) -> Result<Ballot, Error> {
        let (Some(seat), Some(batches)) = (&self.seat, &self.batches) else {
            return Err(Error::NotEntered);
        };
        let (range, total) = (seat.shares.of(seat.rank), seat.shares.total());
        let training = &self.config.training;
        let divisor = training.global_batch_size as f64 * training.seq_len as f64;
        let (layout, work) = (&self.layout, &mut self.work);
        work.accumulator.restart(range.clone(), total);
        let (mut losses, mut tokens, mut consumed) = (Vec::new(), 0, Vec::new());
        for index in range.clone() {
            let ledger = self.ledger.as_mut();
            let batch = batches.micro_batch(step, index, ledger)?;
            let micro_batch =
                MicroBatch::new(&batch.ids, training.seq_len, self.config.model.vocab_size)?;
            let leaf = &mut work.leaf;
            let mut take = |param: usize, gradient: &tch::Tensor| {
                let out = &mut leaf[layout.params()[param].range()];
                Ok(gradient.f_copy_data(out, out.len())?)
            };
            let model = self.state.replica().model();
            let loss = model.forward_backward(&micro_batch, divisor, abort, &mut take)?;
            work.accumulator.push(&work.leaf);
            losses.push(loss as f32);
            tokens += micro_batch.counted();
            consumed.push(batch.sha256);
        }
        let losses = tree::partials(range.start, total, losses, |a, b| a + b);
        Ok(Ballot { step, norms: Vec::new(), losses, tokens, consumed })
    }

    /// Sums the gradients of all ranks, each for the elements that it updates.
    fn exchange(&mut self, comm: &mut dyn Communicator, deadline: Instant) -> Result<(), Error> {
        let seat = self.seat.as_ref().ok_or(Error::NotEntered)?;
        let work = &mut self.work;
        let own = self.state.held();
        if work.gradient.len() != own.len() {
            work.gradient = AlignedBuffer::zeroed(own.len());
        }
        // PANIC: `accumulate` pushed every micro-batch of the range.
        let pieces = work.accumulator.pieces().expect("the range is complete");
        let pieces: Vec<View> = pieces.into_iter().map(|(_, sum)| View::of(sum)).collect();
        match self.config.sharding {
            Sharding::Replicated => {
                let out = ViewMut::of(&mut work.gradient[..]);
                comm.all_reduce_tree(&seat.shares, &pieces, out, deadline)?;
            }
            Sharding::Zero1 => {
                let cuts = self.layout.cuts(comm.size());
                let out = ViewMut::of(&mut work.gradient[..]);
                comm.reduce_scatter_tree(&seat.shares, &pieces, &cuts, out, deadline)?;
            }
        }
        Ok(())
    }

    /// The cut whose norm this rank contributes: its own, also as a replica.
    fn norm_cut(&self) -> Range<usize> {
        match &self.seat {
            Some(seat) => {
                let (index, of) = (seat.rank as u32, seat.shares.ranks() as u32);
                state::elements(&self.layout, Shard { index, of })
            }
            None => 0..self.layout.elements(),
        }
    }

    fn norm_gradient(&self) -> &[f32] {
        let (cut, held) = (self.norm_cut(), self.state.held());
        &self.work.gradient[cut.start - held.start..cut.end - held.start]
    }

    /// Updates the elements held, run by run of equal weight decay.
    fn update(&mut self, update: adamw::Update) {
        let held = self.state.held();
        let state::Parts { weights, exp_avg, exp_avg_sq } = self.state.parts();
        for slice in self.layout.slices(&held) {
            let decay = self.layout.params()[slice.param].decay;
            let at = slice.elements.start - held.start..slice.elements.end - held.start;
            self.adamw.apply(
                adamw::Update { decay, ..update },
                &mut weights[at.clone()],
                &mut exp_avg[at.clone()],
                &mut exp_avg_sq[at.clone()],
                &self.work.gradient[at],
            );
        }
    }
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
