//! The soft state of a leading agent: what it heard, and what it is about to do.
//! Everything here is lost with leadership and rebuilt from beats.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use job::{
    Generation, NodeId, Step, StoreId,
    command::Event,
    planner::{Heard, Limits, View},
    report::{NodeReport, WorkerState},
    state::JobState,
    timeouts::Timeouts,
};

use crate::clock;

/// A beat that waits for a quorum round before it is answered (LS-1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PendingBeat {
    /// None for the leader's own.
    pub(super) from: Option<StoreId>,
    pub(super) sent_micros: u64,
}

#[derive(Debug)]
pub(super) struct Leadership {
    pub(super) view: View,
    /// Beats to answer after the next quorum round.
    pub(super) waiting: Vec<PendingBeat>,
    /// A quorum round is under way.
    pub(super) reading: bool,
    /// A proposal is under way: its outcome decides what comes next.
    pub(super) proposing: bool,
    /// A membership change of the control group is under way.
    pub(super) changing: bool,
    /// Saves that are being assembled, and checkpoints that are being verified.
    pub(super) working_on: BTreeSet<Step>,
    ready: BTreeSet<(NodeId, u64)>,
    newest_step: Step,
    /// The newest generation that was decided on.
    planned: Generation,
}

impl Leadership {
    pub(super) fn new(me: NodeId) -> Self {
        let now = clock::now();
        let view = View {
            me,
            heard: BTreeMap::new(),
            leader_since: now,
            planned_since: now,
            quiet_since: now,
            evicted_at: now,
            accused_since: None,
            last_step: clock::timestamp(),
            verified: BTreeMap::new(),
            late: false,
            now,
            clock: clock::timestamp(),
        };
        Self {
            view,
            waiting: Vec::new(),
            reading: false,
            proposing: false,
            changing: false,
            working_on: BTreeSet::new(),
            ready: BTreeSet::new(),
            newest_step: Step(0),
            planned: Generation(0),
        }
    }

    /// Takes a node's beat.
    pub(super) fn hear(&mut self, report: NodeReport) {
        let at = clock::now();
        let step = report
            .workers
            .iter()
            .filter_map(|worker| worker.progress)
            .map(|progress| progress.step)
            .max();
        if let Some(step) = step.filter(|step| *step != self.newest_step) {
            self.newest_step = step;
            self.view.last_step = clock::timestamp();
        }
        self.view.heard.insert(report.node.clone(), Heard { report, at });
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
    }

    /// Takes note of what became a fact.
    pub(super) fn applied(&mut self, event: &Event) {
        match event {
            Event::NodeEvicted { node, .. } => {
                self.view.evicted_at = clock::now();
                // Whoever speaks under this name next speaks for itself.
                self.view.heard.remove(node);
            }
            Event::NodeAdmitted { .. } => {
                self.view.evicted_at = clock::now();
                self.view.quiet_since = clock::now();
            }
            _ => {}
        }
    }

    /// Brings the view up to now.
    pub(super) fn refresh(&mut self, state: &JobState, late: bool) {
        self.view.now = clock::now();
        self.view.clock = clock::timestamp();
        self.view.late = late;
        let generation = state.generation();
        if generation != self.planned {
            self.planned = generation;
            self.view.planned_since = self.view.now;
            // What was sound at an earlier restore may be damaged or rewritten by now.
            self.view.verified.clear();
            self.view.accused_since = None;
        }
        let accused = self.view.heard.values().any(|heard| {
            heard
                .report
                .workers
                .iter()
                .any(|worker| worker.accuses.is_some_and(|(at, _)| at == generation))
        });
        match (accused, self.view.accused_since) {
            (true, None) => self.view.accused_since = Some(self.view.now),
            (false, Some(_)) => self.view.accused_since = None,
            _ => {}
        }
    }

    /// Raft members that answer, best suited to vote first: nodes that train
    /// before others, then by name.
    pub(super) fn live(&self, state: &JobState) -> Vec<u64> {
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

/// The limits that decisions depend on, out of the one budget.
pub(super) fn limits(timeouts: &Timeouts) -> Limits {
    Limits {
        suspect: timeouts.suspect,
        lease: timeouts.lease,
        seal: timeouts.seal,
        step: timeouts.step,
        accusation: timeouts.beat * 3,
        settle: timeouts.beat,
        settle_max: timeouts.budget * 2,
    }
}

/// A tick that came this much later than planned says that this process did not
/// run, not that others were silent (LS-2).
pub(super) fn is_late(planned: Duration, timeouts: &Timeouts) -> bool {
    clock::now().saturating_sub(planned) > timeouts.beat * 2
}
