//! A member: an inbox, Raft's clock and the progress of the disk. It is turned
//! ([`Member::look`], [`Member::handle`], [`Member::pass`]) by a thread of its own
//! or by a host that steps through time ([`super::stepped`]), and reads no clock
//! itself. What Raft hands out is dealt with in [`Member::ready`].

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use job::replicated::StateMachine;
use job::voters::Change;
use protobuf::Message as _;
use raft::eraftpb::{Message, MessageType};
use raft::{RawNode, SnapshotStatus, StateRole};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast, mpsc, oneshot, watch};

use super::disk::{Disk, LogWriter};
use super::election::{self, Turns};
use super::error::{ChangeError, ProposeError};
use super::handle::{
    Applied, AppliedReceiver, Handle, Inner, Proposed, Role, Snapshot, Status, Ticket, Tickets,
};
use super::log::Log;
use super::membership::PendingChange;
use super::reads::{self, Reads, Waiter};
use super::replica::{self, Replica};
use super::store::{Loaded, Store};
use super::{Error, Options, Outbound, bridge};

/// Inputs waiting for the member; more are refused as busy.
const INBOX: usize = 4096;

/// And the bytes in them; a message with a whole state fits.
const INBOX_KIB: usize = 128 << 10;

/// Inputs taken before Raft's output is dealt with: one transaction for many.
const BURST: usize = 256;

/// Proposals without an answer; more are refused as busy.
const MOST_PROPOSALS: usize = 4096;

/// Missed ticks made up for. After a pause the clock goes on slowly, so that
/// what arrived meanwhile is seen before anybody is given up.
const MOST_TICKS: u32 = 2;

/// Ticks after which a state that nobody reported on counts as lost.
const SNAPSHOT_PATIENCE: u32 = 100;

/// What the member's thread is told.
pub(super) enum Input<S: StateMachine> {
    Step(Box<Message>, OwnedSemaphorePermit),
    Propose {
        /// None for a command of this process that is proposed for the first time.
        ticket: Option<Ticket>,
        command: Vec<u8>,
        reply: ProposeReply<S::Event>,
        room: OwnedSemaphorePermit,
    },
    Read(reads::Reply),
    Change {
        change: Change,
        reply: oneshot::Sender<Result<(), ChangeError>>,
    },
    SnapshotSent {
        to: u64,
        delivered: bool,
    },
    LeaderDied(u64),
    Reachable(u64),
    Unreachable(u64),
    /// The disk made progress, or the member must end.
    Wake,
}

type ProposeReply<E> = oneshot::Sender<Result<Proposed<E>, ProposeError>>;
type Channels<S> = (
    watch::Sender<Arc<Snapshot<S>>>,
    watch::Sender<Status>,
    broadcast::Sender<Arc<Applied<<S as StateMachine>::Event>>>,
);

pub(super) struct Member<S: StateMachine> {
    pub(super) id: u64,
    /// When it was turned last; its host's clock.
    pub(super) now: Instant,
    next_tick: Instant,
    stop: Arc<AtomicBool>,
    tickets: Tickets,
    pub(super) options: Options,
    pub(super) raft: RawNode<Log>,
    pub(super) replica: Replica<S>,
    pub(super) disk: Box<dyn LogWriter>,
    pub(super) applied: u64,
    pub(super) proposals: HashMap<Ticket, ProposeReply<S::Event>>,
    pub(super) reads: Reads,
    pub(super) change: Option<PendingChange>,
    /// Changes in force that are to be answered once the status shows them.
    pub(super) changed: Vec<(PendingChange, Result<(), ChangeError>)>,
    /// Messages that may leave when the Ready of that number is durable.
    pub(super) held: VecDeque<(u64, Vec<Message>)>,
    /// Members to which something could not be sent since the last look.
    pub(super) unsent: Vec<(u64, bool)>,
    pub(super) states: watch::Sender<Arc<Snapshot<S>>>,
    pub(super) events: broadcast::Sender<Arc<Applied<S::Event>>>,
    outbound: mpsc::Sender<Outbound>,
    status: watch::Sender<Status>,
    pub(super) turns: Option<Turns>,
    /// The last request for a pre-vote that the lease of the leader refused.
    pub(super) refused: Option<(Message, Instant)>,
    pub(super) contact: BTreeMap<u64, Instant>,
    /// When a whole state was sent to whom.
    pub(super) snapshots: BTreeMap<u64, Instant>,
    /// Role and term when last looked at.
    pub(super) leading: (bool, u64),
}

