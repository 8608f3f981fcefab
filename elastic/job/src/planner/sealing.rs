//! Where a generation goes on from (GN-3, GN-4, HEAL-1).

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    Step,
    command::Command,
    plan::{Plan, Purpose, Restore, Seal, Shard, Source, Stop, WorkerRef},
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
    let patience = match plan.stop {
        Stop::Now => limits.seal,
        Stop::AtStepBoundary => limits.seal + limits.step,
    };
    let mut answers = Vec::with_capacity(plan.members.len());
    for member in &plan.members {
        let answer = view
            .worker(state, &member.worker)
            .and_then(|report| report.sealed.as_ref())
            .filter(|sealed| sealed.generation == plan.generation);
        let Some(answer) = answer else {
            if view.now.saturating_sub(view.planned_since) > patience && !view.late {
                decision.commands.push(Command::Evict {
                    node: member.worker.node.clone(),
                    incarnation: member.worker.incarnation,
                    cause: format!(
                        "its worker did not seal generation {} within {} ms",
                        plan.generation,
                        patience.as_millis()
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
    let Some(proof) = proof_of_end(state, view, limits, plan) else {
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

/// GN-4: a seal needs proof that the generation before is over. Each vote
/// depends on every rank (ST-2), so one rank that never votes again is enough.
fn proof_of_end(state: &JobState, view: &View, limits: &Limits, plan: &Plan) -> Option<String> {
    let Some(last) = state.chain.last() else {
        return Some("no generation came before".into());
    };
    let before: BTreeSet<&WorkerRef> = state.sealed_members.iter().collect();
    if plan.members.iter().any(|member| before.contains(&member.worker)) {
        return Some(format!("a member of generation {} stopped", last.generation));
    }
    if let Some(member) = before.iter().find(|member| is_reaped(view, member)) {
        return Some(format!("node {} reaped its worker {}", member.node, member.worker));
    }
    let since = view.leader_since.max(view.evicted_at);
    (view.now.saturating_sub(since) > limits.lease)
        .then(|| format!("all leases of generation {} ended", last.generation))
}

/// Whether the agent itself says that its worker's process is gone: by name, or
/// by a younger worker instead. A report that names neither may be older than
/// the worker.
fn is_reaped(view: &View, member: &WorkerRef) -> bool {
    let heard = view.heard.get(&member.node);
    let Some(heard) = heard.filter(|h| h.report.incarnation == Some(member.incarnation)) else {
        return false;
    };
    let workers = &heard.report.workers;
    match workers.iter().find(|worker| worker.worker == member.worker) {
        Some(worker) => matches!(worker.state, WorkerState::Lost(_)),
        None => workers.iter().any(|worker| worker.worker > member.worker),
    }
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
    let donors: Vec<Donor> = answers
        .iter()
        .enumerate()
        .filter_map(|(rank, answer)| Donor::new(state, rank as u32, answer))
        .collect();
    let checkpoint = state.checkpoints.keys().next_back().copied();
    let steps: BTreeSet<Step> =
        donors.iter().filter_map(|donor| donor.answer.position.step()).collect();
    for step in steps.into_iter().rev().filter(|step| checkpoint.is_none_or(|saved| saved <= *step))
    {
        if let Some((restore, why)) = live(&donors, answers.len(), step) {
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
        None => Choice::Restore(
            Restore::Initial,
            match state.chain.is_empty() {
                true => "nothing was ever trained".into(),
                false => "neither memory nor a checkpoint holds a later state".into(),
            },
        ),
    }
}

/// A rank whose state is on the official history (HEAL-1).
struct Donor<'a> {
    rank: u32,
    answer: &'a Sealed,
    /// The step that it is prepared for was committed by the generation that it
    /// is prepared in: its gradient is the one that the verdict is about.
    can_apply: bool,
}

impl<'a> Donor<'a> {
    fn new(state: &JobState, rank: u32, answer: &'a Sealed) -> Option<Self> {
        let step = answer.position.step()?;
        let (era, generation) = answer.lineage?;
        let official = |step| state.is_official(era, generation, step);
        official(step).then(|| Self { rank, answer, can_apply: official(step.next()) })
    }

    /// Whether the rank has the state of `step`, or has it after applying with
    /// the verdict.
    fn holds(&self, step: Step, verdict: Option<&Vec<u8>>) -> bool {
        match self.answer.position {
            Position::Open(at) => at == step,
            Position::Prepared(at) => {
                at == step || (at.next() == step && self.can_apply && verdict.is_some())
            }
            Position::Fresh => false,
        }
    }
}

fn live(donors: &[Donor], ranks: usize, step: Step) -> Option<(Restore, String)> {
    let open = |donor: &&Donor| donor.answer.position == Position::Open(step);
    let verdict = donors.iter().filter(open).find_map(|donor| donor.answer.verdict.clone());
    let holders: Vec<&Donor> =
        donors.iter().filter(|donor| donor.holds(step, verdict.as_ref())).collect();
    // Ranks may have been cut off while the state was moving from one layout to
    // another: either will do.
    let mut first: BTreeMap<Shard, u32> = BTreeMap::new();
    for donor in &holders {
        first.entry(donor.answer.shard).or_insert(donor.rank);
    }
    let layouts: BTreeSet<(u32, u32)> = first.keys().map(|s| (s.of, s.stages)).collect();
    let sources = layouts.into_iter().find_map(|(of, stages)| {
        let source = |index| {
            let shard = Shard { index, of, stages };
            Some(Source { rank: *first.get(&shard)?, shard })
        };
        (0..of).map(source).collect::<Option<Vec<Source>>>()
    })?;
    let holding: BTreeSet<u32> = holders.iter().map(|donor| donor.rank).collect();
    let receivers: Vec<u32> = (0..ranks as u32).filter(|rank| !holding.contains(rank)).collect();
    let why = format!("{} of {ranks} ranks hold step {step}", holders.len());
    Some((Restore::Live { step, sources, receivers, verdict }, why))
}

/// The first step after a seal is committed once any rank applied it.
pub(super) fn resumed(state: &JobState, view: &View) -> Vec<Command> {
    let (Some(plan), true) = (&state.plan, state.is_sealed()) else {
        return Vec::new();
    };
    let reports = || plan.members.iter().filter_map(|member| view.worker(state, &member.worker));
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
