//! What went wrong and where the wall time went (OBS-1): a fold over the
//! leaders' time stamps, kept in the replicated state so that it survives every
//! process. Each moment between founding and end belongs to exactly one kind.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{
    Generation, NodeId, Step,
    plan::{Plan, Restore, Seal, Timestamp},
    report::ResumeTiming,
};

#[cfg(test)]
mod tests;

/// Wall time by kind, in microseconds.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Accounting {
    /// From founding to the first step.
    pub startup: u64,
    /// Steps that count, and the evaluation at the end.
    pub productive: u64,
    /// From the last committed step to the moment that the loss was noticed:
    /// the unfinished step and the silence. All of it when everything was down.
    pub detect: u64,
    /// Reaching agreement on a plan.
    pub agree: u64,
    /// Stopping the old generation and agreeing on where to go on from.
    pub abort: u64,
    /// Building communicators.
    pub rebuild: u64,
    /// Restoring state.
    pub restore: u64,
    /// Steps computed again.
    pub redo: u64,
    /// Training held up by a checkpoint.
    pub checkpoint_stall: u64,
    /// Fewer than `min_nodes` nodes.
    pub wait_for_nodes: u64,
    /// Between a requested stop and the next start.
    pub stopped: u64,
}

impl Accounting {
    /// The sum of all kinds.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.kinds().iter().map(|(_, micros)| micros).sum()
    }

    /// Every kind with its name.
    #[must_use]
    pub fn kinds(&self) -> [(&'static str, u64); 11] {
        [
            ("startup", self.startup),
            ("productive", self.productive),
            ("detect", self.detect),
            ("agree", self.agree),
            ("abort", self.abort),
            ("rebuild", self.rebuild),
            ("restore", self.restore),
            ("redo", self.redo),
            ("checkpoint_stall", self.checkpoint_stall),
            ("wait_for_nodes", self.wait_for_nodes),
            ("stopped", self.stopped),
        ]
    }
}

/// An interruption of training, from what caused it to the first step after.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Incident {
    /// Why, for people.
    pub cause: String,
    /// Whether something was lost (not a join or a leave).
    pub failure: bool,
    /// The generation that it ended.
    pub from: Generation,
    /// The generation that went on.
    pub to: Generation,
    /// Nodes by rank before.
    pub mesh_before: Vec<NodeId>,
    /// Nodes by rank after.
    pub mesh_after: Vec<NodeId>,
    /// The newest step known to be committed before.
    pub committed: Step,
    /// Where it went on from.
    pub restore: Option<Step>,
    /// The tier that it went on from.
    pub tier: String,
    /// Steps computed again.
    pub steps_redone: u64,
    /// When the cause was noticed.
    pub noticed: Timestamp,
    /// When the last plan was proposed.
    pub planned: Timestamp,
    /// When its seal was proposed.
    pub sealed: Option<Timestamp>,
    /// When the first step after it was known to be committed.
    pub resumed: Option<Timestamp>,
    /// Phases as the slowest rank saw them.
    pub timing: ResumeTiming,
}

/// How many incidents are kept.
const LIMIT: usize = 1000;

/// And how many names in their meshes: the state of a job with thousands of nodes
/// must fit into a message.
const MOST_NAMES: usize = 1 << 17;

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
enum Doing {
    #[default]
    Startup,
    Training,
    Stopping,
    Waiting,
    Restoring,
    Ended,
}

/// The incidents of a job and its accounting.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Incidents {
    /// Shared by the clones of a state.
    list: Vec<Arc<Incident>>,
    forgotten: u64,
    accounting: Accounting,
    doing: Doing,
    mark: Option<Timestamp>,
    mesh: Vec<NodeId>,
}

impl Incidents {
    /// Oldest first.
    #[must_use]
    pub fn list(&self) -> &[Arc<Incident>] {
        &self.list
    }

    /// Incidents beyond the kept ones.
    #[must_use]
    pub fn forgotten(&self) -> u64 {
        self.forgotten
    }

    /// The accounting up to the last known moment.
    #[must_use]
    pub fn accounting(&self) -> Accounting {
        self.accounting
    }

    /// The accounting with what goes on at `at` counted until then.
    #[must_use]
    pub fn accounting_at(&self, at: Timestamp) -> Accounting {
        let mut until = self.clone();
        if until.doing != Doing::Ended {
            until.end(at);
        }
        until.accounting
    }

    /// Starts the clock, at founding or after a stop.
    pub fn begin(&mut self, at: Timestamp) {
        if let Some(mark) = self.mark {
            self.accounting.stopped += at.0.saturating_sub(mark.0);
        }
        self.mark = Some(self.mark.map_or(at, |mark| mark.max(at)));
        self.doing = Doing::Startup;
    }

    /// Stops the clock.
    pub fn end(&mut self, at: Timestamp) {
        let spent = self.advance(at);
        match self.doing {
            Doing::Startup => self.accounting.startup += spent,
            Doing::Waiting => self.accounting.wait_for_nodes += spent,
            Doing::Stopping => self.accounting.abort += spent,
            Doing::Restoring => self.accounting.restore += spent,
            Doing::Training | Doing::Ended => self.accounting.productive += spent,
        }
        self.doing = Doing::Ended;
    }

