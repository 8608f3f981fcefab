//! This node's workers: started when their slots are vacant, heard, and ended
//! when they fall silent.

use std::net::SocketAddr;

use job::{
    WorkerId,
    message::{FromWorker, ToWorker},
    plan::WorkerRef,
    report::{SaveFailed, WorkerState},
    spec::JobSpec,
    state::Node,
};
use ractor::ActorRef;

use super::{
    Notice,
    node_agent::{Message, State},
    slots::Urgency,
    spawner::Program,
    worker_process::{Arguments, Handle as WorkerHandle, Heard, WorkerProcess},
};
use crate::clock;

/// How the system's loader ends a program whose libraries it does not find.
const NOT_STARTED: &str = "exit code 127";

impl State {
    pub(super) fn worker(&mut self, myself: &ActorRef<Message>, id: WorkerId, heard: Heard) {
        let message = match heard {
            Heard::Exited(why) => {
                if why == NOT_STARTED
                    && let Some(worker) = self.slots.worker(id)
                    && worker.report.state == WorkerState::Starting
                {
                    let slot = worker.report.slot;
                    let why = self.not_started(slot);
                    self.notice(Notice::Warning(format!("worker cannot run: {why}")));
                    if let Some(worker) = self.slots.worker(id) {
                        worker.report.state = WorkerState::Fatal(why);
                    }
                }
                if let Some(report) = self.slots.exited(id, why) {
                    tracing::info!(pid = report.pid, state = ?report.state, "worker ended");
                }
                self.beat(myself);
                self.finish_ending();
                return;
            }
            Heard::Dying(why) => {
                if let Some(worker) = self.slots.worker(id) {
                    tracing::info!(pid = worker.report.pid, why, "worker is dying");
                    worker.dying(why);
                    self.beat(myself);
                }
                return;
            }
            Heard::Message(message) => message,
        };
        let rank = self.rank_of(id);
        match &message {
            FromWorker::Step(progress) => {
                if let Some(rank) = rank {
                    self.recorder.step(rank, progress);
                }
                if rank == Some(0) {
                    let state = self.shared_state();
                    self.notice(Notice::Stepped { progress: *progress, state });
                }
            }
            FromWorker::TurnedAway { strangers, stale, late, crowded } => {
                let counts = [
                    ("strangers", *strangers),
                    ("stale", *stale),
                    ("late", *late),
                    ("crowded", *crowded),
                ];
                self.recorder.turned_away("tensors", &counts);
            }
            FromWorker::Validated { step, loss } => {
                self.notice(Notice::Validated { step: *step, loss: *loss });
            }
            FromWorker::SaveFailed(SaveFailed { step, why, .. }) => {
                let line = format!("checkpoint of step {step} was not saved: {why}");
                self.notice(Notice::Warning(line));
            }
            FromWorker::Accuses { generation, why, .. } => {
                tracing::info!(generation = generation.0, why, "a collective broke");
            }
            FromWorker::Unloadable { generation, why } => {
                tracing::warn!(generation = generation.0, why, "a checkpoint cannot be loaded");
            }
            FromWorker::Fatal(why) => {
                // What follows is told: the job fails, or the group goes on without it.
                tracing::error!(rank, why, "worker cannot run");
            }
            _ => {}
        }
        let ready = matches!(message, FromWorker::Ready { .. });
        let Some(worker) = self.slots.worker(id) else { return };
        let urgency = worker.hear(message);
        if ready {
            worker.handle.send(ToWorker::Lease { until_micros: self.lease_until });
            self.reconcile(myself);
        }
        if urgency == Urgency::Now {
            self.beat(myself);
        }
    }

    /// What the system's loader said about a program that it did not start: the
    /// last line of the worker's log. Another try would meet the same.
    fn not_started(&self, slot: u32) -> String {
        let text = std::fs::read(self.worker_log(slot)).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let line = text.lines().next_back().unwrap_or("its log is empty");
        format!("{line}; LIBTORCH at build time, or LD_LIBRARY_PATH now, names libtorch's folder")
    }

