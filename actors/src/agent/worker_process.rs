//! The actor that owns one worker process: its socket pair, its lifeline, its
//! pidfd, its end. Death is noticed by whichever of the three is first (LS-4); a
//! process counts as gone when the pidfd says so. It never outlives the actor.

use std::{
    os::{fd::OwnedFd, unix::process::ExitStatusExt},
    process::{Child, ExitStatus},
    time::Duration,
};

use job::{
    WorkerId,
    message::{FromWorker, ToWorker},
};
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::sync::mpsc;

use super::{
    node_agent,
    spawner::{self, Program, Started},
};
use crate::{lifeline::Lifeline, pipe};

pub(super) struct WorkerProcess;

pub(super) struct Arguments {
    pub(super) worker: WorkerId,
    pub(super) program: Program,
    pub(super) agent: ActorRef<node_agent::Message>,
}

pub(super) enum Message {
    Send(ToWorker),
    Kill,
    FromWorker(FromWorker),
    PipeClosed,
    Dying,
    Died(String),
}

pub(super) struct State {
    worker: WorkerId,
    agent: ActorRef<node_agent::Message>,
    pid: u32,
    pidfd: OwnedFd,
    outbox: mpsc::Sender<ToWorker>,
}

/// What the agent hears of a worker.
#[derive(Debug)]
pub(super) enum Heard {
    Message(FromWorker),
    /// It cannot go on, and is not gone yet.
    Dying(String),
    Exited(String),
}

/// A running worker, as its agent holds it.
#[derive(Clone, Debug)]
pub(super) struct Handle {
    actor: ActorRef<Message>,
    pub(super) pid: u32,
}

impl Handle {
    pub(super) fn send(&self, message: ToWorker) {
        let _ = self.actor.send_message(Message::Send(message));
    }

    pub(super) fn kill(&self) {
        let _ = self.actor.send_message(Message::Kill);
    }
}

/// Messages that a worker may be behind; leases and plans are small and rare.
const OUTBOX: usize = 256;

impl WorkerProcess {
    /// Starts the process and the actor, linked to the agent.
    pub(super) async fn start(
        arguments: Arguments,
        supervisor: ActorCell,
    ) -> Result<Handle, String> {
        let worker = arguments.worker;
        let agent = arguments.agent.clone();
        let started = tokio::task::spawn_blocking(move || spawner::spawn(arguments.program))
            .await
            .map_err(|error| error.to_string())?
            .map_err(|error| error.to_string())?;
        let pid = started.child.id();
        let prepared = prepare(started, worker, agent).map_err(|error| error.to_string())?;
        let (actor, _) = Actor::spawn_linked(None, Self, prepared, supervisor)
            .await
            .map_err(|error| error.to_string())?;
        Ok(Handle { actor, pid })
    }
}

pub(super) struct Prepared {
    state: State,
    receiver: pipe::Receiver<FromWorker>,
    child: Child,
    lifeline: Lifeline,
}

fn prepare(
    Started { mut child, stream, lifeline }: Started,
    worker: WorkerId,
    agent: ActorRef<node_agent::Message>,
) -> std::io::Result<Prepared> {
    let parts = (|| {
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::NONBLOCK)?;
        stream.set_nonblocking(true)?;
        Ok((pidfd, tokio::net::UnixStream::from_std(stream)?))
    })();
    let (pidfd, stream) = match parts {
        Ok(parts) => parts,
        Err(error) => {
            let _ = child.kill();
            let _ = child.wait();
            return Err(error);
        }
    };
    let (mut sender, receiver) = pipe::split::<ToWorker, FromWorker>(stream);
    let (outbox, mut messages) = mpsc::channel::<ToWorker>(OUTBOX);
    tokio::spawn(async move {
        while let Some(message) = messages.recv().await {
            if sender.send(&message).await.is_err() {
                return;
            }
        }
    });
    let state = State { worker, agent, pid: child.id(), pidfd, outbox };
    Ok(Prepared { state, receiver, child, lifeline })
}

impl Actor for WorkerProcess {
    type Msg = Message;
    type State = State;
    type Arguments = Prepared;

