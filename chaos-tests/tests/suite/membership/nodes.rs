//! Nodes that nobody starts again: `elastic run` of each, in one dump folder.

use std::{
    collections::BTreeMap,
    fs,
    net::{SocketAddr, TcpListener, UdpSocket},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use chaos_tests::{
    fake,
    harness::{Digests, History, dataset, elastic, release},
};
use serde_json::Value;

use crate::{LIMIT, STEPS};

const TOKEN: &str = "a token of these tests alone";
const POLL: Duration = Duration::from_millis(10);
/// Of the fake trainer: a run lasts some ten seconds.
const MICRO_BATCH: Duration = Duration::from_millis(20);

/// Dropping it ends every process.
pub(crate) struct Nodes {
    pub(crate) folder: PathBuf,
    /// `elastic.min_nodes`, `elastic.max_nodes` and `elastic.max_failures`.
    pub(crate) limits: [u32; 3],
    /// `training.global_batch_size`.
    pub(crate) batch: i32,
    children: BTreeMap<String, Child>,
    taken: Vec<(UdpSocket, TcpListener)>,
}

impl Nodes {
    pub(crate) fn new(name: &str) -> Self {
        let folder = std::env::temp_dir()
            .join(format!("elastic-chaos-{}", std::process::id()))
            .join("membership")
            .join(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder for the nodes");
        let (children, taken) = (BTreeMap::new(), Vec::new());
        Self { folder, limits: [1, 16, 200], batch: 8, children, taken }
    }

    /// Starts a node that founds the job if it is the first, or joins the others.
    pub(crate) fn start(&mut self, node: &str, environment: &[(&str, &str)]) {
        let mut command = self.command(node);
        command.envs(environment.iter().copied());
        self.spawn(node, command);
    }

    /// The same with another join token.
    pub(crate) fn start_as(&mut self, node: &str, token: &str) {
        let command = self.command_as(node, token);
        self.spawn(node, command);
    }

    /// Starts a node that listens here and is told in its own way where others are.
    pub(crate) fn start_at(&mut self, node: &str, listen: SocketAddr, arguments: &[String]) {
        let mut command = self.command(node);
        command.arg("--listen").arg(listen.to_string()).args(arguments);
        self.launch(node, command);
    }

    /// What a command says about the job, and its exit code.
    pub(crate) fn ask(&self, arguments: &[&str]) -> (Option<i32>, String) {
        let output = Command::new(elastic())
            .args(arguments)
            .arg("--dump-folder")
            .arg(&self.folder)
            .output()
            .expect("elastic starts");
        let said = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8_lossy(&said).into_owned())
    }

    /// The same with further arguments.
    pub(crate) fn start_with(&mut self, node: &str, arguments: &[String]) {
        let mut command = self.command(node);
        command.args(arguments);
        self.spawn(node, command);
    }

    fn command(&self, node: &str) -> Command {
        self.command_as(node, TOKEN)
    }

    fn command_as(&self, node: &str, token: &str) -> Command {
        let mut command = Command::new(elastic());
        command
            .args(["run", "--node-id", node, "--token", token])
            .arg(format!("--nodes={}:{}", self.limits[0], self.limits[1]))
            .arg(format!("--max-failures={}", self.limits[2]))
            .arg("--summary")
            .arg(self.folder.join(format!("summary.{node}.json")))
            .arg(format!("--job.dump_folder={}", self.folder.display()))
            .arg(format!("--elastic.worker_bin={}", release().join("fake-worker").display()))
            .arg("--training.local_batch_size=1")
            .arg(format!("--training.global_batch_size={}", self.batch))
            .args(["--training.seq_len=64", "--training.seed=42", "--checkpoint.interval=20"])
            .arg(format!("--training.steps={STEPS}"))
            .args(["--model.name=llama3", "--model.flavor=byte-1M"])
            .env(fake::MICROS, MICRO_BATCH.as_micros().to_string());
        command
    }

    fn spawn(&mut self, node: &str, mut command: Command) {
        command.args(["--listen", "127.0.0.1:0"]);
        let nodes = self.folder.join("nodes");
        let addresses = || {
            let entries = fs::read_dir(&nodes).into_iter().flatten().flatten();
            let others = entries.filter(|entry| entry.file_name() != *node);
            let read = |entry: fs::DirEntry| fs::read_to_string(entry.path().join("address")).ok();
            others.filter_map(read).map(|text| text.trim().to_owned()).collect::<Vec<_>>()
        };
        if !self.children.is_empty() || nodes.exists() {
            let until = Instant::now() + LIMIT;
            let mut found = addresses();
            while found.is_empty() && Instant::now() < until {
                std::thread::sleep(POLL);
                found = addresses();
            }
            command.args(["--join", &found.join(",")]);
        }
        self.launch(node, command);
    }

    fn launch(&mut self, node: &str, mut command: Command) {
        let given = command
            .get_args()
            .any(|arg| arg.to_string_lossy().starts_with("--training.dataset_path"));
        if !given {
            command.arg(format!("--training.dataset_path={}", dataset().display()));
        }
        let log = fs::OpenOptions::new().create(true).append(true).open(self.log(node));
        let log = log.expect("a log for the node");
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a second handle"))
            .stderr(log)
            .process_group(0);
        self.children.insert(node.to_owned(), command.spawn().expect("elastic starts"));
    }

    fn log(&self, node: &str) -> PathBuf {
        self.folder.join(format!("{node}.log"))
    }

    /// SIGKILL, which takes its workers along.
    #[track_caller]
    pub(crate) fn kill(&mut self, node: &str) {
        let mut child = self.children.remove(node).expect("the node runs");
        child.kill().expect("it takes a signal");
        child.wait().expect("it is a child");
    }

    /// The same, and somebody else has its port from then on.
    #[track_caller]
    pub(crate) fn kill_and_take_address(&mut self, node: &str) {
        let file = self.folder.join("nodes").join(node).join("address");
        let address = fs::read_to_string(file).expect("it wrote its address");
        self.kill(node);
        let address: SocketAddr = address.trim().parse().expect("an address");
        let udp = UdpSocket::bind(address).expect("the port is free");
        self.taken.push((udp, TcpListener::bind(address).expect("the port is free")));
    }

    /// The node's disk is gone.
    pub(crate) fn lose_store(&self, node: &str) {
        fs::remove_dir_all(self.folder.join("nodes").join(node)).expect("it had a store");
    }

    /// A copy of the dataset with other tokens.
    pub(crate) fn other_dataset(&self) -> PathBuf {
        let copy = self.folder.join("other-data");
        fs::create_dir_all(&copy).expect("a folder");
        for entry in fs::read_dir(dataset()).expect("the dataset").flatten() {
            fs::copy(entry.path(), copy.join(entry.file_name())).expect("a copy");
        }
        let path = copy.join("train.tok");
        let mut bytes = fs::read(&path).expect("tokens");
        // In the digest of the payload.
        bytes[40] ^= 1;
        fs::write(&path, bytes).expect("other tokens");
        copy
    }

    /// What `elastic status --json` prints.
    pub(crate) fn status(&self, node: &str) -> Option<Value> {
        let output = Command::new(elastic())
            .args(["status", "--json", "--dump-folder"])
            .arg(&self.folder)
            .output()
            .expect("elastic status starts");
        let value: Value = serde_json::from_slice(&output.stdout).ok()?;
        let known = value["agents"].as_array()?.iter().find(|agent| agent["node"] == node)?;
        Some(serde_json::json!({ "status": known }))
    }

    pub(crate) fn history(&self) -> History {
        History::read(&self.folder)
    }

    pub(crate) fn checkpoints(&self) -> usize {
        self.history().checkpoints().len()
    }

    #[track_caller]
    pub(crate) fn wait<T>(&mut self, what: &str, seen: impl Fn(&Self) -> Option<T>) -> T {
        let until = Instant::now() + LIMIT;
        loop {
            if let Some(found) = seen(self) {
                return found;
            }
            assert!(Instant::now() < until, "no {what}\n{}", self.report());
            std::thread::sleep(POLL * 5);
        }
    }

    /// Whether a node's process is over: nobody waits for it before [`Self::ended`].
    pub(crate) fn has_ended(&self, node: &str) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.children[node].id()));
        stat.map_or(true, |stat| stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" Z")))
    }

    /// Waits for a node's end: its exit code and what it said.
    #[track_caller]
    pub(crate) fn ended(&mut self, node: &str) -> (Option<i32>, String) {
        let until = Instant::now() + LIMIT;
        loop {
            let child = self.children.get_mut(node).expect("the node was started");
            if let Some(status) = child.try_wait().expect("it is a child") {
                self.children.remove(node);
                let said = fs::read_to_string(self.log(node)).unwrap_or_default();
                return (status.code(), said);
            }
            assert!(Instant::now() < until, "{node} does not end\n{}", self.report());
            std::thread::sleep(POLL);
        }
    }

    /// Waits until these nodes have finished the job, and gives its digests.
    #[track_caller]
    pub(crate) fn finish(&mut self, nodes: &[&str]) -> Digests {
        let mut found = None;
        for node in nodes {
            let (code, _) = self.ended(node);
            assert_eq!(code, Some(0), "{node}\n{}", self.report());
            let text = fs::read(self.folder.join(format!("summary.{node}.json")));
            let summary: Value = serde_json::from_slice(&text.expect("a summary")).expect("JSON");
            let digest = |name: &str| summary[name].as_str().expect("a digest").to_owned();
            found = Some(Digests {
                weights: digest("weights_sha256"),
                state: digest("state_sha256"),
                losses: digest("loss_sha256"),
            });
        }
        found.expect("some nodes")
    }

    fn report(&self) -> String {
        let logs = ["n1", "n2", "n3", "n4"].map(|node| {
            let tail = |path: &Path| {
                let text = fs::read_to_string(path).unwrap_or_default();
                let lines: Vec<&str> = text.lines().collect();
                lines[lines.len().saturating_sub(12)..].join("\n  ")
            };
            let agent = self.folder.join("nodes").join(node).join("agent.log");
            format!("{node}:\n  {}\n  -- agent.log\n  {}", tail(&self.log(node)), tail(&agent))
        });
        format!("folder {}\n{}", self.folder.display(), logs.join("\n"))
    }
}

/// Addresses of this machine that are free now.
pub(crate) fn addresses(count: usize) -> Vec<SocketAddr> {
    let bind = || TcpListener::bind("127.0.0.1:0").expect("a port");
    let listeners: Vec<TcpListener> = (0..count).map(|_| bind()).collect();
    listeners.iter().map(|listener| listener.local_addr().expect("an address")).collect()
}

impl Drop for Nodes {
    fn drop(&mut self) {
        for child in self.children.values_mut() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if !std::thread::panicking() {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}
