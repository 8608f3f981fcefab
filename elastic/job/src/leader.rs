//! What a leading node keeps beside the replicated state, and what it does with
//! it: beats are answered behind a quorum round (LS-1), the planner is asked one
//! proposal at a time, and the control group's membership follows the live
//! nodes. All of it is soft: it goes with leadership and is rebuilt from beats.
//!
//! Whoever hosts a [`Leader`] (an agent, a simulated one) passes on what it hears
//! together with the time, and carries out what comes back. The host owns the
//! clock, the group and the checkpoint folder; nothing here waits.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::{
    Era, Generation, NodeId, Step, StoreId, WorkerId,
    command::Event,
    links,
    plan::Timestamp,
    planner::{self, Decision, Effect, Heard, Limits, View},
    report::{NodeReport, WorkerState},
    state::{JobState, Node},
    trust::Reputation,
    voters,
};

/// Now, on both clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// On the host's clock that counts suspended time: limits run on it.
    pub now: Duration,
    /// Wall time, for records.
    pub clock: Timestamp,
}

/// A beat that waits for a quorum round before it is answered (LS-1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beat {
    /// Whose; none for the leader's own.
    pub from: Option<StoreId>,
    /// When it was sent, on the sender's clock.
    pub sent_micros: u64,
}

/// What came of a beat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hearing {
    /// It waits for its answer, and says nothing new.
    Known,
    /// It waits for its answer, and a decision may follow from it.
    News,
    /// The group went on without this process start: it gets no lease, but it gets
    /// to know.
    Fenced {
        /// Why.
        cause: String,
        /// Whether starting again is useless.
        refused: bool,
    },
}

/// The members of the control group, as its leader knows them.
#[derive(Clone, Copy, Debug)]
pub struct Members<'a> {
    /// With a vote, by Raft id.
    pub voters: &'a [u64],
    /// Without.
    pub learners: &'a [u64],
    /// The leader itself.
    pub leader: u64,
}

/// The soft state of a leading node.
#[derive(Debug)]
pub struct Leader {
    view: View,
    /// Beats to answer after the next quorum round.
    waiting: Vec<Beat>,
    /// A quorum round is under way.
    reading: bool,
    /// A proposal is under way: its outcome decides what comes next.
    proposing: bool,
    /// A membership change of the control group is under way.
    changing: bool,
    /// Saves that are being assembled, and checkpoints that are being verified.
    working_on: BTreeSet<Step>,
    /// Failed saves whose remains are removed.
    discarded: BTreeSet<(Step, Era, Generation)>,
    newest_step: Step,
    /// The newest generation that was decided on.
    planned: Generation,
    /// The nodes of the newest generation.
    mesh: Vec<NodeId>,
    reputation: Reputation,
}

impl Leader {
    /// A node that begins to lead.
    #[must_use]
    pub fn new(me: NodeId, at: Moment) -> Self {
        let Moment { now, clock } = at;
        let view = View {
            me,
            heard: BTreeMap::new(),
            leader_since: now,
            planned_since: now,
            quiet_since: now,
            evicted_at: now,
            accused_since: None,
            trust: BTreeMap::new(),
            last_step: clock,
            verified: BTreeMap::new(),
            late: false,
            now,
            clock,
        };
        Self {
            view,
            waiting: Vec::new(),
            reading: false,
            proposing: false,
            changing: false,
            working_on: BTreeSet::new(),
            discarded: BTreeSet::new(),
            newest_step: Step(0),
            planned: Generation(0),
            mesh: Vec::new(),
            reputation: Reputation::default(),
        }
    }

    /// What was heard so far.
    #[must_use]
    pub fn view(&self) -> &View {
        &self.view
    }

    /// Takes a beat.
    pub fn hear(
        &mut self,
        state: &JobState,
        beat: Beat,
        report: NodeReport,
        at: Moment,
    ) -> Hearing {
        let known = state.nodes.get(&report.node).filter(|node| node.boot == report.boot);
        if let (Some((cause, refused)), Some(_)) = (known.and_then(Node::fenced), beat.from) {
            return Hearing::Fenced { cause: cause.to_owned(), refused };
        }
        let progress = report.workers.iter().filter_map(|worker| worker.progress);
        let step = progress.map(|progress| progress.step).max();
        if let Some(step) = step.filter(|step| *step != self.newest_step) {
            self.newest_step = step;
            self.view.last_step = at.clock;
        }
        let heard = Heard { report, at: at.now };
        let name = heard.report.node.clone();
        let before = self.view.heard.get(&name).map(|heard| &heard.report);
        let news = before != Some(&heard.report);
        let ready_before = before.map(ready).unwrap_or_default();
        let ready_now = ready(&heard.report);
        if news
            && ready_before != ready_now
            && !(ready_before.1.is_empty() && ready_now.1.is_empty())
        {
            self.view.quiet_since = at.now;
        }
        self.view.heard.insert(name, heard);
        self.waiting.push(beat);
        if news { Hearing::News } else { Hearing::Known }
    }

