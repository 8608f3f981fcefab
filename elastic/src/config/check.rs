//! Rules between keys, one clear line each.

use super::schema::Config;

/// The rules that `config` breaks.
pub(super) fn conflicts(config: &Config) -> Vec<String> {
    let mut broken = Vec::new();
    let mut rule = |holds: bool, text: String| {
        if !holds {
            broken.push(text);
        }
    };

    let Config { training, lr_scheduler, elastic, checkpoint, .. } = config;
    rule(
        !checkpoint.folder.contains("://"),
        format!(
            "checkpoint.folder = {:?} is a URL: a running job saves into a folder that all nodes \
             see (a path); copy its checkpoints to an object store from there",
            checkpoint.folder
        ),
    );
    rule(
        elastic.min_nodes <= elastic.max_nodes,
        format!(
            "elastic.min_nodes = {} is more than elastic.max_nodes = {}",
            elastic.min_nodes, elastic.max_nodes
        ),
    );
    if let Ok(global) = u64::try_from(training.global_batch_size) {
        let local = u64::from(training.local_batch_size);
        rule(
            global % local == 0,
            format!(
                "training.global_batch_size = {global} is not a multiple of \
                 training.local_batch_size = {local}: the nearest is {}",
                global.div_ceil(local) * local
            ),
        );
        rule(
            global / local <= MAX_MICRO_BATCHES,
            format!(
                "training.global_batch_size = {global} is {} micro-batches of \
                 training.local_batch_size = {local}: at most {MAX_MICRO_BATCHES} are possible",
                global / local
            ),
        );
    }
    if let Some(total) = lr_scheduler.total_steps {
        rule(
            total >= training.steps,
            format!(
                "lr_scheduler.total_steps = {total} ends before training.steps = {}: \
                 raise it, or leave it unset",
                training.steps
            ),
        );
    }
    if let Err(impossible) = config.parallel().check(config.sharding()) {
        rule(false, format!("parallelism: {impossible}"));
    }
    if let Err(inconsistent) = config.timeouts() {
        rule(
            false,
            format!(
                "elastic.failure_budget_ms = {} with elastic.step_timeout_s = {}: {inconsistent}",
                elastic.failure_budget_ms, elastic.step_timeout_s
            ),
        );
    }
    broken
}

/// Micro-batches of a step: the reduction tree and the ballots stay small.
const MAX_MICRO_BATCHES: u64 = 1 << 16;
