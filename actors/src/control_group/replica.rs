//! The state machine as the log drives it: each proposal at most once.
//!
//! A caller whose leader died does not know whether its command was committed,
//! and proposes it again under the same [`Ticket`]. Which tickets were applied
//! is part of the replicated state, so every member skips the same ones.

use std::collections::BTreeMap;

use job::codec;
use job::replicated::StateMachine;
use serde::{Deserialize, Serialize};

use super::handle::Ticket;

/// Proposers remembered; the one that was silent for longest is forgotten
/// first. A process uses one, so this is many restarts of many nodes.
const MOST_CLIENTS: usize = 1024;

/// How far behind the newest number of its proposer a ticket may still come.
const WINDOW: u64 = u128::BITS as u64;

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

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Client {
    newest: u64,
    /// Bit n: `newest - n` was applied.
    seen: u128,
    /// Index of the last applied proposal.
    index: u64,
}

impl<S: StateMachine> Replica<S> {
    /// The entry of a proposal.
    pub(super) fn entry(ticket: Ticket, command: &S::Command) -> Vec<u8> {
        codec::encode(&(ticket, command))
    }

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
        let (ticket, command): (Ticket, S::Command) = codec::decode(entry)
            .map_err(|e| format!("entry {index} was written by another version: {e}"))?;
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
        let client =
            self.clients.entry(ticket.client).or_insert(Client { newest: 0, seen: 0, index });
        if ticket.seq > client.newest {
            let by = u32::try_from(ticket.seq - client.newest).unwrap_or(u32::MAX);
            client.seen = client.seen.checked_shl(by).unwrap_or(0) | 1;
            client.newest = ticket.seq;
        } else {
            let back = client.newest - ticket.seq;
            if back >= WINDOW {
                return Some(Outcome::Expired);
            }
            if client.seen >> back & 1 == 1 {
                return Some(Outcome::Duplicate);
            }
            client.seen |= 1 << back;
        }
        client.index = index;
        None
    }
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
        let entry = Replica::<Count>::entry(Ticket { client, seq }, &1);
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
        check(&[(200, 'a'), (73, 'a'), (72, 'e'), (73, 'd'), (199, 'a'), (200, 'd')]);
        check(&[(1, 'a'), (128, 'a'), (1, 'd'), (129, 'a'), (1, 'e')]);
        check(&[(5, 'a'), (u64::MAX, 'a'), (5, 'e'), (u64::MAX - 1, 'a'), (u64::MAX, 'd')]);
        check(&[(0, 'a'), (0, 'd'), (1, 'a'), (0, 'd')]);
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
