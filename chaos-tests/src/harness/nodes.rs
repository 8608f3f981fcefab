//! Nodes that are started one by one, as on a cluster: each `elastic run` has its
//! own place in the network. Those that die, leave or are fenced are started
//! again, as a scheduler would.

use std::{
    net::SocketAddr,
    os::unix::process::ExitStatusExt,
    process::{Child, Command, ExitStatus},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::Duration,
};

/// Where a node is.
#[derive(Clone, Debug)]
pub struct Place {
    /// Put before the command, such as one that enters a network namespace.
    pub prefix: Vec<String>,
    /// Where the agent listens.
    pub listen: SocketAddr,
    /// Where the others reach it, when elsewhere.
    pub advertise: Option<SocketAddr>,
    /// Where its worker listens.
    pub tensor_port: u16,
}

impl Place {
    /// Where the others reach it.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.advertise.unwrap_or(self.listen)
    }
}

/// What every node is started with: the programs, in order of the nodes.
pub(super) type Commands = Box<dyn Fn(usize) -> Command + Send>;

/// A thread that starts nodes, and starts those again that ended early.
#[derive(Debug)]
pub(super) struct Nodes {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    nodes: Mutex<Vec<Node>>,
    stopped: AtomicBool,
}

#[derive(Debug, Default)]
struct Node {
    child: Option<Child>,
    ended: Option<i32>,
}

/// Exit codes after which a node is not started again: finished, failed, refused,
/// do not requeue, interrupted.
const FINAL: [i32; 5] = [0, 1, 2, 3, 130];

const POLL: Duration = Duration::from_millis(10);

impl Nodes {
    pub(super) fn start(count: usize, commands: Commands) -> Self {
        let nodes = Mutex::new((0..count).map(|_| Node::default()).collect());
        let shared = Arc::new(Shared { nodes, stopped: AtomicBool::new(false) });
        let supervisor = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            while !supervisor.stopped.load(Relaxed) {
                for (index, node) in supervisor.lock().iter_mut().enumerate() {
                    node.tend(|| commands(index));
                }
                std::thread::sleep(POLL);
            }
        });
        Self { shared, thread: Some(thread) }
    }

    /// The worst of all codes, once every node ended for good.
    pub(super) fn ended(&self) -> Option<ExitStatus> {
        let codes: Option<Vec<i32>> = self.shared.lock().iter().map(|node| node.ended).collect();
        // As the kernel encodes it.
        codes?.into_iter().max().map(|code| ExitStatus::from_raw(code << 8))
    }

    pub(super) fn kill(&mut self) {
        self.shared.stopped.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        for node in self.shared.lock().iter_mut() {
            if let Some(mut child) = node.child.take() {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Vec<Node>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Node {
    fn tend(&mut self, command: impl FnOnce() -> Command) {
        if self.ended.is_some() {
            return;
        }
        match &mut self.child {
            None => self.child = Some(command().spawn().expect("elastic starts")),
            Some(child) => {
                if let Some(status) = child.try_wait().expect("a node is a child") {
                    self.child = None;
                    self.ended = status.code().filter(|code| FINAL.contains(code));
                }
            }
        }
    }
}
