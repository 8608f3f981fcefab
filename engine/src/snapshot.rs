//! A copy of what one rank saves, and its writing as a DCP shard.
//!
//! Copying is all that the training step waits for; writing needs neither the
//! engine nor libtorch and belongs on another thread. Ranks that hold the same
//! elements save a cut of them each, so that a checkpoint holds everything once
//! and is written by all (CKPT-1, CKPT-2).
//!
//! Keys, types and paths are torchtitan's: the model at top level,
//! `optimizer.state.*` and `optimizer.param_groups.*` flattened by parameter,
//! `lr_scheduler.*`, `train_state.*`. `train_state.loss_chain` is ours.

use std::{path::Path, sync::Arc};

use dcp::{Dtype, Region, Segment, ShardIndex, ShardWriter, Value};
use job::Step;

use crate::{
    Engine, Error, Progress,
    config::{Config, OptimizerName},
    layout::{Layout, Param},
    placement::Portion,
};

/// A rank's share of the state of one step. Owned, and [`Send`].
#[derive(Debug)]
pub struct Snapshot {
    layout: Arc<Layout>,
    rank: u32,
    portion: Portion,
    progress: Progress,
    scalars: Scalars,
    /// Weights and both moments of `portion`, f32 little-endian.
    bytes: [Vec<u8>; 3],
}

/// What torchtitan saves besides tensors.
#[derive(Clone, Debug)]
struct Scalars {
    config: Config,
    lr: f64,
}

impl Engine {
    /// Copies this rank's share of a checkpoint: its cut by its place in the
    /// generation entered. `reuse` is an earlier snapshot whose memory is used
    /// again. No other rank is needed.
    ///
    /// # Errors
    /// [`Error::Fresh`], [`Error::NotEntered`], or [`Error::Shard`] when the
    /// rank does not hold its cut.
    pub fn snapshot(&self, reuse: Option<Snapshot>) -> Result<Snapshot, Error> {
        let progress = self.progress().ok_or(Error::Fresh)?;
        let (rank, needed) = (self.place()?.rank as u32, self.target());
        if self.state.shard() != needed {
            return Err(Error::Shard { held: self.state.shard(), needed });
        }
        let (held, portion) = (self.state.held(), self.spoken_for()?);
        let mut bytes = reuse.map_or_else(Default::default, |old| old.bytes);
        for values in &mut bytes {
            values.resize(4 * portion.len(), 0);
        }
        for (range, place) in portion.pieces().filter(|(range, _)| !range.is_empty()) {
            // PANIC: it is a cut of what is held.
            let own = held.packed(&range).expect("held");
            let out = 4 * place.start..4 * place.end;
            write(&self.state.replica().weights()[range], &mut bytes[0][out.clone()]);
            write(&self.state.exp_avg()[own.clone()], &mut bytes[1][out.clone()]);
            write(&self.state.exp_avg_sq()[own], &mut bytes[2][out]);
        }
        let scalars = Scalars { config: self.config.clone(), lr: self.lr(progress.step) };
        Ok(Snapshot { layout: Arc::clone(&self.layout), rank, portion, progress, scalars, bytes })
    }
}

impl Snapshot {
    /// The step whose state it is.
    #[must_use]
    pub fn step(&self) -> Step {
        self.progress.step
    }

    /// The rank that saves it.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Writes the share into the stage folder, durably. Safe to call off the
    /// training thread.
    ///
    /// # Errors
    /// When the disk refuses, or the stage already has this rank's file.
    pub fn write(&self, stage: &Path) -> Result<ShardIndex, dcp::Error> {
        let mut writer = ShardWriter::create(stage, self.rank)?;
        // What every rank has is written once.
        if self.rank == 0 {
            self.scalars.write(&self.layout, &self.progress, &mut writer)?;
        }
        for (range, place) in self.portion.pieces() {
            for slice in self.layout.slices(&range) {
                let param = &self.layout.params()[slice.param];
                let shape = shape(param);
                let (start, rows) = (slice.rows.start as u64, slice.rows.len() as u64);
                let region = Region::rows(&shape, start, rows);
                let at = place.start + slice.elements.start - range.start;
                let at = 4 * at..4 * (at + slice.elements.len());
                let [weights, exp_avg, exp_avg_sq] = &self.bytes;
                let mut tensor = |fqn: &str, path: &[Segment], bytes: &[u8]| {
                    writer.tensor(fqn, path, Dtype::F32, &shape, &region, bytes)
                };
                tensor(&param.name, &[param.name.as_str().into()], &weights[at.clone()])?;
                for (moment, bytes) in [(EXP_AVG, exp_avg), (EXP_AVG_SQ, exp_avg_sq)] {
                    let (fqn, path) = state_key(&param.name, moment);
                    tensor(&fqn, &path, &bytes[at.clone()])?;
                }
            }
        }
        writer.finish()
    }
}

