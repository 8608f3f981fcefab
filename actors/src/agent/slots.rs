//! The node's device slots and the workers in them.

use std::{collections::BTreeMap, time::Duration};

use job::{
    Generation, WorkerId,
    message::{FromWorker, ToWorker},
    plan::{Plan, WorkerRef},
    report::{WorkerReport, WorkerState},
    state::JobState,
};

use super::worker_process::{Handle, RestartPolicy};
use crate::clock;

/// A device slot.
#[derive(Debug, Default)]
pub(super) struct Slot {
    pub(super) worker: Option<Worker>,
    pub(super) policy: RestartPolicy,
    pub(super) restart_at: Duration,
    pub(super) spawning: bool,
}

/// The worker in a slot.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) handle: Handle,
    pub(super) report: WorkerReport,
    pub(super) heard: Duration,
    born: Duration,
    told_plan: Generation,
    told_seal: Generation,
}

/// What a worker's message asks of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Urgency {
    /// Goes with the next beat.
    Routine,
    /// The leader waits for it.
    Now,
}

/// All slots.
#[derive(Debug, Default)]
pub(super) struct Slots {
    pub(super) slots: BTreeMap<u32, Slot>,
    /// Workers that are gone, until no plan names them any more.
    lost: Vec<WorkerReport>,
    last_id: u64,
}

impl Slots {
    pub(super) fn new(count: u32) -> Self {
        let slots = (0..count).map(|slot| (slot, Slot::default())).collect();
        Self { slots, ..Self::default() }
    }

    pub(super) fn next_id(&mut self) -> WorkerId {
        self.last_id += 1;
        WorkerId(self.last_id)
    }

    /// Slots whose worker is to be started now.
    pub(super) fn vacant(&self) -> Vec<u32> {
        let now = clock::now();
        let vacant =
            |slot: &Slot| slot.worker.is_none() && !slot.spawning && now >= slot.restart_at;
        self.slots.iter().filter(|(_, slot)| vacant(slot)).map(|(number, _)| *number).collect()
    }

    pub(super) fn started(&mut self, number: u32, worker: WorkerId, handle: Handle) {
        let report = WorkerReport {
            worker,
            slot: number,
            pid: handle.pid,
            state: WorkerState::Starting,
            address: None,
            sealed: None,
            progress: None,
            resumed: None,
            saved: Vec::new(),
            accuses: None,
            save_failed: None,
            unloadable: None,
            finished: None,
        };
        let now = clock::now();
        let (told_plan, told_seal) = (Generation(0), Generation(0));
        if let Some(slot) = self.slots.get_mut(&number) {
            slot.spawning = false;
            slot.worker =
                Some(Worker { handle, report, heard: now, born: now, told_plan, told_seal });
        }
    }

    pub(super) fn workers(&self) -> impl Iterator<Item = &Worker> {
        self.slots.values().filter_map(|slot| slot.worker.as_ref())
    }

    pub(super) fn worker(&mut self, id: WorkerId) -> Option<&mut Worker> {
        self.slots
            .values_mut()
            .filter_map(|slot| slot.worker.as_mut())
            .find(|worker| worker.report.worker == id)
    }

    /// A worker's process is gone. Returns its last report.
    pub(super) fn exited(&mut self, id: WorkerId, why: String) -> Option<WorkerReport> {
        let slot = self
            .slots
            .values_mut()
            .find(|slot| slot.worker.as_ref().is_some_and(|w| w.report.worker == id))?;
        let worker = slot.worker.take()?;
        let pause = slot.policy.pause_after(clock::now().saturating_sub(worker.born));
        slot.restart_at = clock::now() + pause;
        let mut report = worker.report;
        if let WorkerState::Fatal(_) = report.state {
            slot.restart_at = Duration::MAX;
        } else {
            report.state = WorkerState::Lost(why);
        }
        report.sealed = None;
        self.lost.push(report.clone());
        Some(report)
    }

    /// What goes into a beat.
    pub(super) fn reports(&self) -> Vec<WorkerReport> {
        self.workers().map(|worker| &worker.report).chain(&self.lost).cloned().collect()
    }

    pub(super) fn lease(&self, until_micros: u64) {
        for worker in self.workers() {
            worker.handle.send(ToWorker::Lease { until_micros });
        }
    }

