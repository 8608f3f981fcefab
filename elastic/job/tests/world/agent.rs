//! Agents: they follow the log, beat, supervise workers, and end when fenced.

use std::{collections::BTreeSet, rc::Rc};

use job::{
    NodeId, StoreId, WorkerId,
    plan::WorkerRef,
    report::{NodeReport, WorkerReport, WorkerState},
    state::JobState,
};

use crate::{
    rank::Worker,
    sim::{BEAT, Mail, Millis, SUSPECT, Sim},
};

/// A machine; its agent comes and goes.
pub(crate) struct Node {
    pub(crate) name: NodeId,
    pub(crate) store: StoreId,
    pub(crate) agent: Option<Agent>,
    /// When its agent is started again; never once it left.
    pub(crate) restart_at: Millis,
    pub(crate) left: bool,
}

/// A process start.
pub(crate) struct Agent {
    pub(crate) boot: u64,
    /// The entry of the log up to which it has applied.
    pub(crate) applied: usize,
    follows_at: Millis,
    pub(crate) leaving: bool,
    /// It does not run and hears nothing until then.
    pub(crate) silent_until: Millis,
    pub(crate) lease_until: Millis,
    beat_at: Millis,
    last_arrival: Millis,
    dead: Vec<(Millis, NodeId, u64)>,
    pub(crate) worker: Option<usize>,
    spawn_at: Millis,
    last_worker: u64,
    lost: Vec<WorkerReport>,
    admitted: bool,
}

pub(crate) struct Beat {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) sent: Millis,
    pub(crate) report: NodeReport,
}

impl Sim {
    pub(crate) fn add_node(&mut self) {
        let number = self.nodes.len();
        let name =
            NodeId::new(format!("n{:02}", self.random.range(0, 49) * 2 + 100 * number as u64))
                .expect("a good name");
        let restart_at = self.now + self.random.range(0, 500);
        let store = StoreId(uuid::Uuid::from_u128(1 + number as u128));
        self.nodes.push(Node { name, store, agent: None, restart_at, left: false });
    }

    pub(crate) fn agents(&mut self) {
        for number in 0..self.nodes.len() {
            if self.nodes[number].agent.is_some() {
                self.agent(number);
            } else if !self.nodes[number].left && self.now >= self.nodes[number].restart_at {
                self.start_agent(number);
            }
        }
    }

    fn start_agent(&mut self, number: usize) {
        let boot = self.random.next() >> 1;
        let (now, applied) = (self.now, self.log.len() - 1);
        self.nodes[number].agent = Some(Agent {
            boot,
            applied,
            follows_at: now,
            leaving: false,
            silent_until: 0,
            lease_until: 0,
            beat_at: now,
            last_arrival: now,
            dead: Vec::new(),
            worker: None,
            spawn_at: now,
            last_worker: 0,
            lost: Vec::new(),
            admitted: false,
        });
    }

    /// The agent's process is gone. Its worker notices a little later (LS-3).
    pub(crate) fn end_agent(&mut self, number: usize, orphan_for: Millis) {
        let Some(agent) = self.nodes[number].agent.take() else { return };
        let now = self.now;
        if let Some(worker) = agent.worker {
            self.workers[worker].orphan_until = Some(now + orphan_for);
        }
        self.nodes[number].restart_at = now + self.random.range(100, 2_000);
        if self.random.percent(10) {
            // It comes back without its disk (ID-1).
            self.nodes[number].store =
                StoreId(uuid::Uuid::from_u128(u128::from(self.random.next())));
        }
        let name = self.nodes[number].name.clone();
        for other in 0..self.nodes.len() {
            let at = now + self.random.range(5, 60);
            // Some connections are cut silently.
            let sees = self.random.percent(80);
            if let Some(other) = self.nodes[other].agent.as_mut().filter(|_| sees) {
                other.dead.push((at, name.clone(), agent.boot));
            }
        }
        self.lose_leader(number, true);
    }

    fn agent(&mut self, number: usize) {
        let now = self.now;
        let (newest, lag) = (self.log.len() - 1, self.random.range(0, 40));
        let leads = self.leader.as_ref().is_some_and(|leader| leader.node == number);
        let node = &mut self.nodes[number];
        let Some(agent) = &mut node.agent else { return };
        if agent.silent_until > now {
            return;
        }
        if leads || (agent.applied < newest && now >= agent.follows_at) {
            agent.applied = newest;
            agent.follows_at = now + lag;
        }
        let seen = Rc::clone(&self.log[agent.applied]);
        if self.is_over(number, &seen) {
            let orphans = 0;
            let left = self.nodes[number].agent.as_ref().is_some_and(|agent| agent.leaving);
            self.end_agent(number, orphans);
            self.nodes[number].left |= left;
            return;
        }
        self.supervise(number, &seen);
        let agent = self.nodes[number].agent.as_mut().expect("it runs");
        let lease = agent.lease_until;
        if let Some(worker) = agent.worker {
            self.workers[worker].lease_until = lease;
            self.tell(worker, &seen);
        }
        self.beat(number, &seen);
    }

