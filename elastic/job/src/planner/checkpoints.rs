//! When a checkpoint is complete (LG-2) and when one may go.

use std::collections::BTreeMap;

use crate::{
    Era, Generation, Step,
    command::Command,
    planner::{Decision, Effect, View},
    report::ShardSaved,
    state::JobState,
};

pub(super) fn decide(state: &JobState, view: &View) -> Decision {
    let mut decision = Decision::default();
    let mut saves: BTreeMap<(Step, Era, Generation), BTreeMap<u32, &ShardSaved>> = BTreeMap::new();
    for heard in view.heard.values() {
        for saved in heard.report.workers.iter().flat_map(|worker| &worker.saved) {
            saves
                .entry((saved.step, saved.era, saved.generation))
                .or_default()
                .insert(saved.rank, saved);
        }
    }
    for ((step, era, generation), shards) in saves {
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
