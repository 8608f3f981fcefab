//! The actor that holds a node's state. It reconciles: workers to the committed
//! plan, links to the known nodes, and, while it leads, the job to what it hears.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use job::{
    Incarnation, NodeId, StoreId, WorkerId, codec,
    command::{Event, LEFT},
    message::{AgentMessage, FromWorker, ToWorker},
    plan::WorkerRef,
    report::NodeReport,
    spec::JobSpec,
    state::{JobState, Node, Phase, Standing},
};
use ractor::{Actor, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::sync::{mpsc, oneshot};
use transport::control::{Control, Lane, LinkEvent, Peer};

use super::{
    Ended, Error, Notice, Options, Outcome, Wish, admin,
    duty::Done,
    enter::Entered,
    leadership::{self, Leadership},
    slots::{Slots, Urgency},
    spawner::Program,
    worker_process::{Arguments, Handle as WorkerHandle, Heard, WorkerProcess},
};
use crate::{
    clock,
    control_group::{Applied, Handle as Group, Role, Snapshot},
    observer::Recorder,
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
    dialled: BTreeMap<std::net::SocketAddr, Duration>,
    dead: BTreeSet<(NodeId, u64)>,
    pub(super) leadership: Option<Leadership>,
    pub(super) lease_until: u64,
    pub(super) checkpoints: Arc<dcp::Folder>,
    recorder: Recorder,
    pub(super) notices: mpsc::Sender<Notice>,
    pub(super) waiting: Option<String>,
    leaving: bool,
    stop_job: bool,
    next_tick: Duration,
    ending: Option<Ending>,
    ended: Option<oneshot::Sender<Ended>>,
}

struct Ending {
    outcome: Outcome,
    speaks: bool,
    kill_at: Duration,
    give_up_at: Duration,
}

/// Starts the actor and everything that feeds it; returns when it ended.
pub(super) async fn serve(
    options: Options,
    entered: Entered,
    mut wishes: mpsc::Receiver<Wish>,
    notices: mpsc::Sender<Notice>,
) -> Result<Ended, Error> {
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
        dialled: BTreeMap::new(),
        dead: BTreeSet::new(),
        leadership: None,
        lease_until: 0,
        checkpoints,
        recorder,
        notices,
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
        while let Some(wish) = wishes.recv().await {
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
            Message::Wish(wish) => state.wish(&myself, wish),
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
    fn myself(&self) -> Option<&Node> {
        self.job().nodes.get(&self.options.node).filter(|node| node.boot == self.boot)
    }

    pub(super) fn incarnation(&self) -> Option<Incarnation> {
        self.myself().map(|node| node.incarnation)
    }

    /// Whether rank 0 of the newest plan is this node's, of whichever process
    /// start: one node speaks also of a job that ended before it started.
    fn holds_rank_zero(&self) -> bool {
        let first = self.job().plan.as_ref().and_then(|plan| plan.members.first());
        first.is_some_and(|first| first.worker.node == self.options.node)
    }

    pub(super) fn leads(&self) -> bool {
        self.leadership.is_some()
    }

    fn link(&mut self, myself: &ActorRef<Message>, event: LinkEvent) {
        match event {
            LinkEvent::Up { peer } => {
                tracing::debug!(peer = %peer.node, "link up");
                self.group.peer_reachable(peer.store.raft_id());
                self.dead.retain(|(node, _)| *node != peer.node);
                self.linked.insert(peer.store, peer);
                self.beat(myself);
            }
            LinkEvent::Down { peer, reason } => {
                tracing::debug!(peer = %peer.node, %reason, "link down");
                self.linked.remove(&peer.store);
                self.group.peer_unreachable(peer.store.raft_id());
                self.finish_ending();
            }
            LinkEvent::Reset { peer, boot } => self.reset(myself, peer, boot),
            LinkEvent::Refused { addr, reason } => {
                tracing::warn!(%addr, reason, "a peer was turned away");
            }
            LinkEvent::Frame { from, bytes, .. } => match codec::decode::<AgentMessage>(&bytes) {
                Ok(message) => self.peer_says(myself, from, message),
                Err(error) => tracing::warn!(%error, "a peer's message is malformed"),
            },
        }
    }

    /// LS-2: a process is certainly dead.
    fn reset(&mut self, myself: &ActorRef<Message>, peer: StoreId, boot: u64) {
        let raft_id = peer.raft_id();
        let leader = self.group.status().borrow().leader;
        if leader == Some(raft_id) {
            self.group.leader_died(raft_id);
        }
        let known = self.job().nodes.iter().find(|(_, n)| n.store == peer && n.boot == boot);
        if let Some((name, _)) = known {
            self.dead.insert((name.clone(), boot));
            self.beat(myself);
        }
    }

    fn peer_says(&mut self, myself: &ActorRef<Message>, from: StoreId, message: AgentMessage) {
        match message {
            AgentMessage::Beat { sent_micros, report } => {
                if report.store == from {
                    self.hear_beat(myself, Some(from), sent_micros, report);
                }
            }
            AgentMessage::Answer { sent_micros } => self.renew_lease(sent_micros),
            AgentMessage::Drain(node) => self.drain(myself, &node),
            AgentMessage::Fenced { boot, cause } => {
                if boot == self.boot {
                    self.gone(myself, cause);
                }
            }
        }
    }

    /// LS-1: the lease runs from the send time of the answered beat.
    pub(super) fn renew_lease(&mut self, sent_micros: u64) {
        let length = u64::try_from(self.options.timeouts.lease.as_micros()).unwrap_or(u64::MAX);
        self.lease_until = self.lease_until.max(sent_micros.saturating_add(length));
        self.slots.lease(self.lease_until);
    }

    fn applied(&mut self, myself: &ActorRef<Message>, entry: &Applied<Event>) {
        self.job = self.group.state().borrow().clone();
        if let Applied::Events { index, events } = entry {
            for event in events {
                self.recorder.event(*index, event);
                if let Some(leadership) = &mut self.leadership {
                    leadership.applied(event);
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
        self.reconcile(myself);
        self.decide(myself);
    }

    fn status(&mut self, myself: &ActorRef<Message>) {
        let status = self.group.status().borrow().clone();
        if let Some(failure) = &status.failure {
            let why = format!("the control group's member on this node failed: {failure}");
            self.end(myself, Outcome::Failed(why, false));
            return;
        }
        match (status.role == Role::Leader, self.leads()) {
            (true, false) => {
                tracing::info!(term = status.term, "this node leads the job");
                self.leadership = Some(Leadership::new(self.options.node.clone()));
                self.take_over(myself);
                self.beat(myself);
            }
            (false, true) => {
                tracing::info!(term = status.term, "this node leads the job no more");
                self.leadership = None;
            }
            _ => {}
        }
        self.finish_ending();
    }

    fn worker(&mut self, myself: &ActorRef<Message>, id: WorkerId, heard: Heard) {
        let message = match heard {
            Heard::Exited(why) => {
                if let Some(report) = self.slots.exited(id, why) {
                    tracing::info!(pid = report.pid, state = ?report.state, "worker ended");
                }
                self.beat(myself);
                self.finish_ending();
                return;
            }
            Heard::Message(message) => message,
        };
        let rank = self.rank_of(id);
        match &message {
            FromWorker::Step(progress) => {
                if let Some(rank) = rank {
                    self.recorder.step(rank, progress);
                }
                if rank == Some(0) {
                    let state = self.shared_state();
                    self.notice(Notice::Stepped { progress: *progress, state });
                }
            }
            FromWorker::Validated { step, loss } => {
                self.notice(Notice::Validated { step: *step, loss: *loss });
            }
            FromWorker::SaveFailed { step, why } => {
                let line = format!("checkpoint of step {step} was not saved: {why}");
                self.notice(Notice::Warning(line));
            }
            FromWorker::Accuses { generation, why, .. } => {
                tracing::info!(generation = generation.0, why, "a collective broke");
            }
            FromWorker::Fatal(why) => {
                self.notice(Notice::Warning(format!("worker cannot run: {why}")));
            }
            _ => {}
        }
        let ready = matches!(message, FromWorker::Ready { .. });
        let Some(worker) = self.slots.worker(id) else { return };
        let urgency = worker.hear(message);
        if ready {
            worker.handle.send(ToWorker::Lease { until_micros: self.lease_until });
            self.reconcile(myself);
        }
        if urgency == Urgency::Now {
            self.beat(myself);
        }
    }

    fn rank_of(&self, worker: WorkerId) -> Option<u32> {
        let name = self.worker_ref(worker)?;
        let plan = self.job().plan.as_ref()?;
        let rank = plan.members.iter().position(|member| member.worker == name)?;
        Some(rank as u32)
    }

    fn worker_ref(&self, worker: WorkerId) -> Option<WorkerRef> {
        Some(WorkerRef {
            node: self.options.node.clone(),
            incarnation: self.incarnation()?,
            worker,
        })
    }

    fn tick(&mut self, myself: &ActorRef<Message>) {
        let late = leadership::is_late(self.next_tick, &self.options.timeouts);
        self.next_tick = clock::now() + self.options.timeouts.beat;
        if self.ending.is_some() {
            self.finish_ending();
            return;
        }
        if let Some(leadership) = &mut self.leadership {
            leadership.view.late = late;
        }
        if !late {
            self.reap_silent_workers();
        }
        self.job = self.group.state().borrow().clone();
        self.reconcile(myself);
        self.beat(myself);
        self.group_membership(myself);
    }

    /// A worker whose runtime says nothing for as long as a node may be silent is
    /// as good as dead, and made so: what is stopped cannot be fenced otherwise.
    fn reap_silent_workers(&mut self) {
        let limit = self.options.timeouts.suspect;
        let now = clock::now();
        for worker in self.slots.workers() {
            if now.saturating_sub(worker.heard) > limit
                && worker.report.state != job::report::WorkerState::Starting
            {
                tracing::warn!(pid = worker.report.pid, "worker is silent: it is killed");
                worker.handle.kill();
            }
        }
    }

    /// Starts a worker in every vacant slot once this process start is admitted.
    fn fill_slots(&mut self, myself: &ActorRef<Message>) {
        let working = self.job().is_going() && self.myself().is_some_and(Node::is_live);
        if !working || self.leaving {
            return;
        }
        for number in self.slots.vacant() {
            let worker = self.slots.next_id();
            if let Some(slot) = self.slots.slots.get_mut(&number) {
                slot.spawning = true;
            }
            let log = self.options.dump_folder.join("nodes").join(self.options.node.as_str());
            let program = Program {
                path: self.options.worker.clone(),
                environment: self.options.worker_environment.clone(),
                log: log.join(format!("worker-{number}.log")),
            };
            let (agent, supervisor) = (myself.clone(), myself.get_cell());
            tokio::spawn(async move {
                let arguments = Arguments { worker, program, agent: agent.clone() };
                let started = WorkerProcess::start(arguments, supervisor).await;
                let _ = agent.send_message(Message::Spawned(number, worker, started));
            });
        }
    }

    fn spawned(&mut self, slot: u32, worker: WorkerId, started: Result<WorkerHandle, String>) {
        match started {
            Ok(handle) => {
                let path = |path: &std::path::Path| path.display().to_string();
                handle.send(ToWorker::Start {
                    config: (self.options.adopt)(
                        &self.options.proposal.config,
                        &self.job().spec.config,
                    ),
                    spec: Box::new(JobSpec {
                        micro_batches: self.job().micro_batches,
                        authority: String::new(),
                        join_secret: String::new(),
                        ..self.job().spec.clone()
                    }),
                    node: self.options.node.clone(),
                    worker,
                    slot,
                    dump_folder: path(&self.options.dump_folder),
                    checkpoint_folder: path(&self.options.checkpoint_folder),
                    bind: self.address.ip(),
                });
                self.slots.started(slot, worker, handle);
            }
            Err(why) => {
                self.notice(Notice::Warning(why));
                if let Some(slot) = self.slots.slots.get_mut(&slot) {
                    slot.spawning = false;
                    slot.restart_at = clock::now() + self.options.timeouts.budget;
                }
            }
        }
    }

    /// Dials known nodes without a link, one try per beat limit.
    fn dial(&mut self) {
        let now = clock::now();
        let pause = self.options.timeouts.beat * 2;
        let mut wanted: Vec<(std::net::SocketAddr, Option<StoreId>)> = self
            .job()
            .live_nodes()
            .filter(|(_, node)| node.store != self.store && !self.linked.contains_key(&node.store))
            .map(|(_, node)| (node.address, Some(node.store)))
            .collect();
        if self.linked.is_empty() {
            let others = self.options.join.iter().filter(|address| **address != self.address);
            wanted.extend(others.map(|address| (*address, None)));
        }
        for (address, store) in wanted {
            let due = self.dialled.get(&address).copied().unwrap_or_default();
            if now >= due {
                self.dialled.insert(address, now + pause);
                let control = self.control.clone();
                tokio::spawn(async move {
                    if let Err(error) = control.connect(address, store).await {
                        tracing::debug!(%address, %error, "no link");
                    }
                });
            }
        }
        self.dialled.retain(|_, due| now < *due + Duration::from_secs(60));
    }

    fn report(&self) -> NodeReport {
        NodeReport {
            node: self.options.node.clone(),
            store: self.store,
            boot: self.boot,
            incarnation: self.incarnation(),
            address: self.address,
            slots: self.options.slots,
            leaving: self.leaving,
            stop_job: self.stop_job,
            recorded: self.recorder.newest(),
            dead_peers: self.dead.iter().cloned().collect(),
            workers: self.slots.reports(),
        }
    }

    /// Tells the leader how things are; everybody, while none is known.
    pub(super) fn beat(&mut self, myself: &ActorRef<Message>) {
        let sent_micros = clock::now_micros();
        let report = self.report();
        if self.leads() {
            self.hear_beat(myself, None, sent_micros, report);
            return;
        }
        let leader = self.group.status().borrow().leader;
        let bytes = Bytes::from(codec::encode(&AgentMessage::Beat { sent_micros, report }));
        for peer in self.linked.values() {
            if leader.is_none_or(|leader| peer.store.raft_id() == leader) {
                // A full lane means that older beats are still on their way.
                let _ = self.control.send(peer.store, Lane::Control, bytes.clone());
            }
        }
    }

    fn reconcile(&mut self, myself: &ActorRef<Message>) {
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
                    Some(me) if me.boot == self.boot => match &me.standing {
                        Standing::Gone(cause) => Some(cause.clone()),
                        _ => None,
                    },
                    Some(other) if self.was_admitted(other) => {
                        Some("another process took this node's name".into())
                    }
                    _ => None,
                };
                match gone {
                    Some(cause) => self.gone(myself, cause),
                    None => self.fill_slots(myself),
                }
            }
        }
        self.dial();
    }

    /// The group goes on without this process start.
    fn gone(&mut self, myself: &ActorRef<Message>, cause: String) {
        match self.leaving || cause == LEFT {
            true => self.end(myself, Outcome::Left),
            false => self.end(myself, Outcome::Fenced(cause)),
        }
    }

    /// Whether a newer incarnation than any of this process start has the name:
    /// this one had an incarnation when its workers started.
    fn was_admitted(&self, other: &Node) -> bool {
        other.boot != self.boot && self.slots.workers().next().is_some()
    }

    fn wish(&mut self, myself: &ActorRef<Message>, wish: Wish) {
        match wish {
            Wish::EndNow => self.end(myself, Outcome::Interrupted),
            Wish::StopJob => self.stop_the_job(myself),
            Wish::Leave => {
                let alone = self.job().live_nodes().count() <= 1;
                if alone {
                    self.stop_job = true;
                } else {
                    self.leaving = true;
                }
            }
        }
        self.beat(myself);
    }

    pub(super) fn stop_the_job(&mut self, myself: &ActorRef<Message>) {
        self.stop_job = true;
        self.beat(myself);
    }

    /// Ends workers, lets the others hear what is to be heard, and then ends.
    pub(super) fn end(&mut self, _: &ActorRef<Message>, outcome: Outcome) {
        if self.ending.is_some() {
            return;
        }
        let now = clock::now();
        let reap = match outcome {
            Outcome::Interrupted | Outcome::Fenced(_) => Duration::ZERO,
            _ => self.options.timeouts.reap,
        };
        let speaks = self.holds_rank_zero() || (self.leads() && self.linked.is_empty());
        for worker in self.slots.workers() {
            match reap {
                Duration::ZERO => worker.handle.kill(),
                _ => worker.handle.send(ToWorker::End),
            }
        }
        self.ending = Some(Ending {
            outcome,
            speaks,
            kill_at: now + reap,
            give_up_at: now + reap + self.options.timeouts.budget,
        });
        self.finish_ending();
    }

    /// Ends once no worker is left and, for a leader, the others have heard.
    fn finish_ending(&mut self) {
        let Some(ending) = &self.ending else { return };
        let now = clock::now();
        let working = self.slots.workers().next().is_some();
        if working && now >= ending.kill_at {
            for worker in self.slots.workers() {
                worker.handle.kill();
            }
        }
        let needed = match ending.outcome {
            Outcome::Interrupted | Outcome::Fenced(_) => false,
            // A leader that goes first would leave the others without the news.
            _ => self.leads() && !self.linked.is_empty(),
        };
        if (working || needed) && now < ending.give_up_at {
            return;
        }
        let Some(ending) = self.ending.take() else { return };
        if let Some(ended) = self.ended.take() {
            let state = (self.job.applied > 0).then(|| self.shared_state());
            let _ = ended.send(Ended { outcome: ending.outcome, state, speaks: ending.speaks });
        }
    }

    /// Whether this agent is on its way out.
    pub(super) fn is_ending(&self) -> bool {
        self.ending.is_some() || self.ended.is_none()
    }
}