/// What a member is made of, beside its disk.
pub(super) struct Parts {
    pub(super) id: u64,
    pub(super) options: Options,
    pub(super) founding: super::Founding,
    pub(super) loaded: Loaded,
    pub(super) tickets: Tickets,
    pub(super) outbound: mpsc::Sender<Outbound>,
}

/// A member before it is turned for the first time, and its ways in and out.
pub(super) struct Made<S: StateMachine> {
    pub(super) member: Member<S>,
    pub(super) inputs: Receiver<Input<S>>,
    pub(super) handle: Handle<S>,
    pub(super) applied: AppliedReceiver<S>,
}

/// Starts the threads of a member on a founded store.
pub(super) fn start<S: StateMachine>(
    options: Options,
    store: Store,
    outbound: mpsc::Sender<Outbound>,
) -> Result<(Handle<S>, AppliedReceiver<S>), Error> {
    let dir = store.dir().display().to_string();
    let founding = store.founding().cloned().ok_or(Error::NotFounded(dir))?;
    let (id, loaded) = (store.id().raft_id(), store.load()?);
    let tickets = Tickets::default();
    let parts = Parts { id, options, founding, loaded, tickets, outbound };
    let now = Instant::now();
    let made = make(parts, now, |inbox| {
        // A full inbox is looked at soon, and the disk's progress with it.
        let wake = move || drop(inbox.try_send(Input::Wake));
        Ok(Box::new(Disk::start(store, wake).map_err(Error::Thread)?))
    })?;
    let Made { member, inputs, handle, applied } = made;
    std::thread::Builder::new()
        .name("elastic-raft".into())
        .spawn(move || serve(member, &inputs))
        .map_err(Error::Thread)?;
    Ok((handle, applied))
}

/// Makes a member on a disk that is told where to report its progress.
pub(super) fn make<S: StateMachine>(
    parts: Parts,
    now: Instant,
    disk: impl FnOnce(SyncSender<Input<S>>) -> Result<Box<dyn LogWriter>, Error>,
) -> Result<Made<S>, Error> {
    let Parts { id, options, founding, loaded, tickets, outbound } = parts;
    let replica = Replica::<S>::restore(&loaded.snapshot.data).map_err(Error::State)?;
    let applied = loaded.snapshot.get_metadata().index;
    let raft = RawNode::new(&config(id, applied, &options), Log::new(loaded), &bridge::logger())
        .map_err(|e| Error::Raft(e.to_string()))?;

    let (inbox, inputs) = sync_channel(INBOX);
    let first = Snapshot { state: replica.machine.clone(), applied };
    let (states, state) = watch::channel(Arc::new(first));
    let (status_in, status) = watch::channel(first_status(id));
    let (events, receiver) = broadcast::channel(options.event_buffer.max(1));
    let stop = Arc::new(AtomicBool::new(false));
    let disk = disk(inbox.clone())?;
    let handle = Handle::new(Inner {
        id,
        stop: Arc::clone(&stop),
        room: Arc::new(Semaphore::new(INBOX_KIB)),
        tickets: tickets.clone(),
        founding,
        inbox,
        state,
        status,
        applied: events.downgrade(),
    });
    let channels = (states, status_in, events);
    let raft = (raft, replica, applied);
    let member = Member::new((id, stop, tickets), now, options, raft, disk, outbound, channels);
    Ok(Made { member, inputs, handle, applied: receiver })
}

fn config(id: u64, applied: u64, options: &Options) -> raft::Config {
    raft::Config {
        id,
        applied,
        election_tick: options.election_ticks,
        max_election_tick: election::limit(options.election_ticks),
        heartbeat_tick: 2.min(options.election_ticks.saturating_sub(1)).max(1),
        pre_vote: true,
        check_quorum: true,
        max_size_per_msg: 1 << 20,
        max_inflight_msgs: 256,
        max_uncommitted_size: 64 << 20,
        max_committed_size_per_ready: 4 << 20,
        batch_append: true,
        ..raft::Config::default()
    }
}

/// Raft's clock; a member that ticks without end would do nothing else.
fn period(options: &Options) -> Duration {
    options.tick.max(Duration::from_millis(1))
}

fn first_status(id: u64) -> Status {
    Status {
        id,
        role: Role::Outsider,
        leader: None,
        term: 0,
        voters: Vec::new(),
        learners: Vec::new(),
        applied: 0,
        committed: 0,
        last_contact: BTreeMap::new(),
        failure: None,
    }
}

/// Raft panics on what it takes for impossible, a peer that acknowledged entries
/// and then lost them for one: that ends this member and is told, and the process
/// lives on.
pub(super) fn guard<T>(turn: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(turn)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("Raft stopped: {}", text.unwrap_or("no reason given")))
    })
}

