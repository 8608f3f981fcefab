//! One kill and what follows it.

use std::{
    fmt,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use actors::agent::Status;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{
    figures::quiet_step,
    group::{Group, pids},
    record::{Micros, Record},
};

/// What is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A worker under a living agent.
    Worker,
    /// An agent that does not lead, with its worker.
    Node,
    /// The agent that leads, with its worker.
    Leader,
}

/// One recovery.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    pub(super) kind: Kind,
    pub(super) victim: String,
    /// Ranks of the generation that went on.
    pub(super) ranks: usize,
    pub(super) killed: Micros,
    /// The moments in between: the loss noticed, the plan committed, the seal
    /// committed; absent when a node's clock or record has a gap.
    pub(super) noticed: Micros,
    pub(super) planned: Micros,
    pub(super) sealed: Micros,
    /// As the slowest rank measured it.
    pub(super) restoring: Micros,
    pub(super) stepping: Micros,
    pub(super) stepped: Micros,
}

impl Kind {
    pub(super) const ALL: [Self; 3] = [Self::Worker, Self::Node, Self::Leader];

    /// The promised median, a step excluded.
    pub(super) fn target(self) -> Duration {
        Duration::from_millis(match self {
            Self::Worker => 250,
            Self::Node => 1000,
            Self::Leader => 2000,
        })
    }

    /// Whom it meets in a round: in turns, so that every rank is met.
    fn victim(self, nodes: &[Status], round: u32) -> Option<&Status> {
        let leader = nodes.iter().find_map(|status| status.leader.clone())?;
        let followers: Vec<&Status> = nodes.iter().filter(|s| s.node != leader).collect();
        let turn = round as usize;
        match self {
            Self::Worker => nodes.get(turn % nodes.len()),
            Self::Node => followers.get(turn % followers.len().max(1)).copied(),
            Self::Leader => nodes.iter().find(|status| status.node == leader),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Worker => "worker",
            Self::Node => "node",
            Self::Leader => "leader",
        })
    }
}

impl Sample {
    /// From the kill to the first step of the generation that went on.
    pub(super) fn gross(&self) -> Micros {
        self.stepped.saturating_sub(self.killed)
    }

    /// Where the time went; together they are the gross time.
    pub(super) fn phases(&self) -> [(&'static str, Micros); 6] {
        let after_seal = self.stepped.saturating_sub(self.sealed);
        let step = self.stepping.min(after_seal);
        let restore = self.restoring.min(after_seal - step);
        [
            ("detect", self.noticed.saturating_sub(self.killed)),
            ("agree", self.planned.saturating_sub(self.noticed)),
            ("stop+seal", self.sealed.saturating_sub(self.planned)),
            ("rebuild", after_seal - step - restore),
            ("restore", restore),
            ("step", step),
        ]
    }
}

/// Kills at a moment of a step that moves on from round to round, then waits
/// until all nodes train quietly again.
pub(super) fn run(
    group: &mut Group,
    kind: Kind,
    round: u32,
    rounds: u32,
) -> Result<Sample, String> {
    let before = group.settle()?;
    let statuses = group.statuses()?;
    let victim = kind.victim(&statuses, round).ok_or("nobody leads the group")?;
    let step = quiet_step(group.record(), before).unwrap_or_default();
    let newest = group.record().newest_step();
    group.wait_for("next step", |record| (record.newest_step() > newest).then_some(()))?;
    if group.record().newest_plan().is_none_or(|(generation, _)| generation != before) {
        return Err("a node was lost before it was killed".into());
    }
    std::thread::sleep(Duration::from_micros(
        step * u64::from(2 * round + 1) / u64::from(2 * rounds),
    ));
    let killed = now();
    let targets = match kind {
        Kind::Worker => victim.workers.iter().map(|worker| worker.pid).collect(),
        Kind::Node | Kind::Leader => pids(victim),
    };
    for pid in targets {
        send_kill(pid)?;
    }
    group.wait_for("step after the kill", |record| record.first_step_after(before))?;
    group.wait_for("return of the node", |record| {
        let (generation, plan) = record.newest_plan()?;
        (generation > before && plan.ranks == statuses.len()).then_some(())
    })?;
    group.settle()?;
    let victim = victim.node.to_string();
    sample(group.record(), kind, victim, before, killed)
        .ok_or_else(|| "the nodes' events do not tell how it went on".into())
}

fn sample(
    record: &Record,
    kind: Kind,
    victim: String,
    before: u64,
    killed: Micros,
) -> Option<Sample> {
    let (generation, stepped) = record.first_step_after(before)?;
    let (_, first) = record.plans.range(before + 1..).next()?;
    let timing = record.resumed.get(&generation).copied().unwrap_or_default();
    Some(Sample {
        kind,
        victim,
        ranks: record.plans.get(&generation)?.ranks,
        killed,
        noticed: first.noticed.max(killed),
        planned: first.seen,
        sealed: *record.sealed.get(&generation)?,
        restoring: timing.restore_micros,
        stepping: timing.step_micros,
        stepped,
    })
}

fn send_kill(pid: u32) -> Result<(), String> {
    let target = i32::try_from(pid).map_err(|_| format!("{pid} is no process id"))?;
    kill(Pid::from_raw(target), Signal::SIGKILL)
        .map_err(|error| format!("cannot kill process {pid}: {error}"))
}

#[expect(clippy::disallowed_methods, reason = "events are recorded by the wall clock")]
fn now() -> Micros {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
