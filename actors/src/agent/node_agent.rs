//! The actor that holds a node's state. It reconciles: workers to the committed
//! plan, links to the known nodes, and, while it leads, the job to what it hears.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use job::{
    Incarnation, NodeId, StoreId, WorkerId,
    command::Event,
    leader::Leader,
    plan::WorkerRef,
    state::{JobState, Node, Phase},
};
use ractor::{Actor, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::sync::{Mutex, mpsc, oneshot};
use transport::control::{Control, Lane, LinkEvent, Peer, TurnedAway};

use super::{
    Ended, Error, Notice, Options, Outcome, Wish, admin, discovery,
    duty::Done,
    ending::Ending,
    enter::Entered,
    slots::Slots,
    tokens::{Awaited, Gatekeeper},
    witness::Witness,
    worker_process::{Handle as WorkerHandle, Heard},
};
use crate::{
    clock,
    control_group::{Applied, Handle as Group, Role, Snapshot},
    observer::{Place, Recorder},
};

pub(super) struct NodeAgent;

pub(super) enum Message {
    Link(LinkEvent),
    Applied(Arc<Applied<Event>>),
    /// The Raft member's status changed.
    Status,
    Worker(WorkerId, Heard),
    Spawned(u32, WorkerId, Result<WorkerHandle, String>),
    Tick,
    /// Everything that was under way is heard: decide.
    Decide,
    Wish(Wish),
    Admin(admin::Request, oneshot::Sender<admin::Response>),
    Done(Done),
}

pub(super) struct State {
    pub(super) options: Options,
    pub(super) store: StoreId,
    pub(super) boot: u64,
    pub(super) address: std::net::SocketAddr,
    pub(super) control: Control,
    pub(super) group: Group<JobState>,
    pub(super) job: Arc<Snapshot<JobState>>,
    pub(super) slots: Slots,
    pub(super) linked: BTreeMap<StoreId, Peer>,
    pub(super) seeds: Vec<String>,
    /// When the discovery script is asked the next time.
    pub(super) next_ask: Duration,
    pub(super) gate: Gatekeeper,
    pub(super) awaited: Vec<Awaited>,
    pub(super) dialled: BTreeMap<String, Duration>,
    pub(super) dead: BTreeSet<(NodeId, u64)>,
    pub(super) leader: Option<Leader>,
    /// A decision is due once what is in the mailbox was heard.
    pub(super) deciding: bool,
    pub(super) lease_until: u64,
    pub(super) checkpoints: Arc<dcp::Folder>,
    pub(super) recorder: Recorder,
    /// Who had been turned away when that was last recorded, and when that was.
    turned: (TurnedAway, Duration),
    pub(super) notices: mpsc::Sender<Notice>,
    pub(super) witness: Witness,
    pub(super) waiting: Option<String>,
    pub(super) leaving: bool,
    pub(super) stop_job: bool,
    pub(super) next_tick: Duration,
    pub(super) ending: Option<Ending>,
    pub(super) ended: Option<oneshot::Sender<Option<Ended>>>,
}

/// Starts the actor and everything that feeds it; returns when it ended. None
/// when it ended to go on in a newer era (LG-3).
pub(super) async fn serve(
    options: Options,
    entered: Entered,
    wishes: Arc<Mutex<mpsc::Receiver<Wish>>>,
    notices: mpsc::Sender<Notice>,
) -> Result<Option<Ended>, Error> {
    let Entered {
        store,
        boot,
        address,
        control,
        mut links,
        group,
        mut applied,
        folder,
        checkpoints,
        seeds,
        gate,
    } = entered;
    let file = |error| Error::File {
        what: "cannot open the records in",
        path: folder.display().to_string(),
        error,
    };
    let recorder = Recorder::open(&folder, options.node.clone()).map_err(file)?;
    let (ended, end) = oneshot::channel();
    let beat = options.timeouts.beat;
    let job = group.state().borrow().clone();
    let admin_folder = folder.clone();
    let state = State {
        slots: Slots::new(options.slots),
        store,
        boot,
        address,
        control: control.clone(),
        group: group.clone(),
        job,
        linked: BTreeMap::new(),
        seeds,
        next_ask: clock::now() + discovery::PAUSE,
        gate,
        awaited: Vec::new(),
        dialled: BTreeMap::new(),
        dead: BTreeSet::new(),
        leader: None,
        deciding: false,
        lease_until: 0,
        checkpoints,
        recorder,
        turned: (TurnedAway::default(), Duration::ZERO),
        notices,
        witness: Witness::new(clock::now()),
        waiting: None,
        leaving: false,
        stop_job: false,
        next_tick: clock::now(),
        ending: None,
        ended: Some(ended),
        options,
    };
    let name = format!("agent of {}", state.options.node);
    let (agent, task) = Actor::spawn(None, NodeAgent, state)
        .await
        .map_err(|error| Error::Control(format!("cannot start the {name}: {error}")))?;

    let mut feeders = tokio::task::JoinSet::new();
    let (mailbox, raft) = (agent.clone(), group.clone());
    feeders.spawn(async move {
        while let Some(event) = links.recv().await {
            match event {
                // Raft goes to Raft: its messages need no turn of this actor.
                LinkEvent::Frame { lane: Lane::Raft | Lane::Bulk, bytes, .. } => {
                    if let Err(error) = raft.step(&bytes) {
                        tracing::debug!(%error, "raft message dropped");
                    }
                }
                event => {
                    if mailbox.send_message(Message::Link(event)).is_err() {
                        return;
                    }
                }
            }
        }
    });
    let mailbox = agent.clone();
    feeders.spawn(async move {
        loop {
            match applied.recv().await {
                Ok(entry) => {
                    if mailbox.send_message(Message::Applied(entry)).is_err() {
                        return;
                    }
                }
                Err(tokio::sync::broadcast::error::RecvError::Lagged(_)) => {}
                Err(tokio::sync::broadcast::error::RecvError::Closed) => return,
            }
        }
    });
    let (mailbox, mut status) = (agent.clone(), group.status());
    feeders.spawn(async move {
        loop {
            if mailbox.send_message(Message::Status).is_err() || status.changed().await.is_err() {
                return;
            }
        }
    });
    let mailbox = agent.clone();
    feeders.spawn(async move {
        let mut ticks = tokio::time::interval(beat);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            if mailbox.send_message(Message::Tick).is_err() {
                return;
            }
        }
    });
    let mailbox = agent.clone();
    feeders.spawn(async move {
        while let Some(wish) = wishes.lock().await.recv().await {
            if mailbox.send_message(Message::Wish(wish)).is_err() {
                return;
            }
        }
    });
    let mailbox = agent.clone();
    feeders.spawn(admin::serve(admin_folder, move |request, reply| {
        mailbox.send_message(Message::Admin(request, reply)).is_ok()
    }));

    let result = end.await;
    agent.stop(None);
    let _ = task.await;
    feeders.shutdown().await;
    group.stop().await;
    control.close(Duration::from_millis(300)).await;
    result.map_err(|_| Error::Control(format!("the {name} failed")))
}

