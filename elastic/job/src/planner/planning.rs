//! When a new generation begins and who is in it (GN-1).

use crate::{
    NodeId,
    command::Command,
    plan::{Member, Plan, Purpose, Stop, WorkerRef},
    planner::{Decision, Limits, View},
    report::{WorkerReport, WorkerState},
    shares::Shares,
    state::{JobState, Phase, Standing},
};

pub(super) fn decide(
    state: &JobState,
    view: &View,
    limits: &Limits,
    entropy: [u8; 32],
) -> Decision {
    let mut decision = Decision::default();
    let wanted = wanted(state, view);
    let nodes = distinct_nodes(&wanted);
    let enough = nodes >= state.spec.min_nodes as usize;
    if !enough {
        decision.waiting = Some(format!(
            "waiting for nodes: {nodes} of at least {} are ready",
            state.spec.min_nodes
        ));
    }
    let cause = match cause(state, view, limits, &wanted, enough) {
        Cause::None => return decision,
        Cause::Settling => {
            decision.waiting.get_or_insert_with(|| "waiting for starting nodes".into());
            return decision;
        }
        Cause::Plan(cause) => cause,
    };
    let members = if enough { wanted } else { Vec::new() };
    let purpose = match state.phase {
        Phase::Stopping => Purpose::SaveAndStop,
        _ => Purpose::Train,
    };
    let shares = (!members.is_empty()).then(|| {
        let ranks = members.len() as u32;
        Shares::even(state.micro_batches.unwrap_or(ranks), ranks)
    });
    decision.commands.push(Command::Plan(Plan {
        era: state.era,
        generation: state.generation().next(),
        members,
        shares,
        key: entropy,
        stop: cause.stop,
        purpose,
        reason: cause.reason,
        failure: cause.failure,
        last_step: view.last_step.min(view.clock),
        noticed: view.clock,
        at: view.clock,
    }));
    decision
}

enum Cause {
    None,
    Settling,
    Plan(Because),
}

struct Because {
    stop: Stop,
    reason: String,
    failure: bool,
}

fn cause(state: &JobState, view: &View, limits: &Limits, wanted: &[Member], enough: bool) -> Cause {
    let because = |stop, failure, reason: String| Cause::Plan(Because { stop, reason, failure });
    let Some(plan) = &state.plan else {
        return match enough {
            true if settled(state, view, limits) => {
                because(Stop::Now, false, format!("founded with {} ranks", wanted.len()))
            }
            true => Cause::Settling,
            false => Cause::None,
        };
    };
    let lost: Vec<String> = plan
        .members
        .iter()
        .filter(|member| !is_working(state, view, &member.worker))
        .map(|member| why_lost(state, view, &member.worker))
        .collect();
    if !lost.is_empty() {
        return because(Stop::Now, true, format!("lost {}", lost.join("; ")));
    }
    if plan.members.is_empty() {
        return match enough {
            true if settled(state, view, limits) => {
                because(Stop::Now, false, format!("{} ranks are ready", wanted.len()))
            }
            true => Cause::Settling,
            false => Cause::None,
        };
    }
    let broken =
        view.accused_since.is_some_and(|since| view.now.saturating_sub(since) >= limits.accusation);
    if broken && state.is_sealed() {
        return because(Stop::Now, true, "a tensor connection broke between live ranks".into());
    }
    if !state.is_sealed() || !is_training(state, view) {
        return Cause::None;
    }
    let leaving: Vec<&str> = plan
        .members
        .iter()
        .filter(|m| {
            state.nodes.get(&m.worker.node).is_some_and(|n| n.standing == Standing::Leaving)
        })
        .map(|m| m.worker.node.as_str())
        .collect();
    if !leaving.is_empty() {
        return because(Stop::AtStepBoundary, false, format!("{} leaves", leaving.join(", ")));
    }
    if state.phase == Phase::Stopping && plan.purpose != Purpose::SaveAndStop {
        return because(Stop::AtStepBoundary, false, "the job was told to stop".into());
    }
    let joiners: Vec<&str> = wanted
        .iter()
        .filter(|member| plan.members.iter().all(|known| known.worker != member.worker))
        .map(|member| member.worker.node.as_str())
        .collect();
    if joiners.is_empty() || state.phase == Phase::Stopping {
        return Cause::None;
    }
    if settled(state, view, limits) {
        because(Stop::AtStepBoundary, false, format!("{} joins", joiners.join(", ")))
    } else {
        Cause::Settling
    }
}

