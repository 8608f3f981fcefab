//! The state machine as the log drives it: each proposal at most once.
//!
//! A caller whose leader died does not know whether its command was committed,
//! and proposes it again under the same [`Ticket`]. Which tickets were applied
//! is part of the replicated state, so every member skips the same ones.

use std::collections::{BTreeMap, BTreeSet};

use job::codec;
use job::replicated::StateMachine;
use serde::{Deserialize, Serialize};

use super::handle::Ticket;

/// Proposers remembered; the one that was silent for longest is forgotten
/// first. A process uses one, so this is many restarts of many nodes.
const MOST_CLIENTS: usize = 1024;

/// Applied tickets of a proposer remembered beyond the first number that is
/// missing. Numbers go missing rarely: a proposal keeps its own until it is
/// committed.
const MOST_AHEAD: usize = 256;

/// The replicated state and what of the log is in it.
#[derive(Clone, Debug)]
pub(super) struct Replica<S> {
    pub(super) machine: S,
    clients: BTreeMap<u64, Client>,
}

/// What one committed proposal did.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome<E> {
    Applied(Vec<E>),
    /// The ticket was applied before.
    Duplicate,
    /// The ticket is too old to tell.
    Expired,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Client {
    /// Whether a number up to this one was applied is forgotten.
    forgotten: u64,
    /// All numbers from `forgotten` to this one were applied.
    through: u64,
    /// Numbers applied beyond `through + 1`.
    ahead: BTreeSet<u64>,
    /// Index of the last applied proposal.
    index: u64,
}

impl<S: StateMachine> Replica<S> {
    pub(super) fn snapshot(&self) -> Vec<u8> {
        encode(&self.machine.snapshot(), &self.clients)
    }

    pub(super) fn restore(bytes: &[u8]) -> Result<Self, String> {
        let (machine, clients): (Vec<u8>, BTreeMap<u64, Client>) =
            codec::decode(bytes).map_err(|e| e.to_string())?;
        Ok(Self { machine: S::restore(&machine)?, clients })
    }

    /// Applies a committed entry. An error means that this build cannot know
    /// the group's state any more, so the member must stop.
    pub(super) fn apply(
        &mut self,
        index: u64,
        entry: &[u8],
    ) -> Result<(Ticket, Outcome<S::Event>), String> {
        let (ticket, command) = split(entry)
            .and_then(|(ticket, command)| Some((ticket, codec::decode(command).ok()?)))
            .ok_or_else(|| format!("entry {index} was written by another version"))?;
        let outcome = match self.admit(ticket, index) {
            Some(refused) => refused,
            None => Outcome::Applied(self.machine.apply(command)),
        };
        Ok((ticket, outcome))
    }

    /// Records the ticket, or says why it must not be applied.
    fn admit(&mut self, ticket: Ticket, index: u64) -> Option<Outcome<S::Event>> {
        if !self.clients.contains_key(&ticket.client) && self.clients.len() >= MOST_CLIENTS {
            let oldest = self.clients.iter().min_by_key(|(_, c)| c.index).map(|(&id, _)| id);
            oldest.and_then(|id| self.clients.remove(&id));
        }
        let client = self.clients.entry(ticket.client).or_default();
        let outcome = client.admit(ticket.seq);
        client.index = index;
        outcome
    }
}

impl Client {
    fn admit<E>(&mut self, seq: u64) -> Option<Outcome<E>> {
        if seq <= self.forgotten {
            return Some(Outcome::Expired);
        }
        if seq <= self.through || !self.ahead.insert(seq) {
            return Some(Outcome::Duplicate);
        }
        if self.ahead.len() > MOST_AHEAD {
            let first = self.ahead.first().copied().unwrap_or(seq);
            (self.forgotten, self.through) = (first - 1, first - 1);
        }
        while self.ahead.first().is_some_and(|&n| n - 1 == self.through) {
            self.through += 1;
            self.ahead.pop_first();
        }
        None
    }
}

/// The log entry of a proposal: its ticket, then the encoded command.
pub(super) fn entry(ticket: Ticket, command: &[u8]) -> Vec<u8> {
    [&ticket.client.to_le_bytes()[..], &ticket.seq.to_le_bytes(), command].concat()
}

fn split(entry: &[u8]) -> Option<(Ticket, &[u8])> {
    let (client, rest) = entry.split_first_chunk()?;
    let (seq, command) = rest.split_first_chunk()?;
    let ticket = Ticket { client: u64::from_le_bytes(*client), seq: u64::from_le_bytes(*seq) };
    Some((ticket, command))
}

