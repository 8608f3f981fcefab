//! `elastic status`, `events`, `drain` and `stop`: ask an agent of the job on
//! this machine.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use actors::agent::{AdminError, Request, Response, Status, request};
use job::state::{Phase, Standing};

use super::{
    fail,
    print::{print, print_line},
    run::timeline,
};
use crate::{
    cli::{DrainArgs, EventsArgs, StatusArgs, StopArgs},
    exit::Exit,
};

const WATCH: Duration = Duration::from_millis(500);

/// Asks the agent of one node's folder.
///
/// # Errors
/// When none answers.
pub(crate) fn ask(folder: &Path, what: &Request) -> Result<Response, AdminError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let unreachable =
        |error| AdminError::Unreachable { folder: folder.display().to_string(), error };
    runtime.map_err(unreachable)?.block_on(request(folder, what))
}

/// Asks any agent of the job in a dump folder.
pub(super) fn ask_any(dump: &Path, what: &Request) -> Result<Response, String> {
    let nodes = node_folders(dump);
    if nodes.is_empty() {
        return Err(format!(
            "no job in {}: name its job.dump_folder with --dump-folder",
            dump.display()
        ));
    }
    let mut last = String::new();
    for folder in nodes {
        match ask(&folder, what) {
            Ok(response) => return Ok(response),
            Err(error) => last = error.to_string(),
        }
    }
    Err(format!("{last}; the job does not run on this machine now"))
}

fn node_folders(dump: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dump.join("nodes")).into_iter().flatten().flatten();
    let mut folders: Vec<PathBuf> =
        entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    folders.sort();
    folders
}

pub(super) fn status(args: &StatusArgs) -> Exit {
    loop {
        let answer = ask_any(&args.target.dump_folder, &Request::Status);
        match answer {
            Ok(Response::Status(first)) => {
                let agents = agents(&args.target.dump_folder, &first);
                let status = newest(&agents).unwrap_or(&*first);
                let text = if args.json {
                    serde_json::to_string(&serde_json::json!({
                        "status": status,
                        "agents": agents,
                    }))
                    .unwrap_or_default()
                } else {
                    table(status, &agents)
                };
                if args.watch && !args.json {
                    print("\x1b[2J\x1b[H");
                }
                print_line(&text);
            }
            Ok(_) => return fail(Exit::Failed, &"the agent answered with something else"),
            Err(why) => return fail(Exit::NoJob, &why),
        }
        if !args.watch {
            return Exit::Finished;
        }
        std::thread::sleep(WATCH);
    }
}

/// Who knows most: a node that was just started may know only what its disk does.
fn newest(agents: &[Status]) -> Option<&Status> {
    agents.iter().max_by_key(|status| {
        let job = &status.job;
        (job.era, job.generation(), job.is_sealed(), status.lease_micros)
    })
}

/// All agents of this machine.
fn agents(dump: &Path, first: &Status) -> Vec<Status> {
    let mut all = vec![first.clone()];
    for folder in node_folders(dump) {
        if folder.file_name().is_some_and(|name| name == first.node.as_str()) {
            continue;
        }
        if let Ok(Response::Status(status)) = ask(&folder, &Request::Status) {
            all.push(*status);
        }
    }
    for status in &mut all {
        status.job.chain.clear();
    }
    all.sort_by(|a, b| a.node.cmp(&b.node));
    all
}

fn table(status: &Status, agents: &[Status]) -> String {
    let job = &status.job;
    let phase = match &job.phase {
        Phase::Running => "running".to_owned(),
        Phase::Stopping => "stopping".to_owned(),
        Phase::Stopped => "stopped".to_owned(),
        Phase::Finished(_) => "finished".to_owned(),
        Phase::Failed { why, .. } => format!("failed: {why}"),
    };
    let newest = agents.iter().flat_map(|agent| &agent.workers).filter_map(|w| w.step).max();
    let mesh = job.plan.as_ref().map_or_else(String::new, |plan| {
        plan.members.iter().map(|m| m.worker.node.to_string()).collect::<Vec<_>>().join(" ")
    });
    let mut text = format!(
        "job {}  {phase}  step {}/{}  generation {}.{}  leader {}\nmesh dp{}: {mesh}\ncheckpoints {}\n",
        job.spec.job,
        newest.unwrap_or(job.committed.0),
        job.spec.total_steps,
        job.era,
        job.generation(),
        status.leader.as_ref().map_or("none", |leader| leader.as_str()),
        job.plan.as_ref().map_or(0, |plan| plan.members.len()),
        job.checkpoints.keys().map(ToString::to_string).collect::<Vec<_>>().join(" "),
    );
    let automatic = if job.reforming.automatic { "on" } else { "off" };
    text += &format!("automatic re-forming {automatic}: {}\n", job.reforming.why);
    if let Some(waiting) = &status.waiting {
        text += &format!("{waiting}\n");
    }
    text += &format!(
        "{:<12} {:>11} {:<10} {:<22} {:>8}  workers (pid: rank, step)\n",
        "node", "incarnation", "state", "address", "agent"
    );
    for (name, node) in &job.nodes {
        let agent = agents.iter().find(|agent| agent.node == *name);
        let standing = match &node.standing {
            Standing::Active if node.held_back => "held back".to_owned(),
            Standing::Active => "active".to_owned(),
            Standing::Leaving => "leaving".to_owned(),
            Standing::Gone(_) => "gone".to_owned(),
            Standing::Refused(_) => "refused".to_owned(),
        };
        let workers = agent.map_or_else(String::new, |agent| {
            let worker = |w: &actors::agent::WorkerStatus| {
                let rank = w.rank.map_or("-".to_owned(), |rank| rank.to_string());
                let step = w.step.map_or("-".to_owned(), |step| step.to_string());
                format!("{}: rank {rank}, step {step}", w.pid)
            };
            agent.workers.iter().map(worker).collect::<Vec<_>>().join("; ")
        });
        text += &format!(
            "{:<12} {:>11} {:<10} {:<22} {:>8}  {workers}\n",
            name.as_str(),
            node.incarnation.0,
            standing,
            node.address.to_string(),
            agent.map_or("-".to_owned(), |agent| agent.pid.to_string()),
        );
    }
    text.trim_end().to_owned()
}

