//! Which processes belong to a run, read from `/proc`: it works for processes
//! that hang or that lost their parent, and it needs nobody's answer.

use std::{fs, path::Path};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// Environment variable that every process of a run inherits.
pub(super) const MARK: &str = "ELASTIC_CHAOS_RUN";

/// What a process of a run is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// `elastic run --standalone`.
    Launcher,
    /// `elastic run` of this node.
    Agent(String),
    /// A worker.
    Worker,
}

/// A process of a run.
#[derive(Clone, Debug)]
pub struct Process {
    /// Its id.
    pub pid: Pid,
    /// Its parent: for a worker, its agent.
    pub parent: Pid,
    /// What it is.
    pub role: Role,
}

impl Process {
    /// Sends a signal; false when the process is gone already.
    #[must_use]
    pub fn signal(&self, signal: Signal) -> bool {
        kill(self.pid, signal).is_ok()
    }
}

/// Sends a signal to what `find` finds; false when there was nothing.
pub fn send(found: Option<Process>, signal: Signal) -> bool {
    found.is_some_and(|process| process.signal(signal))
}

/// Every process, zombies aside, that was started for the run in `folder`.
#[must_use]
pub fn processes(folder: &Path) -> Vec<Process> {
    let mark = format!("{MARK}={}", folder.display());
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|pid: i32| look(pid, &mark))
        .collect()
}

/// Zombies whose parent is one of these.
pub(super) fn zombies(parents: &[Pid]) -> Vec<Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let unwaited = |pid: &i32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let parent = number(&status, "PPid:").and_then(|parent| i32::try_from(parent).ok());
        let parent = parent.is_some_and(|parent| parents.contains(&Pid::from_raw(parent)));
        parent && status.contains("State:\tZ")
    };
    pids.filter(unwaited).map(Pid::from_raw).collect()
}

fn look(pid: i32, mark: &str) -> Option<Process> {
    let file = |name: &str| fs::read(format!("/proc/{pid}/{name}")).ok();
    let marked = file("environ")?.split(|byte| *byte == 0).any(|pair| pair == mark.as_bytes());
    if !marked {
        return None;
    }
    let status = String::from_utf8(file("status")?).ok()?;
    let command = file("cmdline")?;
    let mut words = command.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    let role = match words.find(|word| word == "--node-id" || word == "--standalone").as_deref() {
        Some("--node-id") => Role::Agent(words.next()?.into_owned()),
        Some(_) => Role::Launcher,
        None => Role::Worker,
    };
    let parent = Pid::from_raw(i32::try_from(number(&status, "PPid:")?).ok()?);
    Some(Process { pid: Pid::from_raw(pid), parent, role })
}

pub(super) fn number(status: &str, key: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(key))?;
    line.split_whitespace().next()?.parse().ok()
}
