//! How a job ends: finished, stopped with a checkpoint, or failed.

use crate::{
    command::Command,
    plan::Purpose,
    planner::{View, checkpoints, mesh::can_save},
    report::{SaveFailed, WorkerState},
    state::{JobState, Phase},
};

pub(super) fn decide(state: &JobState, view: &View) -> Vec<Command> {
    let at = view.clock;
    if state.failures_in_a_row > state.spec.max_failures {
        let why = format!(
            "{} failures in a row without a committed step between them (elastic.max_failures = {})",
            state.failures_in_a_row, state.spec.max_failures
        );
        return vec![Command::Fail { why, final_: true, at }];
    }
    if let Some(why) = fatal(state, view) {
        return vec![Command::Fail { why, final_: true, at }];
    }
    if let Some(why) = last_save_failed(state, view) {
        return vec![Command::Fail { why, final_: false, at }];
    }
    let Some(plan) = state.plan.as_ref() else {
        return match state.phase {
            Phase::Stopping => vec![Command::Stopped { at }],
            _ => Vec::new(),
        };
    };
    if state.phase == Phase::Stopping {
        let saved = plan.purpose == Purpose::SaveAndStop
            && state.seal.as_ref().is_some_and(|seal| {
                !state.spec.checkpoints || state.checkpoints.contains_key(&seal.restore.step())
            });
        if saved || (plan.members.is_empty() && !can_save(state, view)) {
            return vec![Command::Stopped { at }];
        }
    }
    finished(state, view).into_iter().collect()
}

/// ST-4: every rank applied the last step, the last checkpoint is committed,
/// and somebody has the final figures.
fn finished(state: &JobState, view: &View) -> Option<Command> {
    let plan = state.plan.as_ref().filter(|plan| !plan.members.is_empty())?;
    let seal = state.seal.as_ref()?;
    let last = state.spec.total_steps;
    let mut report = None;
    for member in &plan.members {
        let worker = view.worker(state, &member.worker)?;
        let done = worker.finished.as_ref()?;
        // What was finished before a restore of an earlier step does not count.
        let here = worker.progress.is_some_and(|progress| {
            progress.generation == plan.generation && progress.step == last
        });
        if done.step != last || !(here || seal.restore.step() == last) {
            return None;
        }
        if !done.weights_sha256.is_empty() {
            report = Some(done.clone());
        }
    }
    let saved = !state.spec.checkpoints || state.checkpoints.contains_key(&last);
    report.filter(|_| saved).map(|report| Command::Finish { report, at: view.clock })
}

/// A job whose last checkpoint cannot be written has nothing to show: earlier
/// ones stay, and the same command goes on from them.
fn last_save_failed(state: &JobState, view: &View) -> Option<String> {
    let plan = state.plan.as_ref()?;
    let needed = match (&state.seal, plan.purpose) {
        (Some(seal), Purpose::SaveAndStop) => seal.restore.step(),
        _ => state.spec.total_steps,
    };
    checkpoints::failed(view).into_iter().find_map(|SaveFailed { step, why, .. }| {
        let lost = *step == needed && !state.checkpoints.contains_key(step);
        lost.then(|| format!("the last checkpoint, of step {step}, was not saved: {why}"))
    })
}

/// Before anything was ever trained, a worker that cannot run means that the
/// job cannot: the configuration or the data are wrong.
fn fatal(state: &JobState, view: &View) -> Option<String> {
    if state.has_trained() {
        return None;
    }
    view.heard.iter().find_map(|(node, heard)| {
        heard.report.workers.iter().find_map(|worker| match &worker.state {
            WorkerState::Fatal(why) => Some(format!("worker on node {node}: {why}")),
            _ => None,
        })
    })
}
