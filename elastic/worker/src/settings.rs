//! From the user's configuration to the engine's.

use std::{path::PathBuf, time::Duration};

use actors::worker::Settings;
use elastic::config::{Config, schema};
use engine::config::{
    ActivationCheckpoint, Config as EngineConfig, Decay, Dtype, LrScheduler, Optimizer,
    OptimizerName, Parallelism, Reshard, Training,
};
use job::report::Digests;

/// The engine's configuration. `micro_batches` is the frozen global batch.
///
/// # Errors
/// One line that names the key.
pub fn engine_config(config: &Config, micro_batches: u32) -> Result<EngineConfig, String> {
    let model = config.shape()?;
    let parallelism = &config.parallelism;
    let local = config.training.local_batch_size as usize;
    let scheduler = &config.lr_scheduler;
    Ok(EngineConfig {
        model,
        optimizer: Optimizer {
            name: match config.optimizer.name {
                schema::OptimizerName::AdamW => OptimizerName::AdamW,
                schema::OptimizerName::Adam => OptimizerName::Adam,
            },
            lr: config.optimizer.lr,
            beta1: config.optimizer.beta1,
            beta2: config.optimizer.beta2,
            eps: config.optimizer.eps,
            weight_decay: config.optimizer.weight_decay,
        },
        lr_scheduler: LrScheduler {
            warmup_steps: scheduler.warmup_steps,
            total_steps: scheduler.total_steps,
            decay_ratio: scheduler.decay_ratio,
            decay_type: match scheduler.decay_type {
                schema::DecayType::Linear => Decay::Linear,
                schema::DecayType::Sqrt => Decay::Sqrt,
                schema::DecayType::Cosine => Decay::Cosine,
            },
            min_lr_factor: scheduler.min_lr_factor,
        },
        training: Training {
            seq_len: config.training.seq_len as usize,
            local_batch_size: local,
            global_batch_size: local * micro_batches as usize,
            steps: config.training.steps,
            max_norm: config.training.max_norm,
            seed: config.training.seed,
            dtype: match config.training.mixed_precision_param {
                schema::ComputePrecision::Float32 => Dtype::Float32,
                schema::ComputePrecision::Bfloat16 => Dtype::Bfloat16,
            },
            activation_checkpoint: match config.activation_checkpoint.mode {
                schema::RecomputeMode::None => ActivationCheckpoint::None,
                schema::RecomputeMode::Full => ActivationCheckpoint::Full,
                schema::RecomputeMode::Selective => ActivationCheckpoint::Selective(
                    config.activation_checkpoint.selective_ac_option.0 as usize,
                ),
            },
        },
        sharding: config.sharding(),
        parallelism: Parallelism {
            mesh: config.parallel(),
            schedule: config.schedule(),
            first_stage_less_layers: parallelism.pipeline_parallel_first_stage_less_layers,
            last_stage_less_layers: parallelism.pipeline_parallel_last_stage_less_layers,
            reshard_after_forward: match parallelism.fsdp_reshard_after_forward {
                schema::Reshard::Default => Reshard::Default,
                schema::Reshard::Always => Reshard::Always,
                schema::Reshard::Never => Reshard::Never,
            },
        },
        dataset: PathBuf::from(&config.training.dataset_path),
    })
}

/// How the worker paces itself.
pub(crate) fn pace(config: &Config, digests: Digests) -> Result<Settings, String> {
    let timeouts = config.timeouts().map_err(|error| error.to_string())?;
    let validation = &config.validation;
    Ok(Settings {
        digests,
        checkpoint_interval: config.checkpoint.interval,
        checkpoint_async: config.checkpoint.async_mode == schema::AsyncMode::Async,
        validation_freq: if validation.enable { validation.freq } else { 0 },
        step: timeouts.step,
        connect: timeouts.connect,
        grace: timeouts.budget.max(Duration::from_secs(2)) * 4,
    })
}
