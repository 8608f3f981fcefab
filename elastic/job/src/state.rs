//! The replicated facts of a job and how commands change them. Pure and
//! deterministic: every member of the control group computes the same state.
//!
//! A command that does not fit the state (a late one, a duplicate, one from a
//! deposed leader) changes nothing and yields no event.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::{
    Era, Generation, Incarnation, NodeId, Step, StoreId, Token,
    admission::{FOUNDING, MOST_TOKENS, TokenChange, TokenRecord},
    command::{Command, Event},
    incident::{Incident, Incidents},
    plan::{Plan, Restore, Seal, Timestamp, WorkerRef},
    reforming::Reforming,
    replicated::StateMachine,
    report::{Digests, FinalReport},
    shares::Shares,
    spec::JobSpec,
};

/// Where a node stands.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// Its workers take part in plans.
    Active,
    /// It leaves: no further plan includes it.
    Leaving,
    /// It is fenced; the text says why.
    Gone(String),
    /// It does not fit the job and is fenced; the text says why.
    Refused(String),
}

/// A node of the group.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Node {
    /// Its data directory.
    pub store: StoreId,
    /// Its newest process start.
    pub incarnation: Incarnation,
    /// The random number of that process start.
    pub boot: u64,
    /// Where it was last seen.
    pub address: SocketAddr,
    /// Device slots.
    pub slots: u32,
    /// Where it stands.
    pub standing: Standing,
    /// It computes other bits than the others, which this job allows.
    pub differs: bool,
    /// It comes and goes, and is held back until a plan takes it in again.
    pub held_back: bool,
}

impl Node {
    /// Whether it is a member that is not fenced.
    #[must_use]
    pub fn is_live(&self) -> bool {
        matches!(self.standing, Standing::Active | Standing::Leaving)
    }

    /// Why it is fenced, and whether for good; none while it is live.
    #[must_use]
    pub fn fenced(&self) -> Option<(&str, bool)> {
        match &self.standing {
            Standing::Active | Standing::Leaving => None,
            Standing::Gone(cause) => Some((cause, false)),
            Standing::Refused(cause) => Some((cause, true)),
        }
    }
}

/// What the job as a whole is doing.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Training, or waiting for nodes to train.
    Running,
    /// About to save and stop.
    Stopping,
    /// Saved and stopped; starts again when a node is started again.
    Stopped,
    /// All steps are done.
    Finished(FinalReport),
    /// It cannot go on.
    Failed {
        /// Why.
        why: String,
        /// Whether trying again is useless.
        final_: bool,
    },
}

/// A committed checkpoint.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CheckpointRecord {
    /// Era in which the save began.
    pub era: Era,
    /// Generation in which the save began.
    pub generation: Generation,
    /// Its stage folder's name before it was published.
    pub stage: String,
    /// Digests of its files, opaque here.
    pub files: Vec<u8>,
    /// Micro-batches of a step, frozen before it (DATA-2); none in older records.
    pub micro_batches: Option<u32>,
}

/// A link of the official history (GN-5).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ChainLink {
    /// The era.
    pub era: Era,
    /// The sealed generation.
    pub generation: Generation,
    /// Where it went on from.
    pub restore: Step,
}

/// How many links of the official history are kept: as many as any message or
/// checkpoint that is still under way can refer to.
const CHAIN_LIMIT: usize = 4096;

