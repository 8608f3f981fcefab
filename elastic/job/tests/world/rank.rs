//! Workers: they answer plans by sealing (GN-2), follow seals (GN-3), and step
//! forward together through votes (ST-1 to ST-4).

use std::{collections::BTreeMap, rc::Rc};

use job::{
    Era, Generation, Step,
    plan::{Plan, Restore, Seal, Shard, Stop, WorkerRef},
    report::{
        FinalReport, Position, Progress, ResumeTiming, Sealed, ShardSaved, WorkerReport,
        WorkerState,
    },
    spec::Sharding,
    state::JobState,
};

use crate::{
    agent::address,
    sim::{ERA, History, Millis, Sim},
};

/// A worker ends when its lease lapsed this long ago (LIVE-2).
const GRACE: Millis = 1_000;

/// What a worker is at.
#[derive(Clone, PartialEq, Debug)]
enum Work {
    /// Not in a generation.
    Idle,
    /// It answered a plan that it is in.
    Stopped,
    /// It receives or keeps the state that it is to begin with.
    Restoring { until: Millis, history: History, shard: Shard, verdict: Option<Vec<u8>> },
    /// It computes its gradient.
    Computing { until: Millis },
    /// Its gradient is complete: it votes.
    Voting,
    /// The vote passed; it sees so and applies then.
    Applying { until: Millis },
    /// It applied the last step.
    Done,
}

pub(crate) struct Worker {
    id: WorkerRef,
    pub(crate) node: usize,
    pub(crate) alive: bool,
    ready_at: Millis,
    ready: bool,
    pub(crate) paused_since: Millis,
    pub(crate) paused_until: Millis,
    pub(crate) orphan_until: Option<Millis>,
    pub(crate) lease_until: Millis,
    pub(crate) urgent: bool,
    /// The newest plan that it was told, and what it is in it.
    plan: Option<(Plan, Option<u32>)>,
    /// Newest plan that stops at once.
    stop_now: Generation,
    seal: Option<Seal>,
    /// The generation that it is at work in.
    generation: Generation,
    work: Work,
    pub(crate) history: Option<History>,
    prepared: Option<Generation>,
    lineage: Option<(Era, Generation)>,
    verdict: Option<Vec<u8>>,
    shard: Shard,
    sealed: Option<Sealed>,
    progress: Option<Progress>,
    resumed: Option<ResumeTiming>,
    saved: Vec<ShardSaved>,
    saving: Vec<(Millis, ShardSaved)>,
    accuses: Option<(Generation, u32)>,
    finished: Option<FinalReport>,
}

impl Worker {
    pub(crate) fn new(id: WorkerRef, node: usize, ready_at: Millis) -> Self {
        Self {
            id,
            node,
            alive: true,
            ready_at,
            ready: false,
            paused_since: 0,
            paused_until: 0,
            orphan_until: None,
            lease_until: 0,
            urgent: false,
            plan: None,
            stop_now: Generation(0),
            seal: None,
            generation: Generation(0),
            work: Work::Idle,
            history: None,
            prepared: None,
            lineage: None,
            verdict: None,
            shard: Shard::WHOLE,
            sealed: None,
            progress: None,
            resumed: None,
            saved: Vec::new(),
            saving: Vec::new(),
            accuses: None,
            finished: None,
        }
    }

    pub(crate) fn report(&self) -> WorkerReport {
        WorkerReport {
            worker: self.id.worker,
            slot: 0,
            pid: self.id.worker.0 as u32,
            state: if self.ready { WorkerState::Ready } else { WorkerState::Starting },
            address: self.ready.then(|| address(self.node)),
            digests: None,
            sealed: self.sealed.clone(),
            progress: self.progress,
            resumed: self.resumed,
            saved: self.saved.clone(),
            accuses: self.accuses,
            save_failed: None,
            unloadable: None,
            finished: self.finished.clone(),
        }
    }

    fn step(&self) -> u64 {
        self.history.as_ref().map_or(0, |history| history.len() as u64)
    }

    fn told(&self) -> Generation {
        self.plan.as_ref().map_or(Generation(0), |(plan, _)| plan.generation)
    }

    fn must_stop(&self) -> bool {
        self.stop_now > self.generation
    }

