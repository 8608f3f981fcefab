//! `--summary FILE`: what a run came to, for machines. Every agent writes one,
//! also on failure.

use std::{path::Path, time::Duration};

use actors::agent::{Ended, Outcome};
use job::{NodeId, incident::Incident, state::Phase};
use serde::Serialize;

use crate::config::Config;

#[derive(Debug, Serialize)]
struct Summary<'a> {
    outcome: &'a str,
    reason: Option<&'a str>,
    node: &'a NodeId,
    job: Option<String>,
    weights_sha256: Option<&'a str>,
    state_sha256: Option<&'a str>,
    loss_sha256: Option<&'a str>,
    final_step: Option<u64>,
    final_loss: Option<f32>,
    val_loss: Option<f64>,
    /// Over the whole wall time of the job, lost time included.
    tokens_per_s: Option<f64>,
    wall_s: Option<f64>,
    agent_s: f64,
    accounting: std::collections::BTreeMap<&'static str, f64>,
    incidents: Vec<IncidentSummary<'a>>,
}

#[derive(Debug, Serialize)]
struct IncidentSummary<'a> {
    cause: &'a str,
    failure: bool,
    token_before: String,
    token_after: String,
    mesh_before: &'a [NodeId],
    mesh_after: &'a [NodeId],
    phases_ms: std::collections::BTreeMap<&'static str, f64>,
    steps_redone: u64,
    restore_tier: &'a str,
    restore_step: Option<u64>,
}

/// Writes the summary, durably enough to be read after a crash of this process.
pub(super) fn write(
    path: &Path,
    node: &NodeId,
    ended: &Ended,
    config: &Config,
    agent: Duration,
) -> Result<(), String> {
    let json = serde_json::to_vec_pretty(&summarize(node, ended, config, agent))
        .map_err(|error| error.to_string())?;
    let draft = path.with_extension("draft");
    std::fs::write(&draft, json)
        .and_then(|()| std::fs::rename(&draft, path))
        .map_err(|error| format!("cannot write the summary {}: {error}", path.display()))
}

fn summarize<'a>(
    node: &'a NodeId,
    ended: &'a Ended,
    config: &Config,
    agent: Duration,
) -> Summary<'a> {
    let (outcome, reason) = match &ended.outcome {
        Outcome::Finished => ("finished", None),
        Outcome::Stopped => ("stopped", None),
        Outcome::Left => ("left", None),
        Outcome::Interrupted => ("interrupted", None),
        Outcome::Fenced(why) => ("fenced", Some(why.as_str())),
        Outcome::Refused(why) => ("refused", Some(why.as_str())),
        Outcome::Failed(why, _) => ("failed", Some(why.as_str())),
    };
    let state = ended.state.as_deref();
    let report = state.and_then(|state| match &state.phase {
        Phase::Finished(report) => Some(report),
        _ => None,
    });
    let accounting = state.map(|state| state.incidents.accounting());
    let wall_s = accounting.map(|accounting| accounting.total() as f64 / 1e6);
    let tokens_per_step = state.and_then(|state| state.micro_batches).map(|micro_batches| {
        f64::from(micro_batches)
            * f64::from(config.training.local_batch_size)
            * f64::from(config.training.seq_len)
    });
    let steps = state.map(|state| state.committed.0 as f64);
    let tokens_per_s = match (wall_s, tokens_per_step, steps) {
        (Some(wall), Some(tokens), Some(steps)) if wall > 0.0 => Some(tokens * steps / wall),
        _ => None,
    };
    Summary {
        outcome,
        reason,
        node,
        job: state.map(|state| state.spec.job.to_string()),
        weights_sha256: report.map(|report| report.weights_sha256.as_str()),
        state_sha256: report.map(|report| report.state_sha256.as_str()),
        loss_sha256: report.map(|report| report.loss_sha256.as_str()),
        final_step: state.map(|state| state.committed.0),
        final_loss: report.map(|report| report.loss),
        val_loss: report.and_then(|report| report.validation_loss),
        tokens_per_s,
        wall_s,
        agent_s: agent.as_secs_f64(),
        accounting: accounting
            .map(|accounting| {
                accounting.kinds().into_iter().map(|(kind, us)| (kind, us as f64 / 1e6)).collect()
            })
            .unwrap_or_default(),
        incidents: state
            .map(|state| state.incidents().iter().map(|i| incident(i, state.era.0)).collect())
            .unwrap_or_default(),
    }
}

fn incident(incident: &Incident, era: u32) -> IncidentSummary<'_> {
    let between = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e3;
    let sealed = incident.sealed.map_or(incident.planned.0, |at| at.0);
    let resumed = incident.resumed.map_or(sealed, |at| at.0);
    let timing = &incident.timing;
    IncidentSummary {
        cause: &incident.cause,
        failure: incident.failure,
        token_before: format!("{era}.{}", incident.from),
        token_after: format!("{era}.{}", incident.to),
        mesh_before: &incident.mesh_before,
        mesh_after: &incident.mesh_after,
        phases_ms: [
            ("agree", between(incident.noticed.0, incident.planned.0)),
            ("stop_and_seal", between(incident.planned.0, sealed)),
            ("rebuild", timing.rebuild_micros as f64 / 1e3),
            ("restore", timing.restore_micros as f64 / 1e3),
            ("first_step", timing.step_micros as f64 / 1e3),
            ("total", between(incident.noticed.0, resumed)),
        ]
        .into(),
        steps_redone: incident.steps_redone,
        restore_tier: &incident.tier,
        restore_step: incident.restore.map(|step| step.0),
    }
}
