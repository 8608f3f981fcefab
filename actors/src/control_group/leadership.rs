//! Who leads: elections by silence, by certain death and of a lone voter, and
//! what ends with this member's leadership.

use std::time::Instant;

use job::replicated::StateMachine;
use raft::StateRole;

use super::election::{self, Turns};
use super::error::{ChangeError, ProposeError};
use super::member::Member;

impl<S: StateMachine> Member<S> {
    pub(super) fn leads(&self) -> bool {
        self.raft.raft.state == StateRole::Leader
    }

    /// Whether a member was heard of within an election timeout.
    pub(super) fn recently_heard(&self, id: u64) -> bool {
        let ticks = u32::try_from(self.options.election_ticks).unwrap_or(u32::MAX);
        self.contact.get(&id).is_some_and(|at| self.now - *at < self.options.tick * ticks)
    }

    pub(super) fn leader(&self) -> Option<u64> {
        Some(self.raft.raft.leader_id).filter(|&id| id != 0)
    }

    pub(super) fn voters(&self) -> Vec<u64> {
        let mut ids = self.raft.raft.prs().conf().to_conf_state().voters;
        ids.sort_unstable();
        ids
    }

    /// Raft draws its timeout at random; distinct fixed ones never tie, and a
    /// simulated group runs the same way twice.
    pub(super) fn fix_election_timeout(&mut self) {
        let voters = self.voters();
        if let Some(rank) = election::rank(self.id, voters.iter()) {
            let ticks = election::ticks(self.options.election_ticks, rank);
            self.raft.raft.set_randomized_election_timeout(ticks);
        }
    }

    /// A lone voter leads the moment it wins its own vote, and Raft insists that
    /// its log is durable by then.
    pub(super) fn may_campaign(&self) -> bool {
        let log = &self.raft.raft.raft_log;
        self.leads() || !self.raft.raft.prs().is_singleton() || log.persisted == log.last_index()
    }

    /// A lone voter has nobody to wait for.
    pub(super) fn lone_voter_leads(&mut self) {
        let raft = &self.raft.raft;
        let alone = raft.promotable() && raft.prs().is_singleton();
        if alone && !self.leads() && self.may_campaign() && self.applied == raft.raft_log.committed
        {
            self.campaign();
        }
    }

    fn campaign(&mut self) {
        if let Err(error) = self.raft.campaign() {
            tracing::debug!(%error, "no election");
        }
    }

    pub(super) fn leader_died(&mut self, id: u64) {
        if self.leads() || ![0, id].contains(&self.raft.raft.leader_id) {
            return;
        }
        let (now, tick) = (self.now, self.options.tick);
        let until = now + tick * u32::try_from(self.options.election_ticks).unwrap_or(u32::MAX);
        if self.raft.raft.leader_id == id {
            let term = self.raft.raft.term;
            self.raft.raft.become_follower(term, 0);
        }
        // A survivor that heard of the death earlier may have asked for a vote
        // too early: it is answered now and goes first.
        let asked = self.refused.take().filter(|(m, at)| m.from != id && now - *at < until - now);
        let first = if asked.is_some() { now + tick } else { now };
        self.turns = Turns::new(self.id, id, &self.voters(), first, tick, until);
        if let Some((message, _)) = asked {
            self.step(message);
        }
    }

    pub(super) fn take_turn(&mut self, now: Instant) {
        let Some(mut turns) = self.turns else { return };
        let led = self.leader().is_some();
        // A candidate has voted in its term already: let it finish.
        let asking = self.raft.raft.state == StateRole::Candidate;
        if !led && turns.take(now) && !asking && self.may_campaign() {
            self.campaign();
        }
        self.turns = (!led && !turns.over(now)).then_some(turns);
    }

    /// Answers everything that needed this member's leadership when it ended.
    pub(super) fn notice_leadership(&mut self) {
        let now = (self.leads(), self.raft.raft.term);
        if self.leading == now {
            return;
        }
        if self.leading.0 {
            for (_, reply) in self.proposals.drain() {
                // A caller that went away needs no answer.
                let _ = reply.send(Err(ProposeError::Unknown));
            }
            if let Some(change) = self.change.take() {
                change.answer(Err(ChangeError::Unknown));
            }
            self.reads.fail(self.leader());
            self.snapshots.clear();
        }
        if now.0 != self.leading.0 {
            let term = now.1;
            tracing::info!(member = self.id, term, leads = now.0, "leadership of the group");
        }
        self.leading = now;
    }
}