    /// Begins a quorum round for the beats that wait; one round serves them all,
    /// and one is under way at a time.
    pub fn begin_round(&mut self) -> Option<Vec<Beat>> {
        if self.reading || self.waiting.is_empty() {
            return None;
        }
        self.reading = true;
        Some(std::mem::take(&mut self.waiting))
    }

    /// The round ended, one way or the other.
    pub fn round_ended(&mut self) {
        self.reading = false;
    }

    /// The leader's own tick came, in time or late (LS-2).
    pub fn ticked(&mut self, late: bool) {
        self.view.late = late;
    }

    /// Takes note of what became a fact.
    pub fn applied(&mut self, event: &Event, at: Moment) {
        match event {
            Event::NodeEvicted { node, cause, .. } | Event::NodeRefused { node, cause, .. } => {
                self.view.evicted_at = at.now;
                if cause.starts_with(links::BROKEN) {
                    self.reputation.broke(node, at.now);
                }
                // Whoever speaks under this name next speaks for itself.
                let heard = self.view.heard.remove(node);
                if heard.is_some_and(|heard| !ready(&heard.report).1.is_empty()) {
                    self.view.quiet_since = at.now;
                }
            }
            Event::NodeAdmitted { .. } => {
                self.view.evicted_at = at.now;
                self.view.quiet_since = at.now;
            }
            Event::Planned { mesh, failure, .. } => {
                let before = std::mem::replace(&mut self.mesh, mesh.clone());
                if *failure {
                    self.lost(before, at);
                }
            }
            Event::Resumed { step, .. } => self.reputation.hold(&self.mesh, *step),
            Event::CheckpointCommitted { step, .. } => {
                self.working_on.remove(step);
            }
            _ => {}
        }
    }

    /// Of the nodes that trained before a failure, those that are not in the mesh any
    /// more and could not be are lost.
    fn lost(&mut self, before: Vec<NodeId>, at: Moment) {
        let now: BTreeSet<&NodeId> = self.mesh.iter().collect();
        for node in before.iter().filter(|node| !now.contains(node)) {
            let heard = self.view.heard.get(node);
            if heard.is_none_or(|heard| ready(&heard.report).1.is_empty()) {
                self.reputation.lost(node, self.newest_step, at.now);
            }
        }
    }

    /// Asks the planner. None while a proposal is under way; what is decided is
    /// to be proposed, and each effect to be carried out once.
    pub fn decide(
        &mut self,
        state: &JobState,
        limits: &Limits,
        at: Moment,
        entropy: [u8; 32],
    ) -> Option<Decision> {
        if self.proposing {
            return None;
        }
        self.refresh(state, at);
        self.view.trust = self.reputation.trust(self.newest_step, at.now, limits.settle_max);
        let mut decision = planner::decide(state, &self.view, limits, entropy);
        self.proposing = !decision.commands.is_empty();
        decision.effects.retain(|effect| match effect {
            Effect::Assemble { step, .. } | Effect::Verify(step) => self.working_on.insert(*step),
            Effect::Discard { era, generation, step } => {
                self.discarded.insert((*step, *era, *generation))
            }
        });
        Some(decision)
    }

    /// A proposal ended, one way or the other.
    pub fn proposal_ended(&mut self) {
        self.proposing = false;
    }

    /// A committed checkpoint was read through.
    pub fn verified(&mut self, step: Step, found: Result<(), String>) {
        self.working_on.remove(&step);
        self.view.verified.insert(step, found);
    }

    /// One step of the control group's membership towards the live nodes (CG);
    /// none while another is under way.
    pub fn change(
        &mut self,
        state: &JobState,
        members: Members<'_>,
    ) -> Option<(voters::Change, voters::Reason)> {
        if self.changing {
            return None;
        }
        let alive: BTreeSet<u64> = state.live_nodes().map(|(_, n)| n.store.raft_id()).collect();
        let all = members.voters.iter().chain(members.learners).copied();
        let gone: Vec<u64> = all.filter(|id| !alive.contains(id)).collect();
        let change = voters::next_change(&voters::View {
            voters: members.voters,
            learners: members.learners,
            live: &self.live(state),
            gone: &gone,
            leader: members.leader,
        })?;
        self.changing = true;
        Some(change)
    }

