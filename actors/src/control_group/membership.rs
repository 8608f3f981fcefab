//! Changes of membership, one single step at a time.
//!
//! Raft takes a second change while one is pending, says Ok, and turns it into
//! an empty entry: everything is checked here first, and refused by name.

use job::replicated::StateMachine;
use job::voters::Change;
use protobuf::Message as _;
use raft::eraftpb::{ConfChange, ConfChangeType, Entry};
use tokio::sync::oneshot;

use super::error::ChangeError;
use super::member::Member;

/// Entries that a learner may lack when it is promoted: it catches up within a
/// round trip, and the next commit may have to wait for it.
const CAUGHT_UP: u64 = 16;

type Reply = oneshot::Sender<Result<(), ChangeError>>;

/// The change that this leader has proposed.
pub(super) struct PendingChange {
    change: Change,
    reply: Reply,
}

impl PendingChange {
    pub(super) fn answer(self, result: Result<(), ChangeError>) {
        // A caller that went away needs no answer.
        let _ = self.reply.send(result);
    }
}

impl<S: StateMachine> Member<S> {
    pub(super) fn change(&mut self, change: Change, reply: Reply) {
        let pending = PendingChange { change, reply };
        match self.check(change) {
            Ok(Step::AlreadyDone) => return pending.answer(Ok(())),
            Err(error) => return pending.answer(Err(error)),
            Ok(Step::Propose) => {}
        }
        match self.raft.propose_conf_change(Vec::new(), conf_change(change)) {
            Ok(()) => self.change = Some(pending),
            // Dropped while leadership is handed over or too much is uncommitted.
            Err(_) => pending.answer(Err(ChangeError::Busy)),
        }
    }

    /// Applies a committed change. Every member decides alike, so one that Raft
    /// refuses (the last voter) is nobody's.
    pub(super) fn apply_change(&mut self, entry: &Entry) -> Result<(), String> {
        let conf = ConfChange::parse_from_bytes(&entry.data)
            .map_err(|e| format!("entry {} is no membership change: {e}", entry.index))?;
        let result = self.raft.apply_conf_change(&conf);
        // Elected while its own removal was under way: Raft would stop the process
        // over a leader that is no voter.
        if self.leads() && !self.voters().contains(&self.id) {
            let term = self.raft.raft.term;
            self.raft.raft.become_follower(term, 0);
        }
        let done = self.change.take_if(|p| conf_change(p.change) == conf);
        if let Err(error) = &result {
            tracing::warn!(index = entry.index, %error, "a membership change was refused");
        }
        if let Some(pending) = done {
            let refused =
                ChangeError::Refused { change: pending.change, reason: "Raft refuses it" };
            let result = result.map(|_| ()).map_err(|_| refused);
            self.changed.push((pending, result));
        }
        Ok(())
    }

    fn check(&mut self, change: Change) -> Result<Step, ChangeError> {
        if !self.leads() {
            return Err(ChangeError::NotLeader { leader: self.leader() });
        }
        let refuse = |reason| Err(ChangeError::Refused { change, reason });
        let conf = self.raft.raft.prs().conf().to_conf_state();
        let voter = |id: u64| conf.voters.contains(&id);
        let learner = |id: u64| conf.learners.contains(&id);
        match change {
            Change::AddLearner(0) => return refuse("0 is no member"),
            Change::AddLearner(id) if learner(id) || voter(id) => return Ok(Step::AlreadyDone),
            Change::Promote(id) if voter(id) => return Ok(Step::AlreadyDone),
            Change::Promote(id) if !learner(id) => return refuse("it is not a learner"),
            Change::Demote(id) if learner(id) => return Ok(Step::AlreadyDone),
            Change::Demote(id) if !voter(id) => return refuse("it is not a voter"),
            Change::Remove(id) if !voter(id) && !learner(id) => return Ok(Step::AlreadyDone),
            Change::Demote(id) | Change::Remove(id) if conf.voters == [id] => {
                return refuse("it is the last voter");
            }
            _ => {}
        }
        if self.change.is_some() || self.raft.raft.has_pending_conf() {
            return Err(ChangeError::Busy);
        }
        match change {
            Change::Promote(id) => {
                let behind = self.behind(id);
                if behind > CAUGHT_UP || !self.answers(id) {
                    return Err(ChangeError::NotReady { id, behind });
                }
            }
            Change::Demote(id) | Change::Remove(id) if id == self.id => {
                return match self.most_caught_up() {
                    Some(to) => {
                        self.raft.transfer_leader(to);
                        Err(ChangeError::Transferring { to })
                    }
                    None => refuse("no other voter answers, and a leader cannot leave alone"),
                };
            }
            Change::Demote(id) | Change::Remove(id) if voter(id) => {
                let active = conf.voters.iter().filter(|&&v| v != id && self.answers(v)).count();
                if active <= (conf.voters.len() - 1) / 2 {
                    return refuse("the voters that answer would be no majority of the rest");
                }
            }
            _ => {}
        }
        Ok(Step::Propose)
    }

    /// Entries that a member is not known to have.
    fn behind(&self, id: u64) -> u64 {
        let matched = self.raft.raft.prs().get(id).map_or(0, |p| p.matched);
        self.raft.raft.raft_log.last_index().saturating_sub(matched)
    }

    /// Whether a member was heard of within an election timeout. Raft's own mark
    /// is set for a new member before it was ever heard of.
    fn answers(&self, id: u64) -> bool {
        id == self.id || self.recently_heard(id)
    }

    fn most_caught_up(&self) -> Option<u64> {
        let others = self.voters().into_iter().filter(|&v| v != self.id && self.answers(v));
        others.min_by_key(|&v| (self.behind(v), v))
    }
}

enum Step {
    Propose,
    AlreadyDone,
}

fn conf_change(change: Change) -> ConfChange {
    let (kind, id) = match change {
        Change::AddLearner(id) | Change::Demote(id) => (ConfChangeType::AddLearnerNode, id),
        Change::Promote(id) => (ConfChangeType::AddNode, id),
        Change::Remove(id) => (ConfChangeType::RemoveNode, id),
    };
    let mut conf = ConfChange { node_id: id, ..ConfChange::default() };
    conf.set_change_type(kind);
    conf
}