impl Actor for NodeAgent {
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
        myself: ActorRef<Message>,
        message: Message,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            Message::Link(event) => state.link(&myself, event),
            Message::Applied(entry) => state.applied(&myself, &entry),
            Message::Status => state.status(&myself),
            Message::Worker(worker, heard) => state.worker(&myself, worker, heard),
            Message::Spawned(slot, worker, started) => state.spawned(slot, worker, started),
            Message::Tick => state.tick(&myself),
            Message::Decide => {
                state.deciding = false;
                state.decide(&myself);
            }
            Message::Wish(wish) => state.wish(&myself, wish),
            Message::Admin(admin::Request::Token(request), reply) => {
                state.token_asked(&myself, request, reply);
            }
            Message::Admin(request, reply) => {
                let response = state.admin(&myself, request);
                let _ = reply.send(response);
            }
            Message::Done(done) => state.done(&myself, done),
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        _: ActorRef<Message>,
        event: SupervisionEvent,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        if let SupervisionEvent::ActorFailed(_, error) = event {
            state.notice(Notice::Warning(format!("a worker's supervisor failed: {error}")));
        }
        Ok(())
    }
}

impl State {
    pub(super) fn job(&self) -> &JobState {
        &self.job.state
    }

    pub(super) fn notice(&self, notice: Notice) {
        // A watcher that does not keep up misses lines, the job goes on.
        let _ = self.notices.try_send(notice);
    }

    pub(super) fn shared_state(&self) -> Arc<JobState> {
        Arc::new(self.job.state.clone())
    }

    /// This process start as the group knows it.
    pub(super) fn myself(&self) -> Option<&Node> {
        self.job().nodes.get(&self.options.node).filter(|node| node.boot == self.boot)
    }

    pub(super) fn incarnation(&self) -> Option<Incarnation> {
        self.myself().map(|node| node.incarnation)
    }

    /// Whether it is for this node to speak of the job's end: rank 0 of the newest
    /// plan is its own, of whichever process start, since one node speaks also of a
    /// job that ended before it started; or nobody has rank 0 and it leads.
    pub(super) fn speaks(&self) -> bool {
        let job = self.job();
        let first = job.plan.as_ref().and_then(|plan| plan.members.first());
        let first = first.map(|first| &first.worker.node);
        match first.filter(|name| job.nodes.get(name).is_some_and(Node::is_live)) {
            Some(name) => *name == self.options.node || (self.leads() && self.linked.is_empty()),
            None => self.leads(),
        }
    }

