//! The one thread that starts worker processes. The kernel's parent-death signal
//! fires when the *thread* that spawned a child ends, so this one never does
//! (LS-3).

use std::{
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{OnceLock, mpsc},
};

use crate::{
    lifeline::Lifeline,
    worker::{AGENT_FD, LIFELINE_FD},
};

/// What to start.
#[derive(Clone, Debug)]
pub(super) struct Program {
    pub(super) path: PathBuf,
    pub(super) environment: Vec<(String, String)>,
    pub(super) log: PathBuf,
}

/// What was started, and what connects it to this process.
pub(super) struct Started {
    pub(super) child: Child,
    pub(super) stream: UnixStream,
    pub(super) lifeline: Lifeline,
}

struct Request {
    program: Program,
    reply: mpsc::Sender<io::Result<Started>>,
}

/// Starts a process that dies with this one.
pub(super) fn spawn(program: Program) -> io::Result<Started> {
    static SPAWNER: OnceLock<mpsc::Sender<Request>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (sender, requests) = mpsc::channel::<Request>();
        let started = std::thread::Builder::new().name("spawner".into()).spawn(move || {
            for Request { program, reply } in requests {
                let _ = reply.send(start(&program));
            }
        });
        if let Err(error) = started {
            tracing::error!(%error, "no thread to start workers from");
        }
        sender
    });
    let (reply, answer) = mpsc::channel();
    let gone = || io::Error::other("the spawner thread is gone");
    spawner.send(Request { program, reply }).map_err(|_| gone())?;
    answer.recv().map_err(|_| gone())?
}

/// The descriptor number under which a child finds its agent.
const CHILD_FD: i32 = 3;
/// The one under which it finds its lifeline.
const CHILD_LIFELINE_FD: i32 = 4;

fn start(program: &Program) -> io::Result<Started> {
    let (stream, theirs) = UnixStream::pair()?;
    let (lifeline, memory) = Lifeline::new()?;
    let log = std::fs::OpenOptions::new().create(true).append(true).open(&program.log)?;
    let mut command = Command::new(&program.path);
    command
        .envs(program.environment.iter().map(|(key, value)| (key, value)))
        .env(AGENT_FD, CHILD_FD.to_string())
        .env(LIFELINE_FD, CHILD_LIFELINE_FD.to_string())
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    let theirs = OwnedFd::from(theirs);
    let parent = std::process::id();
    // SAFETY: only async-signal-safe system calls on plain values.
    unsafe {
        command.pre_exec(move || prepare_child(theirs.as_raw_fd(), memory.as_raw_fd(), parent));
    }
    let child = command.spawn().map_err(|error| {
        io::Error::new(error.kind(), format!("cannot start {}: {error}", program.path.display()))
    })?;
    Ok(Started { child, stream, lifeline })
}

/// Runs in the child between fork and exec.
fn prepare_child(socket: i32, memory: i32, parent: u32) -> io::Result<()> {
    // SAFETY: plain system calls; the descriptors belong to this child.
    unsafe {
        // Out of each other's way first: dup2 onto itself would keep close-on-exec, and
        // onto the other one would close it.
        let above = CHILD_LIFELINE_FD + 1;
        let socket = libc::fcntl(socket, libc::F_DUPFD_CLOEXEC, above);
        let memory = libc::fcntl(memory, libc::F_DUPFD_CLOEXEC, above);
        if libc::dup2(socket, CHILD_FD) < 0
            || libc::dup2(memory, CHILD_LIFELINE_FD) < 0
            || libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) < 0
        {
            return Err(io::Error::last_os_error());
        }
        // The parent may have died before the call above.
        if libc::getppid() as u32 != parent {
            libc::_exit(1);
        }
        // Workers compute; their agents must answer beats in time. Refusal is harmless.
        libc::nice(WORKER_NICE);
    }
    Ok(())
}

/// On shared cores an agent that waits behind its own worker looks dead.
const WORKER_NICE: i32 = 5;
