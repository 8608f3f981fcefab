//! What a run computes, complete and resolved: two processes with equal
//! configurations produce equal bits (TRAJ-1). Section and key names are
//! torchtitan's where it has them; where files, addresses and schedules of
//! saving live is not said here.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{
    model::{self, Recompute, Shape},
    optimizer::{AdamW, Schedule, schedule},
};

pub use crate::optimizer::schedule::Decay;
pub use job::{mesh::Parallel, pipeline::Schedule as PipelineSchedule, spec::Sharding};

/// The configuration of an [`Engine`](crate::Engine).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The model's shape, as [`model::registry::find`] gives it.
    pub model: Shape,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// The learning rate over the steps.
    pub lr_scheduler: LrScheduler,
    /// Batches, steps and precision.
    pub training: Training,
    /// Who holds which part of the state.
    pub sharding: Sharding,
    /// How the model is spread besides.
    #[serde(default)]
    pub parallelism: Parallelism,
    /// Folder of a prepared dataset (`dataset.json`, `train.tok`, `validation.tok`).
    pub dataset: PathBuf,
}

/// AdamW (arXiv 1711.05101) or Adam (arXiv 1412.6980).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Optimizer {
    /// Which of the two.
    pub name: OptimizerName,
    /// Learning rate before the schedule's factor.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Weight decay, on every parameter, as torchtitan does.
    pub weight_decay: f64,
}

/// What weight decay acts on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OptimizerName {
    /// The weights, apart from the moments.
    #[default]
    AdamW,
    /// The gradient, and so the moments.
    Adam,
}

/// Warm-up, stable, decay (torchtitan's `lr_scheduler`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LrScheduler {
    /// Steps of linear warm-up.
    pub warmup_steps: u64,
    /// Steps that the schedule is made for; none means `training.steps`.
    pub total_steps: Option<u64>,
    /// Share of the steps that decays; none means all after the warm-up.
    pub decay_ratio: Option<f64>,
    /// The curve of the decay.
    pub decay_type: Decay,
    /// The factor at the end of the decay.
    pub min_lr_factor: f64,
}

/// Batches, steps and precision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Training {
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Sequences of a micro-batch, which is never split.
    pub local_batch_size: usize,
    /// Sequences of a step, already resolved (never -1): constant over resizes (DATA-2).
    pub global_batch_size: usize,
    /// Steps of the whole run.
    pub steps: u64,
    /// Gradients are clipped to this global norm; infinity switches clipping off.
    pub max_norm: f64,
    /// Seed of initial weights and data order.
    pub seed: u64,
    /// Element type of forward and backward; weights, gradients and moments
    /// are f32 always.
    #[serde(default)]
    pub dtype: Dtype,
    /// Which blocks recompute their activations.
    #[serde(default)]
    pub activation_checkpoint: ActivationCheckpoint,
}

/// How the model is spread over the ranks of a mesh. No bit depends on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Parallelism {
    /// What is asked of the mesh.
    pub mesh: Parallel,
    /// The order of a pipeline's passes.
    pub schedule: PipelineSchedule,
    /// What the embedding weighs when blocks are dealt to stages, in blocks.
    pub first_stage_less_layers: u32,
    /// What the head weighs.
    pub last_stage_less_layers: u32,
    /// Whether ZeRO-3 gives weights up between forward and backward.
    pub reshard_after_forward: Reshard,
}

/// torchtitan's `fsdp_reshard_after_forward`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reshard {
    /// Unless there is a pipeline, which would gather them for each micro-batch.
    #[default]
    Default,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// Element type of forward and backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE single precision.
    #[default]
    Float32,
    /// bfloat16, with f32 master weights and gradients.
    Bfloat16,
}

/// torchtitan's `activation_checkpoint.mode`, of whole blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ActivationCheckpoint {
    /// Every block keeps its activations.
    #[default]
    None,
    /// Every n-th block recomputes (`selective_ac_option = "n"`).
    Selective(usize),
    /// Every block recomputes.
    Full,
}

