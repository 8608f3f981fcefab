//! Read barriers (LS-1): each waits for a quorum round begun after it was
//! asked. One round is in the air at a time; whoever asks meanwhile shares the
//! next, so any number of lease beats costs one round per round trip.

use std::time::Instant;

use tokio::sync::oneshot;

use super::error::ReadError;

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
        if let Some((_, waiters)) = self.round.take_if(|(n, _)| n.to_le_bytes() == context) {
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn ask(reads: &mut Reads, deadline: Instant) -> oneshot::Receiver<Result<(), ReadError>> {
        let (reply, answer) = oneshot::channel();
        reads.ask(Waiter { reply, deadline });
        answer
    }

    #[test]
    fn whoever_asks_during_a_round_waits_for_the_next() {
        let far = Instant::now() + Duration::from_secs(60);
        let mut reads = Reads::default();
        assert_eq!(reads.begin(), None);
        let mut early = ask(&mut reads, far);
        let first = reads.begin().expect("a round");
        let mut late = ask(&mut reads, far);
        assert_eq!(reads.begin(), None, "one round at a time");
        reads.confirm(&[0; 8], 3);
        reads.confirm(&first, 5);
        reads.release(4);
        assert!(early.try_recv().is_err(), "not applied yet");
        reads.release(5);
        assert_eq!(early.try_recv(), Ok(Ok(())));
        assert!(late.try_recv().is_err(), "asked after the round began");
        let second = reads.begin().expect("another round");
        reads.confirm(&first, 9);
        reads.release(9);
        assert!(late.try_recv().is_err(), "an old answer counts for nothing");
        reads.confirm(&second, 5);
        reads.release(9);
        assert_eq!(late.try_recv(), Ok(Ok(())));
        assert!(reads.is_idle());
    }

    #[test]
    fn a_barrier_ends_with_its_deadline_or_with_the_leadership() {
        let now = Instant::now();
        let mut reads = Reads::default();
        let mut short = ask(&mut reads, now);
        let mut long = ask(&mut reads, now + Duration::from_secs(60));
        reads.begin().expect("a round");
        reads.expire(now);
        assert_eq!(short.try_recv(), Ok(Err(ReadError::NoMajority)));
        assert!(long.try_recv().is_err());
        reads.fail(Some(3));
        assert_eq!(long.try_recv(), Ok(Err(ReadError::NotLeader { leader: Some(3) })));
        assert!(reads.is_idle());
    }
}
