//! Validation loss and digests: what a state is worth, and which it is.

use std::time::Instant;

use job::{codec, plan::Shard, tokens::VALIDATION_FILE};
use serde::{Deserialize, Serialize};
use transport::collective::{Communicator, ViewMut};

use crate::{
    Engine, Error,
    data::batch::Validation,
    digest::{state_sha256, weights_sha256},
    model::MicroBatch,
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
    /// validation file, or of all. All ranks call it together, each computes
    /// every R-th micro-batch, and the sum is in their order: the bits do not
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
        self.gather(comm, deadline)?;
        let config = self.config();
        let validation = Validation::new(open_tokens(config, VALIDATION_FILE)?, sizes(config))?;
        let count = validation.batches().min(batches.unwrap_or(u64::MAX)).max(1);
        let (rank, ranks) = (comm.rank() as u64, comm.size() as u64);
        let mut own: Vec<(f64, u64)> = Vec::new();
        for index in (rank..count).step_by(ranks as usize) {
            let batch = validation.batch(index)?;
            let (time, vocab_size) = (config.training.seq_len, config.model.vocab_size);
            let batch = MicroBatch::new(&batch.ids, time, vocab_size)?;
            let loss = self.state.replica().model().loss(&batch, 1.0, abort)?;
            own.push((loss, batch.counted()));
        }
        let all = comm.all_gather_bytes(&codec::encode(&own), LIMIT, deadline)?;
        let decode = |bytes: &Vec<u8>| codec::decode::<Vec<(f64, u64)>>(bytes);
        let all = all.iter().map(decode).collect::<Result<Vec<_>, _>>();
        let all = all.map_err(|error| Error::Vote(error.into()))?;
        let (mut sum, mut targets) = (0.0, 0);
        for index in 0..count {
            let (rank, at) = ((index % ranks) as usize, (index / ranks) as usize);
            let Some((loss, counted)) = all[rank].get(at) else {
                return Err(Error::Validation { rank, given: all[rank].len() });
            };
            sum += loss;
            targets += counted;
        }
        Ok(sum / targets.max(1) as f64)
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
        let progress = self.progress().ok_or(Error::Fresh)?;
        self.gather(comm, deadline)?;
        let layout = &self.layout;
        let weights = self.state.replica().weights();
        let (step, held) = (progress.step, self.state.held());
        let state_sha256 = if self.shard() == Some(Shard::WHOLE) {
            let (first, second) = (self.state.exp_avg(), self.state.exp_avg_sq());
            state_sha256(layout, weights, first, second, step)
        } else {
            let cuts = layout.cuts(comm.size());
            let mut whole = |own: &[f32]| -> Result<_, Error> {
                let mut buffer = layout.buffer();
                buffer[held.clone()].copy_from_slice(own);
                comm.all_gather(ViewMut::of(&mut buffer[..]), &cuts, deadline)?;
                Ok(buffer)
            };
            let first = whole(self.state.exp_avg())?;
            let second = whole(self.state.exp_avg_sq())?;
            state_sha256(layout, weights, &first, &second, step)
        };
        Ok(Digests {
            weights_sha256: weights_sha256(layout, weights),
            state_sha256,
            loss_sha256: progress.loss_chain.bytes(),
        })
    }
}
