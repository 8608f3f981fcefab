//! Who could train now: the best mesh that the ready workers can form.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    NodeId,
    mesh::Mesh,
    plan::{Member, Shard, WorkerRef},
    planner::View,
    report::{WorkerReport, WorkerState},
    state::{JobState, Phase, Standing},
    trust::Trust,
};

/// The best mesh of at most `ranks` ranks, of which there is at least one.
pub(super) fn mesh(state: &JobState, ranks: u32) -> Mesh {
    state.spec.parallel.fit(state.spec.sharding, ranks, state.micro_batches)
}

/// The ranks of the best mesh, in rank order: at most `max_nodes` nodes and no
/// more ranks than the mesh has places, those that hold the training state first,
/// different parts of it before the same; the rest stands by. Leaving nodes are not in it, except when nobody who stays has
/// the state: then they hand it over before they go.
pub(super) fn wanted(state: &JobState, view: &View) -> Vec<Member> {
    let training: BTreeSet<&WorkerRef> = workers_of_plan(state).collect();
    let sealed: BTreeSet<&WorkerRef> = state.sealed_members.iter().collect();
    let holds = |member: &Member| match view.worker(state, &member.worker) {
        Some(report) => has_state(report),
        None => sealed.contains(&member.worker),
    };
    let rank = |member: &Member| (!holds(member), !training.contains(&member.worker));
    let ready = ready(state, view);
    let leaves = |member: &Member| is_leaving(state, &member.worker.node);
    // When everybody leaves, they save together before they go.
    let together = state.phase == Phase::Stopping && ready.iter().all(leaves);
    let (leaving, mut heirs): (Vec<Member>, Vec<Member>) =
        ready.into_iter().partition(|member| !together && leaves(member));
    heirs.sort_by_cached_key(rank);
    let mut nodes: BTreeSet<NodeId> = BTreeSet::new();
    heirs.retain(|member| {
        let room = nodes.len() < state.spec.max_nodes as usize;
        nodes.contains(&member.worker.node) || (room && nodes.insert(member.worker.node.clone()))
    });
    different_parts_first(state, view, &mut heirs);
    let mut givers: Vec<Member> = Vec::new();
    if !heirs.iter().any(holds) {
        givers.extend(leaving.into_iter().filter(holds));
    }
    let there = (heirs.len() + givers.len()) as u32;
    let most = if there == 0 { 0 } else { mesh(state, there).ranks() as usize };
    givers.truncate(most.saturating_sub(1));
    heirs.truncate(most - givers.len());
    if !heirs.is_empty() {
        heirs.append(&mut givers);
    }
    heirs.sort_by(|a, b| (&a.worker.node, a.slot).cmp(&(&b.worker.node, b.slot)));
    heirs
}

/// Of members that hold the same part of the state, only the first keeps its
/// place: a mesh that cannot have all of them shall have every part.
fn different_parts_first(state: &JobState, view: &View, members: &mut Vec<Member>) {
    let Some(plan) = state.plan.as_ref().filter(|plan| !plan.members.is_empty()) else { return };
    let pipelines = plan.members.len() as u32 / plan.stages();
    let mesh = state.spec.parallel.over(state.spec.sharding, plan.stages(), pipelines);
    let places: BTreeMap<&WorkerRef, u32> =
        plan.members.iter().zip(0..).map(|(member, rank)| (&member.worker, rank)).collect();
    let mut copies: BTreeMap<Shard, usize> = BTreeMap::new();
    let mut copy = |member: &Member| -> usize {
        let report = view.worker(state, &member.worker);
        let trained = report.and_then(|report| report.progress);
        let shard = match trained.filter(|progress| progress.generation == plan.generation) {
            Some(_) => places.get(&member.worker).map(|rank| mesh.shard(*rank)),
            None => report
                .and_then(|report| report.sealed.as_ref())
                .filter(|sealed| sealed.position.step().is_some())
                .map(|sealed| sealed.shard),
        };
        let Some(shard) = shard else { return usize::MAX };
        let copies = copies.entry(shard).or_default();
        *copies += 1;
        *copies
    };
    let mut keyed: Vec<(usize, Member)> =
        members.drain(..).map(|member| (copy(&member), member)).collect();
    keyed.sort_by_key(|(copy, _)| *copy);
    members.extend(keyed.into_iter().map(|(_, member)| member));
}

