//! Read barriers (LS-1): each waits for a quorum round begun after it was
//! asked. One round is in the air at a time; whoever asks meanwhile shares the
//! next, so any number of lease beats costs one round per round trip.

use std::time::Instant;

use tokio::sync::oneshot;

use super::handle::ReadError;

pub(super) type Reply = oneshot::Sender<Result<(), ReadError>>;

#[derive(Default)]
pub(super) struct Reads {
    queued: Vec<Waiter>,
    /// The round in the air and those that wait for it.
    round: Option<(u64, Vec<Waiter>)>,
    /// Confirmed at an index that is not applied yet.
    confirmed: Vec<(u64, Vec<Waiter>)>,
    /// Number of the next round; a late answer to an old round matches nothing.
    next: u64,
}

pub(super) struct Waiter {
    pub(super) reply: Reply,
    pub(super) deadline: Instant,
}

impl Reads {
    pub(super) fn ask(&mut self, waiter: Waiter) {
        self.queued.push(waiter);
    }

    /// Begins a round when someone waits and none is in the air.
    pub(super) fn begin(&mut self) -> Option<[u8; 8]> {
        if self.round.is_some() || self.queued.is_empty() {
            return None;
        }
        self.next += 1;
        self.round = Some((self.next, std::mem::take(&mut self.queued)));
        Some(self.next.to_le_bytes())
    }

    /// A majority answered the round.
    pub(super) fn confirm(&mut self, context: &[u8], index: u64) {
        if let Some((round, waiters)) = self.round.take_if(|(n, _)| n.to_le_bytes() == context) {
            debug_assert!(round > 0, "rounds are numbered from 1");
            self.confirmed.push((index, waiters));
        }
    }

    /// Answers what was confirmed at applied indices.
    pub(super) fn release(&mut self, applied: u64) {
        for (_, waiters) in self.confirmed.extract_if(.., |(index, _)| *index <= applied) {
            for waiter in waiters {
                // A caller that went away needs no answer.
                let _ = waiter.reply.send(Ok(()));
            }
        }
    }

    /// Answers those whose deadline passed.
    pub(super) fn expire(&mut self, now: Instant) {
        let lists = std::iter::once(&mut self.queued)
            .chain(self.round.iter_mut().map(|(_, w)| w))
            .chain(self.confirmed.iter_mut().map(|(_, w)| w));
        for waiters in lists {
            for waiter in waiters.extract_if(.., |w| w.deadline <= now) {
                let _ = waiter.reply.send(Err(ReadError::NoMajority));
            }
        }
    }

    /// This member does not lead (any more).
    pub(super) fn fail(&mut self, leader: Option<u64>) {
        let queued = std::mem::take(&mut self.queued);
        let round = self.round.take().map(|(_, w)| w).unwrap_or_default();
        let confirmed = self.confirmed.drain(..).flat_map(|(_, w)| w);
        for waiter in queued.into_iter().chain(round).chain(confirmed) {
            let _ = waiter.reply.send(Err(ReadError::NotLeader { leader }));
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.queued.is_empty() && self.round.is_none() && self.confirmed.is_empty()
    }
}