/// A configuration that nothing can run.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// The model's shape.
    #[error(transparent)]
    Model(#[from] model::registry::Error),
    /// A key outside its rule.
    #[error("{key} = {value}: {rule}")]
    Invalid {
        /// Section and key.
        key: &'static str,
        /// What it holds.
        value: String,
        /// What it must be.
        rule: String,
    },
}

impl Config {
    /// Number of micro-batches M of a step.
    #[must_use]
    pub fn micro_batches(&self) -> u32 {
        (self.training.global_batch_size / self.training.local_batch_size) as u32
    }

    /// What losses are divided by before the backward pass: near the number of
    /// target tokens, which is known only when all micro-batches are read.
    pub(crate) fn divisor(&self) -> f64 {
        self.training.global_batch_size as f64 * self.training.seq_len as f64
    }

    pub(crate) fn reshards_after_forward(&self, stages: u32) -> bool {
        match self.parallelism.reshard_after_forward {
            Reshard::Default => stages == 1,
            Reshard::Always => true,
            Reshard::Never => false,
        }
    }

    pub(crate) fn schedule(&self) -> Schedule {
        let LrScheduler { warmup_steps, total_steps, decay_ratio, decay_type, min_lr_factor } =
            self.lr_scheduler;
        let total_steps = total_steps.unwrap_or(self.training.steps);
        let options =
            schedule::Options { warmup_steps, total_steps, decay_ratio, decay_type, min_lr_factor };
        Schedule::new(self.optimizer.lr, &options)
    }

    /// Checks every key.
    ///
    /// # Errors
    /// The first key that breaks its rule.
    pub fn validate(&self) -> Result<(), Error> {
        self.model.validate()?;
        self.training.validate()?;
        self.optimizer.validate()?;
        self.lr_scheduler.validate()?;
        let layers = self.model.n_layers as u32;
        let asked = Parallel { layers, ..self.parallelism.mesh };
        let (stages, possible) = (asked.stages(), asked.check(self.sharding));
        possible.or_else(|why| rule(false, "parallelism", stages, why))
    }
}

impl Default for Parallelism {
    fn default() -> Self {
        Self {
            mesh: Parallel::default(),
            schedule: PipelineSchedule::default(),
            first_stage_less_layers: 1,
            last_stage_less_layers: 1,
            reshard_after_forward: Reshard::default(),
        }
    }
}

impl Training {
    pub(crate) fn kind(&self) -> tch::Kind {
        match self.dtype {
            Dtype::Float32 => tch::Kind::Float,
            Dtype::Bfloat16 => tch::Kind::BFloat16,
        }
    }

    pub(crate) fn recompute(&self) -> Recompute {
        match self.activation_checkpoint {
            ActivationCheckpoint::None => Recompute::Never,
            ActivationCheckpoint::Selective(n) => Recompute::Every(n),
            ActivationCheckpoint::Full => Recompute::Every(1),
        }
    }

    fn validate(&self) -> Result<(), Error> {
        let positive = "must be at least 1";
        rule(self.seq_len > 0, "training.seq_len", self.seq_len, positive)?;
        rule(self.steps > 0, "training.steps", self.steps, positive)?;
        let (local, global) = (self.local_batch_size, self.global_batch_size);
        rule(local > 0, "training.local_batch_size", local, positive)?;
        rule(
            global >= local && global.is_multiple_of(local) && global / local <= u32::MAX as usize,
            "training.global_batch_size",
            global,
            format!("must be a multiple of training.local_batch_size = {local}"),
        )?;
        let max_norm = self.max_norm;
        rule(max_norm > 0.0, "training.max_norm", max_norm, "must be positive (inf: no clipping)")?;
        if let ActivationCheckpoint::Selective(n) = self.activation_checkpoint {
            rule(n > 0, "activation_checkpoint.selective_ac_option", n, positive)?;
        }
        Ok(())
    }
}

impl Optimizer {
    pub(crate) fn adamw(&self) -> AdamW {
        let Self { name, beta1, beta2, eps, weight_decay, .. } = *self;
        let decoupled = name == OptimizerName::AdamW;
        AdamW { beta1, beta2, eps, weight_decay, decoupled }
    }

