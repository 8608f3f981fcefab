//! What has to be equal on all nodes that train together (CG): the dataset, or
//! DATA-1 is lost, and the arithmetic, or TRAJ-1 is, without a word. The group
//! records what most members of its first mesh have; whoever has another one is
//! turned away before it takes part.

use std::collections::BTreeMap;

use crate::{
    command::Command,
    plan::Member,
    planner::View,
    report::{Digests, WorkerReport, WorkerState},
    state::{JobState, hex},
};

/// Nodes that do not fit.
pub(super) fn decide(state: &JobState, view: &View) -> Vec<Command> {
    let Some(common) = &state.digests else { return Vec::new() };
    let mut commands = Vec::new();
    for (name, node) in state.live_nodes() {
        let heard = view.heard.get(name).filter(|heard| heard.report.boot == node.boot);
        let digests = heard.into_iter().flat_map(|heard| ready_digests(&heard.report.workers));
        let Some((what, mine, theirs)) = digests.filter_map(|own| difference(&own, common)).next()
        else {
            continue;
        };
        let (node_id, incarnation, at) = (name.clone(), node.incarnation, view.clock);
        let (mine, theirs) = (hex(&mine), hex(&theirs));
        let cause = match what {
            What::Dataset => format!(
                "its dataset has the digest {mine}, the job's has {theirs}: give it the same \
                 token files (training.dataset_path)"
            ),
            What::Arithmetic => format!(
                "a canned training step gives the digest {mine} there and {theirs} on the nodes \
                 of this job: its processor or its libtorch is of another kind, and \
                 elastic.reduction = tree needs the same bits everywhere"
            ),
        };
        if what == What::Arithmetic && !state.spec.exact {
            commands.push(Command::Tolerate { node: node_id, incarnation, cause, at });
        } else {
            commands.push(Command::Refuse { node: node_id, incarnation, cause, at });
        }
    }
    commands
}

/// What most members of the first mesh have, of equally many the lowest rank's;
/// none when the group has it recorded, or nobody said.
pub(super) fn common(state: &JobState, view: &View, members: &[Member]) -> Option<Digests> {
    if state.digests.is_some() {
        return None;
    }
    let mut counts: BTreeMap<Digests, usize> = BTreeMap::new();
    let of = |member: &Member| view.worker(state, &member.worker)?.digests;
    let all: Vec<Digests> = members.iter().filter_map(of).collect();
    for digests in &all {
        *counts.entry(*digests).or_default() += 1;
    }
    let most = counts.values().max().copied()?;
    all.into_iter().find(|digests| counts[digests] == most)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    Dataset,
    Arithmetic,
}

fn difference(own: &Digests, common: &Digests) -> Option<(What, [u8; 32], [u8; 32])> {
    if own.dataset != common.dataset {
        Some((What::Dataset, own.dataset, common.dataset))
    } else if own.arithmetic != common.arithmetic {
        Some((What::Arithmetic, own.arithmetic, common.arithmetic))
    } else {
        None
    }
}

fn ready_digests(workers: &[WorkerReport]) -> impl Iterator<Item = Digests> {
    let ready = workers.iter().filter(|worker| worker.state == WorkerState::Ready);
    ready.filter_map(|worker| worker.digests)
}
