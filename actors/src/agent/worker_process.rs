//! The actor that owns one worker process: its socket pair, its pidfd, its end.
//! The process never outlives the actor.

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
    spawner::{self, Program},
};
use crate::pipe;

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
    Died(String),
}

pub(super) struct State {
    worker: WorkerId,
    agent: ActorRef<node_agent::Message>,
    pidfd: OwnedFd,
    outbox: mpsc::Sender<ToWorker>,
}

/// What the agent hears of a worker.
#[derive(Debug)]
pub(super) enum Heard {
    Message(FromWorker),
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
        let (child, stream) =
            tokio::task::spawn_blocking(move || spawner::spawn(arguments.program))
                .await
                .map_err(|error| error.to_string())?
                .map_err(|error| error.to_string())?;
        let pid = child.id();
        let prepared = prepare(child, stream, worker, agent).map_err(|error| error.to_string())?;
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
}

fn prepare(
    mut child: Child,
    stream: std::os::unix::net::UnixStream,
    worker: WorkerId,
    agent: ActorRef<node_agent::Message>,
) -> std::io::Result<Prepared> {
    let parts = (|| {
        let pid = Pid::from_child(&child);
        let pidfd = pidfd_open(pid, PidfdFlags::NONBLOCK)?;
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
    Ok(Prepared { state: State { worker, agent, pidfd, outbox }, receiver, child })
}

impl Actor for WorkerProcess {
    type Msg = Message;
    type State = State;
    type Arguments = Prepared;

    async fn pre_start(
        &self,
        myself: ActorRef<Message>,
        Prepared { state, mut receiver, mut child }: Prepared,
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
        let reaper = std::thread::Builder::new().name("reaper".into());
        reaper.spawn(move || {
            let why = match child.wait() {
                Ok(status) => describe(status),
                Err(error) => format!("cannot be waited for: {error}"),
            };
            let _ = myself.send_message(Message::Died(why));
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
