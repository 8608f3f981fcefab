//! The actor that makes a rank's share of a checkpoint durable while training
//! goes on. One save at a time: the next one waits, and so memory stays bounded
//! at one snapshot in writing and one being taken.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use job::{
    Era, Generation, Step,
    message::FromWorker,
    report::{SaveFailed, ShardSaved},
};
use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use super::trainer::Snapshot;

/// A save in one rank.
pub(super) struct Save {
    pub(super) era: Era,
    pub(super) generation: Generation,
    pub(super) step: Step,
    pub(super) rank: u32,
    pub(super) ranks: u32,
    /// Stage folder, the same on every rank and never used again (LG-2).
    pub(super) stage: PathBuf,
    pub(super) snapshot: Box<dyn Snapshot>,
    pub(super) stall: Duration,
}

pub(super) struct CheckpointWriter;

pub(super) struct Message {
    save: Save,
    busy: OwnedSemaphorePermit,
}

/// Where the device thread hands saves over.
#[derive(Clone)]
pub(super) struct Handle {
    actor: ActorRef<Message>,
    slot: Arc<Semaphore>,
    runtime: tokio::runtime::Handle,
}

impl CheckpointWriter {
    /// Starts the actor, linked to the rank that supervises it.
    pub(super) async fn start(
        supervisor: ractor::ActorCell,
        out: mpsc::Sender<FromWorker>,
    ) -> Result<Handle, ractor::SpawnErr> {
        let (actor, _) = Actor::spawn_linked(None, Self, out, supervisor).await?;
        let runtime = tokio::runtime::Handle::current();
        Ok(Handle { actor, slot: Arc::new(Semaphore::new(1)), runtime })
    }
}

impl Handle {
    /// Waits for the previous save, then hands over the one that `make` copies.
    /// Returns how long the calling thread was held up, and the copy's error.
    pub(super) fn submit<E>(&self, make: impl FnOnce() -> Result<Save, E>) -> Result<Duration, E> {
        let started = Instant::now();
        let permit = self.runtime.block_on(Arc::clone(&self.slot).acquire_owned());
        let mut save = make()?;
        save.stall = started.elapsed();
        let stall = save.stall;
        if let Ok(busy) = permit {
            // A stopped actor means that the process is about to end.
            let _ = self.actor.send_message(Message { save, busy });
        }
        Ok(stall)
    }

    /// Waits until nothing is being written.
    pub(super) fn drain(&self) {
        let _ = self.runtime.block_on(self.slot.acquire());
    }
}

impl Actor for CheckpointWriter {
    type Msg = Message;
    type State = mpsc::Sender<FromWorker>;
    type Arguments = mpsc::Sender<FromWorker>;

    async fn pre_start(
        &self,
        _: ActorRef<Message>,
        out: Self::Arguments,
    ) -> Result<Self::State, ActorProcessingErr> {
        Ok(out)
    }

    async fn handle(
        &self,
        _: ActorRef<Message>,
        Message { save, busy }: Message,
        out: &mut Self::State,
    ) -> Result<(), ActorProcessingErr> {
        let Save { era, generation, step, rank, ranks, stage, snapshot, stall } = save;
        let written = tokio::task::spawn_blocking(move || {
            snapshot.write(&stage, rank).inspect_err(|_| {
                // What cannot be completed must not keep the disk full. The leader
                // removes what others wrote.
                let _ = std::fs::remove_file(stage.join(format!("__{rank}_0.distcp")));
                let _ = std::fs::remove_dir(&stage);
            })
        })
        .await
        .unwrap_or_else(|_| Err("the writing thread panicked".into()));
        let message = match written {
            Ok(index) => FromWorker::Saved(ShardSaved {
                era,
                generation,
                step,
                rank,
                ranks,
                stall_micros: u64::try_from(stall.as_micros()).unwrap_or(u64::MAX),
                index: job::codec::encode(&index),
            }),
            Err(why) => {
                FromWorker::SaveFailed(SaveFailed { era, generation, step, rank, ranks, why })
            }
        };
        // The rank's end of the pipe is gone only when the process ends.
        let _ = out.send(message).await;
        drop(busy);
        Ok(())
    }
}
