//! Runs of `elastic run --standalone N` under faults: real processes, real
//! signals, files as users have them. Start with [`Run::start`].
//!
//! Everything here panics with what it saw: it is used by tests only. A run's
//! folder stays when its test fails, and its processes never do.

mod fault;
mod nodes;
mod process;
mod programs;
mod random;
mod record;
mod resources;

use std::{
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use nix::{sys::signal::Signal, unistd::Pid};
use serde::Deserialize;
use serde_json::Value;

pub use fault::Fault;
pub use nodes::Place;
pub use process::{Process, Role, processes, send};
pub use programs::{dataset, elastic, release};
pub use random::{Random, SEED};
pub use record::{Event, History, Line, wall_clock};
pub use resources::{Resources, Sockets, shared_memory};

/// What is trained, and with what.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Name of the run's folder.
    pub name: &'static str,
    /// Nodes on this machine.
    pub nodes: u32,
    /// `--min-nodes`.
    pub min_nodes: u32,
    /// Steps to train.
    pub steps: u64,
    /// Micro-batches of a step.
    pub micro_batches: u32,
    /// Tokens of a micro-batch.
    pub seq_len: u32,
    /// `training.seed`.
    pub seed: u64,
    /// Steps between checkpoints.
    pub checkpoint_interval: u64,
    /// The fake worker's program and the time that its micro-batches take; `None`
    /// is the real engine.
    pub fake: Option<(PathBuf, Duration)>,
    /// Further arguments.
    pub arguments: Vec<String>,
    /// Further environment variables.
    pub environment: Vec<(&'static str, String)>,
}

/// A group of nodes on this machine. Dropping it ends every process of it.
#[derive(Debug)]
pub struct Run {
    /// How it was started last.
    pub setup: Setup,
    folder: PathBuf,
    launcher: Option<Launcher>,
    places: Vec<Place>,
    began: Instant,
    // One at a time: the limits below are for a quiet machine.
    _alone: MutexGuard<'static, ()>,
}

/// What runs the nodes.
#[derive(Debug)]
enum Launcher {
    Standalone(Child),
    Each(nodes::Nodes),
}

/// `--summary` of the first node, as far as tests read it.
#[derive(Clone, Debug, Deserialize)]
#[expect(missing_docs, reason = "the fields of the summary")]
pub struct Summary {
    pub outcome: String,
    pub weights_sha256: Option<String>,
    pub state_sha256: Option<String>,
    pub loss_sha256: Option<String>,
    pub final_step: Option<u64>,
    pub incidents: Vec<Value>,
}

/// The three digests that must not depend on placement or faults (TRAJ-1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Digests {
    /// Of the weights.
    pub weights: String,
    /// Of the weights, moments and step.
    pub state: String,
    /// Of all losses.
    pub losses: String,
}

static ALONE: Mutex<()> = Mutex::new(());
static RUNS: AtomicU32 = AtomicU32::new(0);

const POLL: Duration = Duration::from_millis(5);

impl Run {
    /// Starts a group in a new folder: `elastic run --standalone`.
    #[must_use]
    pub fn start(setup: Setup) -> Self {
        let mut run = Self::prepare(setup);
        run.launch();
        run
    }

    /// Starts each node by itself, at places that may depend on the run's folder.
    #[must_use]
    pub fn start_each(setup: Setup, places: impl FnOnce(&Path) -> Vec<Place>) -> Self {
        let mut run = Self::prepare(setup);
        run.places = places(&run.folder);
        run.launch();
        run
    }

