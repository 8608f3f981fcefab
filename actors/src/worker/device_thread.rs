//! The thread that owns the tensors. It answers plans by sealing (GN-2), follows
//! seals (GN-3) and trains in between.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, mpsc as blocking},
    time::{Duration, Instant},
};

use job::{
    Era, Generation, Token,
    message::FromWorker,
    plan::{Plan, Purpose, Restore, Seal},
    report::{Position, ResumeTiming, Sealed},
    shares::Shares,
};
use tokio::sync::mpsc;
use transport::collective::{AbortHandle, Communicator, HostMesh, Listener, MeshSpec, Recorder};

use super::{
    Factory, Settings, Start, Trainer, TrainerError, checkpoint_writer,
    lease::Lease,
    rank::{Order, Watch},
    steps::Steps,
};
use crate::observer::Place;

/// Operations of a broken mesh that go into the agent's log.
const LAST_OPERATIONS: usize = 4;

pub(super) struct DeviceThread {
    pub(super) start: Start,
    pub(super) listener: Listener,
    /// Where the other workers reach it.
    pub(super) address: SocketAddr,
    pub(super) inbox: blocking::Receiver<Order>,
    pub(super) watch: Arc<Watch>,
    pub(super) lease: Lease,
    pub(super) writer: checkpoint_writer::Handle,
    pub(super) out: mpsc::Sender<FromWorker>,
}

/// A rank between generations.
pub(super) struct Device {
    pub(super) thread: DeviceThread,
    pub(super) settings: Settings,
    pub(super) trainer: Box<dyn Trainer>,
    pub(super) checkpoints: dcp::Folder,
    /// Holds a complete gradient of its step (ST-1).
    pub(super) prepared: bool,
    /// Generation in which the state was reached.
    pub(super) lineage: Option<(Era, Generation)>,
    /// Verdict of the newest applied step.
    pub(super) verdict: Option<Vec<u8>>,
}

impl DeviceThread {
    pub(super) fn spawn(self, factory: impl Factory) -> io::Result<()> {
        std::thread::Builder::new().name("device".into()).spawn(move || self.run(factory))?;
        Ok(())
    }

    fn run(self, factory: impl Factory) {
        let opened = dcp::Folder::open(&self.start.checkpoint_folder);
        let built = opened.map_err(|error| error.to_string()).and_then(|checkpoints| {
            factory.build(&self.start).map(|(trainer, settings)| (trainer, settings, checkpoints))
        });
        let (trainer, settings, checkpoints) = match built {
            Ok(built) => built,
            Err(why) => {
                self.tell(FromWorker::Fatal(why));
                return;
            }
        };
        let (address, digests) = (self.address, settings.digests);
        self.tell(FromWorker::Ready { address, digests });
        let mut device = Device {
            thread: self,
            settings,
            trainer,
            checkpoints,
            prepared: false,
            lineage: None,
            verdict: None,
        };
        if let Err(why) = device.serve() {
            device.thread.tell(FromWorker::Fatal(why));
        }
    }

    /// Reports to the agent. When its pipe is gone the process is about to end.
    pub(super) fn tell(&self, message: FromWorker) {
        let _ = self.out.blocking_send(message);
    }
}

impl Device {
    /// Answers orders until the end; an error is one that no generation cures.
    fn serve(&mut self) -> Result<(), String> {
        let mut waiting = None;
        loop {
            let order = match waiting.take() {
                Some(order) => order,
                None => match self.thread.inbox.recv() {
                    Ok(order) => order,
                    Err(_) => return Ok(()),
                },
            };
            match order {
                Order::End => return Ok(()),
                // A seal whose plan was overtaken.
                Order::Seal(_) => {}
                Order::Plan { plan, rank } => waiting = self.take_part(*plan, rank)?,
            }
        }
    }

    /// One generation. Returns the order that ended it, if one did.
    fn take_part(&mut self, plan: Plan, rank: Option<u32>) -> Result<Option<Order>, String> {
        let planned = Instant::now();
        let mut timing = ResumeTiming { generation: plan.generation, ..Default::default() };
        self.thread.tell(FromWorker::Sealed(self.seal(&plan)));
        let (Some(rank), Some(shares)) = (rank, plan.shares.clone()) else {
            return Ok(None);
        };
        timing.stop_micros = micros(planned.elapsed());
        let rebuilding = Instant::now();
        let mesh = self.connect(&plan, rank);
        timing.rebuild_micros = micros(rebuilding.elapsed());
        let seal = loop {
            match self.thread.inbox.recv() {
                Ok(Order::Seal(seal)) if seal.generation == plan.generation => break seal,
                Ok(Order::Seal(_)) => {}
                Ok(order) => return Ok(Some(order)),
                Err(_) => return Ok(Some(Order::End)),
            }
        };
        // Without a mesh the accusation is under way, and a new plan follows.
        let Some(mut mesh) = mesh else { return Ok(None) };
        let restoring = Instant::now();
        if let Err(error) = self.restore(&plan, rank, &shares, &seal, &mut mesh) {
            return self.interrupted(&plan, error, mesh.recorder()).map(|()| None);
        }
        timing.restore_micros = micros(restoring.elapsed());
        self.thread.tell(FromWorker::Restored(timing));
        let steps = Steps { plan: &plan, rank, timing };
        let done = match plan.purpose {
            Purpose::Train => self.train(&steps, &mut mesh),
            Purpose::SaveAndStop => self.save(&steps).map(|_| ()),
        };
        match done {
            Ok(()) => Ok(None),
            Err(error) => self.interrupted(&plan, error, mesh.recorder()).map(|()| None),
        }
    }

