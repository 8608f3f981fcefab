//! Tables over small worlds: what is decided, one line a command.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use super::*;
use crate::{
    Incarnation, JobId, StoreId, WorkerId,
    plan::{Purpose, Restore, Shard, Stop},
    report::{FinalReport, Position, Progress, ResumeTiming, Sealed, WorkerReport, WorkerState},
    spec::{JobSpec, Sharding},
    state::Phase,
};

mod agreement;
mod ending;
mod failures;
mod growth;
mod reforming;
mod sealing;
mod staleness;

const LIMITS: Limits = Limits {
    suspect: Duration::from_millis(800),
    lease: Duration::from_millis(700),
    seal: Duration::from_millis(2_400),
    step: Duration::from_secs(60),
    accusation: Duration::from_millis(300),
    settle: Duration::from_millis(100),
    settle_max: Duration::from_millis(2_400),
};

const LAST: u64 = 100;

/// A job and what its leader, `n1`, has heard. A node's boot is its number,
/// plus 100 for each further process start.
pub(super) struct World {
    pub(super) state: JobState,
    pub(super) view: View,
}

pub(super) fn id(number: u64) -> NodeId {
    NodeId::new(format!("n{number}")).expect("a good name")
}

fn micros(duration: Duration) -> Timestamp {
    Timestamp(duration.as_micros() as u64)
}

impl World {
    /// Nobody is there yet.
    pub(super) fn empty(tune: impl FnOnce(&mut JobSpec)) -> Self {
        let mut spec = JobSpec {
            job: JobId(uuid::Uuid::nil()),
            config: String::new(),
            config_digest: [0; 32],
            min_nodes: 1,
            max_nodes: 16,
            micro_batches: Some(8),
            total_steps: Step(LAST),
            sharding: Sharding::Replicated,
            parallel: Default::default(),
            max_failures: 5,
            max_preemptions: 1_000,
            exact: true,
            checkpoints: true,
            keep_latest_k: 2,
            authority: String::new(),
            join_secret: String::new(),
        };
        tune(&mut spec);
        let now = Duration::from_secs(100);
        let state = JobState::found(spec, Era(1), micros(now));
        let view = View {
            me: id(1),
            heard: BTreeMap::new(),
            leader_since: Duration::ZERO,
            planned_since: now,
            quiet_since: now,
            evicted_at: Duration::ZERO,
            accused_since: None,
            trust: BTreeMap::new(),
            last_step: micros(now),
            verified: BTreeMap::new(),
            late: false,
            now,
            clock: micros(now),
        };
        Self { state, view }
    }

    /// `nodes` nodes trained up to step 10 in generation 1.
    pub(super) fn training(nodes: u64, tune: impl FnOnce(&mut JobSpec)) -> Self {
        let mut world = Self::empty(tune);
        (1..=nodes).for_each(|number| world.join(number));
        world.pass(100);
        world.follow();
        world.seal_members(|_| Position::Fresh);
        world.follow();
        world.step(10);
        world.follow();
        assert_eq!(world.state.committed, Step(10), "the world trains");
        world
    }

    pub(super) fn pass(&mut self, millis: u64) {
        self.view.now += Duration::from_millis(millis);
        self.view.clock = micros(self.view.now);
        // Everybody keeps beating; who should be silent is set back by hand.
        let now = self.view.now;
        self.view.heard.values_mut().for_each(|heard| heard.at = now);
    }

    /// A node with one ready worker beats.
    pub(super) fn join(&mut self, number: u64) {
        self.start(number);
        self.worker(number).state = WorkerState::Ready;
        self.view.quiet_since = self.view.now;
    }