    /// It has not yet answered the newest plan.
    fn answers(&mut self) {
        let Some((plan, rank)) = &self.plan else { return };
        let position = match (&self.history, self.prepared) {
            (None, _) => Position::Fresh,
            (Some(history), None) => Position::Open(Step(history.len() as u64)),
            (Some(history), Some(_)) => Position::Prepared(Step(history.len() as u64)),
        };
        self.sealed = Some(Sealed {
            generation: plan.generation,
            position,
            lineage: self.lineage,
            verdict: self.verdict.clone(),
            shard: self.shard,
        });
        self.generation = plan.generation;
        self.work = if rank.is_some() { Work::Stopped } else { Work::Idle };
        self.urgent = true;
    }

    /// GN-2: stops as the newest plan wants it. `finishes`: the vote was seen in
    /// time and applying finishes.
    fn stop(&mut self, finishes: bool) {
        if self.told() <= self.generation {
            return;
        }
        let now = self.must_stop();
        match &self.work {
            Work::Idle | Work::Stopped | Work::Done => {}
            Work::Restoring { .. } | Work::Computing { .. } | Work::Voting if now => {}
            Work::Applying { .. } if now => {
                if finishes {
                    self.apply();
                }
            }
            _ => return,
        }
        self.answers();
    }

    fn apply(&mut self) {
        let step = self.step();
        let generation = self.prepared.take().expect("it is prepared");
        self.history.as_mut().expect("it has state").push(generation.0);
        self.verdict = Some(step.to_le_bytes().to_vec());
    }
}

impl Sim {
    /// The agent passes on what the committed state says.
    pub(crate) fn tell(&mut self, worker: usize, seen: &JobState) {
        let worker = &mut self.workers[worker];
        if !worker.alive || !worker.ready {
            return;
        }
        let newest = seen.checkpoints.keys().next_back().copied();
        worker.saved.retain(|saved| newest.is_none_or(|newest| saved.step > newest));
        let Some(plan) = &seen.plan else { return };
        let rank = plan.members.iter().position(|member| member.worker == worker.id);
        if worker.told() < plan.generation && (rank.is_some() || worker.plan.is_some()) {
            worker.accuses = None;
            worker.plan = Some((plan.clone(), rank.map(|rank| rank as u32)));
            if plan.stop == Stop::Now {
                worker.stop_now = plan.generation;
            }
        }
        if let Some(seal) = &seen.seal
            && worker.told() == seal.generation
            && rank.is_some()
        {
            worker.seal = Some(seal.clone());
        }
    }

    pub(crate) fn ranks(&mut self) {
        let now = self.now;
        for worker in &mut self.workers {
            let lapsed = now > worker.lease_until + GRACE && worker.lease_until > 0;
            if worker.orphan_until.is_some_and(|until| now >= until) || (lapsed && worker.ready) {
                worker.alive = false;
            }
            if worker.alive && !worker.ready && now >= worker.ready_at {
                (worker.ready, worker.urgent) = (true, true);
            }
        }
        let awake: Vec<usize> = (0..self.workers.len())
            .filter(|at| self.workers[*at].alive && self.workers[*at].paused_until <= now)
            .collect();
        for at in awake {
            // A block of compute, a scheduler's whim.
            let (stops, finishes) = (self.random.percent(40), self.random.percent(50));
            let worker = &mut self.workers[at];
            if stops {
                worker.stop(finishes);
            }
            let durable = worker.saving.extract_if(.., |(due, _)| *due <= now);
            worker.saved.extend(durable.map(|(_, saved)| saved));
            self.rank(at);
        }
    }

