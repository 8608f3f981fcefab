//! Who votes in the control group: the next single step from the present
//! membership towards the wanted one.
//!
//! The wanted number of voters is the largest odd number that is at most
//! [`MOST_VOTERS`] and at most the number of live agents. Only one member
//! changes at a time, and never so that the rest could not reach a majority.
//! Members that are merely silent stay: a member is removed only when it is
//! known to be gone (ID-1: one that comes back with its log is the same member).

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// More voters cost a slower commit and gain nothing that spot clusters need.
pub const MOST_VOTERS: usize = 5;

/// One single-step change of membership, by Raft id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Change {
    /// Add a member that receives the log but has no vote.
    AddLearner(u64),
    /// Give a learner that has caught up a vote.
    Promote(u64),
    /// Take a voter's vote; it stays as a learner.
    Demote(u64),
    /// Remove a voter or a learner.
    Remove(u64),
}

/// Why a change is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// A live agent is not a member yet.
    Joined,
    /// There are fewer live voters than wanted.
    TooFewVoters {
        /// Voters that are live.
        live: usize,
        /// Voters that are wanted.
        wanted: usize,
    },
    /// There are more live voters than wanted.
    TooManyVoters {
        /// Voters that are live.
        live: usize,
        /// Voters that are wanted.
        wanted: usize,
    },
    /// The member is gone for good.
    Gone,
}

/// The membership and what is known of the agents, as the leader sees them.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// Members with a vote.
    pub voters: &'a [u64],
    /// Members without a vote.
    pub learners: &'a [u64],
    /// Agents that answer, best suited to vote first.
    pub live: &'a [u64],
    /// Agents that will not come back under the same id.
    pub gone: &'a [u64],
    /// The member that decides.
    pub leader: u64,
}

/// The number of voters wanted for a number of live agents: odd, at least one.
#[must_use]
pub fn wanted_voters(live: usize) -> usize {
    match live.min(MOST_VOTERS) {
        0 => 1,
        n => n - (1 - n % 2),
    }
}

