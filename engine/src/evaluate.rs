//! Validation loss and digests: what a state is worth, and which it is.

use std::time::Instant;

use job::{codec, plan::Shard, spec::Sharding, tokens::VALIDATION_FILE};
use serde::{Deserialize, Serialize};
use transport::collective::{Communicator, View, ViewMut};

use crate::{
    Engine, Error,
    data::batch::Validation,
    digest::{state_sha256, weights_sha256},
    drive,
    layout::AlignedBuffer,
    model::{self, MicroBatch, Pass},
    placement::Portion,
    step::{open_tokens, sizes},
};

/// Bytes of one rank's losses: far more than a validation file has batches.
const LIMIT: usize = 64 << 20;

/// Digests that anyone can recompute with PyTorch; see [`crate::digest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Digests {
    /// Of the weights.
    pub weights_sha256: [u8; 32],
    /// Of weights, moments and step.
    pub state_sha256: [u8; 32],
    /// The chain over all losses.
    pub loss_sha256: [u8; 32],
}

impl Engine {
    /// Mean loss over the targets of the first `batches` micro-batches of the
    /// validation file, or of all. All ranks call it together, each of R pipelines
    /// computes every R-th micro-batch, and the sum is in their order: the bits do not
    /// depend on the mesh (TRAJ-1). `abort` is polled at block boundaries.
    ///
    /// # Errors
    /// [`Error::Data`] and [`Error::Tokens`] when there is no validation data,
    /// [`Error::Collective`], or an abort. The state stays as it is.
    pub fn evaluate(
        &mut self,
        comm: &mut dyn Communicator,
        batches: Option<u64>,
        abort: &dyn Fn() -> bool,
        deadline: Instant,
    ) -> Result<f64, Error> {
        self.check_mesh(comm)?;
        self.progress().ok_or(Error::Fresh)?;
        self.settle()?;
        let config = self.config.clone();
        let validation = Validation::new(open_tokens(&config, VALIDATION_FILE)?, sizes(&config))?;
        let count = validation.batches().min(batches.unwrap_or(u64::MAX)).max(1);
        let seat = self.place()?;
        let degree = u64::from(seat.mesh.degree());
        let own_index = seat.rank as u64 % degree;
        let mut own: Vec<(u64, f64, u64)> = Vec::new();
        // Ranks that gather weights together do as many rounds, with or without
        // a batch of their own.
        for round in 0..count.div_ceil(degree) {
            let index = round * degree + own_index;
            let mut pass = match index < count {
                true => {
                    let ids = validation.batch(index)?.ids;
                    let (time, vocab_size) = (config.training.seq_len, config.model.vocab_size);
                    Some(Pass::new(MicroBatch::new(&ids, time, vocab_size)?, 1.0))
                }
                false => None,
            };
            self.run_forward(comm, pass.as_mut(), abort, deadline)?;
            if let Some(pass) = &pass
                && let Some(loss) = pass.loss()
            {
                own.push((index, loss, pass.batch().counted()));
            }
        }
        let all = comm.all_gather_bytes(&codec::encode(&own), LIMIT, deadline)?;
        let decode = |bytes: &Vec<u8>| codec::decode::<Vec<(u64, f64, u64)>>(bytes);
        let all = all.iter().map(decode).collect::<Result<Vec<_>, _>>();
        let all = all.map_err(|error| Error::Vote(error.into()))?;
        let mut losses: Vec<_> = all.into_iter().flatten().collect();
        losses.sort_by_key(|(index, ..)| *index);
        if !losses.iter().map(|(index, ..)| *index).eq(0..count) {
            return Err(Error::Validation { given: losses.len(), expected: count });
        }
        let sum = losses.iter().fold(0.0, |sum, (_, loss, _)| sum + loss);
        let targets: u64 = losses.iter().map(|(.., counted)| counted).sum();
        Ok(sum / targets.max(1) as f64)
    }

