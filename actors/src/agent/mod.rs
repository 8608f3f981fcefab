//! An agent: the one process of a node that is a member of the control group,
//! supervises the node's workers, and leads the job when the group elects it.
//!
//! [`run`] is the whole agent. The `NodeAgent` actor holds the node's state and
//! reconciles its workers to the committed facts; `duty` is what it does while it
//! leads; what it keeps for that and decides is `job::leader`'s.

mod admin;
mod checkpoints;
mod discovery;
mod duty;
mod ending;
mod enter;
mod home;
mod knocking;
mod ledger;
mod meeting;
mod node_agent;
mod peers;
mod pulse;
mod reforming;
mod slots;
mod spawner;
mod tokens;
mod voice;
mod witness;
mod worker_process;
mod workers;

use std::{net::SocketAddr, path::PathBuf, sync::Arc};

use job::{
    NodeId, command::Event, report::Progress, spec::JobSpec, state::JobState, timeouts::Timeouts,
};

use crate::observer::Place;

pub use admin::{
    AdminError, Request, Response, Status, TokenLine, TokenRequest, WorkerStatus, request,
};
pub use discovery::Script;

/// How an agent runs.
#[derive(Clone, Debug)]
pub struct Options {
    /// This node's name.
    pub node: NodeId,
    /// The job's outputs.
    pub dump_folder: PathBuf,
    /// The checkpoints; shared by all nodes that survive the loss of their disks.
    pub checkpoint_folder: PathBuf,
    /// Where control and liveness listen.
    pub listen: SocketAddr,
    /// What other nodes are told instead, when they reach it otherwise.
    pub advertise: Option<SocketAddr>,
    /// Port of the first worker's tensor connections, the others follow; 0 is any.
    pub tensor_port: u16,
    /// Whether workers share memory with those of the same machine, or talk to
    /// them over TCP too.
    pub shares_memory: bool,
    /// Nodes to join, HOST:PORT each; empty to found. Names are looked up at each
    /// try: machines come and go.
    pub join: Vec<String>,
    /// Asked for further ones to join, again while nobody is reached.
    pub discovery: Option<Script>,
    /// The join secret, with the authority's fingerprint if the user has it.
    pub token: Option<String>,
    /// Whether this node founds the job when its store is empty.
    pub founds: bool,
    /// Whether it may found again what a checkpoint folder holds: the user says
    /// that no node of that job is left (LG-3).
    pub reforms: bool,
    /// Device slots: workers of this node.
    pub slots: u32,
    /// What the job is if this node founds it, and what it must be to join.
    pub proposal: Proposal,
    /// The worker's program.
    pub worker: PathBuf,
    /// Added to the worker's environment.
    pub worker_environment: Vec<(String, String)>,
    /// All limits.
    pub timeouts: Timeouts,
    /// Names the keys in which two configurations differ, for a refusal.
    pub difference: fn(&str, &str) -> String,
    /// This node's configuration under the job's: own paths, the job's numbers.
    pub adopt: fn(&str, &str) -> String,
}

/// The job as this node's configuration describes it: [`JobSpec`] without what
/// only a founder can know.
#[derive(Clone, Debug)]
pub struct Proposal {
    /// The full configuration as JSON.
    pub config: String,
    /// Digest of what defines the trajectory.
    pub config_digest: [u8; 32],
    /// See [`JobSpec`].
    pub min_nodes: u32,
    /// See [`JobSpec`].
    pub max_nodes: u32,
    /// See [`JobSpec`].
    pub micro_batches: Option<u32>,
    /// See [`JobSpec`].
    pub total_steps: job::Step,
    /// See [`JobSpec`].
    pub sharding: job::spec::Sharding,
    /// See [`JobSpec`].
    pub parallel: job::mesh::Parallel,
    /// See [`JobSpec`].
    pub max_failures: u32,
    /// See [`JobSpec`].
    pub max_preemptions: u32,
    /// See [`JobSpec`].
    pub exact: bool,
    /// See [`JobSpec`].
    pub checkpoints: bool,
    /// See [`JobSpec`].
    pub keep_latest_k: u32,
}

