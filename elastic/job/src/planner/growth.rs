//! Whether growing is worth a pause now (GR).

use std::sync::Arc;

use crate::{
    incident::Incident,
    plan::Timestamp,
    planner::{Limits, View},
    report::WorkerState,
    state::{JobState, Standing},
};

/// Incidents that say what is to be expected.
const RECENT: usize = 8;

/// Nobody else is about to be ready, or that has lasted.
pub(super) fn settled(state: &JobState, view: &View, limits: &Limits) -> bool {
    let quiet = view.now.saturating_sub(view.quiet_since);
    let starting = state.live_nodes().any(|(name, node)| {
        node.standing == Standing::Active
            && view.heard.get(name).is_none_or(|heard| {
                heard.report.workers.len() < node.slots as usize
                    || heard.report.workers.iter().any(|w| w.state == WorkerState::Starting)
            })
    });
    quiet >= limits.settle_max || (!starting && quiet >= limits.settle)
}

/// k ranks more beside n compute k/(n+k) of what follows, until the next failure:
/// that has to be more than the pause. What has not happened yet is expected to
/// take at least as long again as it has not.
pub(super) fn worth(past: &[Arc<Incident>], now: Timestamp, ranks: usize, more: usize) -> bool {
    let incidents = || past.iter().rev();
    let pauses = incidents().filter(|incident| !incident.failure).filter_map(|i| pause(i));
    let mut pauses: Vec<u64> = pauses.take(RECENT).collect();
    pauses.sort_unstable();
    let Some(pause) = pauses.get(pauses.len() / 2) else { return true };
    let failures: Vec<u64> =
        incidents().filter(|i| i.failure).take(RECENT).map(|i| i.noticed.0).collect();
    let [last, .., first] = failures[..] else { return true };
    let mean = last.saturating_sub(first) / (failures.len() as u64 - 1);
    let expected = mean.max(now.0.saturating_sub(last));
    let (ranks, more) = (ranks as u128, more as u128);
    u128::from(*pause) * (ranks + more) < u128::from(expected) * more
}

/// From the last step before to the first step after, in microseconds.
fn pause(incident: &Incident) -> Option<u64> {
    Some(incident.resumed?.0.saturating_sub(incident.noticed.0))
}
