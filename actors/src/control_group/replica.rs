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
