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

use crate::worker::AGENT_FD;

/// What to start.
#[derive(Clone, Debug)]
pub(super) struct Program {
    pub(super) path: PathBuf,
    pub(super) environment: Vec<(String, String)>,
    pub(super) log: PathBuf,
}

struct Request {
    program: Program,
    reply: mpsc::Sender<io::Result<(Child, UnixStream)>>,
}

/// Starts a process that dies with this one and is connected to it by a socket
/// pair.
pub(super) fn spawn(program: Program) -> io::Result<(Child, UnixStream)> {
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

fn start(program: &Program) -> io::Result<(Child, UnixStream)> {
    let (ours, theirs) = UnixStream::pair()?;
    let log = std::fs::OpenOptions::new().create(true).append(true).open(&program.log)?;
    let mut command = Command::new(&program.path);
    command
        .envs(program.environment.iter().map(|(key, value)| (key, value)))
        .env(AGENT_FD, CHILD_FD.to_string())
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    let theirs = OwnedFd::from(theirs);
    let parent = std::process::id();
    // SAFETY: only async-signal-safe system calls on plain values.
    unsafe {
        command.pre_exec(move || prepare_child(theirs.as_raw_fd(), parent));
    }
    let child = command.spawn().map_err(|error| {
        io::Error::new(error.kind(), format!("cannot start {}: {error}", program.path.display()))
    })?;
    Ok((child, ours))
}

/// Runs in the child between fork and exec.
fn prepare_child(socket: i32, parent: u32) -> io::Result<()> {
    // SAFETY: plain system calls; the descriptor belongs to this child.
    unsafe {
        let dead = if socket == CHILD_FD {
            // dup2 onto itself would keep close-on-exec.
            libc::fcntl(socket, libc::F_SETFD, 0)
        } else {
            libc::dup2(socket, CHILD_FD)
        };
        if dead < 0 || libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) < 0 {
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
