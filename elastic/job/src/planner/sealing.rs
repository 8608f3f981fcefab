//! Where a generation goes on from (GN-3, GN-4, HEAL-1).

use crate::{
    Step,
    command::Command,
    plan::{Purpose, Restore, Seal, Shard, Source},
    planner::{Decision, Effect, Limits, View},
    report::{Position, ResumeTiming, Sealed, WorkerReport, WorkerState},
    state::JobState,
};

pub(super) fn decide(state: &JobState, view: &View, limits: &Limits) -> Decision {
    let mut decision = Decision::default();
    let Some(plan) = state.plan.as_ref().filter(|plan| !plan.members.is_empty()) else {
        return decision;
    };
    if state.is_sealed() {
        return decision;
    }
    let mut answers = Vec::with_capacity(plan.members.len());
    for member in &plan.members {
        let answer = view
            .heard
            .get(&member.worker.node)
            .and_then(|heard| {
                heard.report.workers.iter().find(|w| w.worker == member.worker.worker)
            })
            .and_then(|report| report.sealed.as_ref())
            .filter(|sealed| sealed.generation == plan.generation);
        let Some(answer) = answer else {
            if view.now.saturating_sub(view.planned_since) > limits.seal && !view.late {
                decision.commands.push(Command::Evict {
                    node: member.worker.node.clone(),
                    incarnation: member.worker.incarnation,
                    cause: format!(
                        "its worker did not seal generation {} within {} ms",
                        plan.generation,
                        limits.seal.as_millis()
                    ),
                    at: view.clock,
                });
            }
            continue;
        };
        answers.push(answer);
    }
    if answers.len() < plan.members.len() {
        if decision.commands.is_empty() {
            decision.waiting = Some(format!(
                "waiting for {} of {} ranks to stop",
                plan.members.len() - answers.len(),
                plan.members.len()
            ));
        }
        return decision;
    }
    let Some(proof) = proof_of_end(state, view, limits, &answers) else {
        decision.waiting = Some("waiting for the leases of the generation before to end".into());
        return decision;
    };
    match restore(state, view, &answers) {
        Choice::Restore(restore, why) => decision.commands.push(Command::Seal(Seal {
            generation: plan.generation,
            restore,
            reason: format!("{why}; {proof}"),
            at: view.clock,
        })),
        Choice::Verify(step) => {
            decision.effects.push(Effect::Verify(step));
            decision.waiting = Some(format!("verifying the checkpoint of step {step}"));
        }
        Choice::Distrust(step, why) => decision.commands.push(Command::Distrust { step, why }),
    }
    decision
}

/// GN-4: a seal needs proof that the generation before is over.
fn proof_of_end(
    state: &JobState,
    view: &View,
    limits: &Limits,
    answers: &[&Sealed],
) -> Option<String> {
    let Some(last) = state.chain.last() else {
        return Some("no generation came before".into());
    };
    let sealed = answers.iter().any(|answer| answer.lineage == Some((last.era, last.generation)));
    if sealed {
        return Some(format!("a member of generation {} stopped", last.generation));
    }
    let reaped = state.sealed_members.iter().find(|member| {
        view.heard.get(&member.node).is_some_and(|heard| {
            heard.report.incarnation == Some(member.incarnation)
                && heard.report.workers.iter().all(|worker| {
                    worker.worker != member.worker || matches!(worker.state, WorkerState::Lost(_))
                })
        })
    });
    if let Some(member) = reaped {
        return Some(format!("node {} reaped its worker {}", member.node, member.worker));
    }
    let since = view.leader_since.max(view.evicted_at);
    (view.now.saturating_sub(since) > limits.lease)
        .then(|| format!("all leases of generation {} ended", last.generation))
}

enum Choice {
    Restore(Restore, String),
    Verify(Step),
    Distrust(Step, String),
}

