//! What a leading agent does: answer beats behind a quorum round, propose what
//! the planner decides, and carry out its effects off the actor's turn.

use std::{path::PathBuf, sync::Arc};

use bytes::Bytes;
use job::{
    NodeId, Step, StoreId, codec,
    command::{Command, Event},
    leader::{Beat, Hearing, Leader, Members},
    message::AgentMessage,
    planner::{Effect, Limits},
    reforming::Pulse,
    report::NodeReport,
    state::Phase,
};
use ractor::ActorRef;
use transport::control::Lane;

use super::{
    Notice, checkpoints,
    node_agent::{Message, State},
    reforming::{Look, Moved},
};
use crate::clock;

/// Something that was done outside the actor's turn.
pub(super) enum Done {
    /// A quorum round ended.
    Quorum { beats: Vec<Beat>, passed: bool },
    /// A proposal ended, one way or the other.
    Proposed,
    /// A membership change ended, one way or the other.
    Changed,
    /// A checkpoint's index is durable, or could not be written.
    Assembled { step: Step, result: Result<Command, String> },
    /// A committed checkpoint was read through.
    Verified { step: Step, result: Result<(), String> },
    /// A checkpoint folder job that only has to be reported.
    Kept(Result<(), String>),
    /// The checkpoint folder was looked at.
    Looked(Look),
    /// A sign of life was written into it, or could not be.
    Pulsed(Result<Pulse, String>),
    /// An attempt to move into a newer era ended.
    Moved(Moved),
    /// The discovery script was asked.
    Discovered(Result<Vec<String>, String>),
}

impl State {
    /// Takes a beat, when leading.
    pub(super) fn hear_beat(
        &mut self,
        myself: &ActorRef<Message>,
        from: Option<StoreId>,
        sent_micros: u64,
        report: NodeReport,
    ) {
        let job = Arc::clone(&self.job);
        let Some(leader) = &mut self.leader else { return };
        let (node, boot) = (report.node.clone(), report.boot);
        match leader.hear(&job.state, Beat { from, sent_micros }, report, clock::moment()) {
            Hearing::Fenced { cause, refused } => {
                let Some(from) = from else { return };
                tracing::debug!(peer = %node, cause, "a fenced process start beats");
                let fenced = AgentMessage::Fenced { boot, cause, refused };
                let _ = self.control.send(from, Lane::Control, codec::encode(&fenced).into());
                return;
            }
            Hearing::News => self.decide_soon(myself),
            Hearing::Known => {}
        }
        self.quorum_round(myself);
    }

    /// LS-1: beats are answered after a round of a quorum that began after they
    /// arrived.
    fn quorum_round(&mut self, myself: &ActorRef<Message>) {
        let Some(beats) = self.leader.as_mut().and_then(Leader::begin_round) else { return };
        let (group, mailbox) = (self.group.clone(), myself.clone());
        tokio::spawn(async move {
            let passed = group.read_barrier().await.is_ok();
            let _ = mailbox.send_message(Message::Done(Done::Quorum { beats, passed }));
        });
    }

    /// Decides once for all that is in the mailbox: a decision costs a look at
    /// every node, and thousands of nodes beat.
    fn decide_soon(&mut self, myself: &ActorRef<Message>) {
        if !self.deciding {
            self.deciding = myself.send_message(Message::Decide).is_ok();
        }
    }

    /// Asks the planner and proposes what it says.
    pub(super) fn decide(&mut self, myself: &ActorRef<Message>) {
        if self.is_ending() || self.is_overtaken() {
            return;
        }
        let job = Arc::clone(&self.job);
        let Some(leader) = &mut self.leader else { return };
        // What waited while this process did not run may come before its next tick.
        if self.options.timeouts.is_late(self.next_tick, clock::now()) {
            leader.ticked(true);
        }
        let limits = Limits::from(&self.options.timeouts);
        let decision = leader.decide(&job.state, &limits, clock::moment(), entropy());
        let Some(decision) = decision else { return };
        if !decision.commands.is_empty() {
            let (group, mailbox) = (self.group.clone(), myself.clone());
            tokio::spawn(async move {
                if let Err(error) = group.propose(decision.commands).await {
                    tracing::info!(%error, "a proposal did not pass");
                }
                let _ = mailbox.send_message(Message::Done(Done::Proposed));
            });
        }
        for effect in decision.effects {
            self.perform(myself, effect);
        }
        if decision.waiting != self.waiting {
            if let Some(waiting) = &decision.waiting {
                self.notice(Notice::Waiting(waiting.clone()));
            }
            self.waiting = decision.waiting;
        }
    }

