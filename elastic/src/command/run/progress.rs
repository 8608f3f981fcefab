//! Lines for the person who watches: steps from the node that holds rank 0,
//! incidents from the one that leads.

use std::{
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use actors::agent::{Ended, Notice, Outcome};
use job::{
    NodeId, Step,
    command::Event,
    incident::Incident,
    report::Progress,
    state::{JobState, Phase},
};
use tokio::sync::mpsc;

use crate::{config::Config, launch::STANDALONE};

/// File in the node's folder that holds the line that adds a node.
pub(crate) const JOIN_LINE: &str = "join-line";

/// How other nodes get in.
pub(super) struct Door {
    /// This node's, where the line for them is kept.
    pub(super) folder: PathBuf,
    /// That line as far as it does not depend on where this node listens.
    pub(super) command: String,
}

/// Prints until the agent ended.
pub(super) async fn print(
    mut notices: mpsc::Receiver<Notice>,
    log_freq: u64,
    steps: u64,
    door: Door,
) {
    let mut pace = Pace { log_freq, steps, since: None };
    let mut wait = None;
    let standalone = std::env::var_os(STANDALONE).is_some();
    while let Some(notice) = next(&mut notices, &mut wait).await {
        match notice {
            Notice::Founded { address, token, state } => {
                let line = format!("{} --join {address} --token {token}", door.command);
                keep_join_line(&door.folder, &line);
                if !standalone {
                    say(&format!(
                        "job {} founded, listening on {address}; on every other node:\n  {line}",
                        short(&state)
                    ));
                }
            }
            Notice::Joined { state } => {
                if !standalone {
                    say(&format!("joined job {}", short(&state)));
                }
            }
            Notice::Stepped { progress, state } => {
                wait = None;
                if let Some(line) = pace.line(&progress, &state) {
                    say(&line);
                }
            }
            Notice::Validated { step, loss } => {
                say(&format!("validate step {step}  loss {loss:.5}"));
            }
            Notice::Event { event, state, leads } => {
                if let Event::Sealed { .. } = event {
                    wait = None;
                }
                if let Some(line) = describe(&event, &state) {
                    tracing::info!("{}", line.trim_start_matches(['!', '-', ' ']));
                    if leads {
                        say(&line);
                    }
                }
            }
            Notice::Waiting(what) => {
                let due =
                    wait.take().map_or_else(|| Instant::now() + PATIENCE, |wait: Wait| wait.due);
                wait = Some(Wait { what, due });
            }
            Notice::Warning(what) => eprintln!("elastic: {what}"),
        }
    }
}

/// What the job waits for, told once that has lasted.
struct Wait {
    what: String,
    due: Instant,
}

/// A shorter wait is no news: every new generation waits for its ranks to stop.
const PATIENCE: Duration = Duration::from_secs(3);

/// The next notice; a wait that is due meanwhile is told.
async fn next(notices: &mut mpsc::Receiver<Notice>, wait: &mut Option<Wait>) -> Option<Notice> {
    if let Some(Wait { due, .. }) = wait {
        match tokio::time::timeout_at((*due).into(), notices.recv()).await {
            Ok(notice) => return notice,
            Err(_) => {
                if let Some(Wait { what, .. }) = wait.take() {
                    say(&what);
                }
            }
        }
    }
    notices.recv().await
}

struct Pace {
    log_freq: u64,
    steps: u64,
    since: Option<(Instant, u64, u64)>,
}

impl Pace {
    fn line(&mut self, progress: &Progress, state: &Arc<JobState>) -> Option<String> {
        let now = Instant::now();
        let step = progress.step.0;
        let (from, from_step, tokens) = self.since.unwrap_or((now, step, 0));
        let tokens = tokens + progress.tokens;
        let due = step == 1 || step.is_multiple_of(self.log_freq) || step == self.steps;
        if !due {
            self.since = Some((from, from_step, tokens));
            return None;
        }
        self.since = Some((now, step, 0));
        let measured = step > from_step && now > from;
        let (rate, per_step) = if measured {
            let spent = (now - from).as_secs_f64();
            (tokens as f64 / spent, spent / (step - from_step) as f64)
        } else {
            let spent = progress.micros.max(1) as f64 / 1e6;
            (progress.tokens as f64 / spent, spent)
        };
        let eta = Duration::from_secs_f64(per_step * self.steps.saturating_sub(step) as f64);
        let ranks = state.plan.as_ref().map_or(0, |plan| plan.members.len());
        Some(format!(
            "step {step:>5}/{}  loss {:8.5}  grad_norm {:7.4}  {rate:>8.0} tok/s  mesh dp{ranks}  generation {}  eta {}",
            self.steps,
            progress.loss,
            progress.grad_norm,
            progress.generation,
            clock(eta)
        ))
    }
}

fn describe(event: &Event, state: &JobState) -> Option<String> {
    match event {
        Event::Planned { generation, mesh, reason, failure, .. } => {
            let mark = if *failure { "!" } else { "-" };
            Some(format!("{mark} generation {generation}: {reason}; mesh {}", names(mesh)))
        }
        Event::Resumed { generation, .. } => {
            let incident = state.incidents().last().filter(|last| last.to == *generation)?;
            Some(format!("- generation {generation}: {}", timeline(incident)))
        }
        Event::CheckpointCommitted { step, .. } => {
            Some(format!("- checkpoint of step {step} committed"))
        }
        Event::CheckpointDistrusted { step, why } => {
            Some(format!("! checkpoint of step {step} quarantined: {why}"))
        }
        Event::NodeEvicted { node, cause, .. } => Some(format!("! node {node} evicted: {cause}")),
        Event::NodeRefused { node, cause, .. } => Some(format!("! node {node} refused: {cause}")),
        Event::NodeHeldBack { node, stays, pause_micros, .. } => Some(format!(
            "! node {node} is held back for {}: it came and went {stays} times",
            clock(Duration::from_micros(*pause_micros))
        )),
        Event::NodeTolerated { node, cause, .. } => {
            Some(format!("! node {node} computes other bits: {cause}"))
        }
        Event::ReformingSet(reforming) if !reforming.automatic => Some(format!(
            "! re-forming after the loss of most nodes is not automatic: {}",
            reforming.why
        )),
        Event::JobStopping { .. } => Some("- the job saves and stops".into()),
        _ => None,
    }
}

/// One line that tells an incident by phase.
pub(crate) fn timeline(incident: &Incident) -> String {
    let ms = |micros: u64| micros as f64 / 1e3;
    let between = |from: u64, to: u64| ms(to.saturating_sub(from));
    let sealed = incident.sealed.map_or(incident.planned.0, |at| at.0);
    let resumed = incident.resumed.map_or(sealed, |at| at.0);
    format!(
        "resumed at step {} from {} state, {} step(s) redone, {:.0} ms (agree {:.0}, stop and seal {:.0}, rebuild {:.0}, restore {:.0}, first step {:.0})",
        incident.restore.map_or(0, |step| step.0),
        incident.tier,
        incident.steps_redone,
        between(incident.noticed.0, resumed),
        between(incident.noticed.0, incident.planned.0),
        between(incident.planned.0, sealed),
        ms(incident.timing.rebuild_micros),
        ms(incident.timing.restore_micros),
        ms(incident.timing.step_micros),
    )
}

/// The last lines of a run.
pub(super) fn farewell(ended: &Ended, config: &Config) {
    let Some(state) = &ended.state else { return };
    let mut text = String::new();
    if let (Outcome::Finished, Phase::Finished(report)) = (&ended.outcome, &state.phase) {
        text += &format!("finished: step {}  loss {:.5}", report.step, report.loss);
        if let Some(loss) = report.validation_loss {
            text += &format!("  validation loss {loss:.5}");
        }
        text += &format!("\nweights sha256 {}\n", report.weights_sha256);
        if !report.sample.is_empty() {
            text += &format!("sample:\n{}\n", indent(&report.sample));
        }
    } else if let Outcome::Stopped = ended.outcome {
        text += &stopped(state);
    }
    if let Some((step, _)) = state.checkpoints.last_key_value() {
        let folder = config.checkpoint_folder().join(format!("step-{step}"));
        text += &format!("checkpoint {}\n", folder.display());
    }
    let incidents = state.incidents();
    let failures = incidents.iter().filter(|incident| incident.failure).count();
    text += &format!("incidents: {} ({failures} failures)\n", incidents.len());
    for incident in incidents.iter().filter(|incident| incident.failure) {
        text += &format!("  {}: {}\n", incident.cause, timeline(incident));
    }
    let accounting = state.incidents.accounting();
    let total = accounting.total().max(1) as f64;
    let shares: Vec<String> = accounting
        .kinds()
        .iter()
        .filter(|(_, micros)| *micros > 0)
        .map(|(kind, micros)| {
            format!("{kind} {:.1}s ({:.0}%)", *micros as f64 / 1e6, *micros as f64 / total * 100.0)
        })
        .collect();
    text += &format!("wall time: {}", shares.join(", "));
    say(&text);
}

/// Whether a stop kept everything, and if not, why.
fn stopped(state: &JobState) -> String {
    let (saved, reached) = (state.checkpoints.keys().next_back().copied(), state.committed);
    if reached == Step(0) {
        return "stopped before the first step: there was nothing to save\n".into();
    }
    if saved.is_some_and(|saved| saved >= reached) {
        return "stopped with a checkpoint; the same command goes on from it\n".into();
    }
    let why = match state.spec.checkpoints {
        true => "the nodes that were left do not hold the whole state",
        false => "checkpoints are off (checkpoint.enable = false)",
    };
    let from =
        saved.map_or("the beginning".into(), |saved| format!("the checkpoint of step {saved}"));
    format!("stopped without saving step {reached}: {why}; the same command goes on from {from}\n")
}

fn indent(text: &str) -> String {
    text.lines().map(|line| format!("  | {line}")).collect::<Vec<_>>().join("\n")
}

fn names(mesh: &[NodeId]) -> String {
    match mesh {
        [] => "empty, waiting".into(),
        _ => mesh.iter().map(NodeId::as_str).collect::<Vec<_>>().join(" "),
    }
}

fn short(state: &JobState) -> String {
    state.spec.job.to_string().chars().take(8).collect()
}

fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, s) => format!("{s}s"),
        (0, m, s) => format!("{m}m{s:02}s"),
        (h, m, _) => format!("{h}h{m:02}m"),
    }
}