/// GN-3: the newest step for which a complete set of shards exists, among
/// members' memory and committed checkpoints. Only state on the official
/// history donates (HEAL-1).
fn restore(state: &JobState, view: &View, answers: &[&Sealed]) -> Choice {
    let donors: Vec<(u32, &Sealed, Step)> = answers
        .iter()
        .enumerate()
        .filter_map(|(rank, answer)| {
            let step = answer.position.step()?;
            let (era, generation) = answer.lineage?;
            state.is_official(era, generation, step).then_some((rank as u32, *answer, step))
        })
        .collect();
    let newest = donors.iter().map(|(_, _, step)| *step).max();
    let checkpoint = state.checkpoints.keys().next_back().copied();
    if let Some(step) = newest.filter(|step| checkpoint.is_none_or(|saved| saved <= *step)) {
        if let Some((restore, why)) = live(&donors, answers, step) {
            return Choice::Restore(restore, why);
        }
    }
    match checkpoint {
        Some(step) => match view.verified.get(&step) {
            Some(Ok(())) => Choice::Restore(
                Restore::Checkpoint { step },
                "the ranks' memory does not hold a complete newer state".into(),
            ),
            Some(Err(why)) => Choice::Distrust(step, why.clone()),
            None => Choice::Verify(step),
        },
        None => Choice::Restore(Restore::Initial, "no state was ever committed".into()),
    }
}

fn live(
    donors: &[(u32, &Sealed, Step)],
    answers: &[&Sealed],
    step: Step,
) -> Option<(Restore, String)> {
    let verdict = donors.iter().find_map(|(_, answer, _)| match answer.position {
        Position::Open(at) if at == step => answer.verdict.clone(),
        _ => None,
    });
    // A rank that is prepared for step - 1 applies with the verdict and so holds
    // the state of `step` as well.
    let holds = |answer: &Sealed| match answer.position {
        Position::Open(at) | Position::Prepared(at) if at == step => true,
        Position::Prepared(at) => at.next() == step && verdict.is_some(),
        _ => false,
    };
    let of = donors.iter().find(|(_, answer, _)| holds(answer))?.1.shard.of;
    let mut sources: Vec<Source> = Vec::new();
    for index in 0..of {
        let shard = Shard { index, of };
        let (rank, ..) =
            donors.iter().find(|(_, answer, _)| answer.shard == shard && holds(answer))?;
        sources.push(Source { rank: *rank, shard });
    }
    let receivers: Vec<u32> = answers
        .iter()
        .enumerate()
        .filter(|(rank, answer)| {
            let is_donor = donors.iter().any(|(donor, ..)| *donor as usize == *rank);
            !is_donor || !holds(answer)
        })
        .map(|(rank, _)| rank as u32)
        .collect();
    let why =
        format!("{} of {} ranks hold step {step}", answers.len() - receivers.len(), answers.len());
    Some((Restore::Live { step, sources, receivers, verdict }, why))
}

/// The first step after a seal is committed once any rank applied it.
pub(super) fn resumed(state: &JobState, view: &View) -> Vec<Command> {
    let (Some(plan), true) = (&state.plan, state.is_sealed()) else {
        return Vec::new();
    };
    let reports = || {
        plan.members.iter().filter_map(|member| {
            let heard = view.heard.get(&member.worker.node)?;
            heard.report.workers.iter().find(|report| report.worker == member.worker.worker)
        })
    };
    let step = reports()
        .filter_map(|report| report.progress)
        .filter(|progress| progress.generation == plan.generation)
        .map(|progress| progress.step)
        .max();
    let saved = plan.purpose == Purpose::SaveAndStop;
    let Some(step) = step.filter(|_| !saved) else {
        return Vec::new();
    };
    let timing = reports()
        .filter_map(|report: &WorkerReport| report.resumed)
        .filter(|timing| timing.generation == plan.generation)
        .fold(ResumeTiming { generation: plan.generation, ..Default::default() }, |a, b| {
            ResumeTiming {
                generation: a.generation,
                stop_micros: a.stop_micros.max(b.stop_micros),
                rebuild_micros: a.rebuild_micros.max(b.rebuild_micros),
                restore_micros: a.restore_micros.max(b.restore_micros),
                step_micros: a.step_micros.max(b.step_micros),
            }
        });
    vec![Command::Resume { generation: plan.generation, step, timing, at: view.clock }]
}
