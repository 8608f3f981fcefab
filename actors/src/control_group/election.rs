//! The election after a certain death of the leader: at once, and one voter at
//! a time. Every survivor hears of the death at a slightly different moment and
//! a vote asked too early is ignored, so turns repeat until somebody leads.

use std::time::{Duration, Instant};

/// This voter's turns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turns {
    next: Instant,
    every: Duration,
    until: Instant,
}

impl Turns {
    /// Turns of the survivor `id`: the lowest id begins now, each next one a
    /// turn later, until `until`, when usual elections have taken over. None
    /// when `id` has no vote.
    pub(super) fn new(
        id: u64,
        dead: u64,
        voters: &[u64],
        now: Instant,
        turn: Duration,
        until: Instant,
    ) -> Option<Self> {
        if id == dead {
            return None;
        }
        let survivors = voters.iter().filter(|&&v| v != dead).count() as u32;
        let rank = rank(id, voters.iter().filter(|&&v| v != dead))? as u32;
        Some(Self { next: now + turn * rank, every: turn * survivors, until })
    }

    /// When to look next.
    pub(super) fn next(&self) -> Instant {
        self.next
    }

    /// Whether it is this voter's turn now.
    pub(super) fn take(&mut self, now: Instant) -> bool {
        let due = now >= self.next;
        if due {
            self.next = now + self.every;
        }
        due
    }

    /// Whether the turns are over.
    pub(super) fn over(&self, now: Instant) -> bool {
        now >= self.until
    }
}

/// More voters than any change of membership leaves behind: a dead one stays until
/// another has its vote (`job::voters`).
const MOST_RANKS: usize = 32;

/// Ticks of silence before the voter of this rank asks for votes.
pub(super) fn ticks(shortest: usize, rank: usize) -> usize {
    // Raft stops the process over a timeout beyond its own limit.
    shortest + 2 * rank.min(MOST_RANKS)
}

/// Raft's own limit: every timeout is below.
pub(super) fn limit(shortest: usize) -> usize {
    ticks(shortest, MOST_RANKS) + 1
}

/// Position of `id` among `ids` in ascending order.
pub(super) fn rank<'a>(id: u64, ids: impl Iterator<Item = &'a u64>) -> Option<usize> {
    let (mut below, mut found) = (0, false);
    for &other in ids {
        below += usize::from(other < id);
        found |= other == id;
    }
    found.then_some(below)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Milliseconds at which a survivor's turns come, of the first 300.
    #[track_caller]
    fn check(id: u64, dead: u64, voters: &[u64], expected: &[u64]) {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let turns = Turns::new(id, dead, voters, start, Duration::from_millis(50), at(300));
        let mut turned = Vec::new();
        if let Some(mut turns) = turns {
            turned.extend((0..400).filter(|&ms| !turns.over(at(ms)) && turns.take(at(ms))));
        }
        assert_eq!(turned, expected);
    }

    #[test]
    fn every_rank_stays_within_the_limits_of_raft() {
        let most = limit(10);
        for rank in 0..100 {
            assert!((10..most).contains(&ticks(10, rank)), "rank {rank}");
        }
        assert!((1..5).all(|rank| ticks(10, rank) > ticks(10, rank - 1)));
    }

    #[test]
    fn survivors_take_turns_in_the_order_of_their_ids() {
        check(1, 9, &[1, 5, 9], &[0, 100, 200]);
        check(5, 9, &[1, 5, 9], &[50, 150, 250]);
        check(5, 1, &[1, 5, 9], &[0, 100, 200]);
        check(9, 1, &[5, 1, 9], &[50, 150, 250]);
        check(4, 9, &[1, 2, 3, 4, 9], &[150]);
        check(1, 7, &[1], &[0, 50, 100, 150, 200, 250]);
        // Without a vote, and dead itself.
        check(3, 9, &[1, 5, 9], &[]);
        check(9, 9, &[1, 5, 9], &[]);
    }
}