    async fn pre_start(
        &self,
        myself: ActorRef<Message>,
        Prepared { state, mut receiver, mut child, lifeline }: Prepared,
    ) -> Result<State, ActorProcessingErr> {
        let mailbox = myself.clone();
        tokio::spawn(async move {
            while let Ok(Some(message)) = receiver.receive().await {
                if mailbox.send_message(Message::FromWorker(message)).is_err() {
                    return;
                }
            }
            let _ = mailbox.send_message(Message::PipeClosed);
        });
        let (mailbox, watched) = (myself.clone(), lifeline.clone());
        let watch = std::thread::Builder::new().name("lifeline".into());
        watch.spawn(move || {
            watched.wait();
            let _ = mailbox.send_message(Message::Dying);
        })?;
        let reaper = std::thread::Builder::new().name("reaper".into());
        reaper.spawn(move || {
            let why = match child.wait() {
                Ok(status) => describe(status),
                Err(error) => format!("cannot be waited for: {error}"),
            };
            let _ = myself.send_message(Message::Died(why));
            lifeline.cut();
        })?;
        Ok(state)
    }

    async fn handle(
        &self,
        myself: ActorRef<Message>,
        message: Message,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            Message::Send(message) => {
                if state.outbox.try_send(message).is_err() {
                    // It has not read for hundreds of messages: it is stopped.
                    state.kill();
                }
            }
            Message::Kill => state.kill(),
            Message::FromWorker(message) => {
                let _ = state.agent.send_message(node_agent::Message::Worker(
                    state.worker,
                    Heard::Message(message),
                ));
            }
            // A worker without a pipe cannot be told anything (LIVE-2).
            Message::PipeClosed => state.kill(),
            Message::Dying => {
                // Certain by then, whoever wrote into the page.
                state.kill();
                let why = Heard::Dying(cause(state.pid));
                let _ = state.agent.send_message(node_agent::Message::Worker(state.worker, why));
            }
            Message::Died(why) => {
                let exited = node_agent::Message::Worker(state.worker, Heard::Exited(why));
                let _ = state.agent.send_message(exited);
                myself.stop(None);
            }
        }
        Ok(())
    }

    async fn post_stop(
        &self,
        _: ActorRef<Message>,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        state.kill();
        Ok(())
    }
}

impl State {
    fn kill(&mut self) {
        // Fails only when it is dead already.
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }
}

/// Why a process is dying that cannot be waited for yet: the last field of its
/// `stat`, as `wait(2)` will give it.
fn cause(pid: u32) -> String {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    match stat.split_whitespace().next_back().and_then(|status| status.parse().ok()) {
        None | Some(0) => "died".to_owned(),
        Some(status) => describe(ExitStatus::from_raw(status)),
    }
}

fn describe(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => nix::sys::signal::Signal::try_from(signal)
            .map_or_else(|_| format!("signal {signal}"), |signal| signal.as_str().to_owned()),
        (None, Some(crate::worker::FENCED)) => "ended itself: its lease was gone".to_owned(),
        (None, Some(code)) => format!("exit code {code}"),
        (None, None) => "ended".to_owned(),
    }
}

/// Restarts of a worker: at once after a long life, later and later after short
/// ones.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RestartPolicy {
    short_lives: u32,
}

impl RestartPolicy {
    const LONG_LIFE: Duration = Duration::from_secs(10);
    const LONGEST_PAUSE: Duration = Duration::from_secs(30);

    /// How long to wait before the next start.
    pub(super) fn pause_after(&mut self, life: Duration) -> Duration {
        if life >= Self::LONG_LIFE {
            self.short_lives = 0;
            return Duration::ZERO;
        }
        self.short_lives = (self.short_lives + 1).min(10);
        match self.short_lives {
            0..=2 => Duration::ZERO,
            more => (Duration::from_millis(250) * 2u32.pow(more - 3)).min(Self::LONGEST_PAUSE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_keeps_dying_is_started_more_and_more_rarely() {
        let mut policy = RestartPolicy::default();
        let short = Duration::from_secs(1);
        let pauses: Vec<u64> =
            (0..6).map(|_| policy.pause_after(short).as_millis() as u64).collect();
        assert_eq!(pauses, [0, 0, 250, 500, 1000, 2000]);
        assert_eq!(policy.pause_after(Duration::from_secs(60)), Duration::ZERO);
        assert_eq!(policy.pause_after(short), Duration::ZERO);
    }
}