    /// One batch through all parts of the model that are here, without a graph.
    fn run_forward(
        &mut self,
        comm: &mut dyn Communicator,
        mut pass: Option<&mut Pass>,
        abort: &dyn Fn() -> bool,
        deadline: Instant,
    ) -> Result<(), Error> {
        let seat = self.seat.as_mut().ok_or(Error::NotEntered)?;
        seat.connect(comm, deadline)?;
        let training = &self.config.training;
        let releases = self.config.sharding == Sharding::Zero3;
        let stages = seat.mesh.stages;
        for (chunk, units) in seat.chunks.clone().into_iter().enumerate() {
            let (part, parts) = seat.part(chunk as u32);
            if let Some(pass) = pass.as_deref_mut()
                && part > 0
            {
                let from = seat.peer((part - 1) % stages);
                let shape = (training.local_batch_size, training.seq_len);
                let model = self.state.replica().model();
                pass.set_hidden(drive::receive(comm, from, model, shape, deadline)?);
            }
            for unit in units {
                if abort() {
                    return Err(model::Error::Aborted.into());
                }
                let (elements, data) = (self.placement.unit(unit), seat.data(comm));
                let bucket = drive::need(&mut self.state, &self.layout, data, &elements, deadline)?;
                if let Some(pass) = pass.as_deref_mut() {
                    self.state.replica().model().evaluate(unit, pass)?;
                }
                if releases {
                    self.state.release(bucket);
                }
            }
            if let Some(pass) = pass.as_deref_mut()
                && part + 1 < parts
            {
                let hidden = pass.take_hidden();
                drive::send(comm, seat.peer((part + 1) % stages), hidden.as_ref(), deadline)?;
            }
        }
        Ok(())
    }

    /// The digests of the state. All ranks call it together; a replica needs
    /// no other rank for it.
    ///
    /// # Errors
    /// [`Error::Fresh`] or [`Error::Collective`].
    pub fn digests(
        &mut self,
        comm: &mut dyn Communicator,
        deadline: Instant,
    ) -> Result<Digests, Error> {
        self.check_mesh(comm)?;
        let progress = self.progress().ok_or(Error::Fresh)?;
        self.settle()?;
        let layout = &self.layout;
        let (first, second) = (self.state.exp_avg(), self.state.exp_avg_sq());
        let loss_sha256 = progress.loss_chain.bytes();
        if self.shard() == Some(Shard::WHOLE) {
            let weights = self.state.replica().weights();
            let weights_sha256 = weights_sha256(layout, weights);
            let state_sha256 = state_sha256(layout, weights, first, second, progress.step);
            return Ok(Digests { weights_sha256, state_sha256, loss_sha256 });
        }
        let all = self.state.replica().weights();
        let mut weights = vec![0.0; self.state.held().len()];
        for (range, packed) in self.state.held().pieces() {
            weights[packed].copy_from_slice(&all[range]);
        }
        let weights = self.collect(comm, &weights, deadline)?;
        let first = self.collect(comm, first, deadline)?;
        let second = self.collect(comm, second, deadline)?;
        let mut both = [0_u8; 64];
        if comm.rank() == 0 {
            both[..32].copy_from_slice(&weights_sha256(layout, &weights));
            let state = state_sha256(layout, &weights, &first, &second, progress.step);
            both[32..].copy_from_slice(&state);
        }
        comm.broadcast(0, ViewMut::of::<u8>(&mut both), deadline)?;
        let ([weights_sha256, state_sha256], []) = both.as_chunks::<32>() else {
            unreachable!("64 bytes are two digests")
        };
        let (weights_sha256, state_sha256) = (*weights_sha256, *state_sha256);
        Ok(Digests { weights_sha256, state_sha256, loss_sha256 })
    }

    /// The whole of what is held in packed parts, at rank 0.
    fn collect(
        &self,
        comm: &mut dyn Communicator,
        own: &[f32],
        deadline: Instant,
    ) -> Result<AlignedBuffer, Error> {
        let mesh = self.place()?.mesh;
        let speaks = |rank: usize| mesh.place(rank as u32).replica == 0;
        let portion = |rank: usize| match speaks(rank) {
            true => self.placement.portion(mesh.shard(rank as u32)),
            false => Portion::default(),
        };
        let portions: Vec<Portion> = (0..comm.size()).map(portion).collect();
        let mut end = 0;
        let place = |portion: &Portion| {
            end += portion.len();
            end - portion.len()..end
        };
        let splits: Vec<_> = portions.iter().map(place).collect();
        let at_root = comm.rank() == 0;
        let mut packed = vec![0.0; if at_root { end } else { 0 }];
        let own = if speaks(comm.rank()) { own } else { &[] };
        comm.gather(0, View::of(own), &splits, ViewMut::of(&mut packed), deadline)?;
        let mut whole = AlignedBuffer::zeroed(if at_root { self.layout.elements() } else { 0 });
        if at_root {
            for (portion, split) in portions.iter().zip(splits) {
                for (range, place) in portion.pieces() {
                    let from = split.start + place.start..split.start + place.end;
                    whole[range].copy_from_slice(&packed[from]);
                }
            }
        }
        Ok(whole)
    }
}
