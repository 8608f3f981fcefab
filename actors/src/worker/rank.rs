//! The actor of a worker process: it passes plans, seals and leases from the
//! agent to the device thread, and what that reports back to the agent.

use std::{
    net::SocketAddr,
    os::unix::net::UnixStream,
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError, mpsc as blocking},
    time::Duration,
};

use job::{
    Generation,
    message::{FromWorker, ToWorker},
    plan::{Plan, Seal, Stop},
};
use ractor::{Actor, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::sync::{mpsc, oneshot};
use transport::collective::{AbortHandle, Listener, ListenerStats, ListenerWatch};

use super::{
    Factory, checkpoint_writer::CheckpointWriter, device_thread::DeviceThread, lease::Lease,
    out_queue, start_of,
};
use crate::{observer::Place, pipe};

/// What the device thread is told, in order.
pub(super) enum Order {
    Plan { plan: Box<Plan>, rank: Option<u32> },
    Seal(Box<Seal>),
    End,
}

/// What the device thread looks at while it works.
#[derive(Debug, Default)]
pub(super) struct Watch {
    newest: Mutex<Newest>,
}

#[derive(Debug, Default)]
struct Newest {
    planned: Generation,
    /// The newest plan that stops work at once.
    now: Generation,
    /// Ends the collectives of the generation at work.
    abort: Option<(Generation, AbortHandle)>,
    ended: bool,
}

impl Watch {
    fn planned(&self, generation: Generation, stop: Stop) {
        let mut newest = self.lock();
        newest.planned = newest.planned.max(generation);
        if stop == Stop::Now {
            newest.now = newest.now.max(generation);
            if let Some((at_work, abort)) = &newest.abort
                && *at_work < generation
            {
                abort.abort(format!("generation {generation} was planned"));
            }
        }
    }

    fn end(&self) {
        let mut newest = self.lock();
        newest.ended = true;
        if let Some((_, abort)) = &newest.abort {
            abort.abort("the worker ends");
        }
    }

    /// Work of this generation begins; it is aborted at once when it is late.
    pub(super) fn at_work(&self, generation: Generation, abort: AbortHandle) {
        let mut newest = self.lock();
        if newest.now > generation || newest.ended {
            abort.abort("a newer generation was planned");
        }
        newest.abort = Some((generation, abort));
    }

    /// Whether work of this generation has to stop at once.
    pub(super) fn must_stop(&self, generation: Generation) -> bool {
        let newest = self.lock();
        newest.now > generation || newest.ended
    }

    /// Whether work of this generation has to stop at the next step boundary.
    pub(super) fn should_stop(&self, generation: Generation) -> bool {
        let newest = self.lock();
        newest.planned > generation || newest.ended
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Newest> {
        self.newest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Rank;

struct State {
    orders: blocking::Sender<Order>,
    watch: Arc<Watch>,
    lease: Lease,
    ended: Option<oneshot::Sender<ExitCode>>,
}

enum Message {
    FromAgent(ToWorker),
    AgentGone(String),
}

/// Serves until the agent says so or is gone.
pub(super) async fn serve(stream: UnixStream, factory: impl Factory) -> ExitCode {
    let stream = match stream
        .set_nonblocking(true)
        .and_then(|()| tokio::net::UnixStream::from_std(stream))
    {
        Ok(stream) => stream,
        Err(error) => {
            tracing::error!(%error, "the agent's socket cannot be used");
            return ExitCode::FAILURE;
        }
    };
    let (mut to_agent, mut from_agent) = pipe::split::<FromWorker, ToWorker>(stream);
    let first = match from_agent.receive().await {
        Ok(Some(first)) => first,
        Ok(None) => return ExitCode::FAILURE,
        Err(error) => {
            tracing::error!(%error, "{OTHER_BUILD}");
            return ExitCode::FAILURE;
        }
    };
    let Some((start, tensors)) = start_of(first) else {
        tracing::error!("the agent's first message is not a start");
        return ExitCode::FAILURE;
    };
    Place::change(|place| place.node = Some(start.node.clone()));
    let (out, mut outbox) = out_queue();
    tokio::spawn(async move {
        while let Some(message) = outbox.recv().await {
            if to_agent.send(&message).await.is_err() {
                return;
            }
        }
    });
    let listener = match Listener::bind(tensors.bind) {
        Ok(listener) => listener,
        Err(error) => {
            let _ = out.send(FromWorker::Fatal(format!("no port for tensors: {error}"))).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
            return ExitCode::FAILURE;
        }
    };
    let listener = if tensors.shares_memory { listener } else { listener.over_tcp_only() };
    let (orders, inbox) = blocking::channel();
    let (ended, end) = oneshot::channel();
    let state = State {
        orders,
        watch: Arc::new(Watch::default()),
        lease: Lease::default(),
        ended: Some(ended),
    };
    let (watch, lease) = (Arc::clone(&state.watch), state.lease.clone());
    let Ok((rank, _)) = Actor::spawn(None, Rank, state).await else {
        return ExitCode::FAILURE;
    };
    let Ok(writer) = CheckpointWriter::start(rank.get_cell(), out.clone()).await else {
        return ExitCode::FAILURE;
    };
    let watch_port = listener.watch();
    let address = SocketAddr::new(tensors.advertise, listener.local_addr().port());
    let reports = out.clone();
    let device =
        DeviceThread { start, listener, address, inbox, watch, lease, writer, out: reports };
    if let Err(error) = device.spawn(factory) {
        tracing::error!(%error, "the device thread cannot be started");
        return ExitCode::FAILURE;
    }
    tokio::spawn(beat(out, watch_port));
    let mailbox = rank.clone();
    tokio::spawn(async move {
        let why = loop {
            match from_agent.receive().await {
                // The agent sends a plan, a seal or a lease at a time, and this
                // actor never waits: its mailbox stays short.
                Ok(Some(message)) => {
                    if mailbox.send_message(Message::FromAgent(message)).is_err() {
                        return;
                    }
                }
                Ok(None) => break "the agent is gone".to_owned(),
                Err(error) => {
                    tracing::error!(%error, "{OTHER_BUILD}");
                    break format!("the agent's socket broke: {error}");
                }
            }
        };
        let _ = mailbox.send_message(Message::AgentGone(why));
    });
    end.await.unwrap_or(ExitCode::FAILURE)
}

/// The runtime's sign of life; a process that is stopped sends none.
async fn beat(out: mpsc::Sender<FromWorker>, port: ListenerWatch) {
    let (mut told, mut beats) = (ListenerStats::default(), 0_u32);
    let mut ticks = tokio::time::interval(BEAT);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if out.send(FromWorker::Beat).await.is_err() {
            return;
        }
        beats += 1;
        let now = match beats.is_multiple_of(NEWS) {
            true => port.stats().unwrap_or(told),
            false => told,
        };
        let now = ListenerStats { welcomed: 0, ..now };
        if now == told {
            continue;
        }
        told = now;
        let ListenerStats { welcomed: _, strangers, stale, late, crowded } = now;
        let news = FromWorker::TurnedAway { strangers, stale, late, crowded };
        if out.send(news).await.is_err() {
            return;
        }
    }
}

/// The two programs share their messages' layout.
const OTHER_BUILD: &str = "elastic and its worker program must be of one build";

/// Several beats fit into the shortest silence that an agent accepts.
const BEAT: Duration = Duration::from_millis(100);

/// Beats between two reports of who was turned away: a flood of strangers must
/// not become a flood of records.
const NEWS: u32 = 10;

impl Actor for Rank {
    type Msg = Message;
    type State = State;
    type Arguments = State;

    async fn pre_start(
        &self,
        _: ActorRef<Message>,
        state: State,
    ) -> Result<State, ActorProcessingErr> {
        Ok(state)
    }

    async fn handle(
        &self,
        _: ActorRef<Message>,
        message: Message,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        let order = match message {
            Message::FromAgent(ToWorker::Lease { until_micros }) => {
                state.lease.renew(until_micros);
                return Ok(());
            }
            Message::FromAgent(ToWorker::Plan { plan, rank }) => {
                Place::change(|place| {
                    (place.generation, place.rank) = (Some(plan.generation), rank);
                });
                state.watch.planned(plan.generation, plan.stop);
                Order::Plan { plan, rank }
            }
            Message::FromAgent(ToWorker::Seal { seal }) => Order::Seal(seal),
            Message::FromAgent(ToWorker::Start { .. }) => return Ok(()),
            Message::FromAgent(ToWorker::End) => {
                state.watch.end();
                state.end(ExitCode::SUCCESS);
                Order::End
            }
            // LS-3: a worker ends when its agent's link closes.
            Message::AgentGone(why) => {
                tracing::warn!(why, "worker ends");
                state.watch.end();
                state.end(ExitCode::FAILURE);
                Order::End
            }
        };
        let _ = state.orders.send(order);
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        _: ActorRef<Message>,
        event: SupervisionEvent,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        if let SupervisionEvent::ActorFailed(_, error) = event {
            tracing::error!(%error, "the checkpoint writer failed");
            state.end(ExitCode::FAILURE);
        }
        Ok(())
    }
}

impl State {
    fn end(&mut self, code: ExitCode) {
        if let Some(ended) = self.ended.take() {
            let _ = ended.send(code);
        }
    }
}
