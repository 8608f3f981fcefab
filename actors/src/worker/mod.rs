//! A worker process: one device, one rank at most.
//!
//! [`run`] is the whole process. The `Rank` actor talks to the agent over the
//! inherited socket pair and owns the `CheckpointWriter`; the device thread, a
//! plain thread, owns the tensors and is where compute and collectives block.
//! The runtime never does.

mod checkpoint_writer;
mod device_thread;
mod lease;
mod rank;
mod steps;
mod trainer;

use std::{
    net::{IpAddr, SocketAddr},
    os::{
        fd::{BorrowedFd, FromRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use job::{NodeId, WorkerId, message::ToWorker, report::Digests, spec::JobSpec};
use tokio::sync::mpsc;

use crate::lifeline;

pub use trainer::{Applied, Snapshot, Trainer, TrainerError};

/// The environment variable that tells a worker which descriptor leads to its agent.
pub const AGENT_FD: &str = "ELASTIC_AGENT_FD";

/// The environment variable that tells it which one is the page by which its agent
/// notices its death (LS-4).
pub const LIFELINE_FD: &str = "ELASTIC_LIFELINE_FD";

/// Exit code of a worker that ended itself because its lease was gone.
pub const FENCED: i32 = 4;

/// What a worker is started with.
#[derive(Clone, Debug)]
pub struct Start {
    /// The job.
    pub spec: JobSpec,
    /// The configuration as JSON.
    pub config: String,
    /// Its node.
    pub node: NodeId,
    /// Its identity.
    pub worker: WorkerId,
    /// Its device slot.
    pub slot: u32,
    /// Folder of the job's outputs.
    pub dump_folder: PathBuf,
    /// Folder of the checkpoints.
    pub checkpoint_folder: PathBuf,
}

/// How a worker paces itself, and what it trains on.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// What has to be equal on all nodes.
    pub digests: Digests,
    /// Steps between checkpoints; 0 saves only at the end.
    pub checkpoint_interval: u64,
    /// Whether training goes on while a checkpoint is written.
    pub checkpoint_async: bool,
    /// Steps between validations; 0 validates only at the end.
    pub validation_freq: u64,
    /// Longest time for a step and each collective in it.
    pub step: Duration,
    /// Longest time for building a mesh.
    pub connect: Duration,
    /// How long after its lease lapsed a worker ends itself (LIVE-2).
    pub grace: Duration,
}

/// Makes the trainer, on the device thread.
pub trait Factory: Send + 'static {
    /// Builds what is trained.
    ///
    /// # Errors
    /// One line for the user: which setting or file is wrong and what to do.
    fn build(self, start: &Start) -> Result<(Box<dyn Trainer>, Settings), String>;
}

/// Runs a worker until its agent ends it. The agent's end of the socket pair is
/// the descriptor named by [`AGENT_FD`].
#[must_use]
pub fn run(factory: impl Factory) -> ExitCode {
    let Some(stream) = inherited(AGENT_FD).map(UnixStream::from) else {
        eprintln!(
            "elastic-worker is started by an agent (`elastic run`): {AGENT_FD} names no open socket"
        );
        return ExitCode::from(2);
    };
    if let Some(Err(error)) = inherited(LIFELINE_FD).map(lifeline::hold) {
        tracing::warn!(%error, "no robust futex: the agent notices a death by the pidfd alone");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("rank")
        .enable_all()
        .build();
    match runtime {
        Ok(runtime) => {
            let code = runtime.block_on(rank::serve(stream, factory));
            // A device thread in the middle of a block must not hold the process.
            runtime.shutdown_background();
            code
        }
        Err(error) => {
            eprintln!("elastic-worker cannot start its runtime: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The open descriptor whose number an environment variable holds.
pub(crate) fn inherited(variable: &str) -> Option<OwnedFd> {
    let fd: i32 = std::env::var(variable).ok()?.parse().ok()?;
    if fd < 3 || nix::fcntl::fcntl(borrowed(fd), nix::fcntl::FcntlArg::F_GETFD).is_err() {
        return None;
    }
    // SAFETY: the agent opened this descriptor for us before exec, it is open,
    // and nothing else in this process knows its number.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn borrowed(fd: i32) -> BorrowedFd<'static> {
    // SAFETY: used for one fcntl call that fails harmlessly when it is not open.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// Where a worker accepts tensor connections, and where others reach it.
#[derive(Clone, Copy, Debug)]
struct Tensors {
    bind: SocketAddr,
    advertise: IpAddr,
    shares_memory: bool,
}

/// The first message as a value.
fn start_of(message: ToWorker) -> Option<(Start, Tensors)> {
    match message {
        ToWorker::Start {
            spec,
            config,
            node,
            worker,
            slot,
            dump_folder,
            checkpoint_folder,
            bind,
            advertise,
            shares_memory,
        } => {
            let (dump_folder, checkpoint_folder) = (dump_folder.into(), checkpoint_folder.into());
            let spec = *spec;
            Some((
                Start { spec, config, node, worker, slot, dump_folder, checkpoint_folder },
                Tensors { bind, advertise, shares_memory },
            ))
        }
        _ => None,
    }
}

/// Messages to the agent that may wait while it is busy.
const OUT_QUEUE: usize = 256;

fn out_queue() -> (mpsc::Sender<job::message::FromWorker>, mpsc::Receiver<job::message::FromWorker>)
{
    mpsc::channel(OUT_QUEUE)
}
