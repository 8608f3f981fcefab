//! Drives the micro-batches of a step through this rank's part of the model, in
//! the order of its timeline: gathers weights before a unit needs them, hands
//! activations to the next stage and gradients to the one before, and sums
//! gradients in tree order (TRAJ-1).

use std::{
    collections::{HashMap, VecDeque},
    ops::Range,
    time::Instant,
};

use job::{
    Step,
    pipeline::{Action, Pass as Kind, Slot},
    shares::TreeNode,
    spec::Sharding,
};
use tch::Tensor;
use transport::collective::{Communicator, View, ViewMut};

use crate::{
    Error,
    ballot::Ballot,
    config::Config,
    data::{Ledger, batch::Batches},
    gradient::TreeAccumulator,
    layout::{AlignedBuffer, Layout},
    model::{self, MicroBatch, Part, Pass},
    placement::Placement,
    seat::Seat,
    state::State,
    tree,
};

/// Buffers of gradients, kept from step to step.
#[derive(Debug)]
pub(crate) struct Work {
    /// The gradient of one micro-batch for one bucket.
    leaf: AlignedBuffer,
    /// Cuts of leaves that arrived from other ranks.
    arrived: Vec<f32>,
    /// Of each bucket.
    accumulators: Vec<TreeAccumulator>,
    /// The summed gradient of the elements held, packed.
    pub(crate) gradient: AlignedBuffer,
    pub(crate) prepared: bool,
}

/// What a step needs of an engine and of a call.
pub(crate) struct Drive<'a> {
    pub(crate) config: &'a Config,
    pub(crate) layout: &'a Layout,
    pub(crate) placement: &'a Placement,
    pub(crate) state: &'a mut State,
    pub(crate) work: &'a mut Work,
    pub(crate) seat: &'a mut Seat,
    pub(crate) batches: &'a Batches,
    pub(crate) ledger: Option<&'a mut Ledger>,
    pub(crate) comm: &'a mut dyn Communicator,
    pub(crate) abort: &'a dyn Fn() -> bool,
    pub(crate) deadline: Instant,
}

/// What another stage hands over: the pass, the part that computed it, and the
/// turn.
type Parcel = (Kind, u32, u32);

/// What comes from the other stages. Two ranks may send each other activations
/// and gradients: they arrive in the order in which the sender's timeline makes
/// them, and wait here until they are needed.
#[derive(Default)]
struct Inbox {
    expected: HashMap<usize, VecDeque<Parcel>>,
    waiting: HashMap<Parcel, Tensor>,
}

/// What comes out of the passes besides gradients.
#[derive(Default)]
struct Harvest {
    losses: Vec<(u32, f32)>,
    consumed: Vec<(u32, [u8; 32])>,
    tokens: u64,
}

impl Work {
    pub(crate) fn empty() -> Self {
        Self {
            leaf: AlignedBuffer::zeroed(0),
            arrived: Vec::new(),
            accumulators: Vec::new(),
            gradient: AlignedBuffer::zeroed(0),
            prepared: false,
        }
    }

    /// Makes room for the buckets of a place; what fits stays.
    fn fit(&mut self, state: &State, cuts_gradients: bool) {
        let held = state.held();
        let sizes = state
            .buckets()
            .iter()
            .zip(held.ranges())
            .map(|((bucket, _), own)| if cuts_gradients { own.len() } else { bucket.len() });
        let sizes: Vec<usize> = sizes.collect();
        let fits =
            self.accumulators.iter().map(TreeAccumulator::elements).eq(sizes.iter().copied());
        if !fits {
            self.accumulators.clear();
            let new = |size: &usize| TreeAccumulator::new(0..0, 0, *size);
            self.accumulators.extend(sizes.iter().map(new));
        }
        let longest = state.buckets().iter().map(|(bucket, _)| bucket.len()).max().unwrap_or(0);
        for (buffer, length) in [(&mut self.leaf, longest), (&mut self.gradient, held.len())] {
            if buffer.len() != length {
                *buffer = AlignedBuffer::zeroed(length);
            }
        }
    }
}

