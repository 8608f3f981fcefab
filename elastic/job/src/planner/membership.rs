//! Who is in the group: deaths by LS-2, arrivals and departures.

use std::collections::BTreeSet;

use crate::{
    NodeId,
    command::{Command, LEFT},
    planner::{
        Limits, View, certainly_dead,
        mesh::{self, workers_of_plan},
    },
    report::WorkerState,
    state::{JobState, Node, Phase, Standing},
    trust::Trust,
};

pub(super) fn deaths(state: &JobState, view: &View, limits: &Limits) -> Vec<Command> {
    let dead = certainly_dead(view);
    let training: BTreeSet<&NodeId> = workers_of_plan(state).map(|worker| &worker.node).collect();
    let mut commands = Vec::new();
    for (name, node) in state.live_nodes() {
        let heard = view.heard.get(name);
        // Its store speaks under a newer process start, which is about to be admitted.
        let replaced = heard.is_some_and(|heard| {
            let report = &heard.report;
            report.boot != node.boot && report.store == node.store && report.incarnation.is_none()
        });
        let heard = heard.filter(|heard| heard.report.boot == node.boot);
        // A process start that was admitted in place of another has not been heard
        // under its new standing.
        let begun = view.leader_since.max(view.evicted_at);
        let silent = view.now.saturating_sub(heard.map_or(begun, |heard| heard.at));
        let suspected = *name != view.me && !view.late && !replaced && silent > limits.suspect;
        let fatal = heard.and_then(|heard| {
            heard.report.workers.iter().find_map(|worker| match &worker.state {
                WorkerState::Fatal(why) => Some(why),
                _ => None,
            })
        });
        let cause = if dead.contains(&(name.clone(), node.boot)) {
            "its process is gone: connection reset, reconnect refused".to_owned()
        } else if suspected {
            format!(
                "silent for {} ms (limit {} ms)",
                silent.as_millis(),
                limits.suspect.as_millis()
            )
        } else if let (Some(why), true) = (fatal, state.has_trained()) {
            format!("its worker cannot run: {why}")
        } else if node.standing == Standing::Leaving && has_left(state, &training, name) {
            LEFT.to_owned()
        } else {
            continue;
        };
        commands.push(Command::Evict {
            node: name.clone(),
            incarnation: node.incarnation,
            cause,
            at: view.clock,
        });
    }
    commands
}

/// Says of nodes that come and go that they stand by, and for how long (LS-2).
pub(super) fn held_back(state: &JobState, view: &View) -> Vec<Command> {
    let said = |name: NodeId| {
        let Some(Trust::HeldBack { stays, pause }) = view.trust.get(&name) else { return None };
        let node = state.nodes.get(&name).filter(|node| !node.held_back)?;
        Some(Command::HoldBack {
            incarnation: node.incarnation,
            node: name,
            stays: *stays,
            pause_micros: u64::try_from(pause.as_micros()).unwrap_or(u64::MAX),
            at: view.clock,
        })
    };
    mesh::held_back(state, view).into_iter().filter_map(said).collect()
}

/// A leaving node has left once a sealed (or an empty) plan goes without it.
fn has_left(state: &JobState, training: &BTreeSet<&NodeId>, name: &NodeId) -> bool {
    match &state.plan {
        None => true,
        Some(plan) if plan.members.is_empty() => true,
        Some(_) => state.is_sealed() && !training.contains(name),
    }
}

pub(super) fn arrivals(state: &JobState, view: &View) -> Vec<Command> {
    let at = view.clock;
    let mut commands = Vec::new();
    // Who asked for the stop is on its way out: a start before it is gone would
    // meet the same wish again.
    let stopped = state.can_start();
    let wished = |(name, node): (&NodeId, &Node)| {
        let heard = view.heard.get(name).filter(|heard| heard.report.boot == node.boot);
        heard.is_some_and(|heard| heard.report.stop_job)
    };
    if stopped && state.live_nodes().any(wished) {
        return commands;
    }
    let mut leaving: BTreeSet<&NodeId> = state
        .live_nodes()
        .filter(|(_, node)| node.standing == Standing::Leaving)
        .map(|(name, _)| name)
        .collect();
    let mut arrives = false;
    for heard in view.heard.values() {
        let report = &heard.report;
        let known = state.nodes.get(&report.node);
        match known {
            Some(node) if node.boot == report.boot => {
                if node.standing == Standing::Active && report.leaving {
                    let incarnation = node.incarnation;
                    commands.push(Command::Leave { node: report.node.clone(), incarnation, at });
                    leaving.insert(&report.node);
                }
                if node.is_live() && report.stop_job {
                    commands.push(Command::StopJob { at });
                }
                continue;
            }
            // The name is taken by a live node with another store.
            Some(node) if node.is_live() && node.store != report.store => continue,
            _ => {}
        }
        // What has an incarnation was admitted once, and another took its place: a
        // late beat of a process start that is gone (ID-2).
        if report.leaving || report.incarnation.is_some() {
            continue;
        }
        arrives = true;
        commands.push(Command::Admit {
            node: report.node.clone(),
            store: report.store,
            boot: report.boot,
            address: report.address,
            slots: report.slots,
            at,
        });
        if stopped {
            commands.push(Command::Start { at });
        }
    }
    let nobody_stays =
        !leaving.is_empty() && state.live_nodes().all(|(name, _)| leaving.contains(name));
    // What the last ones know would be lost with them: the job saves and stops.
    if nobody_stays && !arrives && state.phase == Phase::Running {
        commands.push(Command::StopJob { at });
    }
    commands
}