/// The ranks of the best mesh that the ready workers can form: at most
/// `max_nodes` nodes, those that train now first, and no more ranks than
/// micro-batches; the rest stands by.
fn wanted(state: &JobState, view: &View) -> Vec<Member> {
    let training = |node: &NodeId| {
        state
            .plan
            .as_ref()
            .is_some_and(|plan| plan.members.iter().any(|member| member.worker.node == *node))
    };
    let mut ready: Vec<Member> = Vec::new();
    for (name, node) in state.live_nodes() {
        if node.standing != Standing::Active {
            continue;
        }
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
                ready.push(Member {
                    worker: WorkerRef {
                        node: name.clone(),
                        incarnation: node.incarnation,
                        worker: worker.worker,
                    },
                    slot: worker.slot,
                    address,
                });
            }
        }
    }
    let mut names: Vec<NodeId> = ready.iter().map(|member| member.worker.node.clone()).collect();
    names.dedup();
    names.sort_by_key(|name| !training(name));
    names.truncate(state.spec.max_nodes as usize);
    ready.retain(|member| names.contains(&member.worker.node));
    if let Some(micro_batches) = state.micro_batches {
        ready.truncate(micro_batches as usize);
    }
    ready
}

fn distinct_nodes(members: &[Member]) -> usize {
    let mut names: Vec<&NodeId> = members.iter().map(|member| &member.worker.node).collect();
    names.dedup();
    names.len()
}

/// GR: growing is worth a pause once nobody else is about to be ready.
fn settled(state: &JobState, view: &View, limits: &Limits) -> bool {
    let quiet = view.now.saturating_sub(view.quiet_since);
    let starting = state.live_nodes().any(|(name, node)| {
        node.standing == Standing::Active
            && view.heard.get(name).is_none_or(|heard| {
                heard.report.workers.len() < node.slots as usize
                    || heard.report.workers.iter().any(|w| w.state == WorkerState::Starting)
            })
    });
    quiet >= limits.settle_max || (!starting && quiet >= limits.settle)
}

fn report_of<'a>(state: &JobState, view: &'a View, worker: &WorkerRef) -> Option<&'a WorkerReport> {
    let node = state.nodes.get(&worker.node)?;
    let heard = view.heard.get(&worker.node).filter(|heard| heard.report.boot == node.boot)?;
    heard.report.workers.iter().find(|report| report.worker == worker.worker)
}

/// Whether a member can go on. A node that this leader has not heard yet has
/// the benefit of the doubt until it is suspected.
fn is_working(state: &JobState, view: &View, worker: &WorkerRef) -> bool {
    if !state.is_current(worker) {
        return false;
    }
    let node = state.nodes.get(&worker.node);
    let heard = view.heard.get(&worker.node);
    match (node, heard) {
        (Some(node), Some(heard)) if heard.report.boot == node.boot => {
            report_of(state, view, worker).is_some_and(|report| report.state == WorkerState::Ready)
        }
        _ => true,
    }
}

fn why_lost(state: &JobState, view: &View, worker: &WorkerRef) -> String {
    let name = &worker.node;
    match state.nodes.get(name) {
        Some(node) if node.incarnation != worker.incarnation => {
            format!("node {name} (its agent started again)")
        }
        Some(node) => match (&node.standing, report_of(state, view, worker)) {
            (Standing::Gone(cause), _) => format!("node {name} ({cause})"),
            (_, Some(WorkerReport { state: WorkerState::Lost(why), pid, .. })) => {
                format!("worker {pid} of node {name} ({why})")
            }
            _ => format!("a worker of node {name} (its process was replaced)"),
        },
        None => format!("node {name}"),
    }
}

/// Whether the newest generation has committed a step, or has nothing left to
/// compute.
fn is_training(state: &JobState, view: &View) -> bool {
    let generation = state.generation();
    state.plan.as_ref().is_some_and(|plan| {
        plan.members.iter().any(|member| {
            report_of(state, view, &member.worker).is_some_and(|report| {
                report.progress.is_some_and(|progress| progress.generation == generation)
            })
        })
    })
}