    /// A process start of a node's agent beats, its worker is starting.
    pub(super) fn start(&mut self, number: u64) {
        let before = self.view.heard.get(&id(number)).map_or(0, |heard| heard.report.boot);
        let boot = if before == 0 { number } else { before + 100 };
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 4000 + number as u16));
        let worker = WorkerReport {
            worker: WorkerId(1),
            slot: 0,
            pid: 1000 + number as u32,
            state: WorkerState::Starting,
            address: Some(address),
            digests: None,
            sealed: None,
            progress: None,
            resumed: None,
            saved: Vec::new(),
            accuses: None,
            save_failed: None,
            unloadable: None,
            finished: None,
        };
        let report = NodeReport {
            node: id(number),
            store: StoreId(uuid::Uuid::from_u128(u128::from(number))),
            boot,
            incarnation: None,
            address,
            slots: 1,
            leaving: false,
            stop_job: false,
            recorded: Step(0),
            shared: None,
            dead_peers: Vec::new(),
            workers: vec![worker],
        };
        let at = self.view.now;
        self.view.heard.insert(id(number), Heard { report, at });
    }

    pub(super) fn report(&mut self, number: u64) -> &mut NodeReport {
        &mut self.view.heard.get_mut(&id(number)).expect("it was heard").report
    }

    pub(super) fn worker(&mut self, number: u64) -> &mut WorkerReport {
        self.report(number).workers.last_mut().expect("it has a worker")
    }

    /// The worker of a node was killed, and its agent starts another.
    pub(super) fn kill_worker(&mut self, number: u64) {
        let mut young = self.worker(number).clone();
        let old = self.worker(number);
        old.state = WorkerState::Lost("killed".into());
        old.sealed = None;
        young.worker.0 += 1;
        young.state = WorkerState::Starting;
        (young.sealed, young.progress, young.finished) = (None, None, None);
        self.report(number).workers.push(young);
        self.view.quiet_since = self.view.now;
    }

    /// Members of the newest plan answer it.
    pub(super) fn seal_members(&mut self, position: impl Fn(u64) -> Position) {
        let lineage = self.state.chain.last().map(|link| (link.era, link.generation));
        for number in self.members() {
            let position = position(number);
            let open = matches!(position, Position::Open(_));
            self.answer(
                number,
                Sealed {
                    generation: self.state.generation(),
                    position,
                    lineage: lineage.filter(|_| position != Position::Fresh),
                    verdict: open.then(|| vec![7]),
                    shard: Shard::WHOLE,
                },
            );
        }
    }

    pub(super) fn answer(&mut self, number: u64, sealed: Sealed) {
        self.worker(number).sealed = Some(sealed);
    }

    /// Members apply a step in the newest generation.
    pub(super) fn step(&mut self, step: u64) {
        let generation = self.state.generation();
        for number in self.members() {
            let worker = self.worker(number);
            worker.progress = Some(Progress {
                generation,
                step: Step(step),
                loss: 1.0,
                grad_norm: 1.0,
                learning_rate: 1.0,
                tokens: 1,
                micros: 1000,
            });
            worker.resumed =
                Some(ResumeTiming { generation, step_micros: 1000, ..Default::default() });
        }
    }

    /// Numbers of the nodes in the newest plan.
    pub(super) fn members(&self) -> Vec<u64> {
        let members = self.state.plan.iter().flat_map(|plan| &plan.members);
        members.map(|member| member.worker.node.as_str()[1..].parse().expect("a number")).collect()
    }

    pub(super) fn checkpoint(&mut self, step: u64) {
        let link = *self.state.chain.last().expect("something was trained");
        let events = self.state.apply(Command::CommitCheckpoint {
            era: link.era,
            generation: link.generation,
            step: Step(step),
            stage: String::new(),
            files: Vec::new(),
            stall_micros: 0,
            at: self.view.clock,
        });
        assert_eq!(events.len(), 1, "step {step} is official");
    }

    pub(super) fn decide(&self) -> Decision {
        decide(&self.state, &self.view, &LIMITS, [7; 32])
    }

    /// Makes one decision a fact, as the leader's shell does. Applying it once
    /// more changes nothing (level-triggered).
    pub(super) fn act(&mut self) -> Decision {
        let decision = self.decide();
        let before = self.state.generation();
        for command in decision.commands.clone() {
            assert!(!self.state.apply(command.clone()).is_empty(), "{command:?} does not fit");
            if let Command::Evict { node, .. } | Command::Refuse { node, .. } = command {
                self.view.evicted_at = self.view.now;
                self.view.heard.remove(&node);
            }
        }
        for command in &decision.commands {
            let events = self.state.clone().apply(command.clone());
            assert!(events.is_empty(), "{command:?} twice: {events:?}");
        }
        if self.state.generation() != before {
            self.view.planned_since = self.view.now;
            self.view.accused_since = None;
        }
        for (name, heard) in &mut self.view.heard {
            let known = self.state.nodes.get(name).filter(|node| node.boot == heard.report.boot);
            heard.report.incarnation = known.map(|node| node.incarnation);
        }
        decision
    }

    /// Acts until nothing is left to do.
    pub(super) fn follow(&mut self) {
        for _ in 0..10 {
            if self.act().commands.is_empty() {
                return;
            }
        }
        panic!("decisions do not end: {:?}", self.decide());
    }
}

