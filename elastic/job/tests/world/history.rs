//! What must be true, checked at every fact.

use job::{Generation, command::Event, plan::Restore, state::JobState};

use crate::sim::{History, Sim};

/// GN-5: which generation committed each step, by the seals alone. Committed
/// steps of g are those after its own restore step, up to that of the next
/// sealed generation.
pub(crate) fn official(state: &JobState) -> History {
    let mut history = History::new();
    let mut before = 0;
    for link in &state.chain {
        history.resize(link.restore.0 as usize, before);
        before = link.generation.0;
    }
    history
}

impl Sim {
    pub(crate) fn check_fact(&mut self, event: &Event) {
        match event {
            Event::Sealed { generation, restore, .. } => {
                let truth = self.truth();
                let history = official(&truth);
                if history.len() as u64 > truth.spec.total_steps.0 {
                    self.violated("DATA-1: more steps than the job has");
                }
                let seal = truth.seal.as_ref().expect("it was just sealed");
                match &seal.restore {
                    Restore::Initial if restore.0 != 0 => {
                        self.violated("HEAL-1: initial weights stand for a later step");
                    }
                    Restore::Checkpoint { step } if self.damaged.contains(&step.0) => {
                        self.violated("CKPT-1: a damaged checkpoint is restored");
                    }
                    Restore::Checkpoint { step } if self.saved[&step.0] != history => {
                        self.violated("CKPT-1: the checkpoint is not on the official history");
                    }
                    _ => {}
                }
                self.official.insert(generation.0, history);
            }
            Event::CheckpointCommitted { step, .. } => {
                let truth = self.truth();
                let record = &truth.checkpoints[step];
                let history = self.staged[&(record.generation.0, step.0)].clone();
                let mut expected = official(&truth);
                let newest = truth.chain.last().expect("somebody saved").generation;
                expected.resize(expected.len().max(step.0 as usize), newest.0);
                expected.truncate(step.0 as usize);
                if history != expected {
                    self.violated("CKPT-1: a checkpoint off the official history is committed");
                }
                self.saved.insert(step.0, history);
                self.damaged.remove(&step.0);
            }
            _ => {}
        }
    }

    /// STEP-1, HEAL-1: a rank begins a generation with the one official state.
    pub(crate) fn check_restored(&mut self, worker: usize, generation: Generation) {
        if self.workers[worker].history.as_ref() != Some(&self.official[&generation.0]) {
            let held = &self.workers[worker].history;
            self.violated(&format!(
                "STEP-1: worker {worker} begins generation {generation} with {held:?} instead of {:?}",
                self.official[&generation.0]
            ));
        }
    }

    /// GEN-1, GN-4: a generation votes only while no later one is sealed.
    pub(crate) fn check_vote(&mut self, generation: Generation) {
        let newest = self.newest_sealed();
        if newest != generation {
            self.violated(&format!(
                "GEN-1: generation {generation} votes after generation {newest} was sealed"
            ));
        }
    }

    /// DATA-1: at the end every rank has every step once, as the history says.
    pub(crate) fn check_finish(&mut self) -> History {
        let truth = self.truth();
        let mut history = official(&truth);
        let newest = self.newest_sealed();
        history.resize(truth.spec.total_steps.0 as usize, newest.0);
        if self.saved.get(&truth.spec.total_steps.0) != Some(&history) {
            self.violated("ST-4: the last checkpoint does not hold the history");
        }
        history
    }
}
