//! The steps of one generation: prepare, vote, apply (ST-1 to ST-4).

use std::time::Instant;

use job::{
    Step,
    message::FromWorker,
    plan::Plan,
    report::{Progress, ResumeTiming},
};
use transport::collective::Communicator;

use super::{
    Applied, TrainerError,
    checkpoint_writer::Save,
    device_thread::{Device, micros},
    lease::Held,
};
use crate::observer::Place;

/// What the steps of a generation need to know.
pub(super) struct Steps<'a> {
    pub(super) plan: &'a Plan,
    pub(super) rank: u32,
    pub(super) timing: ResumeTiming,
}

/// The largest ballot: a few numbers and a hash per tree piece.
const BALLOT_LIMIT: usize = 1 << 20;

impl Device {
    /// Trains until the last step or until a newer plan stops it.
    pub(super) fn train(
        &mut self,
        steps: &Steps<'_>,
        mesh: &mut dyn Communicator,
    ) -> Result<(), TrainerError> {
        let generation = steps.plan.generation;
        let last = self.thread.start.spec.total_steps;
        let mut first = true;
        while self.position() < last {
            if self.thread.watch.should_stop(generation) {
                return Ok(());
            }
            let started = Instant::now();
            let applied = self.step(steps, mesh)?;
            let spent = micros(started.elapsed());
            Place::change(|place| place.step = Some(applied.step));
            tracing::debug!(loss = f64::from(applied.loss), micros = spent, "step applied");
            if first {
                first = false;
                let timing = ResumeTiming { step_micros: spent, ..steps.timing };
                self.thread.tell(FromWorker::Resumed(timing));
            }
            self.thread.tell(FromWorker::Step(Progress {
                generation,
                step: applied.step,
                loss: applied.loss,
                grad_norm: applied.grad_norm,
                learning_rate: applied.learning_rate,
                tokens: applied.tokens,
                micros: spent,
            }));
            self.after_step(steps, mesh, applied.step, last)?;
        }
        if first {
            // Restored at the last step: its checkpoint may still be missing.
            self.save(steps)?;
        }
        self.finish(steps, mesh)
    }

    fn step(
        &mut self,
        steps: &Steps<'_>,
        mesh: &mut dyn Communicator,
    ) -> Result<Applied, TrainerError> {
        let generation = steps.plan.generation;
        let watch = std::sync::Arc::clone(&self.thread.watch);
        let aborted = || watch.must_stop(generation);
        let deadline = Instant::now() + self.settings.step;
        let ballot = self.trainer.prepare(mesh, &aborted, deadline)?;
        self.prepared = true;
        self.hold_lease(&aborted)?;
        // ST-2: the vote depends on every rank and is entered only prepared.
        let ballots = mesh.all_gather_bytes(&ballot, BALLOT_LIMIT, deadline)?;
        let verdict = self.trainer.tally(&ballots)?;
        self.hold_lease(&aborted)?;
        // ST-3: applying has no collective and always finishes.
        let applied = self.trainer.apply(&verdict)?;
        self.prepared = false;
        self.verdict = Some(verdict);
        Ok(applied)
    }

    fn hold_lease(&self, aborted: &dyn Fn() -> bool) -> Result<(), TrainerError> {
        match self.thread.lease.hold(self.settings.grace, aborted) {
            Held::Valid => Ok(()),
            Held::Aborted => Err(TrainerError::Aborted),
            Held::Lost => {
                tracing::error!(
                    "the lease lapsed and was not renewed: this rank is fenced and ends"
                );
                // LIVE-2: nothing of a fenced rank may outlive it, whatever its
                // other threads are doing.
                std::process::exit(super::FENCED)
            }
        }
    }

    fn after_step(
        &mut self,
        steps: &Steps<'_>,
        mesh: &mut dyn Communicator,
        step: Step,
        last: Step,
    ) -> Result<(), TrainerError> {
        let every = |freq: u64| freq > 0 && step.0.is_multiple_of(freq);
        if step == last || every(self.settings.checkpoint_interval) {
            self.save(steps)?;
        }
        if step < last && every(self.settings.validation_freq) {
            let generation = steps.plan.generation;
            let watch = std::sync::Arc::clone(&self.thread.watch);
            let aborted = || watch.must_stop(generation);
            let deadline = Instant::now() + self.settings.step;
            if let Some(loss) = self.trainer.validate(mesh, &aborted, deadline)? {
                self.thread.tell(FromWorker::Validated { step, loss });
            }
        }
        Ok(())
    }

    /// Copies this rank's share and lets it be written in the background.
    pub(super) fn save(&mut self, steps: &Steps<'_>) -> Result<(), TrainerError> {
        if !self.thread.start.spec.checkpoints {
            return Ok(());
        }
        let plan = steps.plan;
        let step = self.position();
        let trainer = &mut self.trainer;
        let folder = &self.checkpoints;
        self.thread.writer.submit(|| {
            Ok::<_, TrainerError>(Save {
                era: plan.era,
                generation: plan.generation,
                step,
                rank: steps.rank,
                ranks: plan.members.len() as u32,
                stage: folder.stage(&dcp::folder::stage_name(
                    plan.era.0,
                    plan.generation.0,
                    step.0,
                )),
                snapshot: trainer.snapshot()?,
                stall: std::time::Duration::ZERO,
            })
        })?;
        if !self.settings.checkpoint_async {
            self.thread.writer.drain();
        }
        Ok(())
    }

    fn finish(
        &mut self,
        steps: &Steps<'_>,
        mesh: &mut dyn Communicator,
    ) -> Result<(), TrainerError> {
        let generation = steps.plan.generation;
        let watch = std::sync::Arc::clone(&self.thread.watch);
        let aborted = || watch.must_stop(generation);
        let deadline = Instant::now() + self.settings.step;
        let report = self.trainer.finish(mesh, &aborted, deadline)?;
        self.thread.tell(FromWorker::Finished(report));
        Ok(())
    }

    fn position(&self) -> Step {
        self.trainer.position().unwrap_or_default()
    }
}
