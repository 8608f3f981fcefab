//! The keys of torchtitan 0.2.2 that elastic knows but does not honour: the
//! values that ask for nothing are accepted, others are refused by name. A
//! setting is never ignored silently.

use super::value::Value;

/// What becomes of a key.
pub(super) enum Verdict {
    /// Accepted: it asks for what elastic does anyway.
    Neutral,
    /// Accepted with a note.
    NoEffect(&'static str),
    /// Refused.
    Unsupported { only: String, hint: &'static str },
}

/// Accepted values as TOML writes them, or nothing when any value will do;
/// then what to do instead, or why it has no effect.
type Row = (&'static str, &'static [&'static str], &'static str);

const FALSE: &[&str] = &["false"];
const ONE: &[&str] = &["1"];
const UNSET: &[&str] = &["unset", "\"\""];
const EMPTY: &[&str] = &["[]", "unset", "\"\""];
const ANY: &[&str] = &[];

const TOKENS: &str =
    "elastic reads token files: run `elastic data prepare`, set training.dataset_path";
const LOADER: &str = "token files are memory-mapped, no loader process reads them";
const BUDGET: &str = "all limits derive from elastic.failure_budget_ms and elastic.step_timeout_s";
const ALWAYS: &str = "elastic is always fault tolerant: see the section elastic";
const SAME_LENGTH: &str = "validation uses the batches of the section training";
const BLOCKS: &str = "whole blocks are recomputed";
const LOADING: &str = "a run continues from the newest checkpoint in its own folder";

static ROWS: &[Row] = &[
    ("job.config_file", UNSET, "name the file after `elastic run`"),
    ("job.print_config", FALSE, "use --print-config"),
    ("job.save_config_file", UNSET, "use --print-config > FILE"),
    ("job.custom_config_module", UNSET, ""),
    ("profiling.enable_profiling", FALSE, ""),
    ("profiling.save_traces_folder", ANY, "profiling is off"),
    ("profiling.profile_freq", ANY, "profiling is off"),
    ("profiling.profiler_active", ANY, "profiling is off"),
    ("profiling.profiler_warmup", ANY, "profiling is off"),
    ("profiling.enable_memory_snapshot", FALSE, ""),
    ("profiling.save_memory_snapshot_folder", ANY, "profiling is off"),
    ("metrics.enable_tensorboard", FALSE, "metrics.jsonl of each node has every step"),
    ("metrics.disable_color_printing", ANY, "elastic prints no colours"),
    ("metrics.save_tb_folder", ANY, "TensorBoard output is off"),
    ("metrics.save_for_all_ranks", FALSE, "the loss is the same on every rank"),
    ("metrics.enable_wandb", FALSE, "metrics.jsonl of each node has every step"),
    ("model.hf_assets_path", ANY, "the tokens are made by `elastic data prepare`"),
    ("model.tokenizer_path", ANY, "the tokens are made by `elastic data prepare`"),
    ("model.converters", EMPTY, ""),
    ("model.print_after_conversion", FALSE, ""),
    ("optimizer.implementation", ANY, "one implementation gives the same bits everywhere"),
    (
        "optimizer.early_step_in_backward",
        FALSE,
        "a step that began before the vote cannot be undone",
    ),
    ("training.dataset", &["unset", "\"c4_test\""], TOKENS),
    ("training.enable_cpu_offload", FALSE, ""),
    ("training.mixed_precision_reduce", &["\"float32\""], ""),
    ("training.gc_freq", ANY, "there is no garbage collector"),
    ("training.gc_debug", ANY, "there is no garbage collector"),
    ("training.dataloader.num_workers", ANY, LOADER),
    ("training.dataloader.persistent_workers", FALSE, LOADER),
    ("training.dataloader.pin_memory", FALSE, LOADER),
    ("training.dataloader.prefetch_factor", ANY, LOADER),
    ("parallelism.tensor_parallel_degree", ONE, ""),
    ("parallelism.disable_loss_parallel", ANY, "it belongs to tensor parallelism, which is off"),
    ("parallelism.enable_async_tensor_parallel", FALSE, ""),
    ("parallelism.module_fqns_per_model_part", EMPTY, ""),
    ("parallelism.pipeline_parallel_schedule_csv", UNSET, ""),
    (
        "parallelism.pipeline_parallel_microbatch_size",
        ANY,
        "a pipeline's micro-batch is training.local_batch_size",
    ),
    ("parallelism.pipeline_parallel_expert_parallel_overlap", ANY, "there are no experts"),
    ("parallelism.context_parallel_degree", ONE, ""),
    ("parallelism.context_parallel_load_balancer", ANY, "context parallelism is off"),
    ("parallelism.context_parallel_rotate_method", ANY, "context parallelism is off"),
    ("parallelism.expert_parallel_degree", ONE, ""),
    ("parallelism.expert_tensor_parallel_degree", ONE, ""),
    ("parallelism.expert_parallel_comm_backend", &["\"standard\""], ""),
    (
        "checkpoint.enable_ft_dataloader_checkpoints",
        ANY,
        "the data order is a function of the step",
    ),
    ("checkpoint.initial_load_path", UNSET, LOADING),
    ("checkpoint.initial_load_model_only", ANY, LOADING),
    ("checkpoint.initial_load_in_hf", FALSE, ""),
    ("checkpoint.initial_load_in_hf_quantized", FALSE, ""),
    ("checkpoint.last_save_model_only", FALSE, "the last checkpoint is complete like the others"),
    ("checkpoint.last_save_in_hf", FALSE, ""),
    ("checkpoint.export_dtype", &["\"float32\""], ""),
    ("checkpoint.load_step", &["-1"], LOADING),
    ("checkpoint.exclude_from_loading", EMPTY, ""),
    ("checkpoint.enable_first_step_checkpoint", FALSE, "set checkpoint.interval"),
    ("checkpoint.create_seed_checkpoint", FALSE, "initial weights are the same on any mesh"),
    ("checkpoint.load_only", FALSE, ""),
    ("activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns", ANY, BLOCKS),
    ("activation_checkpoint.early_stop", ANY, BLOCKS),
    ("activation_checkpoint.memory_budget", ANY, BLOCKS),
    ("activation_checkpoint.visualize_memory_budget_pareto", FALSE, ""),
    ("activation_checkpoint.preserve_rng_state", ANY, "randomness is a function of the step"),
    ("activation_checkpoint.determinism_check", ANY, BLOCKS),
    ("activation_checkpoint.debug", FALSE, ""),
    ("compile.enable", FALSE, ""),
    ("compile.components", ANY, "nothing is compiled"),
    ("compile.backend", ANY, "nothing is compiled"),
    ("quantize.linear.float8.enable_fsdp_float8_all_gather", FALSE, ""),
    ("quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp", FALSE, ""),
    ("quantize.linear.float8.recipe_name", UNSET, ""),
    ("quantize.linear.float8.filter_fqns", ANY, "model.converters is empty"),
    ("quantize.linear.float8.emulate", FALSE, ""),
    ("quantize.linear.mx.mxfp8_dim1_cast_kernel_choice", ANY, "model.converters is empty"),
    ("quantize.linear.mx.recipe_name", ANY, "model.converters is empty"),
    ("quantize.linear.mx.filter_fqns", ANY, "model.converters is empty"),
    ("quantize.grouped_mm.float8.fqns", EMPTY, ""),
    ("quantize.grouped_mm.mx.recipe_name", ANY, "model.converters is empty"),
    ("quantize.grouped_mm.mx.fqns", EMPTY, ""),
    ("comm.init_timeout_seconds", ANY, BUDGET),
    ("comm.train_timeout_seconds", ANY, BUDGET),
    ("comm.trace_buf_size", ANY, "failures are in `elastic events`"),
    ("comm.save_traces_folder", ANY, "failures are in `elastic events`"),
    ("comm.save_traces_file_prefix", ANY, "failures are in `elastic events`"),
    ("comm.mode", &["\"default\""], ""),
    ("memory_estimation.enable", FALSE, ""),
    ("memory_estimation.disable_fake_mode", ANY, "memory estimation is off"),
    ("fault_tolerance.enable", &["true", "false"], ALWAYS),
    ("fault_tolerance.process_group", ANY, ALWAYS),
    ("fault_tolerance.process_group_timeout_ms", ANY, BUDGET),
    ("fault_tolerance.replica_id", ANY, "a node is known by --node-id"),
    ("fault_tolerance.group_size", ANY, "set elastic.max_nodes"),
    ("fault_tolerance.min_replica_size", ONE, "set elastic.min_nodes"),
    ("fault_tolerance.semi_sync_method", UNSET, ""),
    ("fault_tolerance.sync_steps", ANY, "there is no semi-synchronous training"),
    ("fault_tolerance.should_quantize", FALSE, ""),
    ("fault_tolerance.fragment_sync_delay", ANY, "there is no semi-synchronous training"),
    ("fault_tolerance.fragment_update_alpha", ANY, "there is no semi-synchronous training"),
    ("fault_tolerance.module_fqns_per_model_fragment", EMPTY, ""),
    ("fault_tolerance.num_fragments", ONE, ""),
    ("experimental.custom_import", UNSET, ""),
    ("experimental.custom_args_module", UNSET, ""),
    ("validation.dataset", &["unset", "\"c4_validation\""], TOKENS),
    ("validation.dataset_path", UNSET, "it is in the folder of training.dataset_path"),
    ("validation.local_batch_size", ANY, SAME_LENGTH),
    ("validation.seq_len", ANY, SAME_LENGTH),
    ("validation.dataloader.num_workers", ANY, LOADER),
    ("validation.dataloader.persistent_workers", FALSE, LOADER),
    ("validation.dataloader.pin_memory", FALSE, LOADER),
    ("validation.dataloader.prefetch_factor", ANY, LOADER),
    ("debug.deterministic", ANY, "training is always deterministic"),
    ("debug.deterministic_warn_only", ANY, "training is always deterministic"),
    ("debug.moe_force_load_balance", FALSE, "there are no experts"),
];

/// `None` when torchtitan has no such key either.
pub(super) fn judge(key: &str, value: &Value) -> Option<Verdict> {
    let (_, accepted, hint) = row(key)?;
    Some(if accepted.is_empty() {
        Verdict::NoEffect(hint)
    } else if accepted.contains(&value.to_string().as_str()) {
        Verdict::Neutral
    } else {
        let only: Vec<_> = accepted.iter().copied().filter(|text| *text != "\"\"").collect();
        Verdict::Unsupported { only: only.join(" or "), hint }
    })
}

/// Whether the key is a switch, which may stand alone on the command line.
pub(super) fn is_bool(key: &str) -> bool {
    row(key).is_some_and(|(_, accepted, _)| *accepted == FALSE)
}

/// Whether torchtitan has a section of that name.
pub(super) fn has_section(name: &str) -> bool {
    ROWS.iter().any(|(key, ..)| key.split('.').next() == Some(name))
}

fn row(key: &str) -> Option<&'static Row> {
    ROWS.iter().find(|(name, ..)| *name == key)
}

#[cfg(test)]
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    ROWS.iter().map(|(key, ..)| *key)
}