    pub(super) fn leads(&self) -> bool {
        self.leader.is_some()
    }

    /// Takes up the newest committed state.
    pub(super) fn catch_up(&mut self) {
        self.job = self.group.state().borrow().clone();
        let generation = self.job().plan.as_ref().map(|plan| plan.generation);
        Place::change(|place| place.generation = generation);
    }

    pub(super) fn applied(&mut self, myself: &ActorRef<Message>, entry: &Applied<Event>) {
        self.catch_up();
        if let Applied::Events { index, events } = entry {
            let era = self.job().era;
            for event in events {
                self.recorder.event(era, *index, event);
                if let Some(leader) = &mut self.leader {
                    leader.applied(event, clock::moment());
                }
                let notice = Notice::Event {
                    event: event.clone(),
                    state: self.shared_state(),
                    leads: self.leads(),
                };
                self.notice(notice);
                self.duty_after(myself, event);
            }
        }
        self.keep_gate();
        self.reconcile(myself);
        self.decide(myself);
    }

    pub(super) fn status(&mut self, myself: &ActorRef<Message>) {
        let status = self.group.status().borrow().clone();
        if let Some(failure) = &status.failure {
            let why = format!("the control group's member on this node failed: {failure}");
            self.end(myself, Outcome::Failed(why, false));
            return;
        }
        match (status.role == Role::Leader, self.leads()) {
            (true, false) => {
                tracing::info!(term = status.term, "this node leads the job");
                self.leader = Some(Leader::new(self.options.node.clone(), clock::moment()));
                self.take_over(myself);
                self.beat(myself);
            }
            (false, true) => {
                tracing::info!(term = status.term, "this node leads the job no more");
                self.leader = None;
            }
            _ => {}
        }
        self.finish_ending();
    }

    pub(super) fn tick(&mut self, myself: &ActorRef<Message>) {
        let late = self.options.timeouts.is_late(self.next_tick, clock::now());
        self.next_tick = clock::now() + self.options.timeouts.beat;
        if self.ending.is_some() {
            self.finish_ending();
            return;
        }
        if let Some(leader) = &mut self.leader {
            leader.ticked(late);
        }
        match late {
            true => self.slots.excuse(),
            false => self.reap_silent_workers(),
        }
        self.catch_up();
        self.reconcile(myself);
        self.keep_gate();
        self.watch_ledger(myself);
        self.discover(myself);
        self.beat(myself);
        self.decide(myself);
        self.group_membership(myself);
        self.record_turned_away();
    }

    /// At most once a second: a flood of strangers must not become one of records.
    fn record_turned_away(&mut self) {
        let (known, since) = self.turned;
        let now = clock::now();
        let turned = self.control.turned_away();
        if turned != known && now.saturating_sub(since) >= Duration::from_secs(1) {
            self.turned = (turned, now);
            self.recorder.turned_away("control", &turned.kinds());
        }
    }

    pub(super) fn reconcile(&mut self, myself: &ActorRef<Message>) {
        if self.ending.is_some() {
            return;
        }
        let job = Arc::clone(&self.job);
        let job = &job.state;
        let incarnation = self.incarnation();
        let node = self.options.node.clone();
        self.slots.reconcile(job, |worker| {
            Some(WorkerRef { node: node.clone(), incarnation: incarnation?, worker })
        });
        self.dead.retain(|(name, boot)| {
            job.nodes.get(name).is_some_and(|node| node.boot == *boot && node.is_live())
        });
        match &job.phase {
            Phase::Finished(_) => self.end(myself, Outcome::Finished),
            Phase::Stopped if self.myself().is_some() => self.end(myself, Outcome::Stopped),
            Phase::Failed { why, final_ } if *final_ || self.myself().is_some() => {
                self.end(myself, Outcome::Failed(why.clone(), *final_));
            }
            _ => {
                let gone = match job.nodes.get(&node) {
                    Some(me) if me.boot == self.boot => {
                        me.fenced().map(|(cause, refused)| (cause.to_owned(), refused))
                    }
                    Some(other) if self.was_admitted(other) => {
                        Some(("another process took this node's name".into(), false))
                    }
                    _ => None,
                };
                match gone {
                    Some((cause, refused)) => self.gone(myself, cause, refused),
                    None if self.is_overtaken() => {}
                    None => self.fill_slots(myself),
                }
            }
        }
        self.dial();
    }
}