    /// A membership change ended, one way or the other.
    pub fn change_ended(&mut self) {
        self.changing = false;
    }

    /// Brings the view up to now.
    fn refresh(&mut self, state: &JobState, at: Moment) {
        self.view.now = at.now;
        self.view.clock = at.clock;
        if self.view.late {
            // LS-2: who did not listen accuses nobody; from now on it listens again.
            self.view.heard.values_mut().for_each(|heard| heard.at = at.now);
        }
        let generation = state.generation();
        if generation != self.planned {
            self.planned = generation;
            self.view.planned_since = at.now;
            // What was sound at an earlier restore may be damaged or rewritten by now.
            self.view.verified.clear();
            self.view.accused_since = None;
        }
        let reports = self.view.heard.values().flat_map(|heard| &heard.report.workers);
        let accused = reports
            .filter_map(|worker| worker.accuses)
            .any(|(accused_in, _)| accused_in == generation);
        match (accused, self.view.accused_since) {
            (true, None) => self.view.accused_since = Some(at.now),
            (false, Some(_)) => self.view.accused_since = None,
            _ => {}
        }
    }

    /// Raft members that answer, best suited to vote first: the leader, then by
    /// name.
    fn live(&self, state: &JobState) -> Vec<u64> {
        let mut live: Vec<(bool, &NodeId, u64)> = state
            .live_nodes()
            .filter(|(name, node)| {
                self.view.heard.get(*name).is_some_and(|heard| heard.report.boot == node.boot)
            })
            .map(|(name, node)| (*name != self.view.me, name, node.store.raft_id()))
            .collect();
        live.sort();
        live.into_iter().map(|(.., id)| id).collect()
    }
}

/// The ready workers of a process start.
fn ready(report: &NodeReport) -> (u64, Vec<WorkerId>) {
    let ready = report.workers.iter().filter(|worker| worker.state == WorkerState::Ready);
    (report.boot, ready.map(|worker| worker.worker).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Era, JobId, spec::JobSpec, spec::Sharding};

    fn node(name: &str) -> NodeId {
        NodeId::new(name).expect("a good name")
    }

    fn at(millis: u64) -> Moment {
        Moment { now: Duration::from_millis(millis), clock: Timestamp(millis * 1000) }
    }

    #[test]
    fn ls_2_whoever_did_not_listen_accuses_nobody() {
        let spec = JobSpec {
            job: JobId(uuid::Uuid::nil()),
            config: String::new(),
            config_digest: [0; 32],
            min_nodes: 1,
            max_nodes: 8,
            micro_batches: Some(8),
            total_steps: Step(1),
            sharding: Sharding::Replicated,
            parallel: Default::default(),
            max_failures: 1,
            max_preemptions: 1,
            exact: true,
            checkpoints: true,
            keep_latest_k: 1,
            authority: String::new(),
            join_secret: String::new(),
        };
        let state = JobState::found(spec, Era(0), Timestamp(0));
        let mut leader = Leader::new(node("n1"), at(0));
        let report = NodeReport {
            node: node("n2"),
            store: StoreId(uuid::Uuid::nil()),
            boot: 1,
            incarnation: None,
            address: ([127, 0, 0, 1], 4000).into(),
            slots: 1,
            leaving: false,
            stop_job: false,
            recorded: Step(0),
            shared: None,
            dead_peers: Vec::new(),
            workers: Vec::new(),
        };
        leader.hear(&state, Beat { from: None, sent_micros: 0 }, report, at(0));
        let silence = |leader: &Leader| leader.view.now - leader.view.heard[&node("n2")].at;
        leader.refresh(&state, at(500));
        assert_eq!(silence(&leader), Duration::from_millis(500), "it listened");
        // Stopped for seconds: what the others said meanwhile is still in the queue.
        leader.ticked(true);
        leader.refresh(&state, at(3_000));
        assert_eq!(silence(&leader), Duration::ZERO, "it was away itself");
        leader.ticked(false);
        leader.refresh(&state, at(3_100));
        assert_eq!(silence(&leader), Duration::from_millis(100), "silence counts anew");
    }
}