    /// A run whose programs the caller starts.
    #[must_use]
    pub fn prepare(setup: Setup) -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let number = RUNS.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir()
            .join(format!("elastic-chaos-{}", std::process::id()))
            .join(format!("{number}-{}", setup.name));
        fs::create_dir_all(&folder).expect("a folder for the run");
        let (launcher, places, began) = (None, Vec::new(), Instant::now());
        Self { setup, folder, launcher, places, began, _alone: alone }
    }

    /// Gives the same command again, after the group ended.
    ///
    /// # Panics
    /// When the launcher still runs.
    pub fn launch(&mut self) {
        assert!(self.launcher.is_none(), "the launcher still runs");
        self.launcher = Some(if self.places.is_empty() {
            let mut command = command(&self.setup, &self.folder, &[]);
            command.args(["--standalone", &self.setup.nodes.to_string()]);
            command.arg("--summary").arg(self.folder.join("summary.json"));
            Launcher::Standalone(command.spawn().expect("elastic starts"))
        } else {
            let (setup, folder, places) =
                (self.setup.clone(), self.folder.clone(), self.places.clone());
            let join: Vec<String> =
                places.iter().map(|place| place.address().to_string()).collect();
            let node = move |index: usize| {
                let place = &places[index];
                let mut command = command(&setup, &folder, &place.prefix);
                command
                    .args(["--node-id", &format!("n{}", index + 1)])
                    .args(["--join", &join.join(","), "--token", TOKEN])
                    .args(["--listen", &place.listen.to_string()])
                    .args(["--tensor-port", &place.tensor_port.to_string()])
                    .arg("--summary")
                    .arg(folder.join(summary(index)));
                if let Some(advertise) = place.advertise {
                    command.args(["--advertise", &advertise.to_string()]);
                }
                command
            };
            Launcher::Each(nodes::Nodes::start(self.places.len(), Box::new(node)))
        });
    }

    /// The dump folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Every process of this run.
    #[must_use]
    pub fn processes(&self) -> Vec<Process> {
        processes(&self.folder)
    }

    /// Dead children of this run's processes that their parents did not wait for.
    #[must_use]
    pub fn zombies(&self) -> Vec<Pid> {
        let parents: Vec<Pid> = self.processes().iter().map(|process| process.pid).collect();
        process::zombies(&parents)
    }

    /// The agent of a node, when it runs.
    #[must_use]
    pub fn agent(&self, node: &str) -> Option<Process> {
        let is = |process: &Process| matches!(&process.role, Role::Agent(name) if name == node);
        self.processes().into_iter().find(is)
    }

    /// A worker of a node, when one runs.
    #[must_use]
    pub fn worker(&self, node: &str) -> Option<Process> {
        let agent = self.agent(node)?.pid;
        let of = |process: &Process| process.role == Role::Worker && process.parent == agent;
        self.processes().into_iter().find(of)
    }

    /// What `elastic status --json` prints.
    #[must_use]
    pub fn status(&self) -> Option<Value> {
        let output = Command::new(elastic())
            .args(["status", "--json", "--dump-folder"])
            .arg(&self.folder)
            .output()
            .expect("elastic status starts");
        serde_json::from_slice(&output.stdout).ok()
    }

    /// The node that leads the control group, when one is known.
    #[must_use]
    pub fn leader(&self) -> Option<String> {
        Some(self.status()?["status"]["leader"].as_str()?.to_owned())
    }

    /// The committed events and the steps of all ranks so far.
    #[must_use]
    pub fn history(&self) -> History {
        History::read(&self.folder)
    }

    /// The newest step that any rank applied.
    #[must_use]
    pub fn step(&self) -> u64 {
        record::newest_step(&self.folder)
    }

    /// Waits until `seen` gives something.
    ///
    /// # Panics
    /// When it does not within `limit`, or the launcher ended.
    #[track_caller]
    pub fn wait<T>(&mut self, what: &str, limit: Duration, seen: impl Fn(&Self) -> Option<T>) -> T {
        let until = Instant::now() + limit;
        loop {
            if let Some(found) = seen(self) {
                return found;
            }
            if let Some(status) = self.launcher.as_mut().and_then(Launcher::ended) {
                // What was waited for may have come with the end.
                if let Some(found) = seen(self) {
                    return found;
                }
                panic!("the run ended with {status} before {what}\n{}", self.report());
            }
            assert!(
                Instant::now() < until,
                "no {what} within {} s\n{}",
                limit.as_secs_f64(),
                self.report()
            );
            std::thread::sleep(POLL);
        }
    }

    /// Waits until some rank applied `step`.
    #[track_caller]
    pub fn wait_step(&mut self, step: u64, limit: Duration) {
        self.wait(&format!("step {step}"), limit, |run| (run.step() >= step).then_some(()));
    }

    /// SIGKILL to everything, the launcher first, as a power cut does.
    pub fn kill_all(&mut self) {
        if let Some(mut launcher) = self.launcher.take() {
            launcher.kill();
        }
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            let left = self.processes();
            if left.is_empty() {
                return;
            }
            assert!(Instant::now() < until, "processes survive SIGKILL: {left:?}");
            for process in left {
                let _ = nix::sys::signal::kill(process.pid, Signal::SIGKILL);
            }
            std::thread::sleep(POLL);
        }
    }

    /// Waits for the launcher's end.
    ///
    /// # Panics
    /// When it does not end within `limit`.
    #[track_caller]
    pub fn end(&mut self, limit: Duration) -> ExitStatus {
        let until = Instant::now() + limit;
        loop {
            let launcher = self.launcher.as_mut().expect("the launcher runs");
            if let Some(status) = launcher.ended() {
                self.launcher = None;
                return status;
            }
            assert!(
                Instant::now() < until,
                "no end within {} s\n{}",
                limit.as_secs(),
                self.report()
            );
            std::thread::sleep(POLL);
        }
    }

    /// Waits for a successful end: exit code 0, a summary, every step trained,
    /// and a history without contradictions. Returns the digests.
    ///
    /// # Panics
    /// Otherwise.
    #[track_caller]
    pub fn finish(&mut self, limit: Duration) -> Digests {
        let status = self.end(limit);
        assert!(status.success(), "the run ended with {status}\n{}", self.report());
        self.finished()
    }

    /// What [`Self::finish`] checks and returns, of a run that has ended.
    ///
    /// # Panics
    /// When it did not train every step, or left a history with contradictions.
    #[must_use]
    #[track_caller]
    pub fn finished(&self) -> Digests {
        let summary = self.summary();
        assert_eq!(summary.outcome, "finished", "{summary:?}\n{}", self.report());
        assert_eq!(summary.final_step, Some(self.setup.steps), "{}", self.report());
        self.history().check(self.setup.micro_batches, self.setup.steps);
        let digest = |found: Option<String>| found.expect("a finished run has digests");
        Digests {
            weights: digest(summary.weights_sha256),
            state: digest(summary.state_sha256),
            losses: digest(summary.loss_sha256),
        }
    }

    /// The summary of a node that saw the job finish, or else of any.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    pub fn summary(&self) -> Summary {
        let texts = (0..self.setup.nodes as usize)
            .map(summary)
            .filter_map(|name| fs::read(self.folder.join(name)).ok());
        let parse = |text: Vec<u8>| serde_json::from_slice(&text).expect("the summary is JSON");
        let all: Vec<Summary> = texts.map(parse).collect();
        let finished = all.iter().find(|summary| summary.outcome == "finished");
        let found = finished.or(all.first()).cloned();
        found.unwrap_or_else(|| panic!("no summary\n{}", self.report()))
    }

    /// The pid of the `--standalone` launcher, while it runs.
    #[must_use]
    pub fn launcher(&self) -> Option<Pid> {
        match &self.launcher {
            Some(Launcher::Standalone(child)) => Some(Pid::from_raw(child.id() as i32)),
            Some(Launcher::Each(_)) | None => None,
        }
    }

    /// Seconds since the first start.
    #[must_use]
    pub fn age(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Where the run stands, for a panic's message.
    #[must_use]
    pub fn report(&self) -> String {
        let tail = |path: &Path, lines: usize| {
            let text = fs::read(path).unwrap_or_default();
            let text = String::from_utf8_lossy(&text).into_owned();
            let all: Vec<&str> = text.lines().collect();
            all[all.len().saturating_sub(lines)..].join("\n  ")
        };
        format!(
            "after {:.1} s, folder {}\nprocesses {:?}\nrun.log:\n  {}",
            self.age(),
            self.folder.display(),
            self.processes(),
            tail(&self.folder.join("run.log"), 30),
        )
    }
}