/// How many nodes the members are on.
pub(super) fn distinct_nodes(members: &[Member]) -> usize {
    let mut names: Vec<&NodeId> = members.iter().map(|member| &member.worker.node).collect();
    names.dedup();
    names.len()
}

pub(super) fn is_leaving(state: &JobState, name: &NodeId) -> bool {
    state.nodes.get(name).is_some_and(|node| node.standing == Standing::Leaving)
}

/// Whether a stopping job has something to save and somebody to save it. That takes
/// fewer nodes than training does: below `min_nodes` what is left saves too.
pub(super) fn can_save(state: &JobState, view: &View) -> bool {
    state.spec.checkpoints
        && state.has_trained()
        && ready(state, view)
            .iter()
            .any(|member| view.worker(state, &member.worker).is_some_and(has_state))
}

/// Whether a worker has training state, as far as it says.
fn has_state(report: &WorkerReport) -> bool {
    let answer = report.sealed.as_ref().and_then(|sealed| sealed.position.step());
    report.progress.is_some() || answer.is_some()
}

/// Workers that can train now.
fn ready(state: &JobState, view: &View) -> Vec<Member> {
    let held_back = held_back(state, view);
    let mut ready = able(state, view);
    ready.retain(|member| !held_back.contains(&member.worker.node));
    ready
}

/// Nodes that could train and come and go too much for it, while the others are
/// enough (LIVE-1).
pub(super) fn held_back(state: &JobState, view: &View) -> BTreeSet<NodeId> {
    let is_held = |name: &NodeId| matches!(view.trust.get(name), Some(Trust::HeldBack { .. }));
    if !view.trust.keys().any(is_held) {
        return BTreeSet::new();
    }
    let able = able(state, view);
    let nodes: BTreeSet<&NodeId> = able.iter().map(|member| &member.worker.node).collect();
    let (held, others): (Vec<&NodeId>, Vec<&NodeId>) =
        nodes.into_iter().partition(|name| is_held(name));
    let enough = others.len() >= state.spec.min_nodes as usize;
    held.into_iter().filter(|_| enough).cloned().collect()
}

fn able(state: &JobState, view: &View) -> Vec<Member> {
    let mut planned: BTreeMap<&NodeId, Vec<&Member>> = BTreeMap::new();
    for member in state.plan.iter().flat_map(|plan| &plan.members) {
        planned.entry(&member.worker.node).or_default().push(member);
    }
    let mut ready: Vec<Member> = Vec::new();
    let trusted = |name: &NodeId| view.trust.get(name) != Some(&Trust::Apart);
    for (name, node) in state.live_nodes().filter(|(name, _)| trusted(name)) {
        let Some(heard) = view.heard.get(name).filter(|heard| heard.report.boot == node.boot)
        else {
            // A leader that has just begun has not heard everybody yet: who trains
            // stays until it is suspected.
            let known = planned.get(name).into_iter().flatten().copied();
            ready.extend(known.filter(|member| state.is_current(&member.worker)).cloned());
            continue;
        };
        for worker in &heard.report.workers {
            if let (WorkerState::Ready, Some(address)) = (&worker.state, worker.address) {
                let worker_ref = WorkerRef {
                    node: name.clone(),
                    incarnation: node.incarnation,
                    worker: worker.worker,
                };
                ready.push(Member { worker: worker_ref, slot: worker.slot, address });
            }
        }
    }
    ready
}

/// The ranks of the newest plan.
pub(super) fn workers_of_plan(state: &JobState) -> impl Iterator<Item = &WorkerRef> {
    state.plan.iter().flat_map(|plan| &plan.members).map(|member| &member.worker)
}