    fn seal(&self, plan: &Plan) -> Sealed {
        let position = match self.trainer.position() {
            None => Position::Fresh,
            Some(step) if self.prepared => Position::Prepared(step),
            Some(step) => Position::Open(step),
        };
        Sealed {
            generation: plan.generation,
            position,
            lineage: self.lineage,
            verdict: self.verdict.clone(),
            shard: self.trainer.shard(),
        }
    }

    /// Builds the communicators while the others still seal: the addresses and
    /// the key are in the plan, no second rendezvous is needed.
    fn connect(&self, plan: &Plan, rank: u32) -> Option<HostMesh> {
        let spec = MeshSpec {
            token: self.token(plan),
            key: plan.key,
            rank: rank as usize,
            addresses: plan.members.iter().map(|member| member.address).collect(),
        };
        let connected = AbortHandle::new().and_then(|abort| {
            self.thread.watch.at_work(plan.generation, abort.clone());
            self.thread.listener.connect(spec, Instant::now() + self.settings.connect, &abort)
        });
        match connected {
            Ok(mesh) => Some(mesh),
            Err(error) => {
                self.accuse(plan, &error, &Recorder::default());
                None
            }
        }
    }

    /// From where the seal says (GN-3).
    fn restore(
        &mut self,
        plan: &Plan,
        rank: u32,
        shares: &Shares,
        seal: &Seal,
        mesh: &mut dyn Communicator,
    ) -> Result<(), TrainerError> {
        let deadline = Instant::now() + self.settings.step;
        let step = seal.restore.step();
        // What was prepared is applied in the generation that prepared it.
        match &seal.restore {
            Restore::Live { verdict: Some(verdict), .. }
                if self.prepared && self.trainer.position().is_some_and(|at| at.next() == step) =>
            {
                self.trainer.apply(verdict)?;
                self.prepared = false;
                self.verdict = Some(verdict.clone());
            }
            _ => self.drop_prepared(),
        }
        self.trainer.enter(self.token(plan), rank, plan.stages(), shares)?;
        match &seal.restore {
            Restore::Initial => {
                self.trainer.initialize()?;
                self.verdict = None;
            }
            Restore::Checkpoint { step } => {
                // What is half loaded is nobody's state (HEAL-1).
                self.lineage = None;
                self.trainer.load(&self.checkpoints.step(step.0))?;
                self.verdict = None;
            }
            Restore::Live { sources, receivers, verdict, .. } => {
                self.trainer.sync(mesh, sources, receivers, deadline)?;
                if receivers.contains(&rank) {
                    self.verdict.clone_from(verdict);
                }
            }
        }
        if self.trainer.position() != Some(step) {
            return Err(TrainerError::Fatal(format!(
                "rank {rank} holds step {:?} after the {} restore of step {step}",
                self.trainer.position().map(|at| at.0),
                seal.restore.tier()
            )));
        }
        self.lineage = Some((plan.era, plan.generation));
        Place::change(|place| place.step = Some(step));
        tracing::info!(generation = plan.generation.0, tier = seal.restore.tier(), "goes on");
        Ok(())
    }

    fn drop_prepared(&mut self) {
        if self.prepared {
            self.trainer.discard();
            self.prepared = false;
        }
    }

    pub(super) fn token(&self, plan: &Plan) -> Token {
        Token { job: self.thread.start.spec.job, era: plan.era, generation: plan.generation }
    }

    /// The generation's work ended early: wait for the next plan, unless the
    /// error is one that it would not cure.
    fn interrupted(
        &mut self,
        plan: &Plan,
        error: TrainerError,
        recorder: &Recorder,
    ) -> Result<(), String> {
        match error {
            TrainerError::Aborted => Ok(()),
            TrainerError::Collective(error) => {
                self.accuse(plan, &error, recorder);
                Ok(())
            }
            TrainerError::Damaged(why) => {
                let generation = plan.generation;
                self.thread.tell(FromWorker::Unloadable { generation, why });
                Ok(())
            }
            TrainerError::Fatal(why) => Err(why),
        }
    }

    /// The error names who did not arrive, the record says in which operation,
    /// and what went before.
    fn accuse(&self, plan: &Plan, error: &transport::collective::Error, recorder: &Recorder) {
        if self.thread.watch.must_stop(plan.generation) {
            return;
        }
        tracing::info!(generation = plan.generation.0, %error, "collective ended");
        let rank = error.peer().map_or(u32::MAX, |peer| peer as u32);
        let records = recorder.records();
        let last = records[records.len().saturating_sub(LAST_OPERATIONS)..].iter();
        let last: Vec<_> = last.map(ToString::to_string).collect();
        let why = match last.is_empty() {
            true => error.to_string(),
            false => format!("{error}; last operations: {}", last.join(", ")),
        };
        self.thread.tell(FromWorker::Accuses { generation: plan.generation, rank, why });
    }
}

pub(super) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
