//! Forming the group again when the majority of its stores is gone (LG-3): who
//! may, and who of those that may does.
//!
//! The checkpoint folder is the second witness. A leader with a quorum writes a
//! [`Pulse`] into it, so that a minority that still sees the folder knows that the
//! others go on; a record of the ledger, created exclusively, decides between two
//! halves that both see none.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::{Era, NodeId};

/// A leader's sign of life in the checkpoint folder. Only that it changes says
/// something: clocks are not compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Pulse {
    /// Its era.
    pub era: Era,
    /// The random number of the leader's process start.
    pub boot: u64,
    /// Counts up.
    pub count: u64,
}

/// Whether the group may be formed again without a person's word.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Reforming {
    /// Whether it may.
    pub automatic: bool,
    /// Why, for people.
    pub why: String,
}

impl Default for Reforming {
    fn default() -> Self {
        Self::off("it is not known yet whether all nodes share the checkpoint folder")
    }
}

impl Reforming {
    /// It may.
    #[must_use]
    pub fn on() -> Self {
        Self { automatic: true, why: "all nodes share the checkpoint folder".into() }
    }

    /// It may not, for this reason.
    #[must_use]
    pub fn off(why: impl Into<String>) -> Self {
        Self { automatic: false, why: why.into() }
    }
}

/// A set of nodes without a quorum that all reach each other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Muster {
    /// Its members, by name.
    pub members: BTreeSet<NodeId>,
    /// How many of them go first in trying: the others are given a head start,
    /// for the ledger lets one win anyhow.
    pub turn: u32,
}

/// The nodes that `me` can form a group with, itself included: each says that it
/// hears each other one. None when they are fewer than `min_nodes`.
#[must_use]
pub fn muster(
    me: &NodeId,
    heard: &BTreeMap<NodeId, BTreeSet<NodeId>>,
    min_nodes: u32,
) -> Option<Muster> {
    let mut members = BTreeSet::from([me.clone()]);
    for (name, reaches) in heard {
        let mutual = |member: &NodeId| {
            reaches.contains(member)
                && (member == me || heard.get(member).is_some_and(|known| known.contains(name)))
        };
        if name != me && members.iter().all(mutual) {
            members.insert(name.clone());
        }
    }
    if members.len() < min_nodes as usize {
        return None;
    }
    let turn = members.iter().take_while(|member| *member != me).count() as u32;
    Some(Muster { members, turn })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u32) -> NodeId {
        NodeId::new(format!("n{number}")).expect("a good name")
    }

    /// `links` are directed: who hears whom.
    #[track_caller]
    fn check(me: u32, links: &[(u32, &[u32])], min_nodes: u32, expected: Option<(&[u32], u32)>) {
        let set = |ids: &[u32]| ids.iter().copied().map(id).collect::<BTreeSet<_>>();
        let heard = links.iter().map(|(from, reaches)| (id(*from), set(reaches))).collect();
        let found = muster(&id(me), &heard, min_nodes);
        let expected = expected.map(|(members, turn)| Muster { members: set(members), turn });
        assert_eq!(found, expected);
    }

    #[test]
    fn lg_3_only_nodes_that_all_reach_each_other_form_a_group() {
        check(1, &[], 1, Some((&[1], 0)));
        check(1, &[], 2, None);
        check(2, &[(1, &[2]), (3, &[2])], 2, Some((&[1, 2], 1)));
        check(2, &[(1, &[2, 3]), (3, &[1, 2])], 3, Some((&[1, 2, 3], 1)));
        check(3, &[(1, &[2, 3]), (2, &[1, 3])], 3, Some((&[1, 2, 3], 2)));
        // One way is none.
        check(1, &[(2, &[3]), (3, &[1, 2])], 2, Some((&[1, 3], 0)));
        // 1 and 3 do not reach each other.
        check(2, &[(1, &[2]), (3, &[2])], 3, None);
        check(2, &[(1, &[2, 3]), (3, &[2])], 3, None);
    }
}