/// The decision in `world`, then what follows from it, one line each.
#[track_caller]
pub(super) fn check(world: &mut World, expected: &[&str]) {
    let lines = lines(&world.act());
    assert_eq!(lines, expected);
}

fn lines(decision: &Decision) -> Vec<String> {
    let commands = decision.commands.iter().map(line);
    let effects = decision.effects.iter().map(|effect| match effect {
        Effect::Assemble { generation, step, shards, .. } => {
            format!("assemble {step} of generation {generation} from {} shards", shards.len())
        }
        Effect::Discard { generation, step, .. } => {
            format!("discard {step} of generation {generation}")
        }
        Effect::Verify(step) => format!("verify {step}"),
    });
    let waiting = decision.waiting.iter().map(|waiting| format!("... {waiting}"));
    commands.chain(effects).chain(waiting).collect()
}

fn line(command: &Command) -> String {
    match command {
        Command::Admit { node, .. } => format!("admit {node}"),
        Command::Evict { node, cause, .. } => format!("evict {node}: {cause}"),
        Command::HoldBack { node, stays, .. } => format!("hold {node} back after {stays} stays"),
        Command::Leave { node, .. } => format!("leave {node}"),
        Command::RecordDigests { digests, .. } => {
            format!("record {} {}", digests.dataset[0], digests.arithmetic[0])
        }
        Command::Refuse { node, cause, .. } => format!("refuse {node}: {}", brief(cause)),
        Command::Tolerate { node, cause, .. } => format!("tolerate {node}: {}", brief(cause)),
        Command::ChangeTokens(_) => "tokens".into(),
        Command::SetReforming(reforming) => format!(
            "re-forming {}: {}",
            if reforming.automatic { "on" } else { "off" },
            reforming.why.split(':').next().unwrap_or_default()
        ),
        Command::Plan(plan) => {
            let nodes: Vec<&str> = plan.members.iter().map(|m| m.worker.node.as_str()).collect();
            let stop = match plan.stop {
                Stop::Now => "now",
                Stop::AtStepBoundary => "at the boundary",
            };
            let purpose = match plan.purpose {
                Purpose::Train => "",
                Purpose::SaveAndStop => " to save",
            };
            let failure = if plan.failure { " (failure)" } else { "" };
            let (generation, reason) = (plan.generation, &plan.reason);
            format!("plan {generation} [{}] {stop}{purpose}{failure}: {reason}", nodes.join(" "))
        }
        Command::Seal(seal) => {
            let from = match &seal.restore {
                Restore::Live { sources, receivers, verdict, .. } => {
                    let from: Vec<u32> = sources.iter().map(|source| source.rank).collect();
                    let verdict = if verdict.is_some() { " with a verdict" } else { "" };
                    format!(" from {from:?} to {receivers:?}{verdict}")
                }
                _ => String::new(),
            };
            let (tier, step) = (seal.restore.tier(), seal.restore.step());
            format!("seal {} {tier} {step}{from}: {}", seal.generation, seal.reason)
        }
        Command::Resume { generation, step, .. } => format!("resume {generation} at {step}"),
        Command::CommitCheckpoint { step, .. } => format!("commit {step}"),
        Command::Retire { step } => format!("retire {step}"),
        Command::Distrust { step, why } => format!("distrust {step}: {why}"),
        Command::StopJob { .. } => "stop".into(),
        Command::Stopped { .. } => "stopped".into(),
        Command::Start { .. } => "start".into(),
        Command::Finish { report, .. } => format!("finish at {}", report.step),
        Command::Fail { why, .. } => format!("fail: {why}"),
    }
}

/// The cause of a refusal with its digests cut to their first byte.
fn brief(cause: &str) -> String {
    let cut = |word: &str| match word.trim_end_matches(',') {
        digest if digest.len() == 64 => format!("{}..", &digest[..2]),
        word => word.to_owned(),
    };
    cause.split(':').next().unwrap_or_default().split(' ').map(cut).collect::<Vec<_>>().join(" ")
}
