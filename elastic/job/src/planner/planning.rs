//! When a new generation begins and who is in it (GN-1).

use std::collections::BTreeSet;

use crate::{
    Step,
    command::Command,
    links,
    mesh::Parallel,
    plan::{Member, Plan, Purpose, Stop, WorkerRef},
    planner::{
        Decision, Limits, View, agreement,
        growth::{settled, worth},
        mesh::{can_save, distinct_nodes, is_leaving, mesh, wanted, workers_of_plan},
    },
    report::{WorkerReport, WorkerState},
    shares::Shares,
    state::{JobState, Phase, Standing},
    trust::Trust,
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
    let saves = state.phase == Phase::Stopping && can_save(state, view);
    let enough = saves || nodes >= state.spec.min_nodes as usize;
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
        Cause::Evict(workers, cause) => {
            decision.commands.extend(workers.into_iter().map(|worker| Command::Evict {
                node: worker.node,
                incarnation: worker.incarnation,
                cause: cause.clone(),
                at: view.clock,
            }));
            return decision;
        }
        Cause::Plan(cause) => cause,
    };
    // Whom the others do not agree with is turned away before the first plan.
    if let Some(digests) = agreement::common(state, view, &wanted) {
        decision.commands.push(Command::RecordDigests { digests, at: view.clock });
        return decision;
    }
    let members = if enough { wanted } else { Vec::new() };
    let purpose = match state.phase {
        Phase::Stopping => Purpose::SaveAndStop,
        _ => Purpose::Train,
    };
    let mesh = (!members.is_empty()).then(|| mesh(state, members.len() as u32));
    let shares = mesh.map(|mesh| {
        let degree = mesh.degree();
        Shares::even(state.micro_batches.unwrap_or(degree), degree)
    });
    let reason = match mesh {
        Some(mesh) if state.spec.parallel != Parallel::default() => {
            format!("{}; {mesh}", cause.reason)
        }
        _ => cause.reason,
    };
    decision.commands.push(Command::Plan(Plan {
        era: state.era,
        generation: state.generation().next(),
        members,
        shares,
        key: entropy,
        stop: cause.stop,
        purpose,
        reason,
        failure: cause.failure,
        reached: reached(state, view),
        last_step: view.last_step.min(view.clock),
        noticed: view.clock,
        at: view.clock,
    }));
    decision
}

enum Cause {
    None,
    Settling,
    Evict(Vec<WorkerRef>, String),
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
            true if state.phase == Phase::Stopping => {
                because(Stop::Now, false, "the job was told to stop".into())
            }
            true if settled(state, view, limits) => {
                because(Stop::Now, false, format!("{} ranks are ready", wanted.len()))
            }
            true => Cause::Settling,
            false => Cause::None,
        };
    }
    if let Some(why) = unloadable(state, view, plan) {
        return because(Stop::Now, true, why);
    }
    let broken =
        view.accused_since.is_some_and(|since| view.now.saturating_sub(since) >= limits.accusation);
    if broken && state.is_sealed() {
        let cause = match state.failures_in_a_row {
            times @ PATIENCE_WITH_LINKS.. => {
                format!("{} in {times} generations in a row", links::BROKEN)
            }
            _ => format!("{} again", links::BROKEN),
        };
        let worst = worst_linked(state, view, plan);
        if !worst.is_empty() && !view.late {
            return Cause::Evict(worst, cause);
        }
        return because(Stop::Now, true, "a tensor connection broke between live ranks".into());
    }
    if !state.is_sealed() || !is_training(state, view) {
        return Cause::None;
    }
    let leaving: Vec<&str> = plan
        .members
        .iter()
        .filter(|member| is_leaving(state, &member.worker.node))
        .map(|member| member.worker.node.as_str())
        .collect();
    // Whoever hands its state over stays until somebody has it.
    if !leaving.is_empty() && *wanted != plan.members {
        return because(Stop::AtStepBoundary, false, format!("{} leaves", leaving.join(", ")));
    }
    if state.phase == Phase::Stopping && plan.purpose != Purpose::SaveAndStop {
        return because(Stop::AtStepBoundary, false, "the job was told to stop".into());
    }
    let known: BTreeSet<&WorkerRef> = workers_of_plan(state).collect();
    let joiners: Vec<&str> = wanted
        .iter()
        .filter(|member| !known.contains(&member.worker))
        .map(|member| member.worker.node.as_str())
        .collect();
    if joiners.is_empty() || state.phase == Phase::Stopping {
        return Cause::None;
    }
    if !settled(state, view, limits) {
        return Cause::Settling;
    }
    match worth(state.incidents(), view.clock, plan.members.len(), joiners.len()) {
        true => because(Stop::AtStepBoundary, false, format!("{} joins", joiners.join(", "))),
        false => Cause::None,
    }
}