    pub(crate) fn plan(&mut self, plan: &Plan, committed: Step) {
        let mesh: Vec<NodeId> = plan.members.iter().map(|m| m.worker.node.clone()).collect();
        match self.doing {
            Doing::Training => {
                let productive = self.advance(plan.last_step);
                self.accounting.productive += productive;
                let silent = self.advance(plan.noticed);
                if plan.failure {
                    self.accounting.detect += silent;
                } else {
                    self.accounting.productive += silent;
                }
                self.accounting.agree += self.advance(plan.at);
                self.open(plan, &mesh, committed);
            }
            Doing::Startup => self.accounting.startup += self.advance(plan.at),
            Doing::Waiting => self.accounting.wait_for_nodes += self.advance(plan.at),
            Doing::Stopping => self.accounting.abort += self.advance(plan.at),
            Doing::Restoring => self.accounting.restore += self.advance(plan.at),
            Doing::Ended => {}
        }
        if self.doing != Doing::Startup || !plan.members.is_empty() {
            if let Some(open) = self.open_incident() {
                open.to = plan.generation;
                open.planned = plan.at;
                open.mesh_after.clone_from(&mesh);
                open.failure |= plan.failure;
            }
            if self.doing != Doing::Startup {
                self.doing = if mesh.is_empty() { Doing::Waiting } else { Doing::Stopping };
            }
        }
        self.mesh = mesh;
    }

    pub(crate) fn seal(&mut self, seal: &Seal, committed: Step) {
        let spent = self.advance(seal.at);
        match self.doing {
            Doing::Startup => self.accounting.startup += spent,
            _ => {
                self.accounting.abort += spent;
                self.doing = Doing::Restoring;
            }
        }
        if let Some(open) = self.open_incident() {
            open.sealed = Some(seal.at);
            open.tier = seal.restore.tier().into();
            let restore = seal.restore.step();
            open.restore = Some(restore);
            open.steps_redone = committed.0.saturating_sub(restore.0);
            if matches!(seal.restore, Restore::Initial) {
                open.steps_redone = committed.0;
            }
        }
    }

    /// Returns false when the generation was known to be training already.
    pub(crate) fn resume(
        &mut self,
        generation: Generation,
        at: Timestamp,
        timing: ResumeTiming,
    ) -> bool {
        if matches!(self.doing, Doing::Training | Doing::Ended) {
            return false;
        }
        let mut spent = self.advance(at);
        if self.doing == Doing::Startup {
            self.accounting.startup += spent;
        } else {
            let mut take = |micros: u64| {
                let taken = micros.min(spent);
                spent -= taken;
                taken
            };
            let step = take(timing.step_micros);
            self.accounting.rebuild += take(timing.rebuild_micros);
            self.accounting.restore += take(timing.restore_micros);
            self.accounting.agree += spent;
            self.accounting.productive += step;
        }
        self.doing = Doing::Training;
        if let Some(open) = self.open_incident() {
            open.to = generation;
            open.resumed = Some(at);
            open.timing = timing;
            let redo = open.steps_redone.saturating_mul(timing.step_micros);
            let redo = redo.min(self.accounting.productive);
            self.accounting.productive -= redo;
            self.accounting.redo += redo;
        }
        true
    }

    /// A checkpoint held training up for so long, out of productive time.
    pub(crate) fn stall(&mut self, at: Timestamp, micros: u64) {
        if self.doing == Doing::Training {
            self.accounting.productive += self.advance(at);
        }
        let stall = micros.min(self.accounting.productive);
        self.accounting.productive -= stall;
        self.accounting.checkpoint_stall += stall;
    }

    fn open(&mut self, plan: &Plan, mesh: &[NodeId], committed: Step) {
        let names =
            |incident: &Arc<Incident>| incident.mesh_before.len() + incident.mesh_after.len();
        let most = MOST_NAMES.saturating_sub(self.mesh.len() + mesh.len());
        let mut kept: usize = self.list.iter().map(names).sum();
        let mut gone = 0;
        while self.list.len() - gone >= LIMIT || (kept > most && gone < self.list.len()) {
            kept -= names(&self.list[gone]);
            gone += 1;
        }
        self.list.drain(..gone);
        self.forgotten += gone as u64;
        self.list.push(Arc::new(Incident {
            cause: plan.reason.clone(),
            failure: plan.failure,
            from: Generation(plan.generation.0.saturating_sub(1)),
            to: plan.generation,
            mesh_before: self.mesh.clone(),
            mesh_after: mesh.to_vec(),
            committed,
            restore: None,
            tier: String::new(),
            steps_redone: 0,
            noticed: plan.noticed,
            planned: plan.at,
            sealed: None,
            resumed: None,
            timing: ResumeTiming::default(),
        }));
    }

    fn open_incident(&mut self) -> Option<&mut Incident> {
        self.list.last_mut().filter(|incident| incident.resumed.is_none()).map(Arc::make_mut)
    }

    /// Time since the mark, which moves on. Leaders' clocks differ: time that
    /// seems to run backwards counts as none.
    fn advance(&mut self, to: Timestamp) -> u64 {
        let mark = *self.mark.get_or_insert(to);
        let spent = to.0.saturating_sub(mark.0);
        self.mark = Some(mark.max(to));
        spent
    }
}