    fn validate(&self) -> Result<(), Error> {
        let at_least_0 = |x: f64| x.is_finite() && x >= 0.0;
        let decay = |x: f64| (0.0..1.0).contains(&x);
        let Self { lr, beta1, beta2, eps, weight_decay, .. } = *self;
        rule(at_least_0(lr), "optimizer.lr", lr, "must be finite and not negative")?;
        rule(decay(beta1), "optimizer.beta1", beta1, "must be at least 0 and below 1")?;
        rule(decay(beta2), "optimizer.beta2", beta2, "must be at least 0 and below 1")?;
        rule(eps.is_finite() && eps > 0.0, "optimizer.eps", eps, "must be positive")?;
        let text = "must be finite and not negative";
        rule(at_least_0(weight_decay), "optimizer.weight_decay", weight_decay, text)
    }
}

impl LrScheduler {
    fn validate(&self) -> Result<(), Error> {
        let share = |x: f64| (0.0..=1.0).contains(&x);
        let (ratio, floor) = (self.decay_ratio.unwrap_or(0.0), self.min_lr_factor);
        rule(share(ratio), "lr_scheduler.decay_ratio", ratio, "must be from 0 to 1")?;
        rule(share(floor), "lr_scheduler.min_lr_factor", floor, "must be from 0 to 1")?;
        let total = self.total_steps.unwrap_or(1);
        rule(total > 0, "lr_scheduler.total_steps", total, "must be at least 1")
    }
}

impl Default for Optimizer {
    fn default() -> Self {
        let name = OptimizerName::AdamW;
        Self { name, lr: 8e-4, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }
    }
}

impl Default for LrScheduler {
    fn default() -> Self {
        Self {
            warmup_steps: 200,
            total_steps: None,
            decay_ratio: None,
            decay_type: Decay::Linear,
            min_lr_factor: 0.0,
        }
    }
}

fn rule(
    good: bool,
    key: &'static str,
    value: impl ToString,
    rule: impl Into<String>,
) -> Result<(), Error> {
    if good {
        Ok(())
    } else {
        Err(Error::Invalid { key, value: value.to_string(), rule: rule.into() })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    fn good() -> Config {
        Config {
            model: model::registry::find("llama3", "byte-1M").unwrap(),
            optimizer: Optimizer::default(),
            lr_scheduler: LrScheduler::default(),
            training: Training {
                seq_len: 128,
                local_batch_size: 2,
                global_batch_size: 8,
                steps: 30,
                max_norm: 1.0,
                seed: 42,
                dtype: Dtype::Float32,
                activation_checkpoint: ActivationCheckpoint::None,
            },
            sharding: Sharding::Replicated,
            parallelism: Parallelism::default(),
            dataset: PathBuf::from("data"),
        }
    }

    #[track_caller]
    fn check(change: impl FnOnce(&mut Config), expected: &str) {
        let mut config = good();
        change(&mut config);
        assert_eq!(config.validate().unwrap_err().to_string(), expected);
    }

    #[test]
    fn a_broken_key_is_named_with_its_value_and_rule() {
        assert_eq!(good().validate(), Ok(()));
        check(
            |c| c.training.global_batch_size = 7,
            "training.global_batch_size = 7: must be a multiple of training.local_batch_size = 2",
        );
        check(|c| c.training.seq_len = 0, "training.seq_len = 0: must be at least 1");
        check(|c| c.optimizer.beta2 = 1.0, "optimizer.beta2 = 1: must be at least 0 and below 1");
        check(
            |c| c.lr_scheduler.decay_ratio = Some(1.5),
            "lr_scheduler.decay_ratio = 1.5: must be from 0 to 1",
        );
        check(
            |c| c.training.max_norm = f64::NAN,
            "training.max_norm = NaN: must be positive (inf: no clipping)",
        );
    }

    #[test]
    fn configurations_survive_json() {
        let text = serde_json::to_string(&good()).unwrap();
        assert_eq!(serde_json::from_str::<Config>(&text).unwrap(), good());
    }
}