impl Drive<'_> {
    /// Computes this rank's micro-batches and sums the gradients of all ranks,
    /// each for the elements that it holds. The ballot has no norms yet.
    pub(crate) fn run(mut self, step: Step) -> Result<Ballot, Error> {
        let cuts_gradients = self.config.sharding.cuts_gradients();
        self.work.fit(self.state, cuts_gradients);
        let (own, total) = (self.seat.own(), self.config.micro_batches());
        for accumulator in &mut self.work.accumulators {
            accumulator.restart(own.clone(), total);
        }
        if !cuts_gradients {
            // Also where there are more ranks than micro-batches: all gather together.
            for bucket in 0..self.state.buckets().len() {
                let data = self.seat.data(self.comm);
                gather(self.state, self.layout, data, bucket, self.deadline)?;
            }
        }
        let turns = self.seat.turns();
        let mut passes: Vec<Option<Pass>> = turns.iter().map(|_| None).collect();
        let mut harvest = Harvest::default();
        let mut inbox = self.inbox(&turns);
        let slots = self.seat.timeline.ranks[self.seat.place.stage as usize].clone();
        for Slot { action, .. } in slots {
            let Action { pass: kind, chunk, micro_batch: turn } = action;
            let pass = &mut passes[turn as usize];
            match kind {
                Kind::Forward => {
                    if chunk == 0
                        && let Some(index) = turns[turn as usize]
                    {
                        *pass = Some(self.begin(step, index, &mut harvest)?);
                    }
                    self.forward(chunk, turn, pass.as_mut(), &mut inbox)?;
                    if let (Some(index), Some(loss)) =
                        (turns[turn as usize], pass.as_ref().and_then(Pass::loss))
                    {
                        harvest.losses.push((index, loss as f32));
                    }
                }
                Kind::Backward => {
                    self.backward((chunk, turn), pass.as_mut(), Part::Both, &mut inbox)?
                }
                Kind::Input => {
                    self.backward((chunk, turn), pass.as_mut(), Part::Input, &mut inbox)?
                }
                Kind::Weight => {
                    self.backward((chunk, turn), pass.as_mut(), Part::Weights, &mut inbox)?
                }
            }
            if chunk == 0 && matches!(kind, Kind::Backward | Kind::Weight) {
                *pass = None;
            }
        }
        self.exchange()?;
        let Harvest { losses, consumed, tokens } = harvest;
        let losses = match cuts_gradients {
            true => leaves(losses),
            false => {
                let first = losses.first().map_or(0, |(index, _)| *index);
                tree::partials(first, total, losses.into_iter().map(|(_, loss)| loss), |a, b| a + b)
            }
        };
        Ok(Ballot { step, norms: Vec::new(), losses, tokens, consumed })
    }

    /// Reads a micro-batch. The first stage answers for it (DATA-1).
    fn begin(&mut self, step: Step, index: u32, harvest: &mut Harvest) -> Result<Pass, Error> {
        let training = &self.config.training;
        let answers = self.seat.place.stage == 0;
        let ledger = self.ledger.as_deref_mut().filter(|_| answers);
        let batch = self.batches.micro_batch(step, index, ledger)?;
        let ids = MicroBatch::new(&batch.ids, training.seq_len, self.config.model.vocab_size)?;
        if answers {
            harvest.tokens += ids.counted();
            harvest.consumed.push((index, batch.sha256));
        }
        Ok(Pass::new(ids, self.config.divisor()))
    }

    /// What the neighbours will send, in their order.
    fn inbox(&self, turns: &[Option<u32>]) -> Inbox {
        let (me, stages) = (self.seat.place.stage, self.seat.mesh.stages);
        let mut inbox = Inbox::default();
        for stage in (0..stages).filter(|stage| *stage != me) {
            let mut queue = VecDeque::new();
            for Slot { action, .. } in &self.seat.timeline.ranks[stage as usize] {
                let Action { pass, chunk, micro_batch: turn } = *action;
                let (part, parts) = (chunk * stages + stage, self.seat.part(0).1);
                let to = match pass {
                    Kind::Forward if part + 1 < parts => (part + 1) % stages,
                    Kind::Backward | Kind::Input if part > 0 => (part - 1) % stages,
                    _ => continue,
                };
                if to == me && turns[turn as usize].is_some() {
                    queue.push_back((direction(pass), part, turn));
                }
            }
            inbox.expected.insert(self.seat.peer(stage), queue);
        }
        inbox
    }

    fn forward(
        &mut self,
        chunk: u32,
        turn: u32,
        mut pass: Option<&mut Pass>,
        inbox: &mut Inbox,
    ) -> Result<(), Error> {
        let (part, parts) = self.seat.part(chunk);
        if part > 0
            && let Some(pass) = pass.as_deref_mut()
        {
            let hidden = self.receive(inbox, self.before(part), (Kind::Forward, part - 1, turn))?;
            pass.set_hidden(hidden);
        }
        let last = self.placement.units() - 1;
        for unit in self.seat.chunks[chunk as usize].clone() {
            self.poll()?;
            let bucket = self.need(unit)?;
            if let Some(pass) = pass.as_deref_mut() {
                self.state.replica().model().forward(unit, pass)?;
            }
            // The head's weights are needed again at once.
            if self.reshards() && unit != last {
                self.state.release(bucket);
            }
        }
        if part + 1 < parts
            && let Some(pass) = pass
        {
            let hidden = pass.take_hidden();
            self.send(self.behind(part), hidden.as_ref())?;
        }
        Ok(())
    }

    fn backward(
        &mut self,
        (chunk, turn): (u32, u32),
        mut pass: Option<&mut Pass>,
        which: Part,
        inbox: &mut Inbox,
    ) -> Result<(), Error> {
        let (part, parts) = self.seat.part(chunk);
        let flows = which != Part::Weights;
        if flows
            && part + 1 < parts
            && let Some(pass) = pass.as_deref_mut()
        {
            let parcel = (Kind::Backward, part + 1, turn);
            let gradient = self.receive(inbox, self.behind(part), parcel)?;
            pass.set_gradient(gradient);
        }
        let cuts_gradients = self.config.sharding.cuts_gradients();
        for unit in self.seat.chunks[chunk as usize].clone().rev() {
            self.poll()?;
            let bucket = self.need(unit)?;
            let start = self.state.buckets()[bucket].0.start;
            if let Some(pass) = pass.as_deref_mut() {
                let (layout, leaf) = (self.layout, &mut self.work.leaf);
                let mut take = |param: usize, gradient: &Tensor| {
                    let range = layout.params()[param].range();
                    let out = &mut leaf[range.start - start..range.end - start];
                    Ok(gradient.f_copy_data(out, out.len())?)
                };
                self.state.replica().model().backward(unit, pass, which, &mut take)?;
            }
            if self.reshards() && which != Part::Input {
                self.state.release(bucket);
            }
            if cuts_gradients && which != Part::Input {
                self.deal(bucket, turn, pass.is_some())?;
            }
        }
        if !cuts_gradients && which != Part::Input {
            let length = self.state.buckets()[chunk as usize].0.len();
            self.work.accumulators[chunk as usize].push(&self.work.leaf[..length]);
        }
        if flows
            && part > 0
            && let Some(pass) = pass
        {
            let gradient = pass.take_gradient();
            self.send(self.before(part), gradient.as_ref())?;
        }
        Ok(())
    }

    /// Weights between forward and backward only take memory while they are
    /// used, where nothing but memory is lost by it.
    fn reshards(&self) -> bool {
        self.config.sharding == Sharding::Zero3
            && self.config.reshards_after_forward(self.seat.mesh.stages)
    }

    /// All weights of a unit are current afterwards.
    fn need(&mut self, unit: usize) -> Result<usize, Error> {
        let unit = self.placement.unit(unit);
        need(self.state, self.layout, self.seat.data(self.comm), &unit, self.deadline)
    }

    /// Deals a leaf to the ranks that hold its cuts, and takes those of the own
    /// cut in the order of the micro-batches.
    fn deal(&mut self, bucket: usize, turn: u32, has_leaf: bool) -> Result<(), Error> {
        let range = self.state.buckets()[bucket].0.clone();
        let length = self.state.held().ranges()[bucket].len();
        let brings = self.seat.wave(turn).len();
        let comm = self.seat.data(self.comm);
        let size = comm.size();
        let Work { leaf, arrived, accumulators, .. } = &mut *self.work;
        let send = match has_leaf {
            true => cuts_within(self.layout, &range, size),
            false => vec![0..0; size],
        };
        if arrived.len() < brings * length {
            arrived.resize(brings * length, 0.0);
        }
        let receive: Vec<_> = (0..size)
            .map(|rank| rank.min(brings) * length..(rank + 1).min(brings) * length)
            .collect();
        comm.all_to_all(
            View::of(&leaf[..range.len()]),
            &send,
            ViewMut::of(&mut arrived[..brings * length]),
            &receive,
            self.deadline,
        )?;
        for cut in receive.into_iter().take(brings) {
            accumulators[bucket].push(&arrived[cut]);
        }
        Ok(())
    }

    /// Sums the partial sums of all ranks, each for the elements that it holds.
    fn exchange(&mut self) -> Result<(), Error> {
        let Self { config, layout, state, work, seat, deadline, .. } = self;
        let shares = seat.shares.clone();
        let Work { accumulators, gradient, .. } = &mut **work;
        for (index, (_, packed)) in state.held().pieces().enumerate() {
            // PANIC: every micro-batch of the range was pushed.
            let pieces = accumulators[index].pieces().expect("the range is complete");
            let views: Vec<View> = pieces.iter().map(|(_, sum)| View::of(sum)).collect();
            let out = &mut gradient[packed];
            match config.sharding {
                Sharding::Replicated => {
                    let comm = seat.data(self.comm);
                    comm.all_reduce_tree(&shares, &views, ViewMut::of(out), *deadline)?;
                }
                Sharding::Zero1 => {
                    let comm = seat.data(self.comm);
                    let cuts = cuts_within(layout, &state.buckets()[index].0, comm.size());
                    let out = ViewMut::of(out);
                    comm.reduce_scatter_tree(&shares, &views, &cuts, out, *deadline)?;
                }
                Sharding::Zero2 | Sharding::Zero3 => match seat.replicas() {
                    // Equal shards have equal lengths: all skip, or none.
                    Some(_) if out.is_empty() => {}
                    Some(comm) => {
                        comm.all_reduce_tree(&shares, &views, ViewMut::of(out), *deadline)?;
                    }
                    None => pieces.iter().for_each(|(_, sum)| out.copy_from_slice(sum)),
                },
            }
        }
        if config.sharding == Sharding::Zero3 {
            (0..state.buckets().len()).for_each(|bucket| state.release(bucket));
        }
        Ok(())
    }

    fn before(&self, part: u32) -> usize {
        let stages = self.seat.mesh.stages;
        self.seat.peer((part - 1) % stages)
    }

    fn behind(&self, part: u32) -> usize {
        let stages = self.seat.mesh.stages;
        self.seat.peer((part + 1) % stages)
    }

    fn send(&mut self, to: usize, tensor: Option<&Tensor>) -> Result<(), Error> {
        send(self.comm, to, tensor, self.deadline)
    }

    fn receive(&mut self, inbox: &mut Inbox, from: usize, parcel: Parcel) -> Result<Tensor, Error> {
        let training = &self.config.training;
        let shape = (training.local_batch_size, training.seq_len);
        loop {
            if let Some(tensor) = inbox.waiting.remove(&parcel) {
                return Ok(tensor);
            }
            let next = inbox.expected.get_mut(&from).and_then(VecDeque::pop_front);
            let Some(next) = next else {
                return Err(model::Error::Torch(format!("no stage sends {parcel:?}")).into());
            };
            let model = self.state.replica().model();
            let tensor = receive(self.comm, from, model, shape, self.deadline)?;
            inbox.waiting.insert(next, tensor);
        }
    }

    fn poll(&self) -> Result<(), Error> {
        if (self.abort)() { Err(model::Error::Aborted.into()) } else { Ok(()) }
    }
}