    /// Fenced, replaced, or gone as it wished.
    fn is_over(&mut self, number: usize, seen: &JobState) -> bool {
        let node = &mut self.nodes[number];
        let Some(agent) = &mut node.agent else { return false };
        match seen.nodes.get(&node.name) {
            Some(me) if me.boot == agent.boot => {
                agent.admitted = true;
                !me.is_live()
            }
            Some(_) => agent.admitted,
            None => false,
        }
    }

    fn supervise(&mut self, number: usize, seen: &JobState) {
        let now = self.now;
        let pause = self.random.range(0, 300);
        let starts = self.random.range(200, 600);
        let next = self.workers.len();
        let node = &mut self.nodes[number];
        let agent = node.agent.as_mut().expect("it runs");
        if let Some(at) = agent.worker {
            let worker = &mut self.workers[at];
            // A worker that says nothing is made what it seems.
            if worker.paused_until > now && now - worker.paused_since > SUSPECT {
                worker.alive = false;
            }
            if !worker.alive {
                let mut report = worker.report();
                report.state = WorkerState::Lost("killed".into());
                report.sealed = None;
                agent.lost.push(report);
                agent.worker = None;
                agent.spawn_at = now + pause;
                agent.beat_at = now;
            }
        }
        let known = seen.nodes.get(&node.name).filter(|known| known.boot == agent.boot);
        let incarnation = known.map(|known| known.incarnation);
        if let (None, Some(incarnation), false) = (agent.worker, incarnation, agent.leaving)
            && now >= agent.spawn_at
        {
            agent.last_worker += 1;
            let id = WorkerRef {
                node: node.name.clone(),
                incarnation,
                worker: WorkerId(agent.last_worker),
            };
            self.workers.push(Worker::new(id, number, now + starts));
            agent.worker = Some(next);
        }
        let members: BTreeSet<&WorkerRef> =
            seen.plan.iter().flat_map(|plan| &plan.members).map(|member| &member.worker).collect();
        let newest = seen.checkpoints.keys().next_back().copied();
        agent.lost.retain_mut(|report| {
            report.saved.retain(|saved| newest.is_none_or(|newest| saved.step > newest));
            let known = members.iter().any(|member| {
                member.node == node.name
                    && Some(member.incarnation) == incarnation
                    && member.worker == report.worker
            });
            known || !report.saved.is_empty()
        });
    }

    fn beat(&mut self, number: usize, seen: &JobState) {
        let now = self.now;
        let urgent = self.nodes[number].agent.as_ref().and_then(|agent| agent.worker);
        let urgent = urgent.is_some_and(|worker| std::mem::take(&mut self.workers[worker].urgent));
        let delay = match self.random.percent(5) {
            true => self.random.range(50, 400),
            false => self.random.range(1, 20),
        };
        let (twice, late) = (self.random.percent(4), self.random.range(50, 1_500));
        let node = &mut self.nodes[number];
        let Some(agent) = &mut node.agent else { return };
        if now < agent.beat_at && !urgent {
            return;
        }
        agent.beat_at = now + BEAT;
        let Some(leader) = self.leader.as_ref().map(|leader| leader.node) else { return };
        let known = seen.nodes.get(&node.name).filter(|known| known.boot == agent.boot);
        agent.dead.retain(|(_, name, boot)| {
            seen.nodes.get(name).is_none_or(|node| node.boot == *boot && node.is_live())
        });
        let dead = agent.dead.iter().filter(|(at, ..)| *at <= now);
        let mut workers: Vec<WorkerReport> =
            agent.worker.map(|worker| self.workers[worker].report()).into_iter().collect();
        let newest = seen.checkpoints.keys().next_back().copied();
        for worker in &mut workers {
            worker.saved.retain(|saved| newest.is_none_or(|newest| saved.step > newest));
        }
        workers.extend(agent.lost.iter().cloned());
        let report = NodeReport {
            node: node.name.clone(),
            store: node.store,
            boot: agent.boot,
            incarnation: known.map(|node| node.incarnation),
            address: address(number),
            slots: 1,
            leaving: agent.leaving,
            stop_job: false,
            recorded: job::Step(0),
            shared: None,
            dead_peers: dead.map(|(_, name, boot)| (name.clone(), *boot)).collect(),
            workers,
        };
        // One ordered stream; what comes twice comes late.
        let arrival = match number == leader {
            true => now,
            false => agent.last_arrival.max(now + delay),
        };
        agent.last_arrival = arrival;
        let beat = |report| Mail::Beat(Beat { from: number, to: leader, sent: now, report });
        if twice {
            self.mail.push((arrival + late, beat(report.clone())));
        }
        self.mail.push((arrival, beat(report)));
    }
}

pub(crate) fn address(number: usize) -> std::net::SocketAddr {
    (std::net::Ipv4Addr::LOCALHOST, 4000 + number as u16).into()
}
