//! The socket on which a node's agent answers `elastic status`, `events`, `drain`
//! and `stop`: one JSON request a line, one JSON answer.

use std::{
    io,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    time::Duration,
};

use job::{NodeId, state::JobState};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
    sync::oneshot,
    time::timeout,
};

/// What a person asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
pub enum Request {
    /// How things are.
    Status,
    /// A node is to leave without losing a step.
    Drain {
        /// Its name.
        node: NodeId,
    },
    /// Save and stop the whole job.
    Stop,
}

/// The answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// How things are.
    Status(Box<Status>),
    /// It will be done.
    Accepted(String),
    /// It will not be done.
    Refused(String),
}

/// The job as one node sees it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    /// The answering node.
    pub node: NodeId,
    /// Its process.
    pub pid: u32,
    /// The node that leads, if one is known.
    pub leader: Option<NodeId>,
    /// Voters of the control group by node, as far as known.
    pub voters: Vec<String>,
    /// Microseconds until this node's lease ends; negative when it has.
    pub lease_micros: i64,
    /// What the leading node waits for.
    pub waiting: Option<String>,
    /// The newest step of each worker of this node: slot, process, rank, step.
    pub workers: Vec<WorkerStatus>,
    /// The replicated state, without its secrets.
    pub job: JobState,
}

/// A worker of the answering node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WorkerStatus {
    /// Device slot.
    pub slot: u32,
    /// Its process.
    pub pid: u32,
    /// Its rank in the newest plan.
    pub rank: Option<u32>,
    /// Its state.
    pub state: job::report::WorkerState,
    /// Newest step.
    pub step: Option<u64>,
    /// Loss of that step.
    pub loss: Option<f32>,
    /// Tokens of that step, of all ranks, over its wall time.
    pub tokens_per_s: Option<f64>,
}

/// Why an agent could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// Nobody answers.
    #[error("no agent answers in {folder}: {error}")]
    Unreachable {
        /// The node's folder.
        folder: String,
        /// Why.
        error: io::Error,
    },
    /// The answer is none.
    #[error("the agent in {0} answered with something else")]
    Malformed(String),
}

const SOCKET: &str = "admin.sock";
const LONGEST_REQUEST: u64 = 4096;
const PATIENCE: Duration = Duration::from_secs(5);
const CONNECTIONS: usize = 16;

/// A path to the socket that fits into the 108 bytes that the kernel allows,
/// however deep the folder is.
fn socket(folder: &Path) -> io::Result<(std::fs::File, PathBuf)> {
    let folder = std::fs::File::open(folder)?;
    let path = PathBuf::from(format!("/proc/self/fd/{}/{SOCKET}", folder.as_raw_fd()));
    Ok((folder, path))
}

/// Answers until dropped. `ask` passes a request on; false when nobody is there.
pub(super) async fn serve(
    folder: PathBuf,
    ask: impl Fn(Request, oneshot::Sender<Response>) -> bool + Clone + Send + Sync + 'static,
) {
    let _ = std::fs::remove_file(folder.join(SOCKET));
    let bound = socket(&folder).and_then(|(folder, path)| Ok((folder, UnixListener::bind(path)?)));
    let (_folder, listener) = match bound {
        Ok(bound) => bound,
        Err(error) => {
            tracing::warn!(%error, "`elastic status` will not work: the admin socket cannot be bound");
            return;
        }
    };
    let places = std::sync::Arc::new(tokio::sync::Semaphore::new(CONNECTIONS));
    while let Ok((stream, _)) = listener.accept().await {
        let Ok(place) = std::sync::Arc::clone(&places).try_acquire_owned() else { continue };
        let ask = ask.clone();
        tokio::spawn(async move {
            let _ = timeout(PATIENCE, answer(stream, ask)).await;
            drop(place);
        });
    }
}

async fn answer(
    stream: UnixStream,
    ask: impl Fn(Request, oneshot::Sender<Response>) -> bool,
) -> io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut line = String::new();
    BufReader::new(read.take(LONGEST_REQUEST)).read_line(&mut line).await?;
    let response = match serde_json::from_str(&line) {
        Ok(request) => {
            let (reply, response) = oneshot::channel();
            match ask(request, reply) {
                true => {
                    response.await.unwrap_or_else(|_| Response::Refused("the agent ends".into()))
                }
                false => Response::Refused("the agent ends".into()),
            }
        }
        Err(error) => Response::Refused(format!("not a request: {error}")),
    };
    let mut bytes = serde_json::to_vec(&response).map_err(io::Error::other)?;
    bytes.push(b'\n');
    write.write_all(&bytes).await
}

/// Asks the agent of the node whose folder this is.
///
/// # Errors
/// [`AdminError`].
pub async fn request(folder: &Path, request: &Request) -> Result<Response, AdminError> {
    let unreachable =
        |error| AdminError::Unreachable { folder: folder.display().to_string(), error };
    let asked = timeout(PATIENCE, async {
        let (_folder, path) = socket(folder)?;
        let mut stream = UnixStream::connect(path).await?;
        let mut bytes = serde_json::to_vec(request).map_err(io::Error::other)?;
        bytes.push(b'\n');
        stream.write_all(&bytes).await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        Ok(answer)
    });
    let answer = match asked.await {
        Ok(answer) => answer.map_err(unreachable)?,
        Err(_) => return Err(unreachable(io::Error::from(io::ErrorKind::TimedOut))),
    };
    serde_json::from_slice(&answer).map_err(|_| AdminError::Malformed(folder.display().to_string()))
}
