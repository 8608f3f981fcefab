//! What the leader decides, as a pure function of the replicated state and of
//! what it has heard. Level-triggered: the same inputs give the same commands
//! until the state reflects them, so a new leader needs no memory of the old.
//!
//! [`decide`] asks in this order, each question with the answers so far taken as
//! facts: who is gone and who has come (`membership`), who does not fit
//! (`agreement`), may the group be formed again (`reforming`), is the job over (`ending`),
//! does a new generation have to begin (`planning`, with the best mesh from
//! `mesh`), where does a begun one go on from (`sealing`), is a checkpoint
//! complete or superfluous (`checkpoints`).
//!
//! Absent on purpose: memory. A decision that needs to know how long something
//! has been so finds that in [`View`], which the leader's shell keeps up.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::{
    Era, Generation, NodeId, Step,
    command::Command,
    plan::{Timestamp, WorkerRef},
    report::{NodeReport, ShardSaved, WorkerReport},
    state::JobState,
    timeouts::Timeouts,
    trust::Trust,
};

mod agreement;
mod checkpoints;
mod ending;
mod growth;
mod membership;
mod mesh;
mod planning;
mod reforming;
mod sealing;
#[cfg(test)]
mod tests;

/// What the leader has heard. Soft state: it is rebuilt from beats.
#[derive(Clone, Debug)]
pub struct View {
    /// The leader's own node.
    pub me: NodeId,
    /// Newest report of each node and when it arrived.
    pub heard: BTreeMap<NodeId, Heard>,
    /// Since when this node leads.
    pub leader_since: Duration,
    /// Since when the newest plan is known.
    pub planned_since: Duration,
    /// Since when the set of ready workers has not changed.
    pub quiet_since: Duration,
    /// When an incarnation was last evicted or replaced.
    pub evicted_at: Duration,
    /// Since when a member reports a broken connection in the newest generation.
    pub accused_since: Option<Duration>,
    /// Nodes that kept ending generations (LS-2).
    pub trust: BTreeMap<NodeId, Trust>,
    /// When the leader last heard of a new step.
    pub last_step: Timestamp,
    /// What verifying a checkpoint found.
    pub verified: BTreeMap<Step, Result<(), String>>,
    /// The leader's own tick came late: it accuses nobody (LS-2).
    pub late: bool,
    /// Now, on a clock that counts suspended time.
    pub now: Duration,
    /// Now, for records.
    pub clock: Timestamp,
}

/// A report and when it arrived.
#[derive(Clone, Debug)]
pub struct Heard {
    /// The report.
    pub report: NodeReport,
    /// When it arrived.
    pub at: Duration,
}

/// Durations that decisions depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Silence after which a node is evicted.
    pub suspect: Duration,
    /// Longest validity of a lease (LS-1).
    pub lease: Duration,
    /// How long a member may take to stop and seal.
    pub seal: Duration,
    /// How long the step in progress may take, when a plan waits for it.
    pub step: Duration,
    /// A broken connection between two workers that both look alive ends their
    /// generation after this long.
    pub accusation: Duration,
    /// Growth waits for this long a quiet when nobody is starting (GR).
    pub settle: Duration,
    /// Growth waits at most this long for nodes that are starting.
    pub settle_max: Duration,
}

impl From<&Timeouts> for Limits {
    /// The limits of decisions, out of the one budget.
    fn from(timeouts: &Timeouts) -> Self {
        Self {
            suspect: timeouts.suspect,
            lease: timeouts.lease,
            seal: timeouts.seal,
            step: timeouts.step,
            accusation: timeouts.beat * 3,
            settle: timeouts.beat,
            settle_max: timeouts.budget * 2,
        }
    }
}