impl Proposal {
    pub(crate) fn spec(&self, job: job::JobId, authority: String, secret: String) -> JobSpec {
        JobSpec {
            job,
            config: self.config.clone(),
            config_digest: self.config_digest,
            min_nodes: self.min_nodes,
            max_nodes: self.max_nodes,
            micro_batches: self.micro_batches,
            total_steps: self.total_steps,
            sharding: self.sharding,
            parallel: self.parallel,
            max_failures: self.max_failures,
            max_preemptions: self.max_preemptions,
            exact: self.exact,
            checkpoints: self.checkpoints,
            keep_latest_k: self.keep_latest_k,
            authority,
            join_secret: secret,
        }
    }
}

/// Something worth a line for the person who watches.
#[derive(Clone, Debug)]
pub enum Notice {
    /// The control endpoint stands: others join with this.
    Founded {
        /// Where this node listens.
        address: SocketAddr,
        /// The join token, with the authority's fingerprint.
        token: String,
        /// The job.
        state: Arc<JobState>,
    },
    /// This node is a member of a running job.
    Joined {
        /// The job.
        state: Arc<JobState>,
    },
    /// A step of rank 0 on this node.
    Stepped {
        /// The step.
        progress: Progress,
        /// The job.
        state: Arc<JobState>,
    },
    /// A validation of rank 0 on this node.
    Validated {
        /// After this step.
        step: job::Step,
        /// Mean loss.
        loss: f64,
    },
    /// A committed fact.
    Event {
        /// The fact.
        event: Event,
        /// The job after it.
        state: Arc<JobState>,
        /// Whether this node speaks for the group now: it leads.
        leads: bool,
    },
    /// What a leading node waits for, when that changes.
    Waiting(String),
    /// Something that went wrong here without ending anything.
    Warning(String),
}

/// How an agent ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// Why.
    pub outcome: Outcome,
    /// The last known state of the job, if it was ever known.
    pub state: Option<Arc<JobState>>,
    /// Whether this node spoke for the group at the end: it led, or it held rank 0.
    pub speaks: bool,
}

/// Why an agent ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The job is finished.
    Finished,
    /// The job saved and stopped.
    Stopped,
    /// This node left as it was told to.
    Left,
    /// Told to end at once.
    Interrupted,
    /// The group went on without this node; the text says why.
    Fenced(String),
    /// This node does not fit the job; the text says why.
    Refused(String),
    /// The job failed; the text says why, the flag whether trying again is useless.
    Failed(String, bool),
}

/// Why an agent did not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or folder of this node.
    #[error("{what} {path}: {error}")]
    File {
        /// What was tried.
        what: &'static str,
        /// Where.
        path: String,
        /// The system's word.
        error: std::io::Error,
    },
    /// The control group's store.
    #[error(transparent)]
    Group(#[from] crate::control_group::Error),
    /// The control endpoint.
    #[error("{0}")]
    Control(String),
    /// The group does not take this node.
    #[error("{0}")]
    Refused(String),
    /// The checkpoint folder.
    #[error("{0}")]
    Checkpoints(String),
}

/// Tells a running agent what a person wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Leave without losing a step.
    Leave,
    /// Save and stop the whole job.
    StopJob,
    /// End at once.
    EndNow,
}

/// Runs an agent to its end. `wishes` comes from signals, `notices` goes to the
/// person who watches; a watcher that does not keep up misses notices.
///
/// # Errors
/// When the agent could not start; each is one line that says what to do.
pub async fn run(
    options: Options,
    wishes: tokio::sync::mpsc::Receiver<Wish>,
    notices: tokio::sync::mpsc::Sender<Notice>,
) -> Result<Ended, Error> {
    Place::change(|place| place.node = Some(options.node.clone()));
    let wishes = Arc::new(tokio::sync::Mutex::new(wishes));
    loop {
        let entered = enter::enter(&options, &notices).await?;
        let (options, wishes, notices) = (options.clone(), Arc::clone(&wishes), notices.clone());
        if let Some(ended) = node_agent::serve(options, entered, wishes, notices).await? {
            return Ok(ended);
        }
    }
}