/// The replicated state.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct JobState {
    /// What was fixed at founding.
    pub spec: JobSpec,
    /// The era.
    pub era: Era,
    /// When the job was founded.
    pub founded: Timestamp,
    /// What the job is doing.
    pub phase: Phase,
    /// Every node ever admitted under its name, newest incarnation.
    pub nodes: BTreeMap<NodeId, Node>,
    /// The last incarnation that was given out.
    pub incarnations: u64,
    /// Global batch in micro-batches, frozen by the first plan (DATA-2).
    pub micro_batches: Option<u32>,
    /// What opens the gate to newcomers, by id.
    pub tokens: BTreeMap<String, TokenRecord>,
    /// What all nodes have to agree in (CG), once somebody trained.
    pub digests: Option<Digests>,
    /// Whether the group may be formed again without a person's word, and why.
    pub reforming: Reforming,
    /// The newest plan.
    pub plan: Option<Plan>,
    /// Its seal, once there.
    pub seal: Option<Seal>,
    /// The newest step known to be committed.
    pub committed: Step,
    /// The official history.
    pub chain: Vec<ChainLink>,
    /// The members of the newest sealed generation.
    pub sealed_members: Vec<WorkerRef>,
    /// Committed checkpoints that are not retired.
    pub checkpoints: BTreeMap<Step, CheckpointRecord>,
    /// Failures without a committed step between them.
    pub failures_in_a_row: u32,
    /// Nodes that left as they were told to, without a committed step between them.
    pub preemptions_in_a_row: u32,
    /// What went wrong and what it cost.
    pub incidents: Incidents,
}

impl JobState {
    /// The state of a job that was just founded.
    #[must_use]
    pub fn found(spec: JobSpec, era: Era, at: Timestamp) -> Self {
        let mut incidents = Incidents::default();
        incidents.begin(at);
        let secret = spec.join_secret.clone();
        let founding = TokenRecord { secret, made: at, expires: None };
        Self {
            micro_batches: spec.micro_batches,
            spec,
            era,
            founded: at,
            phase: Phase::Running,
            nodes: BTreeMap::new(),
            incarnations: 0,
            tokens: BTreeMap::from([(FOUNDING.to_owned(), founding)]),
            digests: None,
            reforming: Reforming::default(),
            plan: None,
            seal: None,
            committed: Step(0),
            chain: Vec::new(),
            sealed_members: Vec::new(),
            checkpoints: BTreeMap::new(),
            failures_in_a_row: 0,
            preemptions_in_a_row: 0,
            incidents,
        }
    }

    /// The same job where its checkpoints are what is left of it: whoever goes on,
    /// the batch that they were trained with stays (DATA-2).
    #[must_use]
    pub fn going_on(mut self, checkpoints: BTreeMap<Step, CheckpointRecord>) -> Self {
        let frozen = checkpoints.values().next_back().and_then(|newest| newest.micro_batches);
        self.micro_batches = frozen.or(self.micro_batches);
        self.checkpoints = checkpoints;
        self
    }

