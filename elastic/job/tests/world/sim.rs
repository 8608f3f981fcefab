//! The clock, the processes and the replicated log.

use std::{
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
};

use job::{
    Era, Generation, JobId, Step,
    command::{Command, Event},
    plan::Timestamp,
    replicated::StateMachine,
    spec::{JobSpec, Sharding},
    state::{JobState, Phase},
};

use crate::{
    agent::{Beat, Node},
    leader::Leader,
    random::Random,
    rank::Worker,
};

/// A moment or a span in milliseconds.
pub(crate) type Millis = u64;

pub(crate) const TICK: Millis = 10;
pub(crate) const BEAT: Millis = 100;
pub(crate) const LEASE: Millis = 700;
pub(crate) const SUSPECT: Millis = 800;
pub(crate) const SEAL: Millis = 2_400;

/// How long things go wrong.
pub(crate) const FAULTS: Millis = 20_000;
/// How long the rest may take.
const REST: Millis = 60_000;

pub(crate) const ERA: Era = Era(1);

/// The log of training: which generation applied each step.
pub(crate) type History = Vec<u64>;

/// Something on its way.
pub(crate) enum Mail {
    Beat(Beat),
    /// An answered beat of this node and process start, by its send time.
    Answer(usize, u64, Millis),
}

pub(crate) struct Sim {
    pub(crate) seed: u64,
    pub(crate) random: Random,
    pub(crate) now: Millis,
    /// The replicated state after each entry; the last one is the truth.
    pub(crate) log: Vec<Rc<JobState>>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) workers: Vec<Worker>,
    pub(crate) leader: Option<Leader>,
    pub(crate) elect_at: Millis,
    pub(crate) mail: Vec<(Millis, Mail)>,
    /// Broken connections between two nodes, until when.
    pub(crate) broken: Vec<(usize, usize, Millis)>,
    /// What saves hold that are not committed, by generation and step.
    pub(crate) staged: BTreeMap<(u64, u64), History>,
    /// What committed checkpoints hold.
    pub(crate) saved: BTreeMap<u64, History>,
    pub(crate) damaged: BTreeSet<u64>,
    /// The workers of each generation, in rank order.
    pub(crate) meshes: BTreeMap<u64, Rc<Vec<usize>>>,
    /// The official history at the beginning of each sealed generation.
    pub(crate) official: BTreeMap<u64, History>,
    pub(crate) save_every: u64,
    pub(crate) next_fault: Millis,
    /// The newest facts, for a failure's message.
    trace: Vec<String>,
}

impl Sim {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let nodes = random.range(3, 12);
        let min_nodes = random.range(1, 2) as u32;
        let spec = JobSpec {
            job: JobId(uuid::Uuid::nil()),
            config: String::new(),
            config_digest: [0; 32],
            min_nodes,
            max_nodes: random.range(2, nodes) as u32,
            micro_batches: random.percent(70).then_some(8),
            total_steps: Step(random.range(40, 160)),
            sharding: if random.percent(30) { Sharding::Zero1 } else { Sharding::Replicated },
            parallel: Default::default(),
            max_failures: 1_000,
            max_preemptions: 1_000,
            exact: true,
            checkpoints: true,
            keep_latest_k: random.range(0, 3) as u32,
            authority: String::new(),
            join_secret: String::new(),
        };
        let state = JobState::found(spec, ERA, Timestamp(0));
        let mut sim = Self {
            seed,
            now: 0,
            log: vec![Rc::new(state)],
            nodes: Vec::new(),
            workers: Vec::new(),
            leader: None,
            elect_at: 0,
            mail: Vec::new(),
            broken: Vec::new(),
            staged: BTreeMap::new(),
            saved: BTreeMap::new(),
            damaged: BTreeSet::new(),
            meshes: BTreeMap::new(),
            official: BTreeMap::new(),
            save_every: random.range(5, 25),
            next_fault: 3_000,
            trace: Vec::new(),
            random,
        };
        (0..nodes).for_each(|_| sim.add_node());
        sim
    }

    pub(crate) fn truth(&self) -> Rc<JobState> {
        Rc::clone(self.log.last().expect("the founding state"))
    }

    /// Runs to the end of the job. Returns what happened, in short.
    pub(crate) fn run(mut self) -> (Millis, History) {
        while self.now < FAULTS + REST {
            self.now += TICK;
            if self.now < FAULTS {
                self.faults();
            }
            self.agents();
            self.ranks();
            self.deliver();
            self.lead();
            if let Phase::Finished(_) = self.truth().phase {
                return (self.now, self.check_finish());
            }
        }
        self.violated("LIVE-1: the job does not end")
    }

    /// Ends the test with the seed and what came before.
    #[track_caller]
    pub(crate) fn violated(&self, what: &str) -> ! {
        let recent = self.trace.iter().rev().take(40).rev().cloned().collect::<Vec<_>>();
        panic!("seed={} at {} ms: {what}\n{}", self.seed, self.now, recent.join("\n"))
    }

    pub(crate) fn note(&mut self, what: String) {
        self.trace.push(format!("{:>6} {what}", self.now));
    }

    /// Makes commands facts.
    pub(crate) fn commit(&mut self, commands: Vec<Command>) {
        let mut state = JobState::clone(&self.truth());
        let events = StateMachine::apply(&mut state, commands);
        self.log.push(Rc::new(state));
        for event in &events {
            self.note(format!("{event:?}"));
            self.check_fact(event);
            if let Some(leader) = &mut self.leader {
                leader.applied(event, self.now);
            }
            match event {
                Event::Planned { .. } => self.resolve(),
                Event::CheckpointRetired { step } | Event::CheckpointDistrusted { step, .. } => {
                    self.saved.remove(&step.0);
                    self.damaged.remove(&step.0);
                }
                _ => {}
            }
        }
    }

    fn deliver(&mut self) {
        let now = self.now;
        let mut due: Vec<(Millis, Mail)> = Vec::new();
        let mut later = Vec::new();
        for mail in std::mem::take(&mut self.mail) {
            if mail.0 <= now { due.push(mail) } else { later.push(mail) }
        }
        self.mail = later;
        due.sort_by_key(|(at, _)| *at);
        for (_, mail) in due {
            match mail {
                Mail::Beat(beat) => self.hear(beat),
                Mail::Answer(node, boot, sent) => {
                    let agent = self.nodes[node].agent.as_mut();
                    if let Some(agent) = agent.filter(|a| a.boot == boot && a.silent_until <= now) {
                        agent.lease_until = agent.lease_until.max(sent + LEASE);
                    }
                }
            }
        }
    }

    /// Whether two nodes can exchange tensors.
    pub(crate) fn connected(&self, a: usize, b: usize) -> bool {
        let cut = |(x, y, until): &(usize, usize, Millis)| {
            *until > self.now && ((*x, *y) == (a, b) || (*x, *y) == (b, a))
        };
        a == b || !self.broken.iter().any(cut)
    }

    pub(crate) fn newest_sealed(&self) -> Generation {
        self.truth().chain.last().map_or(Generation(0), |link| link.generation)
    }
}