impl Scalars {
    fn write(
        &self,
        layout: &Layout,
        progress: &Progress,
        writer: &mut ShardWriter,
    ) -> Result<(), dcp::Error> {
        let mut object = |group: &str, key: &str, value: &Value| {
            writer.object(&format!("{group}.{key}"), &[group.into(), key.into()], value)
        };
        let int = |value: u64| Value::Int(i64::try_from(value).unwrap_or(i64::MAX));
        object("train_state", "step", &int(progress.step.0))?;
        object("train_state", "ntokens_seen", &int(progress.tokens))?;
        object("train_state", LOSS_CHAIN, &Value::Str(progress.loss_chain.to_string()))?;

        let floats = |value: f64| Value::List(vec![Value::Float(value)]);
        object("lr_scheduler", "base_lrs", &floats(self.config.optimizer.lr))?;
        object("lr_scheduler", "last_epoch", &int(progress.step.0))?;
        object("lr_scheduler", "_step_count", &int(progress.step.0 + 1))?;
        object("lr_scheduler", "_last_lr", &floats(self.lr))?;
        object("lr_scheduler", "_is_initial", &Value::Bool(false))?;
        object("lr_scheduler", "_get_lr_called_within_step", &Value::Bool(false))?;

        for param in layout.params() {
            for (key, value) in self.param_group(param) {
                object("optimizer", &format!("param_groups.{}.{key}", param.name), &value)?;
            }
        }
        let number = (progress.updates as f32).to_le_bytes();
        for param in layout.params() {
            let (fqn, path) = state_key(&param.name, "step");
            writer.tensor(&fqn, &path, Dtype::F32, &[], &Region::whole(&[]), &number)?;
        }
        Ok(())
    }

    /// The options of `torch.optim.AdamW` or `Adam`, as torchtitan sets them.
    fn param_group(&self, param: &Param) -> [(&'static str, Value); 12] {
        let optimizer = &self.config.optimizer;
        let decay = if param.decay { optimizer.weight_decay } else { 0.0 };
        let betas = [optimizer.beta1, optimizer.beta2].map(Value::Float);
        [
            ("lr", Value::Float(self.lr)),
            ("betas", Value::Tuple(betas.into())),
            ("eps", Value::Float(optimizer.eps)),
            ("weight_decay", Value::Float(decay)),
            ("amsgrad", Value::Bool(false)),
            ("maximize", Value::Bool(false)),
            ("foreach", Value::Bool(false)),
            ("capturable", Value::Bool(false)),
            ("differentiable", Value::Bool(false)),
            ("fused", Value::Bool(true)),
            ("decoupled_weight_decay", Value::Bool(optimizer.name == OptimizerName::AdamW)),
            ("initial_lr", Value::Float(optimizer.lr)),
        ]
    }
}

pub(crate) const EXP_AVG: &str = "exp_avg";
pub(crate) const EXP_AVG_SQ: &str = "exp_avg_sq";
pub(crate) const LOSS_CHAIN: &str = "loss_chain";

/// Key and path of an optimizer state tensor.
pub(crate) fn state_key(param: &str, what: &str) -> (String, [Segment; 2]) {
    let inner = format!("state.{param}.{what}");
    (format!("optimizer.{inner}"), ["optimizer".into(), Segment::Key(inner)])
}

pub(crate) fn shape(param: &Param) -> Vec<u64> {
    param.shape.iter().map(|&size| size as u64).collect()
}

fn write(values: &[f32], bytes: &mut [u8]) {
    for (value, out) in values.iter().zip(bytes.as_chunks_mut::<4>().0) {
        *out = value.to_le_bytes();
    }
}