    fn rank(&mut self, at: usize) {
        let now = self.now;
        match self.workers[at].work.clone() {
            Work::Idle => {}
            Work::Stopped => self.gather(at),
            Work::Restoring { until, history, shard, verdict } => {
                if now >= until {
                    let worker = &mut self.workers[at];
                    let generation = worker.generation;
                    worker.history = Some(history);
                    worker.lineage = Some((ERA, generation));
                    (worker.prepared, worker.shard, worker.verdict) = (None, shard, verdict);
                    self.check_restored(at, generation);
                    self.begin_step(at, true);
                } else {
                    self.watch(at);
                }
            }
            Work::Computing { until } => {
                if now >= until {
                    self.workers[at].prepared = Some(self.workers[at].generation);
                    self.workers[at].work = Work::Voting;
                }
                self.watch(at);
            }
            Work::Voting => self.vote(at),
            Work::Applying { until } => {
                let worker = &mut self.workers[at];
                if now >= until && now < worker.lease_until {
                    worker.apply();
                    let first = worker.progress.is_none_or(|p| p.generation != worker.generation);
                    worker.urgent |= first;
                    worker.progress = Some(Progress {
                        generation: worker.generation,
                        step: Step(worker.step()),
                        loss: 1.0,
                        grad_norm: 1.0,
                        learning_rate: 1.0,
                        tokens: 1,
                        micros: 1,
                    });
                    let timing =
                        ResumeTiming { generation: worker.generation, ..Default::default() };
                    worker.resumed = Some(timing);
                    self.begin_step(at, false);
                }
            }
            Work::Done => self.finish(at),
        }
    }

    fn begin_step(&mut self, at: usize, restored: bool) {
        let spec = self.truth().spec.clone();
        let (compute, writes) = (self.random.range(20, 120), self.random.range(20, 400));
        let (now, every) = (self.now, self.save_every);
        let worker = &mut self.workers[at];
        let step = worker.step();
        let last = step == spec.total_steps.0;
        if last || (!restored && step.is_multiple_of(every)) {
            let mesh = self.mesh(at);
            let rank = mesh.iter().position(|peer| *peer == at).map_or(0, |rank| rank as u32);
            let ranks = mesh.len() as u32;
            let worker = &mut self.workers[at];
            let generation = worker.generation;
            let (step, stall_micros, index) = (Step(step), 0, Vec::new());
            let saved = ShardSaved { era: ERA, generation, step, rank, ranks, stall_micros, index };
            worker.saving.push((now + writes, saved));
            let history = worker.history.clone().expect("it has state");
            let known =
                self.staged.entry((generation.0, step.0)).or_insert_with(|| history.clone());
            if *known != history {
                self.violated("STEP-1: two ranks save different states");
            }
        }
        let worker = &mut self.workers[at];
        worker.work = match last {
            true => Work::Done,
            // A plan at a step boundary stops it here.
            false if worker.told() > worker.generation => Work::Idle,
            false => Work::Computing { until: now + compute },
        };
    }

    /// The workers of the generation that a worker is at work in, in rank order.
    fn mesh(&self, at: usize) -> Rc<Vec<usize>> {
        self.meshes.get(&self.workers[at].generation.0).cloned().unwrap_or_default()
    }

    /// Finds the workers that a plan names.
    pub(crate) fn resolve(&mut self) {
        let truth = self.truth();
        let Some(plan) = &truth.plan else { return };
        let by_id: BTreeMap<&WorkerRef, usize> =
            self.workers.iter().enumerate().map(|(at, worker)| (&worker.id, at)).collect();
        let mesh = plan.members.iter().map(|member| by_id[&member.worker]).collect();
        self.meshes.insert(plan.generation.0, Rc::new(mesh));
    }

    /// The rank of a peer that cannot take part any more.
    fn broken_peer(&self, at: usize, mesh: &[usize]) -> Option<u32> {
        let me = &self.workers[at];
        let gone = |peer: &usize| {
            let peer = &self.workers[*peer];
            let idle = peer.work == Work::Idle && peer.generation == me.generation;
            !peer.alive
                || peer.generation > me.generation
                || idle
                || !self.connected(me.node, peer.node)
        };
        mesh.iter().position(gone).map(|rank| rank as u32)
    }

    /// A collective that cannot end is given up a little later.
    fn watch(&mut self, at: usize) {
        if !self.random.percent(15) {
            return;
        }
        let mesh = self.mesh(at);
        if let Some(rank) = self.broken_peer(at, &mesh) {
            let worker = &mut self.workers[at];
            if !worker.must_stop() {
                worker.accuses = Some((worker.generation, rank));
                worker.urgent = true;
            }
            worker.work = Work::Idle;
        }
    }