impl Launcher {
    fn ended(&mut self) -> Option<ExitStatus> {
        match self {
            Self::Standalone(child) => child.try_wait().ok().flatten(),
            Self::Each(nodes) => nodes.ended(),
        }
    }

    fn kill(&mut self) {
        match self {
            Self::Standalone(child) => {
                let _ = child.kill();
                let _ = child.wait();
            }
            Self::Each(nodes) => nodes.kill(),
        }
    }
}

/// `elastic run` without what says which nodes there are.
fn command(setup: &Setup, folder: &Path, prefix: &[String]) -> Command {
    let log = fs::OpenOptions::new().create(true).append(true).open(folder.join("run.log"));
    let log = log.expect("a log for the run");
    let mut command = match prefix {
        [program, arguments @ ..] => {
            let mut command = Command::new(program);
            command.args(arguments).arg(elastic());
            command
        }
        [] => Command::new(elastic()),
    };
    command
        .args(["run", "--min-nodes", &setup.min_nodes.to_string(), "--max-failures", "200"])
        .arg(format!("--job.dump_folder={}", folder.display()))
        .arg(format!("--training.dataset_path={}", dataset().display()))
        .arg("--training.local_batch_size=1")
        .arg(format!("--training.global_batch_size={}", setup.micro_batches))
        .arg(format!("--training.seq_len={}", setup.seq_len))
        .arg(format!("--training.steps={}", setup.steps))
        .arg(format!("--training.seed={}", setup.seed))
        .arg(format!("--checkpoint.interval={}", setup.checkpoint_interval))
        .args(["--model.name=llama3", "--model.flavor=byte-1M"])
        .args(&setup.arguments)
        .envs(setup.environment.iter().map(|(key, value)| (key, value)))
        .env(process::MARK, folder)
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("a second handle of the log"))
        .stderr(log)
        .process_group(0);
    if let Some((program, time)) = &setup.fake {
        command
            .arg(format!("--elastic.worker_bin={}", program.display()))
            .env(crate::fake::MICROS, time.as_micros().to_string());
    }
    command
}

/// Where a node writes its summary, as the launcher names it.
fn summary(index: usize) -> String {
    match index {
        0 => "summary.json".into(),
        more => format!("summary.n{}.json", more + 1),
    }
}

/// The join secret of nodes that are started one by one.
const TOKEN: &str = "E1.00112233445566778899aabbccddeeff";

impl Drop for Run {
    fn drop(&mut self) {
        let failing = std::thread::panicking();
        if let Some(mut launcher) = self.launcher.take() {
            launcher.kill();
        }
        for _ in 0..100 {
            let left = self.processes();
            if left.is_empty() {
                break;
            }
            for process in left {
                let _ = nix::sys::signal::kill(process.pid, Signal::SIGKILL);
            }
            std::thread::sleep(POLL);
        }
        if failing {
            eprintln!("the run's folder is kept: {}", self.folder.display());
        } else {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}
