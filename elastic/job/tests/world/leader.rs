//! The shell around the planner: soft state out of beats, proposals that commit
//! a little later or never, effects carried out. It is lost with leadership.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use job::{
    Generation, NodeId, Step,
    command::{Command, Event},
    plan::Timestamp,
    planner::{self, Effect, Heard, Limits, View},
    report::WorkerState,
    state::JobState,
};

use crate::{
    agent::Beat,
    sim::{BEAT, LEASE, Mail, Millis, SEAL, SUSPECT, Sim},
};

pub(crate) struct Leader {
    pub(crate) node: usize,
    boot: u64,
    view: View,
    proposal: Option<(Millis, Vec<Command>)>,
    assembling: BTreeMap<Step, (Millis, Command)>,
    verifying: BTreeMap<Step, Millis>,
    ready: BTreeSet<(NodeId, u64)>,
    planned: Generation,
    decided_at: Millis,
    news: bool,
}

const LIMITS: Limits = Limits {
    suspect: Duration::from_millis(SUSPECT),
    lease: Duration::from_millis(LEASE),
    seal: Duration::from_millis(SEAL),
    step: Duration::from_secs(5),
    accusation: Duration::from_millis(3 * BEAT),
    settle: Duration::from_millis(BEAT),
    settle_max: Duration::from_millis(2_400),
};

fn span(at: Millis) -> Duration {
    Duration::from_millis(at)
}

impl Leader {
    fn new(node: usize, me: NodeId, boot: u64, at: Millis) -> Self {
        let now = span(at);
        let view = View {
            me,
            heard: BTreeMap::new(),
            leader_since: now,
            planned_since: now,
            quiet_since: now,
            evicted_at: now,
            accused_since: None,
            trust: BTreeMap::new(),
            last_step: Timestamp(at * 1000),
            verified: BTreeMap::new(),
            late: false,
            now,
            clock: Timestamp(at * 1000),
        };
        Self {
            node,
            boot,
            view,
            proposal: None,
            assembling: BTreeMap::new(),
            verifying: BTreeMap::new(),
            ready: BTreeSet::new(),
            planned: Generation(0),
            decided_at: 0,
            news: true,
        }
    }

    fn hear(&mut self, beat: Beat, now: Millis) {
        let at = span(now);
        self.view.heard.insert(beat.report.node.clone(), Heard { report: beat.report, at });
        let ready: BTreeSet<(NodeId, u64)> = self
            .view
            .heard
            .values()
            .flat_map(|heard| {
                let ready = heard.report.workers.iter().filter(|w| w.state == WorkerState::Ready);
                ready.map(|w| (heard.report.node.clone(), w.worker.0 ^ heard.report.boot))
            })
            .collect();
        if ready != self.ready {
            self.ready = ready;
            self.view.quiet_since = at;
        }
        self.news = true;
    }

    pub(crate) fn applied(&mut self, event: &Event, now: Millis) {
        self.news = true;
        match event {
            Event::NodeEvicted { node, .. } => {
                self.view.evicted_at = span(now);
                self.view.heard.remove(node);
            }
            Event::NodeAdmitted { .. } => {
                self.view.evicted_at = span(now);
                self.view.quiet_since = span(now);
            }
            Event::CheckpointCommitted { step, .. } => drop(self.assembling.remove(step)),
            _ => {}
        }
    }

    fn refresh(&mut self, state: &JobState, now: Millis) {
        self.view.now = span(now);
        self.view.clock = Timestamp(now * 1000);
        let generation = state.generation();
        if generation != self.planned {
            self.planned = generation;
            self.view.planned_since = self.view.now;
            self.view.accused_since = None;
            self.view.verified.clear();
        }
        let accused = self.view.heard.values().any(|heard| {
            let mut accusations = heard.report.workers.iter().filter_map(|worker| worker.accuses);
            accusations.any(|(at, _)| at == generation)
        });
        match (accused, self.view.accused_since) {
            (true, None) => self.view.accused_since = Some(self.view.now),
            (false, Some(_)) => self.view.accused_since = None,
            _ => {}
        }
    }
}

impl Sim {
    /// The leader is gone or cut off: what it proposed may have passed.
    pub(crate) fn lose_leader(&mut self, node: usize, certain: bool) {
        let Some(leader) = self.leader.take_if(|leader| leader.node == node) else { return };
        if let Some((_, commands)) = leader.proposal
            && self.random.percent(50)
        {
            self.commit(commands);
        }
        let delay = match certain && self.random.percent(70) {
            true => self.random.range(20, 100),
            false => self.random.range(500, 900),
        };
        self.elect_at = self.now + delay;
    }