/// Gathers the bucket of the elements `unit`, unless it is current, from the
/// ranks over which it is cut. Returns which bucket it is.
pub(crate) fn need(
    state: &mut State,
    layout: &Layout,
    comm: &mut dyn Communicator,
    unit: &Range<usize>,
    deadline: Instant,
) -> Result<usize, Error> {
    let holds =
        |(range, _): &(Range<usize>, bool)| range.start <= unit.start && unit.end <= range.end;
    // PANIC: the units of a stage are in its buckets.
    let bucket = state.buckets().iter().position(holds).expect("a unit of this stage");
    gather(state, layout, comm, bucket, deadline)?;
    Ok(bucket)
}

/// Gathers a bucket, unless it is current.
pub(crate) fn gather(
    state: &mut State,
    layout: &Layout,
    comm: &mut dyn Communicator,
    bucket: usize,
    deadline: Instant,
) -> Result<(), Error> {
    let (range, gathered) = state.buckets()[bucket].clone();
    if !gathered {
        let cuts = cuts_within(layout, &range, comm.size());
        comm.all_gather(ViewMut::of(&mut state.weights_mut()[range]), &cuts, deadline)?;
        state.set_gathered(bucket);
    }
    Ok(())
}

/// Hands what flows between two units to another stage.
pub(crate) fn send(
    comm: &mut dyn Communicator,
    to: usize,
    tensor: Option<&Tensor>,
    deadline: Instant,
) -> Result<(), Error> {
    let Some(tensor) = tensor else {
        return Err(model::Error::Torch("a stage has nothing to hand over".into()).into());
    };
    let whole = tensor.f_contiguous().map_err(model::Error::from)?;
    let mut bytes = vec![0_u8; whole.numel() * whole.kind().elt_size_in_bytes()];
    whole.f_copy_data_u8(&mut bytes, whole.numel()).map_err(model::Error::from)?;
    Ok(comm.send(to, View::of::<u8>(&bytes), deadline)?)
}