/// The bytes of a replica with the state `machine` to which nothing was applied.
pub(super) fn first(machine: &[u8]) -> Vec<u8> {
    encode(machine, &BTreeMap::new())
}

fn encode(machine: &[u8], clients: &BTreeMap<u64, Client>) -> Vec<u8> {
    codec::encode(&(machine, clients))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Debug, PartialEq)]
    struct Count(u64);

    impl StateMachine for Count {
        type Command = u64;
        type Event = u64;
        fn apply(&mut self, command: u64) -> Vec<u64> {
            self.0 += command;
            vec![self.0]
        }
        fn snapshot(&self) -> Vec<u8> {
            codec::encode(&self.0)
        }
        fn restore(bytes: &[u8]) -> Result<Self, String> {
            codec::decode(bytes).map(Self).map_err(|e| e.to_string())
        }
    }

    fn new() -> Replica<Count> {
        Replica::restore(&first(&Count(0).snapshot())).expect("restores")
    }

    fn apply(replica: &mut Replica<Count>, index: u64, client: u64, seq: u64) -> Outcome<u64> {
        let entry = entry(Ticket { client, seq }, &codec::encode(&1u64));
        replica.apply(index, &entry).expect("applies").1
    }

    /// Tickets of one proposer in order of the log, and what each does: applied,
    /// duplicate or expired.
    #[track_caller]
    fn check(tickets: &[(u64, char)]) {
        let mut replica = new();
        for (index, &(seq, expected)) in tickets.iter().enumerate() {
            let outcome = match apply(&mut replica, index as u64, 1, seq) {
                Outcome::Applied(_) => 'a',
                Outcome::Duplicate => 'd',
                Outcome::Expired => 'e',
            };
            assert_eq!(outcome, expected, "ticket {seq} at {index}");
            // A member that restores a state decides as one that applied it all.
            replica = Replica::restore(&replica.snapshot()).expect("restores");
        }
        let applied = tickets.iter().filter(|(_, c)| *c == 'a').count();
        assert_eq!(replica.machine, Count(applied as u64));
    }

    #[test]
    fn a_ticket_is_applied_once_whatever_the_order() {
        check(&[(1, 'a'), (1, 'd'), (2, 'a'), (1, 'd'), (2, 'd')]);
        check(&[(3, 'a'), (1, 'a'), (2, 'a'), (1, 'd'), (3, 'd')]);
        check(&[(900, 'a'), (1, 'a'), (500, 'a'), (900, 'd'), (500, 'd'), (2, 'a'), (1, 'd')]);
        check(&[(u64::MAX, 'a'), (1, 'a'), (u64::MAX, 'd'), (u64::MAX - 1, 'a')]);
        check(&[(0, 'e'), (1, 'a')]);
    }

    #[test]
    fn numbers_that_never_came_are_given_up_in_the_end() {
        let mut tickets = vec![(1, 'a')];
        tickets.extend((3..=2 + MOST_AHEAD as u64).map(|n| (n, 'a')));
        tickets.extend([(1, 'd'), (3, 'd')]);
        let last = 3 + MOST_AHEAD as u64;
        let given_up = [(last, 'a'), (2, 'e'), (1, 'e'), (3, 'd'), (last, 'd'), (last + 1, 'a')];
        check(&[&tickets[..], &given_up].concat());
    }

    #[test]
    fn proposers_are_bounded_and_the_quietest_is_forgotten() {
        let mut replica = new();
        let most = MOST_CLIENTS as u64;
        for client in 0..most {
            apply(&mut replica, 10 + client, client, 1);
        }
        apply(&mut replica, 10 + most, 0, 2);
        apply(&mut replica, 11 + most, most, 1);
        assert_eq!(replica.clients.len(), MOST_CLIENTS);
        assert!(!replica.clients.contains_key(&1) && replica.clients.contains_key(&0));
        assert_eq!(apply(&mut replica, 12 + most, 0, 2), Outcome::Duplicate);
    }

    #[test]
    fn what_does_not_decode_is_an_error() {
        assert!(new().apply(7, &[1, 2, 3]).expect_err("cut").contains("entry 7"));
        assert!(Replica::<Count>::restore(&[0; 3]).is_err());
        assert!(Replica::<Count>::restore(&first(&[1])).is_err());
    }
}