fn keep_join_line(folder: &Path, line: &str) {
    use std::os::unix::fs::OpenOptionsExt;
    // It holds the token: for this user's eyes only.
    let file = std::fs::OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(folder.join(JOIN_LINE));
    let written = file.and_then(|mut file| file.write_all(line.as_bytes()));
    if let Err(error) = written {
        tracing::warn!(%error, "the join line could not be kept");
    }
}

/// A closed pipe on the other side ends the lines, not the job.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

#[cfg(test)]
mod tests {
    use job::{
        Era, Generation, JobId,
        plan::Timestamp,
        spec::{JobSpec, Sharding},
        state::CheckpointRecord,
    };

    use super::*;

    #[track_caller]
    fn check(checkpoints: bool, saved: &[u64], reached: u64, expected: &str) {
        let spec = JobSpec {
            job: JobId(uuid::Uuid::nil()),
            config: String::new(),
            config_digest: [0; 32],
            min_nodes: 2,
            max_nodes: 2,
            micro_batches: None,
            total_steps: Step(100),
            sharding: Sharding::Zero1,
            parallel: Default::default(),
            max_failures: 5,
            max_preemptions: 5,
            exact: true,
            checkpoints,
            keep_latest_k: 2,
            authority: String::new(),
            join_secret: String::new(),
        };
        let mut state = JobState::found(spec, Era(0), Timestamp(0));
        state.committed = Step(reached);
        state.checkpoints.extend(saved.iter().map(|step| {
            let (stage, files) = (String::new(), Vec::new());
            let (era, generation, micro_batches) = (Era(0), Generation(1), None);
            let record = CheckpointRecord { era, generation, stage, files, micro_batches };
            (Step(*step), record)
        }));
        let text = stopped(&state);
        assert!(text.contains(expected), "{text:?} does not say {expected:?}");
    }

    #[test]
    fn a_stop_says_what_it_kept() {
        check(true, &[], 0, "nothing to save");
        check(true, &[10, 20], 20, "stopped with a checkpoint");
        check(true, &[10], 15, "without saving step 15: the nodes that were left do not hold");
        check(true, &[10], 15, "goes on from the checkpoint of step 10");
        check(
            false,
            &[],
            15,
            "(checkpoint.enable = false); the same command goes on from the beginning",
        );
    }
}