    fn elect(&mut self) {
        let truth = self.truth();
        let able: Vec<usize> = (0..self.nodes.len())
            .filter(|number| {
                let node = &self.nodes[*number];
                let known = truth.nodes.get(&node.name);
                node.agent.as_ref().is_some_and(|agent| {
                    let member =
                        known.is_some_and(|k| k.boot == agent.boot || k.store == node.store);
                    agent.silent_until <= self.now && (member || truth.nodes.is_empty())
                })
            })
            .collect();
        let Some(node) = self.random.pick(&able) else { return };
        let name = self.nodes[node].name.clone();
        let boot = self.nodes[node].agent.as_ref().map_or(0, |agent| agent.boot);
        self.note(format!("{name} leads"));
        self.leader = Some(Leader::new(node, name, boot, self.now));
    }

    pub(crate) fn hear(&mut self, beat: Beat) {
        let (truth, now) = (self.truth(), self.now);
        let known = truth.nodes.get(&beat.report.node);
        let fenced = known.is_some_and(|node| node.boot == beat.report.boot && !node.is_live());
        let Some(leader) = self.leader.as_mut().filter(|leader| leader.node == beat.to) else {
            return;
        };
        if fenced {
            return;
        }
        let answer = Mail::Answer(beat.from, beat.report.boot, beat.sent);
        leader.hear(beat, now);
        let at = now + self.random.range(1, 40);
        self.mail.push((at, answer));
    }

    /// One turn of the leader.
    pub(crate) fn lead(&mut self) {
        let now = self.now;
        if self.leader.is_none() && now >= self.elect_at {
            self.elect();
        }
        let passed = self.leader.as_mut().and_then(|leader| {
            leader.proposal.take_if(|(due, _)| *due <= now).map(|(_, commands)| commands)
        });
        if let Some(commands) = passed {
            self.commit(commands);
        }
        let mut assembled = Vec::new();
        if let Some(leader) = &mut self.leader {
            for (due, command) in leader.assembling.values_mut().filter(|(due, _)| *due <= now) {
                *due = Millis::MAX;
                assembled.push(command.clone());
            }
            let due = |(step, at): (&Step, &Millis)| (*at <= now).then_some(*step);
            for step in leader.verifying.iter().filter_map(due).collect::<Vec<_>>() {
                leader.verifying.remove(&step);
                let found = match self.damaged.contains(&step.0) {
                    true => Err("a byte is flipped".to_owned()),
                    false => Ok(()),
                };
                leader.view.verified.insert(step, found);
                leader.news = true;
            }
        }
        assembled.into_iter().for_each(|command| self.commit(vec![command]));
        self.decide();
    }

    fn decide(&mut self) {
        let (now, truth) = (self.now, self.truth());
        let late = self.random.percent(1);
        let (passes, works) = (self.random.range(10, 60), self.random.range(20, 200));
        let key = [self.random.next() as u8; 32];
        let Some(leader) = &mut self.leader else { return };
        let alive = self.nodes[leader.node].agent.as_ref().is_some_and(|a| a.boot == leader.boot);
        if !alive || leader.proposal.is_some() || !(leader.news || now >= leader.decided_at + BEAT)
        {
            return;
        }
        (leader.news, leader.decided_at) = (false, now);
        leader.refresh(&truth, now);
        leader.view.late = late;
        let decision = planner::decide(&truth, &leader.view, &LIMITS, key);
        if !decision.commands.is_empty() {
            leader.proposal = Some((now + passes, decision.commands));
        }
        for effect in decision.effects {
            match effect {
                Effect::Assemble { era, generation, step, .. } => {
                    let command = Command::CommitCheckpoint {
                        era,
                        generation,
                        step,
                        stage: format!(".stage-{generation}-{step}"),
                        files: Vec::new(),
                        stall_micros: 0,
                        at: Timestamp(now * 1000),
                    };
                    leader.assembling.entry(step).or_insert((now + works, command));
                }
                // No save fails in this world.
                Effect::Discard { .. } => {}
                Effect::Verify(step) => {
                    leader.verifying.entry(step).or_insert(now + works);
                }
            }
        }
    }
}