pub(super) fn events(args: &EventsArgs) -> Exit {
    if args.json {
        return raw_events(&args.target.dump_folder);
    }
    match ask_any(&args.target.dump_folder, &Request::Status) {
        Ok(Response::Status(status)) => {
            let incidents = status.job.incidents();
            if incidents.is_empty() {
                print_line("no incidents");
            }
            for incident in incidents {
                let kind = if incident.failure { "failure" } else { "change" };
                print_line(&format!("{kind}: {}\n  {}", incident.cause, timeline(incident)));
            }
            Exit::Finished
        }
        Ok(_) => fail(Exit::Failed, &"the agent answered with something else"),
        // The job has ended: its records are still here.
        Err(_) => recorded_events(&args.target.dump_folder),
    }
}

/// The committed events of the job: any node's record has them all from its
/// start on; together they are complete.
fn records(dump: &Path) -> Vec<String> {
    let mut lines: BTreeMap<(u64, u64, u64), String> = BTreeMap::new();
    for folder in node_folders(dump) {
        let Ok(text) = fs::read_to_string(folder.join("events.jsonl")) else { continue };
        let mut within = (0, 0, 0);
        for line in text.lines() {
            let Ok(value) = serde_json::from_str::<serde_json::Value>(line) else { continue };
            let number = |field: &str| value.get(field).and_then(serde_json::Value::as_u64);
            // What only this node saw has no place in the log.
            let Some(index) = number("index") else {
                lines.insert((u64::MAX, number("seen").unwrap_or_default(), 0), line.to_owned());
                continue;
            };
            // An index counts within the log of its era.
            let log = value.get("log").and_then(serde_json::Value::as_u64).unwrap_or(0);
            let again = (within.0, within.1) == (log, index);
            within = (log, index, if again { within.2 + 1 } else { 0 });
            lines.entry(within).or_insert_with(|| line.to_owned());
        }
    }
    lines.into_values().collect()
}

fn raw_events(dump: &Path) -> Exit {
    show(dump, &records(dump))
}

/// What a person reads of each record: its kind and what it is about.
fn recorded_events(dump: &Path) -> Exit {
    const FIELDS: [&str; 8] =
        ["generation", "mesh", "node", "step", "restore", "tier", "reason", "cause"];
    let line = |record: &String| {
        let value: serde_json::Value = serde_json::from_str(record).unwrap_or_default();
        let kind = value.get("kind").and_then(serde_json::Value::as_str).unwrap_or_default();
        let mut line = kind.replace('_', " ");
        for field in FIELDS {
            match value.get(field) {
                Some(serde_json::Value::String(text)) => line += &format!("  {field} {text}"),
                Some(other) => line += &format!("  {field} {other}"),
                None => {}
            }
        }
        line
    };
    show(dump, &records(dump).iter().map(line).collect::<Vec<_>>())
}

fn show(dump: &Path, lines: &[String]) -> Exit {
    if lines.is_empty() {
        return fail(Exit::NoJob, &format!("no events in {}", dump.display()));
    }
    print(&lines.join("\n"));
    Exit::Finished
}

pub(super) fn drain(args: &DrainArgs) -> Exit {
    tell(&args.target.dump_folder, &Request::Drain { node: args.node.clone() })
}

pub(super) fn stop(args: &StopArgs) -> Exit {
    tell(&args.target.dump_folder, &Request::Stop)
}

fn tell(dump: &Path, what: &Request) -> Exit {
    match ask_any(dump, what) {
        Ok(Response::Accepted(text)) => {
            print_line(&text);
            Exit::Finished
        }
        Ok(Response::Refused(why)) => fail(Exit::Failed, &why),
        Ok(_) => fail(Exit::Failed, &"the agent answered with something else"),
        Err(why) => fail(Exit::NoJob, &why),
    }
}