    /// GN-3: the mesh follows the seal together.
    fn gather(&mut self, at: usize) {
        let worker = &self.workers[at];
        let Some(seal) = worker.seal.clone().filter(|seal| seal.generation == worker.generation)
        else {
            return self.watch(at);
        };
        let (mesh, now) = (self.mesh(at), self.now);
        let here = |peer: &usize| {
            let peer = &self.workers[*peer];
            let told = peer.seal.as_ref().is_some_and(|told| told.generation == seal.generation);
            let sealed = peer.work == Work::Stopped && peer.generation == seal.generation;
            peer.alive && peer.paused_until <= now && sealed && told && !peer.must_stop()
        };
        if !mesh.iter().all(here) || self.broken_peer(at, &mesh).is_some() {
            return self.watch(at);
        }
        let step = seal.restore.step();
        // What was prepared is applied in the generation that prepared it.
        for peer in mesh.iter() {
            let peer = &mut self.workers[*peer];
            match &seal.restore {
                Restore::Live { verdict: Some(_), .. }
                    if peer.prepared.is_some() && peer.step() + 1 == step.0 =>
                {
                    peer.apply();
                }
                _ => peer.prepared = None,
            }
        }
        let zero = self.truth().spec.sharding == Sharding::Zero1;
        for (rank, peer) in mesh.iter().enumerate() {
            let (history, verdict) = match &seal.restore {
                Restore::Initial => (History::new(), None),
                Restore::Checkpoint { step } => {
                    (self.saved.get(&step.0).cloned().unwrap_or_default(), None)
                }
                Restore::Live { sources, receivers, verdict, .. } => {
                    let receives = receivers.contains(&(rank as u32)) || zero;
                    let from = match receives {
                        true => mesh[sources[0].rank as usize],
                        false => *peer,
                    };
                    for source in sources {
                        let source = &self.workers[mesh[source.rank as usize]];
                        if source.history != self.workers[mesh[sources[0].rank as usize]].history {
                            self.violated("STEP-1: sources of one restore differ");
                        }
                    }
                    let known = self.workers[*peer].verdict.clone();
                    let verdict = if receives { verdict.clone() } else { known };
                    (self.workers[from].history.clone().unwrap_or_default(), verdict)
                }
            };
            let shard = match zero {
                true => Shard { index: rank as u32, of: mesh.len() as u32, stages: 1 },
                false => Shard::WHOLE,
            };
            let until = now + self.random.range(10, 120);
            self.workers[*peer].work = Work::Restoring { until, history, shard, verdict };
        }
    }

    /// ST-2: the vote needs every rank of the mesh, prepared and with a lease.
    fn vote(&mut self, at: usize) {
        let (mesh, now) = (self.mesh(at), self.now);
        let me = &self.workers[at];
        let here = |peer: &usize| {
            let peer = &self.workers[*peer];
            peer.alive
                && peer.paused_until <= now
                && peer.generation == me.generation
                && peer.work == Work::Voting
                && peer.step() == me.step()
                && now < peer.lease_until
                && !peer.must_stop()
        };
        if mesh.iter().all(here) && self.broken_peer(at, &mesh).is_none() {
            let generation = me.generation;
            self.check_vote(generation);
            for peer in mesh.iter().copied() {
                let until = now + self.random.range(0, 60);
                self.workers[peer].work = Work::Applying { until };
            }
        } else {
            self.watch(at);
        }
    }

    /// ST-4: nobody leaves before the group says so.
    fn finish(&mut self, at: usize) {
        let mesh = self.mesh(at);
        let generation = self.workers[at].generation;
        let done = |peer: &usize| {
            let peer = &self.workers[*peer];
            peer.alive && peer.work == Work::Done && peer.generation == generation
        };
        if mesh.iter().all(done) {
            let worker = &mut self.workers[at];
            if worker.finished.is_none() {
                worker.urgent = true;
                worker.finished = Some(FinalReport {
                    step: Step(worker.step()),
                    loss: 1.0,
                    validation_loss: None,
                    weights_sha256: "abc".into(),
                    state_sha256: String::new(),
                    loss_sha256: String::new(),
                    sample: String::new(),
                });
            }
        } else if !self.workers[at].must_stop() {
            let given_up = self.workers[at].finished.is_some();
            if !given_up {
                self.watch(at);
            }
        }
    }
}
