//! What Raft hands out: entries to store, messages to send, committed entries
//! to apply.
//!
//! The leader's messages leave at once, beside its own disk write. A follower's
//! promises (votes, acknowledged entries) leave when they are durable. What
//! promises nothing leaves at once as well: answers to heartbeats, which leases
//! hang on, and pre-votes.

use std::sync::Arc;

use job::replicated::StateMachine;
use raft::Ready;
use raft::eraftpb::{Entry, EntryType, Message, MessageType, Snapshot as RaftSnapshot};

use super::error::ProposeError;
use super::handle::{Applied, Proposed, Snapshot};
use super::member::Member;
use super::replica::{Outcome, Replica};
use super::store::Write;

impl<S: StateMachine> Member<S> {
    /// Deals with all that Raft has to hand out.
    pub(super) fn ready(&mut self) -> Result<(), String> {
        while self.raft.has_ready() {
            let ready = self.raft.ready();
            self.one(ready)?;
            self.report_unsent();
        }
        self.notice_leadership();
        self.reads.release(self.applied);
        self.compact()
    }

    /// Tells Raft what became durable, and sends what waited for it.
    pub(super) fn durable(&mut self) -> Result<(), String> {
        let number = self.disk.durable()?;
        if number > 0 {
            self.raft.on_persist_ready(number);
        }
        let free = self.held.partition_point(|(n, _)| *n <= number);
        let messages: Vec<Message> = self.held.drain(..free).flat_map(|(_, m)| m).collect();
        for message in &messages {
            self.send(message);
        }
        self.report_unsent();
        Ok(())
    }

    fn one(&mut self, mut ready: Ready) -> Result<(), String> {
        for message in ready.take_messages() {
            self.send(&message);
        }
        let (now, later): (Vec<Message>, Vec<Message>) =
            ready.take_persisted_messages().into_iter().partition(promises_nothing);
        for message in &now {
            self.send(message);
        }
        if !later.is_empty() {
            self.held.push_back((ready.number(), later));
        }
        for read in ready.take_read_states() {
            self.reads.confirm(&read.request_ctx, read.index);
        }
        self.apply(&ready.take_committed_entries())?;

        let installed = Some(ready.snapshot()).filter(|s| !s.is_empty()).cloned();
        let write = Write {
            installed: installed.clone(),
            entries: ready.take_entries(),
            hard_state: ready.hs().cloned(),
            compacted: None,
        };
        let log = self.raft.mut_store();
        if let Some(snapshot) = &installed {
            log.install(snapshot.clone());
        }
        log.append(&write.entries);
        if let Some(hard_state) = &write.hard_state {
            log.set_hard_state(hard_state.clone());
        }
        let (number, sync) = (ready.number(), ready.must_sync());
        self.disk.write(number, write, sync)?;
        self.raft.advance_append_async(ready);
        match installed {
            // Rare, and Raft can do nothing until it is durable: wait.
            Some(snapshot) => {
                self.disk.flush()?;
                self.durable()?;
                self.install(&snapshot)
            }
            None => {
                self.raft.advance_apply_to(self.applied);
                Ok(())
            }
        }
    }

    /// Applies committed entries, publishes the state, then tells the events and
    /// answers proposers: who hears of a fact finds it in the state.
    fn apply(&mut self, entries: &[Entry]) -> Result<(), String> {
        let Some(last) = entries.last() else {
            return Ok(());
        };
        let mut answers = Vec::new();
        let mut facts = Vec::new();
        for entry in entries {
            match entry.get_entry_type() {
                EntryType::EntryNormal if entry.data.is_empty() => {}
                EntryType::EntryNormal => {
                    let (ticket, outcome) = self.replica.apply(entry.index, &entry.data)?;
                    let result = conclude(entry.index, outcome, &mut facts);
                    answers.extend(self.proposals.remove(&ticket).map(|reply| (reply, result)));
                }
                EntryType::EntryConfChange => self.apply_change(entry)?,
                EntryType::EntryConfChangeV2 => {
                    return Err(format!("entry {} was written by another version", entry.index));
                }
            }
        }
        self.applied = last.index;
        self.show_state();
        for fact in facts {
            // Nobody may be listening.
            let _ = self.events.send(Arc::new(fact));
        }
        for (reply, result) in answers {
            // A caller that went away needs no answer.
            let _ = reply.send(result);
        }
        Ok(())
    }

    fn install(&mut self, snapshot: &RaftSnapshot) -> Result<(), String> {
        let index = snapshot.get_metadata().index;
        self.replica = Replica::restore(&snapshot.data)
            .map_err(|e| format!("the state at {index} does not restore: {e}"))?;
        self.applied = index;
        self.raft.advance_apply_to(index);
        self.show_state();
        // Nobody may be listening.
        let _ = self.events.send(Arc::new(Applied::Restored { index }));
        Ok(())
    }

    fn show_state(&self) {
        let state = self.replica.machine.clone();
        self.states.send_replace(Arc::new(Snapshot { state, applied: self.applied }));
    }

    /// Snapshots the state and drops what is in it from the log, now and then or
    /// when a member waits for a state that knows it.
    fn compact(&mut self) -> Result<(), String> {
        let log = self.raft.store();
        let before = log.latest_snapshot().get_metadata().index;
        let wanted = log.take_wanted();
        let new = self.applied - before;
        if new == 0 || (new < self.options.snapshot_every && !wanted) {
            return Ok(());
        }
        let term = self.raft.raft.raft_log.term(self.applied).map_err(|e| e.to_string())?;
        let mut snapshot =
            RaftSnapshot { data: self.replica.snapshot().into(), ..RaftSnapshot::default() };
        let at = snapshot.mut_metadata();
        (at.index, at.term) = (self.applied, term);
        at.set_conf_state(self.raft.raft.prs().conf().to_conf_state());
        let log = self.raft.mut_store();
        let truncated = log.compact(snapshot.clone(), self.options.keep_entries);
        // With the commit index: a snapshot beyond it would not load.
        let hard_state = Some(log.hard_state().clone());
        let write =
            Write { hard_state, compacted: Some((snapshot, truncated)), ..Write::default() };
        self.disk.write(0, write, true)
    }
}

fn promises_nothing(message: &Message) -> bool {
    matches!(
        message.get_msg_type(),
        MessageType::MsgHeartbeatResponse
            | MessageType::MsgRequestPreVote
            | MessageType::MsgRequestPreVoteResponse
    )
}

fn conclude<E: Clone>(
    index: u64,
    outcome: Outcome<E>,
    facts: &mut Vec<Applied<E>>,
) -> Result<Proposed<E>, ProposeError> {
    match outcome {
        Outcome::Applied(events) => {
            facts.push(Applied::Events { index, events: events.clone() });
            Ok(Proposed { index, events, duplicate: false })
        }
        Outcome::Duplicate => Ok(Proposed { index, events: Vec::new(), duplicate: true }),
        Outcome::Expired => Err(ProposeError::Unknown),
    }
}
