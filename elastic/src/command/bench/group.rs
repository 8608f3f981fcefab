//! The group under test: a launcher of its own with its nodes, seen only from
//! outside, through the files and the admin sockets of the nodes.

use std::{
    fs::File,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use actors::agent::{Request, Response, Status};

use super::record::Record;
use crate::{command::ask, launch::die_with_launcher};

/// A group that is not back at full strength by then never will be.
const PATIENCE: Duration = Duration::from_secs(60);
/// Steps after which a generation is quiet: the first one still pays for it.
const QUIET: usize = 1 + 3;
const POLL: Duration = Duration::from_millis(5);

/// A running group.
#[derive(Debug)]
pub(super) struct Group {
    launcher: Child,
    nodes: Vec<PathBuf>,
    record: Record,
}

impl Group {
    /// Starts the nodes `n1`, `n2`, … that log into `folder`.
    pub(super) fn start(folder: &Path, config: &Path, nodes: u32) -> Result<Self, String> {
        let log = folder.join("run.log");
        let log_file = || {
            File::options()
                .create(true)
                .append(true)
                .open(&log)
                .map_err(|error| format!("cannot open {}: {error}", log.display()))
        };
        // This very program, even if its file was replaced meanwhile.
        let mut command = Command::new("/proc/self/exe");
        command.arg0("elastic").arg("run").arg("--standalone").arg(nodes.to_string()).arg(config);
        command.stdin(Stdio::null()).stdout(log_file()?).stderr(log_file()?);
        die_with_launcher(&mut command);
        let launcher = command
            .spawn()
            .map_err(|error| format!("cannot start the group's launcher: {error}"))?;
        let nodes: Vec<PathBuf> =
            (1..=nodes).map(|number| folder.join(format!("run/nodes/n{number}"))).collect();
        let record = Record::of(nodes.iter().map(PathBuf::as_path));
        Ok(Self { launcher, nodes, record })
    }

    /// What the nodes wrote so far.
    pub(super) fn record(&self) -> &Record {
        &self.record
    }

    /// Reads on until there is what is looked for.
    pub(super) fn wait_for<T>(
        &mut self,
        what: &str,
        look: impl Fn(&Record) -> Option<T>,
    ) -> Result<T, String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.record.update()?;
            if let Some(found) = look(&self.record) {
                return Ok(found);
            }
            if let Ok(Some(status)) = self.launcher.try_wait() {
                return Err(format!("no {what}: the group ended with {status}"));
            }
            if Instant::now() >= deadline {
                return Err(format!("no {what} within {} s", PATIENCE.as_secs()));
            }
            std::thread::sleep(POLL);
        }
    }

    /// Waits until all nodes train quietly; returns the generation.
    pub(super) fn settle(&mut self) -> Result<u64, String> {
        let full = self.nodes.len();
        self.wait_for("quiet steps of all nodes", |record| {
            let (generation, plan) = record.newest_plan()?;
            let quiet = plan.ranks == full && record.steps_in(generation) >= QUIET;
            quiet.then_some(generation)
        })
    }

    /// How every node sees itself, in the order of their names.
    pub(super) fn statuses(&self) -> Result<Vec<Status>, String> {
        let status = |node: &PathBuf| match ask(node, &Request::Status) {
            Ok(Response::Status(status)) => Ok(*status),
            Ok(_) => Err(format!("the agent in {} answered with something else", node.display())),
            Err(error) => Err(error.to_string()),
        };
        self.nodes.iter().map(status).collect()
    }

    /// Ends everything: the kernel ends the nodes with their launcher, and the
    /// workers with their nodes.
    pub(super) fn end(&mut self) {
        let pids: Vec<u32> = self.statuses().into_iter().flatten().flat_map(|s| pids(&s)).collect();
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
        let deadline = Instant::now() + PATIENCE / 10;
        let alive = |pid: &u32| Path::new(&format!("/proc/{pid}")).exists();
        while pids.iter().any(alive) && Instant::now() < deadline {
            std::thread::sleep(POLL);
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }
}

/// The processes of a node, its agent first.
pub(super) fn pids(status: &Status) -> Vec<u32> {
    std::iter::once(status.pid).chain(status.workers.iter().map(|worker| worker.pid)).collect()
}