/// The next change, or none when the membership is as wanted (or nothing can be
/// done safely until more is known).
#[must_use]
pub fn next_change(view: &View<'_>) -> Option<(Change, Reason)> {
    let set = |ids: &[u64]| ids.iter().copied().collect::<BTreeSet<u64>>();
    let (gone_ids, members) = (set(view.gone), &set(view.voters) | &set(view.learners));
    let live: Vec<u64> = view.live.iter().copied().filter(|id| !gone_ids.contains(id)).collect();
    let live_ids = set(&live);
    let wanted = wanted_voters(live.len());
    let live_voters = view.voters.iter().filter(|id| live_ids.contains(id)).count();

    // A learner receives the log early, so that it can be promoted at once.
    if let Some(&id) = live.iter().find(|id| !members.contains(id)) {
        return Some((Change::AddLearner(id), Reason::Joined));
    }
    // Replace before removing: the group is never weaker than it must be.
    if live_voters < wanted
        && let Some(&id) = live.iter().find(|id| view.learners.contains(id))
    {
        return Some((Change::Promote(id), Reason::TooFewVoters { live: live_voters, wanted }));
    }
    let gone = |id: &&u64| gone_ids.contains(id) && **id != view.leader;
    if let Some(&id) = view.voters.iter().find(gone) {
        return Some((Change::Remove(id), Reason::Gone));
    }
    // A silent voter counts in the majority: without `id` the live ones must
    // still reach it, or the group would stop for good.
    let safe = (view.voters.len().saturating_sub(1)) / 2 + 1 < live_voters;
    let least = live.iter().rev().find(|id| view.voters.contains(id) && **id != view.leader);
    if live_voters > wanted
        && safe
        && let Some(&id) = least
    {
        return Some((Change::Demote(id), Reason::TooManyVoters { live: live_voters, wanted }));
    }
    view.learners.iter().find(gone).map(|&id| (Change::Remove(id), Reason::Gone))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wanted_number_is_odd_and_at_most_five() {
        let wanted: Vec<usize> = (0..9).map(wanted_voters).collect();
        assert_eq!(wanted, [1, 1, 1, 3, 3, 5, 5, 5, 5]);
    }

    #[track_caller]
    fn check(
        voters: &[u64],
        learners: &[u64],
        live: &[u64],
        gone: &[u64],
        expected: Option<Change>,
    ) {
        let view = View { voters, learners, live, gone, leader: 1 };
        assert_eq!(next_change(&view).map(|(change, _)| change), expected);
    }

    #[test]
    fn one_safe_step_at_a_time() {
        use Change::{AddLearner, Demote, Promote, Remove};
        // Growing from the founder.
        check(&[1], &[], &[1], &[], None);
        check(&[1], &[], &[1, 2], &[], Some(AddLearner(2)));
        check(&[1], &[2], &[1, 2], &[], None);
        check(&[1], &[2], &[1, 2, 3], &[], Some(AddLearner(3)));
        check(&[1], &[2, 3], &[1, 3, 2], &[], Some(Promote(3)));
        check(&[1, 3], &[2], &[1, 3, 2], &[], Some(Promote(2)));
        check(&[1, 2, 3], &[4, 5, 6], &[1, 2, 3, 4, 5, 6], &[], Some(Promote(4)));
        check(&[1, 2, 3, 4, 5], &[6], &[1, 2, 3, 4, 5, 6], &[], None);
        // A silent voter stays; its place is filled when somebody can.
        check(&[1, 2, 3], &[], &[1, 2], &[], None);
        check(&[1, 2, 3], &[4], &[1, 2, 4], &[], Some(Promote(4)));
        // It comes back: the least preferred gives its vote up.
        check(&[1, 2, 3, 4], &[], &[1, 2, 4, 3], &[], Some(Demote(3)));
        check(&[1, 2, 3, 4], &[], &[2, 3, 4, 1], &[], Some(Demote(4)));
        // Replaced before removed; removed when nobody can replace it.
        check(&[1, 2, 3], &[4], &[1, 2, 4], &[3], Some(Promote(4)));
        check(&[1, 2, 3, 4], &[], &[1, 2, 4], &[3], Some(Remove(3)));
        check(&[1, 2, 3], &[], &[1, 2], &[3], Some(Remove(3)));
        // Two nodes left: one vote.
        check(&[1, 2], &[], &[1, 2], &[], Some(Demote(2)));
        // Never below a majority: 1 of {1, 3 silent} could not go on.
        check(&[1, 2, 3], &[], &[1, 2], &[], None);
        check(&[1, 2, 3, 4], &[], &[1, 2, 3], &[], None);
        // Gone learners go last; a leader does not remove itself.
        check(&[1], &[2], &[1], &[2], Some(Remove(2)));
        check(&[1], &[], &[1], &[1], None);
        // An agent known to be gone is not live, whatever the caller lists.
        check(&[1], &[], &[1, 2], &[2], None);
    }

    #[test]
    fn every_sequence_of_changes_keeps_a_live_majority_and_ends() {
        // All small memberships with a live majority: each step keeps one.
        for bits in 0u32..(1 << 10) {
            let pick = |shift: u32| -> Vec<u64> {
                (1..=5u64).filter(|id| bits >> (shift + *id as u32 - 1) & 1 == 1).collect()
            };
            let (mut voters, live) = (pick(0), pick(5));
            let majority = |voters: &[u64]| {
                voters.iter().filter(|id| live.contains(id)).count() > voters.len() / 2
            };
            if !voters.contains(&1) || !live.contains(&1) || !majority(&voters) {
                continue;
            }
            let gone: Vec<u64> = (1..=5).filter(|id| !live.contains(id) && id % 2 == 0).collect();
            let mut learners: Vec<u64> = Vec::new();
            let mut steps = 0;
            loop {
                let view = View {
                    voters: &voters,
                    learners: &learners,
                    live: &live,
                    gone: &gone,
                    leader: 1,
                };
                let Some((change, _)) = next_change(&view) else { break };
                match change {
                    Change::AddLearner(id) => learners.push(id),
                    Change::Promote(id) => {
                        learners.retain(|&l| l != id);
                        voters.push(id);
                    }
                    Change::Demote(id) => {
                        voters.retain(|&v| v != id);
                        learners.push(id);
                    }
                    Change::Remove(id) => {
                        voters.retain(|&v| v != id);
                        learners.retain(|&l| l != id);
                    }
                }
                assert!(majority(&voters), "{change:?} of {bits:010b} left {voters:?}");
                steps += 1;
                assert!(steps < 20, "{bits:010b} does not settle");
            }
        }
    }
}
