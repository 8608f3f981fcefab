//! Who could train now: the best mesh that the ready workers can form.

use crate::{
    NodeId,
    plan::{Member, WorkerRef},
    planner::View,
    report::WorkerState,
    state::{JobState, Standing},
};

/// The ranks of the best mesh, in rank order: at most `max_nodes` nodes and no
/// more ranks than micro-batches, those that hold the training state first; the
/// rest stands by. Leaving nodes are not in it, except when nobody who stays has
/// the state: then they hand it over before they go.
pub(super) fn wanted(state: &JobState, view: &View) -> Vec<Member> {
    let rank = |member: &Member| {
        let training =
            state.plan.iter().flat_map(|plan| &plan.members).any(|m| m.worker == member.worker);
        (!holds_state(state, view, &member.worker), !training)
    };
    let (leaving, mut heirs): (Vec<Member>, Vec<Member>) =
        ready(state, view).into_iter().partition(|member| is_leaving(state, &member.worker.node));
    heirs.sort_by_key(rank);
    let mut nodes: Vec<NodeId> = Vec::new();
    heirs.retain(|member| {
        let known = nodes.contains(&member.worker.node);
        if !known && nodes.len() < state.spec.max_nodes as usize {
            nodes.push(member.worker.node.clone());
        }
        known || nodes.contains(&member.worker.node)
    });
    let most = state.micro_batches.map_or(usize::MAX, |micro_batches| micro_batches as usize);
    let mut givers: Vec<Member> = Vec::new();
    if !heirs.iter().any(|member| holds_state(state, view, &member.worker)) {
        givers.extend(leaving.into_iter().filter(|m| holds_state(state, view, &m.worker)));
        givers.truncate(most.saturating_sub(1));
    }
    heirs.truncate(most - givers.len());
    if !heirs.is_empty() {
        heirs.append(&mut givers);
    }
    heirs.sort_by(|a, b| (&a.worker.node, a.slot).cmp(&(&b.worker.node, b.slot)));
    heirs
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

fn ready(state: &JobState, view: &View) -> Vec<Member> {
    let mut ready: Vec<Member> = Vec::new();
    for (name, node) in state.live_nodes() {
        let Some(heard) = view.heard.get(name).filter(|heard| heard.report.boot == node.boot)
        else {
            // A leader that has just begun has not heard everybody yet: who trains
            // stays until it is suspected.
            let known = state.plan.iter().flat_map(|plan| &plan.members);
            let known = known.filter(|member| state.is_current(&member.worker));
            ready.extend(known.filter(|member| member.worker.node == *name).cloned());
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

/// Whether a worker has training state, as far as is known.
fn holds_state(state: &JobState, view: &View, worker: &WorkerRef) -> bool {
    match view.worker(state, worker) {
        Some(report) => {
            let sealed = report.sealed.as_ref().and_then(|sealed| sealed.position.step());
            report.progress.is_some() || sealed.is_some()
        }
        None => state.sealed_members.contains(worker),
    }
}