    /// Tells workers what the committed state says and they have not heard, and
    /// forgets what it has taken up.
    pub(super) fn reconcile(
        &mut self,
        state: &JobState,
        me: impl Fn(WorkerId) -> Option<WorkerRef>,
    ) {
        let saved = state.checkpoints.keys().next_back().copied();
        if let Some(plan) = &state.plan {
            for worker in self.slots.values_mut().filter_map(|slot| slot.worker.as_mut()) {
                if worker.report.state != WorkerState::Ready {
                    continue;
                }
                let Some(name) = me(worker.report.worker) else { continue };
                worker.tell(plan, state, &name);
                if let Some(saved) = saved {
                    worker.report.saved.retain(|shard| shard.step > saved);
                }
            }
        }
        // A worker that an unfinished save needs stays reported: its shard is durable.
        let in_plan = |report: &WorkerReport| {
            state.plan.as_ref().is_some_and(|plan| {
                let name = me(report.worker);
                plan.members.iter().any(|member| Some(&member.worker) == name.as_ref())
            })
        };
        for report in &mut self.lost {
            report.saved.retain(|shard| saved.is_none_or(|saved| shard.step > saved));
        }
        let fatal = |report: &WorkerReport| matches!(report.state, WorkerState::Fatal(_));
        self.lost.retain(|report| in_plan(report) || !report.saved.is_empty() || fatal(report));
        let surplus = self.lost.len().saturating_sub(MOST_LOST);
        self.lost.drain(..surplus);
    }
}

/// Gone workers that are remembered at most.
const MOST_LOST: usize = 16;

impl Worker {
    fn tell(&mut self, plan: &Plan, state: &JobState, name: &WorkerRef) {
        let rank = plan.members.iter().position(|member| member.worker == *name);
        let rank = rank.map(|rank| rank as u32);
        // A plan that never had and does not have this worker is not its business.
        let concerns = rank.is_some() || self.told_plan > Generation(0);
        if concerns && self.told_plan < plan.generation {
            self.told_plan = plan.generation;
            self.report.accuses = None;
            self.report.unloadable = None;
            self.handle.send(ToWorker::Plan { plan: Box::new(plan.clone()), rank });
        }
        if let Some(seal) = &state.seal
            && rank.is_some()
            && self.told_seal < seal.generation
            && self.told_plan == seal.generation
        {
            self.told_seal = seal.generation;
            self.handle.send(ToWorker::Seal { seal: Box::new(seal.clone()) });
        }
    }

    /// It cannot go on (LS-4): the leader need not wait until it is gone.
    pub(super) fn dying(&mut self, why: String) {
        if !matches!(self.report.state, WorkerState::Fatal(_)) {
            self.report.state = WorkerState::Dying(why);
        }
    }

    /// Takes a message into the report.
    pub(super) fn hear(&mut self, message: FromWorker) -> Urgency {
        self.heard = clock::now();
        match message {
            FromWorker::Ready { address } => {
                self.report.address = Some(address);
                // A word of a worker that is dying by now comes late.
                if self.report.state == WorkerState::Starting {
                    self.report.state = WorkerState::Ready;
                }
            }
            FromWorker::Sealed(sealed) => self.report.sealed = Some(sealed),
            FromWorker::Accuses { generation, rank, .. } => {
                self.report.accuses = Some((generation, rank));
            }
            FromWorker::Step(progress) => {
                let known = self.report.progress.map(|known| known.generation);
                self.report.progress = Some(progress);
                if known == Some(progress.generation) {
                    return Urgency::Routine;
                }
            }
            FromWorker::Resumed(timing) => {
                self.report.resumed = Some(timing);
                return Urgency::Routine;
            }
            FromWorker::Saved(shard) => {
                self.report.saved.retain(|known| known.step != shard.step);
                self.report.saved.push(shard);
                let surplus = self.report.saved.len().saturating_sub(MOST_SAVED);
                self.report.saved.drain(..surplus);
            }
            FromWorker::SaveFailed(failed) => self.report.save_failed = Some(failed),
            FromWorker::Unloadable { generation, why } => {
                self.report.unloadable = Some((generation, why));
            }
            FromWorker::Finished(report) => self.report.finished = Some(report),
            FromWorker::Fatal(why) => self.report.state = WorkerState::Fatal(why),
            FromWorker::Beat | FromWorker::Restored(_) | FromWorker::Validated { .. } => {
                return Urgency::Routine;
            }
        }
        Urgency::Now
    }
}

/// Durable shards that are reported at most: older saves were overtaken.
const MOST_SAVED: usize = 4;