/// Runs the member to its end.
fn serve<S: StateMachine>(mut member: Member<S>, inputs: &Receiver<Input<S>>) {
    if let Err(failure) = guard(|| member.run(inputs)) {
        tracing::error!(member = member.id, "the control group member stopped: {failure}");
        member.status.send_modify(|s| s.failure = Some(failure.into()));
    }
    let Member { disk, status, .. } = member;
    // The status closes last: whoever waits for it may open the store again.
    drop(disk);
    drop(status);
}

impl<S: StateMachine> Member<S> {
    fn new(
        (id, stop, tickets): (u64, Arc<AtomicBool>, Tickets),
        now: Instant,
        options: Options,
        (raft, replica, applied): (RawNode<Log>, Replica<S>, u64),
        disk: Box<dyn LogWriter>,
        outbound: mpsc::Sender<Outbound>,
        (states, status, events): Channels<S>,
    ) -> Self {
        let next_tick = now + period(&options);
        Self {
            id,
            now,
            next_tick,
            stop,
            tickets,
            options,
            raft,
            replica,
            disk,
            applied,
            proposals: HashMap::new(),
            reads: Reads::default(),
            change: None,
            changed: Vec::new(),
            held: VecDeque::new(),
            unsent: Vec::new(),
            states,
            events,
            outbound,
            status,
            turns: None,
            refused: None,
            contact: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            leading: (false, 0),
        }
    }