/// A thing for the leader's shell to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Merge the shards' indexes into the checkpoint's own and then propose
    /// [`Command::CommitCheckpoint`].
    Assemble {
        /// Era of the save.
        era: Era,
        /// Generation of the save.
        generation: Generation,
        /// The step.
        step: Step,
        /// All ranks' shards, in rank order.
        shards: Vec<ShardSaved>,
    },
    /// Remove what was written of a save that can never be complete (LG-2).
    Discard {
        /// Era of the save.
        era: Era,
        /// Generation of the save.
        generation: Generation,
        /// The step.
        step: Step,
    },
    /// Read a checkpoint through and record what was found in
    /// [`View::verified`].
    Verify(Step),
}

/// What to do now, and what the job is waiting for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    /// To be proposed together, in order.
    pub commands: Vec<Command>,
    /// To be done by the shell.
    pub effects: Vec<Effect>,
    /// For people: what the job waits for.
    pub waiting: Option<String>,
}

/// Decides. `entropy` becomes the key of a planned generation.
#[must_use]
pub fn decide(state: &JobState, view: &View, limits: &Limits, entropy: [u8; 32]) -> Decision {
    let mut decision = Decision::default();
    if !state.is_going() && !state.can_start() {
        return decision;
    }
    let mut next = state.clone();
    decision.add(&mut next, membership::deaths(state, view, limits).into());
    let arrivals = membership::arrivals(&next, view);
    decision.add(&mut next, arrivals.into());
    let held_back = membership::held_back(&next, view);
    decision.add(&mut next, held_back.into());
    decision.effects.extend(checkpoints::discards(&next, view));
    let strangers = agreement::decide(&next, view);
    decision.add(&mut next, strangers.into());
    let reforming = reforming::decide(&next, view);
    decision.add(&mut next, reforming.into());
    let ends = ending::decide(&next, view);
    decision.add(&mut next, ends.into());
    if next.is_going() {
        let resumed = sealing::resumed(&next, view);
        decision.add(&mut next, resumed.into());
        let planned = planning::decide(&next, view, limits, entropy);
        decision.add(&mut next, planned);
        if next.generation() == state.generation() {
            let sealed = sealing::decide(&next, view, limits);
            decision.add(&mut next, sealed);
        }
        let kept = checkpoints::decide(&next, view);
        decision.add(&mut next, kept);
    }
    decision
}

impl View {
    /// What the leader heard of a worker, from the process start that owns it:
    /// worker ids begin anew with each (ID-2).
    fn worker(&self, state: &JobState, worker: &WorkerRef) -> Option<&WorkerReport> {
        let node = state.nodes.get(&worker.node).filter(|_| state.is_current(worker))?;
        let heard = self.heard.get(&worker.node).filter(|heard| heard.report.boot == node.boot)?;
        heard.report.workers.iter().find(|report| report.worker == worker.worker)
    }
}

impl Decision {
    /// Takes over a partial decision; commands that do not fit the state as it
    /// will be after the earlier ones are dropped.
    fn add(&mut self, next: &mut JobState, other: Self) {
        for command in other.commands {
            if !next.apply(command.clone()).is_empty() {
                self.commands.push(command);
            }
        }
        self.effects.extend(other.effects);
        self.waiting = self.waiting.take().or(other.waiting);
    }
}

impl From<Vec<Command>> for Decision {
    fn from(commands: Vec<Command>) -> Self {
        Self { commands, ..Self::default() }
    }
}

/// Nodes that are certainly dead, by process start: the leader saw the reset
/// and the refusal itself, or two other nodes did (LS-2).
fn certainly_dead(view: &View) -> BTreeSet<(NodeId, u64)> {
    let mut accusers: BTreeMap<(NodeId, u64), u32> = BTreeMap::new();
    for (name, heard) in &view.heard {
        let weight = if *name == view.me { 2 } else { 1 };
        for dead in &heard.report.dead_peers {
            *accusers.entry(dead.clone()).or_default() += weight;
        }
    }
    accusers.into_iter().filter(|(_, weight)| *weight >= 2).map(|(dead, _)| dead).collect()
}