/// A member could not load what the seal says: the choice has to be made again. The
/// next one reads the checkpoint through before it is believed (CKPT-1).
fn unloadable(state: &JobState, view: &View, plan: &Plan) -> Option<String> {
    let restore = &state.seal.as_ref()?.restore;
    plan.members.iter().find_map(|member| {
        let report = view.worker(state, &member.worker)?;
        let (generation, why) = report.unloadable.as_ref()?;
        (*generation == plan.generation).then(|| {
            let (step, node) = (restore.step(), &member.worker.node);
            format!("node {node} could not load the checkpoint of step {step}: {why}")
        })
    })
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
            view.worker(state, worker).is_some_and(|report| report.state == WorkerState::Ready)
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
        Some(node) => match (&node.standing, view.worker(state, worker)) {
            (Standing::Gone(cause) | Standing::Refused(cause), _) => {
                format!("node {name} ({cause})")
            }
            (
                _,
                Some(WorkerReport {
                    state: WorkerState::Dying(why) | WorkerState::Lost(why),
                    pid,
                    ..
                }),
            ) => {
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
            view.worker(state, &member.worker).is_some_and(|report| {
                report.progress.is_some_and(|progress| progress.generation == generation)
            })
        })
    })
}

/// The newest step that is known to be applied in the newest generation. When
/// all that trained is gone, the nodes' records tell; while somebody lives they
/// do not: the job may have gone back behind them and know so.
fn reached(state: &JobState, view: &View) -> Step {
    let trained = &state.sealed_members;
    if trained.iter().all(|member| view.worker(state, member).is_none()) {
        let recorded = view.heard.values().map(|heard| heard.report.recorded);
        return recorded.max().unwrap_or_default();
    }
    let members = state.plan.iter().flat_map(|plan| &plan.members);
    let progress = members.filter_map(|member| view.worker(state, &member.worker)?.progress);
    let steps = progress.filter(|progress| progress.generation == state.generation());
    steps.map(|progress| progress.step).max().unwrap_or_default()
}

/// Generations in a row that may break without a committed step before one end
/// of a broken connection has to go: a first break may be a hiccup.
const PATIENCE_WITH_LINKS: u32 = 2;

/// LS-2: of members that accuse each other and all look alive, those with the most
/// broken connections go, of equals the one with the higher id, so that no broken
/// connection is left.
fn worst_linked(state: &JobState, view: &View, plan: &Plan) -> Vec<WorkerRef> {
    let mut broken: BTreeSet<(usize, usize)> = BTreeSet::new();
    for (rank, member) in plan.members.iter().enumerate() {
        let accused = view.worker(state, &member.worker).and_then(|report| report.accuses);
        if let Some((generation, peer)) = accused
            && generation == plan.generation
        {
            let peer = peer as usize;
            if peer < plan.members.len() && peer != rank {
                broken.insert((rank.min(peer), rank.max(peer)));
            }
        }
    }
    let on_probation =
        |rank: usize| view.trust.get(&plan.members[rank].worker.node) == Some(&Trust::OnProbation);
    if state.failures_in_a_row < PATIENCE_WITH_LINKS {
        broken.retain(|(a, b)| on_probation(*a) || on_probation(*b));
    }
    let mut worst: Vec<WorkerRef> = Vec::new();
    for rank in links::cover(broken, on_probation) {
        let worker = &plan.members[rank].worker;
        // The workers of a node go together.
        if worst.iter().all(|gone| gone.node != worker.node) {
            worst.push(worker.clone());
        }
    }
    worst
}