    fn run(&mut self, inputs: &Receiver<Input<S>>) -> Result<(), String> {
        while !self.stop.load(Ordering::Acquire) {
            let wake = self.look(Instant::now())?;
            match inputs.recv_timeout(wake.saturating_duration_since(Instant::now())) {
                Ok(input) => {
                    self.now = Instant::now();
                    self.handle(input);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
            for input in inputs.try_iter().take(BURST) {
                self.handle(input);
            }
            self.pass(Instant::now());
        }
        Ok(())
    }

    /// Takes in what the disk did and deals with what Raft hands out. Returns
    /// when time itself next matters.
    pub(super) fn look(&mut self, now: Instant) -> Result<Instant, String> {
        self.now = now;
        self.durable()?;
        self.lone_voter_leads();
        self.begin_read();
        self.ready()?;
        self.publish();
        Ok(self.turns.map_or(self.next_tick, |turns| turns.next().min(self.next_tick)))
    }

    /// Time has passed: Raft's clock, and this voter's turns to ask for votes.
    pub(super) fn pass(&mut self, now: Instant) {
        self.now = now;
        let tick = period(&self.options);
        if now >= self.next_tick {
            let missed = (now - self.next_tick).as_nanos() / tick.as_nanos();
            for _ in 0..MOST_TICKS.min(1 + u32::try_from(missed).unwrap_or(MOST_TICKS)) {
                self.tick(now);
            }
            self.next_tick = (self.next_tick + tick).max(now);
        }
        self.take_turn(now);
    }

    pub(super) fn handle(&mut self, input: Input<S>) {
        match input {
            Input::Step(message, _room) => self.step(*message),
            Input::Propose { ticket, command, reply, room: _room } => {
                self.propose(ticket, &command, reply);
            }
            Input::Read(reply) => {
                let deadline = self.now + self.options.read_deadline;
                self.reads.ask(Waiter { reply, deadline });
            }
            Input::Change { change, reply } => self.change(change, reply),
            Input::SnapshotSent { to, delivered } => self.snapshot_sent(to, delivered),
            Input::LeaderDied(id) => self.leader_died(id),
            Input::Reachable(id) => {
                if self.snapshots.contains_key(&id) {
                    self.snapshot_sent(id, false);
                }
                self.raft.ping();
            }
            Input::Unreachable(id) => self.unreachable(id),
            Input::Wake => {}
        }
    }

    pub(super) fn step(&mut self, message: Message) {
        let (from, log) = (message.from, &self.raft.raft.raft_log);
        // Raft would stop the process: this log once was longer than it is.
        if message.get_msg_type() == MessageType::MsgHeartbeat && message.commit > log.last_index()
        {
            let (commit, last) = (message.commit, log.last_index());
            tracing::warn!(from, commit, last, "the leader knows more of this log than it holds");
            return;
        }
        self.contact.insert(from, self.now);
        if message.get_msg_type() == MessageType::MsgRequestPreVote && self.leader().is_some() {
            self.refused = Some((message.clone(), self.now));
        }
        if let Err(error) = self.raft.step(message) {
            tracing::debug!(from, %error, "a message was dropped");
        }
    }

    fn propose(&mut self, ticket: Option<Ticket>, command: &[u8], reply: ProposeReply<S::Event>) {
        match self.try_propose(ticket, command) {
            // A caller that went away needs no answer.
            Err(error) => drop(reply.send(Err(error))),
            Ok(ticket) => drop(self.proposals.insert(ticket, reply)),
        }
    }

    fn try_propose(
        &mut self,
        ticket: Option<Ticket>,
        command: &[u8],
    ) -> Result<Ticket, ProposeError> {
        if !self.leads() {
            return Err(ProposeError::NotLeader { leader: self.leader() });
        }
        let under_way = ticket.is_some_and(|t| self.proposals.contains_key(&t));
        if self.proposals.len() >= MOST_PROPOSALS || under_way {
            return Err(ProposeError::Busy);
        }
        // Numbered here, in the order of the log, own numbers leave no gaps.
        let ticket = ticket.unwrap_or_else(|| self.tickets.next());
        // Dropped while leadership is handed over or too much is uncommitted.
        let proposed = self.raft.propose(Vec::new(), replica::entry(ticket, command));
        proposed.map(|()| ticket).map_err(|_| ProposeError::Busy)
    }

    fn tick(&mut self, now: Instant) {
        self.fix_election_timeout();
        if self.may_campaign() {
            self.raft.tick();
        }
        self.reads.expire(now);
        let patience = self.options.tick * SNAPSHOT_PATIENCE;
        let late = self.snapshots.iter().filter(|(_, sent)| now - **sent > patience);
        for id in late.map(|(&id, _)| id).collect::<Vec<_>>() {
            self.snapshot_sent(id, false);
        }
    }

    fn unreachable(&mut self, id: u64) {
        self.raft.report_unreachable(id);
        if self.snapshots.contains_key(&id) {
            self.snapshot_sent(id, false);
        }
    }

    fn snapshot_sent(&mut self, to: u64, delivered: bool) {
        self.snapshots.remove(&to);
        let status = if delivered { SnapshotStatus::Finish } else { SnapshotStatus::Failure };
        self.raft.report_snapshot(to, status);
    }

    fn begin_read(&mut self) {
        if self.reads.is_idle() {
            return;
        }
        if !self.leads() {
            self.reads.fail(self.leader());
        } else if self.raft.raft.commit_to_current_term() {
            // Earlier, Raft would drop the request without a word.
            if let Some(context) = self.reads.begin() {
                self.raft.read_index(context.to_vec());
            }
        }
    }

    /// Hands a message to the caller's link; a full link loses it.
    pub(super) fn send(&mut self, message: &Message) {
        let (to, snapshot) = (message.to, message.get_msg_type() == MessageType::MsgSnapshot);
        let sent = message.write_to_bytes().is_ok_and(|bytes| {
            self.outbound.try_send(Outbound { to, bytes: bytes.into(), snapshot }).is_ok()
        });
        if sent && snapshot {
            self.snapshots.insert(to, self.now);
        }
        if !sent {
            self.unsent.push((to, snapshot));
        }
    }

    /// Tells Raft what could not be sent.
    pub(super) fn report_unsent(&mut self) {
        for (to, snapshot) in std::mem::take(&mut self.unsent) {
            self.raft.report_unreachable(to);
            if snapshot {
                self.snapshot_sent(to, false);
            }
        }
    }

    fn role(&self, voters: &[u64], learners: &[u64]) -> Role {
        match self.raft.raft.state {
            StateRole::Leader => Role::Leader,
            StateRole::Candidate | StateRole::PreCandidate => Role::Candidate,
            StateRole::Follower if voters.contains(&self.id) => Role::Follower,
            StateRole::Follower if learners.contains(&self.id) => Role::Learner,
            StateRole::Follower => Role::Outsider,
        }
    }

    fn publish(&mut self) {
        let voters = self.voters();
        let mut learners = self.raft.raft.prs().conf().to_conf_state().learners;
        learners.sort_unstable();
        self.contact.retain(|id, _| voters.contains(id) || learners.contains(id));
        let status = Status {
            id: self.id,
            role: self.role(&voters, &learners),
            leader: self.leader(),
            term: self.raft.raft.term,
            voters,
            learners,
            applied: self.applied,
            committed: self.raft.raft.raft_log.committed,
            last_contact: self.contact.clone(),
            failure: None,
        };
        self.status.send_if_modified(|old| {
            old.last_contact.clone_from(&status.last_contact);
            let changed = *old != status;
            *old = status;
            changed
        });
        for (change, result) in self.changed.drain(..) {
            change.answer(result);
        }
    }
}