    fn perform(&mut self, myself: &ActorRef<Message>, effect: Effect) {
        let folder = Arc::clone(&self.checkpoints);
        match effect {
            Effect::Discard { era, generation, step } => self.offload(myself, move || {
                Done::Kept(checkpoints::discard(&folder, era, generation, step))
            }),
            Effect::Assemble { era, generation, step, shards } => {
                self.offload(myself, move || {
                    let result = checkpoints::assemble(&folder, era, generation, step, &shards);
                    if result.is_err() {
                        let _ = checkpoints::discard(&folder, era, generation, step);
                    }
                    Done::Assembled { step, result }
                });
            }
            Effect::Verify(step) => {
                let record = self.job().checkpoints.get(&step).cloned();
                self.offload(myself, move || Done::Verified {
                    step,
                    result: match record {
                        Some(record) => checkpoints::verify(&folder, step, &record),
                        None => Err("the group has no record of it".into()),
                    },
                });
            }
        }
    }

    pub(super) fn offload(
        &self,
        myself: &ActorRef<Message>,
        work: impl FnOnce() -> Done + Send + 'static,
    ) {
        let mailbox = myself.clone();
        tokio::task::spawn_blocking(move || {
            let _ = mailbox.send_message(Message::Done(work()));
        });
    }

    pub(super) fn done(&mut self, myself: &ActorRef<Message>, done: Done) {
        match done {
            Done::Quorum { beats, passed } => {
                if let Some(leader) = &mut self.leader {
                    leader.round_ended();
                }
                if passed && !self.is_overtaken() {
                    self.beat_pulse(myself);
                    self.answer(&beats);
                }
                self.quorum_round(myself);
            }
            Done::Proposed => {
                if let Some(leader) = &mut self.leader {
                    leader.proposal_ended();
                }
                self.catch_up();
                self.decide(myself);
            }
            Done::Changed => {
                if let Some(leader) = &mut self.leader {
                    leader.change_ended();
                }
            }
            Done::Assembled { step, result } => match result {
                Ok(command) => self.propose(myself, command),
                Err(why) => self.not_completed(myself, step, &why),
            },
            Done::Verified { step, result } => {
                if let Err(why) = &result {
                    let line = format!("checkpoint of step {step} is damaged: {why}");
                    self.notice(Notice::Warning(line));
                }
                if let Some(leader) = &mut self.leader {
                    leader.verified(step, result);
                }
                self.decide(myself);
            }
            Done::Looked(look) => self.looked(myself, look),
            Done::Pulsed(pulse) => self.pulsed(pulse),
            Done::Moved(moved) => self.moved(moved),
            Done::Discovered(hosts) => self.discovered(hosts),
            Done::Kept(result) => {
                if let Err(why) = result {
                    self.notice(Notice::Warning(why));
                }
            }
        }
    }

    /// A save whose index could not be written. Another one follows, unless this was
    /// the last.
    fn not_completed(&mut self, myself: &ActorRef<Message>, step: Step, why: &str) {
        let job = self.job();
        if step == job.spec.total_steps || job.phase == Phase::Stopping {
            let why = format!("the last checkpoint, of step {step}, was not completed: {why}");
            let fail = Command::Fail { why, final_: false, at: clock::timestamp() };
            return self.propose(myself, fail);
        }
        let line = format!("checkpoint of step {step} was not completed: {why}");
        self.notice(Notice::Warning(line));
    }