/// Takes what another stage handed over, for (samples, tokens).
pub(crate) fn receive(
    comm: &mut dyn Communicator,
    from: usize,
    model: &model::Model,
    (samples, time): (usize, usize),
    deadline: Instant,
) -> Result<Tensor, Error> {
    let (shape, kind) = model.boundary(samples, time);
    let elements: i64 = shape.iter().product();
    let mut bytes = vec![0_u8; elements as usize * kind.elt_size_in_bytes()];
    comm.receive(from, ViewMut::of::<u8>(&mut bytes), deadline)?;
    Ok(Tensor::f_from_data_size(&bytes, &shape, kind).map_err(model::Error::from)?)
}

/// The cuts of a bucket, counted from its start.
pub(crate) fn cuts_within(
    layout: &Layout,
    bucket: &Range<usize>,
    ranks: usize,
) -> Vec<Range<usize>> {
    let from_start = |cut: Range<usize>| cut.start - bucket.start..cut.end - bucket.start;
    layout.cut(bucket, ranks).into_iter().map(from_start).collect()
}

/// Gradients of inputs flow alike, whether those of weights come with them or not.
fn direction(pass: Kind) -> Kind {
    if pass == Kind::Forward { Kind::Forward } else { Kind::Backward }
}

fn leaves(values: Vec<(u32, f32)>) -> Vec<(TreeNode, f32)> {
    values.into_iter().map(|(index, value)| (TreeNode { level: 0, index }, value)).collect()
}