    /// The newest generation that was planned; zero before the first.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.plan.as_ref().map_or(Generation(0), |plan| plan.generation)
    }

    /// The newest token.
    #[must_use]
    pub fn token(&self) -> Token {
        Token { job: self.spec.job, era: self.era, generation: self.generation() }
    }

    /// Whether the newest plan is sealed.
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        self.seal.is_some()
    }

    /// Nodes that are not fenced.
    pub fn live_nodes(&self) -> impl Iterator<Item = (&NodeId, &Node)> {
        self.nodes.iter().filter(|(_, node)| node.is_live())
    }

    /// The live node that owns a Raft member.
    #[must_use]
    pub fn node_of_raft(&self, raft_id: u64) -> Option<(&NodeId, &Node)> {
        self.nodes.iter().find(|(_, node)| node.store.raft_id() == raft_id)
    }

    /// Whether a worker belongs to the newest incarnation of a live node.
    #[must_use]
    pub fn is_current(&self, worker: &WorkerRef) -> bool {
        self.nodes
            .get(&worker.node)
            .is_some_and(|node| node.is_live() && node.incarnation == worker.incarnation)
    }

    /// Whether the state that was reached at `step` in a generation is on the
    /// official history (GN-5, HEAL-1): committed steps of g are those from its
    /// own restore step to that of the next sealed generation, as far as no later
    /// one went back behind them.
    #[must_use]
    pub fn is_official(&self, era: Era, generation: Generation, step: Step) -> bool {
        let Some(at) =
            self.chain.iter().position(|link| link.era == era && link.generation == generation)
        else {
            return false;
        };
        // Any later seal may have gone back behind it, not only the next one.
        let until = self.chain[at + 1..].iter().map(|later| later.restore).min();
        step >= self.chain[at].restore && until.is_none_or(|until| step <= until)
    }

    /// Whether anything was ever trained and kept: before, a worker that cannot
    /// run means that the job cannot.
    #[must_use]
    pub fn has_trained(&self) -> bool {
        self.committed > Step(0) || !self.checkpoints.is_empty()
    }

    /// Applies one command. Returns what became a fact, in order; empty when
    /// the command does not fit the state.
    pub fn apply(&mut self, command: Command) -> Vec<Event> {
        match command {
            Command::Admit { node, store, boot, address, slots, at } => {
                self.admit(node, store, boot, address, slots, at)
            }
            Command::Evict { node, incarnation, cause, at } => {
                self.evict(node, incarnation, cause, at)
            }
            Command::Leave { node, incarnation, at } => self.leave(node, incarnation, at),
            Command::RecordDigests { digests, at } => {
                if self.digests.is_some() {
                    return Vec::new();
                }
                self.digests = Some(digests);
                let (dataset, arithmetic) = (hex(&digests.dataset), hex(&digests.arithmetic));
                vec![Event::DigestsRecorded { dataset, arithmetic, at }]
            }
            Command::Refuse { node, incarnation, cause, at } => {
                match self.live_incarnation(&node, incarnation) {
                    Some(known) => {
                        known.standing = Standing::Refused(cause.clone());
                        vec![Event::NodeRefused { node, incarnation, cause, at }]
                    }
                    None => Vec::new(),
                }
            }
            Command::Tolerate { node, incarnation, cause, at } => {
                match self.live_incarnation(&node, incarnation).filter(|known| !known.differs) {
                    Some(known) => {
                        known.differs = true;
                        vec![Event::NodeTolerated { node, incarnation, cause, at }]
                    }
                    None => Vec::new(),
                }
            }
            Command::HoldBack { node, incarnation, stays, pause_micros, at } => {
                match self.live_incarnation(&node, incarnation).filter(|known| !known.held_back) {
                    Some(known) => {
                        known.held_back = true;
                        vec![Event::NodeHeldBack { node, incarnation, stays, pause_micros, at }]
                    }
                    None => Vec::new(),
                }
            }
            Command::SetReforming(reforming) => {
                if self.reforming == reforming {
                    return Vec::new();
                }
                self.reforming = reforming.clone();
                vec![Event::ReformingSet(reforming)]
            }
            Command::ChangeTokens(change) => self.change_tokens(change),
            Command::Plan(plan) => self.plan(plan),
            Command::Seal(seal) => self.seal(seal),
            Command::Resume { generation, step, timing, at } => {
                if generation != self.generation() || !self.is_sealed() {
                    return Vec::new();
                }
                if !self.incidents.resume(generation, at, timing) {
                    return Vec::new();
                }
                self.failures_in_a_row = 0;
                self.preemptions_in_a_row = 0;
                self.committed = self.committed.max(step);
                vec![Event::Resumed { era: self.era, generation, step, timing, at }]
            }
            Command::CommitCheckpoint { era, generation, step, stage, files, stall_micros, at } => {
                if !self.is_official(era, generation, step) || self.checkpoints.contains_key(&step)
                {
                    return Vec::new();
                }
                self.committed = self.committed.max(step);
                self.incidents.stall(at, stall_micros);
                let micro_batches = self.micro_batches;
                let record = CheckpointRecord {
                    era,
                    generation,
                    stage: stage.clone(),
                    files,
                    micro_batches,
                };
                self.checkpoints.insert(step, record);
                vec![Event::CheckpointCommitted { step, stage, at }]
            }
            Command::Retire { step } => match self.checkpoints.remove(&step) {
                Some(_) => vec![Event::CheckpointRetired { step }],
                None => Vec::new(),
            },
            Command::Distrust { step, why } => match self.checkpoints.remove(&step) {
                Some(_) => vec![Event::CheckpointDistrusted { step, why }],
                None => Vec::new(),
            },
            Command::StopJob { at } if self.phase == Phase::Running => {
                self.phase = Phase::Stopping;
                vec![Event::JobStopping { at }]
            }
            Command::Stopped { at } if self.phase == Phase::Stopping => {
                self.phase = Phase::Stopped;
                self.incidents.end(at);
                vec![Event::JobStopped { at }]
            }
            Command::Start { at } if self.can_start() => {
                self.phase = Phase::Running;
                self.incidents.begin(at);
                vec![Event::JobStarted { at }]
            }
            Command::Finish { report, at } if self.is_going() => {
                self.committed = self.committed.max(report.step);
                self.incidents.end(at);
                self.phase = Phase::Finished(report.clone());
                vec![Event::JobFinished { report, at }]
            }
            Command::Fail { why, final_, at } if self.is_going() => {
                self.incidents.end(at);
                self.phase = Phase::Failed { why: why.clone(), final_ };
                vec![Event::JobFailed { why, final_, at }]
            }
            Command::StopJob { .. }
            | Command::Stopped { .. }
            | Command::Start { .. }
            | Command::Finish { .. }
            | Command::Fail { .. } => Vec::new(),
        }
    }

    /// Whether the job rests and a node that is started again starts it too.
    #[must_use]
    pub fn can_start(&self) -> bool {
        matches!(self.phase, Phase::Stopped | Phase::Failed { final_: false, .. })
    }

    /// Whether the job still has work to do.
    #[must_use]
    pub fn is_going(&self) -> bool {
        matches!(self.phase, Phase::Running | Phase::Stopping)
    }

    fn admit(
        &mut self,
        node: NodeId,
        store: StoreId,
        boot: u64,
        address: SocketAddr,
        slots: u32,
        at: Timestamp,
    ) -> Vec<Event> {
        let mut events = Vec::new();
        if let Some(known) = self.nodes.get_mut(&node) {
            if known.boot == boot {
                return events;
            }
            if known.is_live() {
                events.push(Event::NodeEvicted {
                    node: node.clone(),
                    incarnation: known.incarnation,
                    cause: "its agent started again".into(),
                    at,
                });
            }
        }
        self.incarnations += 1;
        let incarnation = Incarnation(self.incarnations);
        let standing = Standing::Active;
        let (differs, held_back) = (false, false);
        let known = Node { store, incarnation, boot, address, slots, standing, differs, held_back };
        self.nodes.insert(node.clone(), known);
        events.push(Event::NodeAdmitted { node, incarnation, address, at });
        events
    }

    fn evict(
        &mut self,
        name: NodeId,
        incarnation: Incarnation,
        cause: String,
        at: Timestamp,
    ) -> Vec<Event> {
        match self.live_incarnation(&name, incarnation) {
            Some(node) => {
                node.standing = Standing::Gone(cause.clone());
                vec![Event::NodeEvicted { node: name, incarnation, cause, at }]
            }
            None => Vec::new(),
        }
    }

    fn change_tokens(&mut self, change: TokenChange) -> Vec<Event> {
        match change {
            TokenChange::Add { id, token }
                if self.tokens.len() < MOST_TOKENS && !self.tokens.contains_key(&id) =>
            {
                let expires = token.expires;
                self.tokens.insert(id.clone(), token);
                vec![Event::TokenAdded { id, expires }]
            }
            TokenChange::Revoke { id } if self.tokens.remove(&id).is_some() => {
                vec![Event::TokenRevoked { id }]
            }
            TokenChange::Add { .. } | TokenChange::Revoke { .. } => Vec::new(),
        }
    }

    fn live_incarnation(&mut self, name: &NodeId, incarnation: Incarnation) -> Option<&mut Node> {
        let node = self.nodes.get_mut(name)?;
        (node.incarnation == incarnation && node.is_live()).then_some(node)
    }

    fn leave(&mut self, name: NodeId, incarnation: Incarnation, at: Timestamp) -> Vec<Event> {
        match self.nodes.get_mut(&name) {
            Some(node) if node.incarnation == incarnation && node.standing == Standing::Active => {
                node.standing = Standing::Leaving;
                self.preemptions_in_a_row += 1;
                vec![Event::NodeLeaving { node: name, incarnation, at }]
            }
            _ => Vec::new(),
        }
    }

    fn plan(&mut self, plan: Plan) -> Vec<Event> {
        let fits = self.is_going()
            && plan.era == self.era
            && plan.generation == self.generation().next()
            && plan.members.iter().all(|member| self.is_current(&member.worker))
            && match plan.shares.as_ref().map_or(0, Shares::ranks) {
                0 => plan.members.is_empty(),
                pipelines => {
                    !plan.members.is_empty() && plan.members.len().is_multiple_of(pipelines)
                }
            };
        if !fits {
            return Vec::new();
        }
        if let Some(shares) = &plan.shares {
            match self.micro_batches {
                Some(frozen) if frozen != shares.total() => return Vec::new(),
                _ => self.micro_batches = Some(shares.total()),
            }
        }
        let mesh = plan.members.iter().map(|m| m.worker.node.clone()).collect::<Vec<_>>();
        if plan.failure {
            self.failures_in_a_row += 1;
        }
        self.committed = self.committed.max(plan.reached);
        self.incidents.plan(&plan, self.committed);
        let event = Event::Planned {
            era: plan.era,
            generation: plan.generation,
            mesh,
            shares: plan.shares.as_ref().map_or_else(Vec::new, |shares| {
                (0..shares.ranks()).map(|rank| shares.of(rank).len() as u32).collect()
            }),
            reason: plan.reason.clone(),
            failure: plan.failure,
            noticed: plan.noticed,
            at: plan.at,
        };
        for member in &plan.members {
            if let Some(node) = self.nodes.get_mut(&member.worker.node) {
                node.held_back = false;
            }
        }
        self.plan = Some(plan);
        self.seal = None;
        vec![event]
    }

    fn seal(&mut self, seal: Seal) -> Vec<Event> {
        let known = match &seal.restore {
            Restore::Checkpoint { step } => self.checkpoints.contains_key(step),
            Restore::Initial | Restore::Live { .. } => true,
        };
        // A checkpoint that was committed after the seal was decided would stay beside
        // a history that goes another way (GN-5).
        let newest = self.checkpoints.keys().next_back();
        let behind = newest.is_some_and(|newest| *newest > seal.restore.step());
        if !self.is_going()
            || behind
            || seal.generation != self.generation()
            || self.seal.is_some()
            || self.plan.as_ref().is_none_or(|plan| plan.members.is_empty())
            || !known
        {
            return Vec::new();
        }
        let restore = seal.restore.step();
        self.incidents.seal(&seal, self.committed);
        self.committed = restore;
        self.chain.push(ChainLink { era: self.era, generation: seal.generation, restore });
        if self.chain.len() > CHAIN_LIMIT {
            self.chain.remove(0);
        }
        self.sealed_members = self
            .plan
            .iter()
            .flat_map(|plan| plan.members.iter().map(|member| member.worker.clone()))
            .collect();
        let event = Event::Sealed {
            era: self.era,
            generation: seal.generation,
            restore,
            tier: seal.restore.tier().into(),
            reason: seal.reason.clone(),
            at: seal.at,
        };
        self.seal = Some(seal);
        vec![event]
    }

    /// Incidents so far, oldest first.
    #[must_use]
    pub fn incidents(&self) -> &[Arc<Incident>] {
        self.incidents.list()
    }
}

/// A digest for people.
#[must_use]
pub fn hex(digest: &[u8; 32]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl StateMachine for JobState {
    /// Commands that were decided together become facts together.
    type Command = Vec<Command>;
    type Event = Event;

    fn apply(&mut self, commands: Vec<Command>) -> Vec<Event> {
        commands.into_iter().flat_map(|command| Self::apply(self, command)).collect()
    }

    fn snapshot(&self) -> Vec<u8> {
        crate::codec::encode(self)
    }

    fn restore(bytes: &[u8]) -> Result<Self, String> {
        crate::codec::decode(bytes).map_err(|error| error.to_string())
    }
}