    fn answer(&mut self, beats: &[Beat]) {
        let pulse = self.own_pulse();
        for beat in beats {
            match beat.from {
                None => self.renew_lease(beat.sent_micros),
                Some(peer) => {
                    let answer = AgentMessage::Answer { sent_micros: beat.sent_micros, pulse };
                    let bytes = Bytes::from(codec::encode(&answer));
                    let _ = self.control.send(peer, Lane::Control, bytes);
                }
            }
        }
    }

    pub(super) fn propose(&self, _: &ActorRef<Message>, command: Command) {
        let group = self.group.clone();
        tokio::spawn(async move {
            if let Err(error) = group.propose(vec![command]).await {
                tracing::info!(%error, "a proposal did not pass");
            }
        });
    }

    /// Passes a wish for a node's leave on to whoever leads.
    pub(super) fn drain(&mut self, myself: &ActorRef<Message>, node: &NodeId) {
        if self.leads() {
            if let Some(known) = self.job().nodes.get(node) {
                let incarnation = known.incarnation;
                let node = node.clone();
                let at = clock::timestamp();
                self.propose(myself, Command::Leave { node, incarnation, at });
            }
            return;
        }
        let leader = self.group.status().borrow().leader;
        let bytes = Bytes::from(codec::encode(&AgentMessage::Drain(node.clone())));
        for peer in self.linked.values() {
            if Some(peer.store.raft_id()) == leader {
                let _ = self.control.send(peer.store, Lane::Control, bytes.clone());
            }
        }
    }

    /// A new leader finishes what the old one may have left half done.
    pub(super) fn take_over(&mut self, myself: &ActorRef<Message>) {
        let folder = Arc::clone(&self.checkpoints);
        let records = self.job().checkpoints.clone();
        self.offload(myself, move || Done::Kept(checkpoints::roll_forward(&folder, &records)));
    }

    /// What a fact asks of a leader's disk.
    pub(super) fn duty_after(&mut self, myself: &ActorRef<Message>, event: &Event) {
        if !self.leads() {
            return;
        }
        let folder = Arc::clone(&self.checkpoints);
        match event {
            Event::CheckpointCommitted { step, .. } => {
                let step = *step;
                if let Some(record) = self.job().checkpoints.get(&step).cloned() {
                    self.offload(myself, move || {
                        Done::Kept(
                            checkpoints::publish(&folder, step, &record).map(|_: PathBuf| ()),
                        )
                    });
                }
            }
            Event::CheckpointRetired { .. } => {
                let (era, keep) = (self.job().era, self.job().spec.keep_latest_k);
                self.offload(myself, move || Done::Kept(checkpoints::retire(&folder, era, keep)));
            }
            Event::JobFinished { report, .. } => {
                let (era, step) = (self.job().era, report.step);
                self.offload(myself, move || Done::Kept(checkpoints::finish(&folder, era, step)));
            }
            _ => {}
        }
    }

    /// One step of the control group's membership towards the live nodes (CG).
    pub(super) fn group_membership(&mut self, myself: &ActorRef<Message>) {
        let job = Arc::clone(&self.job);
        let Some(leader) = &mut self.leader else { return };
        let status = self.group.status().borrow().clone();
        let members =
            Members { voters: &status.voters, learners: &status.learners, leader: status.id };
        let Some((change, reason)) = leader.change(&job.state, members) else { return };
        tracing::debug!(?change, ?reason, "changing the control group");
        let (group, mailbox) = (self.group.clone(), myself.clone());
        tokio::spawn(async move {
            if let Err(error) = group.change(change).await {
                tracing::debug!(%error, "membership change did not pass");
            }
            let _ = mailbox.send_message(Message::Done(Done::Changed));
        });
    }
}

/// A fresh secret from the operating system.
fn entropy() -> [u8; 32] {
    let (a, b) = (uuid::Uuid::new_v4(), uuid::Uuid::new_v4());
    let mut key = [0; 32];
    key[..16].copy_from_slice(a.as_bytes());
    key[16..].copy_from_slice(b.as_bytes());
    key
}