    fn worker_log(&self, slot: u32) -> std::path::PathBuf {
        let nodes = self.options.dump_folder.join("nodes");
        nodes.join(self.options.node.as_str()).join(format!("worker-{slot}.log"))
    }

    pub(super) fn rank_of(&self, worker: WorkerId) -> Option<u32> {
        let name = self.worker_ref(worker)?;
        let plan = self.job().plan.as_ref()?;
        let rank = plan.members.iter().position(|member| member.worker == name)?;
        Some(rank as u32)
    }

    pub(super) fn worker_ref(&self, worker: WorkerId) -> Option<WorkerRef> {
        Some(WorkerRef {
            node: self.options.node.clone(),
            incarnation: self.incarnation()?,
            worker,
        })
    }

    /// A worker whose runtime says nothing for as long as a node may be silent is
    /// as good as dead, and made so: what is stopped cannot be fenced otherwise.
    pub(super) fn reap_silent_workers(&mut self) {
        let limit = self.options.timeouts.suspect;
        let now = clock::now();
        for worker in self.slots.workers() {
            if now.saturating_sub(worker.heard) > limit
                && worker.report.state != WorkerState::Starting
            {
                tracing::warn!(pid = worker.report.pid, "worker is silent: it is killed");
                worker.handle.kill();
            }
        }
    }

    /// Starts a worker in every vacant slot once this process start is admitted.
    pub(super) fn fill_slots(&mut self, myself: &ActorRef<Message>) {
        let working = self.job().is_going() && self.myself().is_some_and(Node::is_live);
        if !working || self.leaving {
            return;
        }
        for number in self.slots.vacant() {
            let worker = self.slots.next_id();
            if let Some(slot) = self.slots.slots.get_mut(&number) {
                slot.spawning = true;
            }
            let program = Program {
                path: self.options.worker.clone(),
                environment: self.options.worker_environment.clone(),
                log: self.worker_log(number),
            };
            let (agent, supervisor) = (myself.clone(), myself.get_cell());
            tokio::spawn(async move {
                let arguments = Arguments { worker, program, agent: agent.clone() };
                let started = WorkerProcess::start(arguments, supervisor).await;
                let _ = agent.send_message(Message::Spawned(number, worker, started));
            });
        }
    }

    /// Where the worker of a slot accepts tensor connections. An address that only
    /// others use cannot be bound.
    fn tensors(&self, slot: u32) -> SocketAddr {
        let ip = match self.options.advertise {
            Some(_) => self.options.listen.ip(),
            None => self.address.ip(),
        };
        let port = match self.options.tensor_port {
            0 => 0,
            first => first.saturating_add(u16::try_from(slot).unwrap_or(u16::MAX)),
        };
        SocketAddr::new(ip, port)
    }

    pub(super) fn spawned(
        &mut self,
        slot: u32,
        worker: WorkerId,
        started: Result<WorkerHandle, String>,
    ) {
        match started {
            Ok(handle) => {
                let path = |path: &std::path::Path| path.display().to_string();
                handle.send(ToWorker::Start {
                    config: (self.options.adopt)(
                        &self.options.proposal.config,
                        &self.job().spec.config,
                    ),
                    spec: Box::new(JobSpec {
                        micro_batches: self.job().micro_batches,
                        authority: String::new(),
                        join_secret: String::new(),
                        ..self.job().spec.clone()
                    }),
                    node: self.options.node.clone(),
                    worker,
                    slot,
                    dump_folder: path(&self.options.dump_folder),
                    checkpoint_folder: path(&self.options.checkpoint_folder),
                    bind: self.tensors(slot),
                    advertise: self.address.ip(),
                    shares_memory: self.options.shares_memory,
                });
                self.slots.started(slot, worker, handle);
            }
            Err(why) => {
                self.notice(Notice::Warning(why));
                if let Some(slot) = self.slots.slots.get_mut(&slot) {
                    slot.spawning = false;
                    slot.restart_at = clock::now() + self.options.timeouts.budget;
                }
            }
        }
    }
}
