//! When a checkpoint is complete, when it never will be (LG-2), and when one may go.

use std::collections::BTreeMap;

use crate::{
    Era, Generation, Step,
    command::Command,
    planner::{Decision, Effect, View},
    report::{SaveFailed, ShardSaved},
    state::JobState,
};

/// A save: which step, begun by which generation.
type Save = (Step, Era, Generation);

pub(super) fn decide(state: &JobState, view: &View) -> Decision {
    let mut decision = Decision::default();
    for ((step, era, generation), shards) in saved(view) {
        let complete = shards.values().next().is_some_and(|any| any.ranks as usize == shards.len());
        if complete
            && state.is_official(era, generation, step)
            && !state.checkpoints.contains_key(&step)
            && state.checkpoints.keys().next_back().is_none_or(|newest| *newest < step)
        {
            let shards = shards.into_values().cloned().collect();
            decision.effects.push(Effect::Assemble { era, generation, step, shards });
        }
    }
    let keep = state.spec.keep_latest_k as usize;
    if keep > 0 {
        let surplus = state.checkpoints.len().saturating_sub(keep);
        let oldest = state.checkpoints.keys().take(surplus);
        decision.commands.extend(oldest.map(|step| Command::Retire { step: *step }));
    }
    decision
}

/// What every rank has written, by save.
fn saved(view: &View) -> BTreeMap<Save, BTreeMap<u32, &ShardSaved>> {
    let mut saves: BTreeMap<Save, BTreeMap<u32, &ShardSaved>> = BTreeMap::new();
    for heard in view.heard.values() {
        for saved in heard.report.workers.iter().flat_map(|worker| &worker.saved) {
            let save = (saved.step, saved.era, saved.generation);
            saves.entry(save).or_default().insert(saved.rank, saved);
        }
    }
    saves
}

/// Saves that will never be complete: every rank has answered, and one of them that
/// it failed. Before, somebody may still be writing.
pub(super) fn failed(view: &View) -> Vec<&SaveFailed> {
    let saved = saved(view);
    let mut failures: BTreeMap<Save, BTreeMap<u32, &SaveFailed>> = BTreeMap::new();
    for heard in view.heard.values() {
        for failed in heard.report.workers.iter().filter_map(|worker| worker.save_failed.as_ref()) {
            let save = (failed.step, failed.era, failed.generation);
            failures.entry(save).or_default().insert(failed.rank, failed);
        }
    }
    let over = failures.into_iter().filter_map(|(save, ranks)| {
        let first = *ranks.values().next()?;
        let written = saved
            .get(&save)
            .map_or(0, |shards| shards.keys().filter(|rank| !ranks.contains_key(rank)).count());
        (ranks.len() + written == first.ranks as usize).then_some(first)
    });
    over.collect()
}

/// What they leave behind goes, unless the step was saved by another generation.
pub(super) fn discards(state: &JobState, view: &View) -> Vec<Effect> {
    let lost = failed(view).into_iter().filter(|failed| {
        state
            .checkpoints
            .get(&failed.step)
            .is_none_or(|record| (record.era, record.generation) != (failed.era, failed.generation))
    });
    lost.map(|failed| Effect::Discard {
        era: failed.era,
        generation: failed.generation,
        step: failed.step,
    })
    .collect()
}
