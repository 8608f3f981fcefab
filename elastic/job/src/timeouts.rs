//! All time limits of a job, from one budget.
//!
//! A limit that someone sets alone sooner or later contradicts another one: a
//! lease longer than the suspicion that ends it, an election slower than the
//! eviction that needs its leader. So there is one budget, the time from a
//! node's last sign of life to the decision to go on without it, and one lattice
//! of inequalities that [`Timeouts::derive`] checks.

use std::time::Duration;

/// The limits. Every one is positive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// The budget that all others but `step` derive from.
    pub budget: Duration,
    /// Raft's clock tick.
    pub tick: Duration,
    /// Ticks without a leader before an election: fewest and most (CG).
    pub election_ticks: (u32, u32),
    /// Time between two beats of an agent.
    pub beat: Duration,
    /// How long an agent may act after the send time of an answered beat (LS-1).
    pub lease: Duration,
    /// Silence after which a node is evicted (LS-2).
    pub suspect: Duration,
    /// From `Plan` until every member has sealed; a late one is evicted (GN-3).
    pub seal: Duration,
    /// From `Seal` until the communicators stand.
    pub connect: Duration,
    /// A step, and so each collective in it: a hang is detected by it.
    pub step: Duration,
    /// From asking to join until the answer.
    pub join: Duration,
    /// Silence of a quorum after which re-forming may begin (LG-3).
    pub reform: Duration,
    /// From telling a worker to end until it is killed (LIVE-2).
    pub reap: Duration,
}

/// An inequality between limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The inequality.
    pub rule: &'static str,
    /// Its left side.
    pub left: Duration,
    /// Its right side.
    pub right: Duration,
    /// What to change when it does not hold.
    pub remedy: &'static str,
}

/// Two limits that contradict each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} does not hold ({:?} against {:?}): {}", .0.rule, .0.left, .0.right, .0.remedy)]
pub struct Inconsistent(pub Rule);

/// Below this a beat says more about the scheduler than about the node: a
/// runnable process on two shared cores was seen to wait 60 ms at p90, and a
/// suspicion is eight beats.
const SHORTEST_BEAT: Duration = Duration::from_millis(20);

impl Timeouts {
    /// Derives every limit from the failure budget and the limit of a step.
    ///
    /// # Errors
    /// Names the inequality that fails and what to change.
    pub fn derive(budget: Duration, step: Duration) -> Result<Self, Inconsistent> {
        let derived = Self {
            budget,
            tick: budget / 24,
            election_ticks: (10, 16),
            beat: budget / 12,
            lease: budget * 7 / 12,
            suspect: budget * 8 / 12,
            seal: budget * 2,
            connect: budget * 2,
            step,
            join: (budget * 10).max(Duration::from_secs(10)),
            reform: budget * 3,
            reap: budget,
        };
        derived.check()?;
        Ok(derived)
    }

    /// The longest time without a leader before an election.
    #[must_use]
    pub fn longest_election(&self) -> Duration {
        self.tick * self.election_ticks.1
    }

    /// Whether a tick came so much later than planned that this process did not
    /// run, rather than others were silent: who is late accuses nobody (LS-2).
    #[must_use]
    pub fn is_late(&self, planned: Duration, now: Duration) -> bool {
        now.saturating_sub(planned) > self.beat * 2
    }

    /// Name, limit and meaning of each, for people.
    #[must_use]
    pub fn table(&self) -> [(&'static str, Duration, &'static str); 12] {
        [
            ("tick", self.tick, "Raft's clock"),
            ("beat", self.beat, "between two signs of life"),
            ("lease", self.lease, "a node without an answer stops (LS-1)"),
            ("suspect", self.suspect, "a silent node is evicted (LS-2)"),
            ("election min", self.tick * self.election_ticks.0, "no leader: soonest election"),
            ("election max", self.longest_election(), "no leader: latest election"),
            ("seal", self.seal, "a member that has not stopped is evicted (GN-3)"),
            ("connect", self.connect, "a new mesh stands"),
            ("step", self.step, "a step has finished, or its rank is hung"),
            ("join", self.join, "a joiner has its answer"),
            ("reform", self.reform, "no quorum: re-forming may begin (LG-3)"),
            ("reap", self.reap, "a worker that was told to end is killed (LIVE-2)"),
        ]
    }

    /// The inequalities that the limits have to keep.
    #[must_use]
    pub fn rules(&self) -> [Rule; 8] {
        const RAISE: &str = "raise the failure budget";
        let rule = |rule, left, right, remedy| Rule { rule, left, right, remedy };
        [
            rule(
                "shortest beat ≤ beat",
                SHORTEST_BEAT,
                self.beat,
                "raise the failure budget: beats this short accuse healthy nodes",
            ),
            // Two lost beats and a quorum round must not cost the lease.
            rule("4 × beat ≤ lease", self.beat * 4, self.lease, RAISE),
            // A node is only replaced after it has stopped by itself (GN-4).
            rule("lease + beat ≤ suspect", self.lease + self.beat, self.suspect, RAISE),
            // A new leader is there when the old one is due for eviction.
            rule("election max ≤ suspect", self.longest_election(), self.suspect, RAISE),
            rule("suspect + 2 × beat ≤ budget", self.suspect + self.beat * 2, self.budget, RAISE),
            // Re-forming begins only when no lease of the old side can live.
            rule(
                "lease + election max ≤ reform",
                self.lease + self.longest_election(),
                self.reform,
                RAISE,
            ),
            // A change of leaders is no silence: a pulse is due every lease (LG-3).
            rule(
                "2 × lease + election max ≤ reform",
                self.lease * 2 + self.longest_election(),
                self.reform,
                RAISE,
            ),
            // A dead peer is named by the detector before a survivor's step runs out.
            rule(
                "seal ≤ step",
                self.seal,
                self.step,
                "raise the step limit to at least twice the failure budget",
            ),
        ]
    }

    fn check(&self) -> Result<(), Inconsistent> {
        let broken = self.rules().into_iter().find(|rule| rule.left > rule.right);
        broken.map_or(Ok(()), |rule| Err(Inconsistent(rule)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(budget_ms: u64, step_ms: u64, broken: Option<&str>) {
        let derived =
            Timeouts::derive(Duration::from_millis(budget_ms), Duration::from_millis(step_ms));
        assert_eq!(derived.as_ref().err().map(|error| error.0.rule), broken, "{derived:?}");
    }

    #[test]
    fn a_budget_is_consistent_or_names_the_inequality() {
        for budget in [240, 500, 1_200, 5_000, 60_000, 3_600_000] {
            check(budget, budget * 2, None);
            check(budget, 86_400_000, None);
        }
        check(100, 60_000, Some("shortest beat ≤ beat"));
        check(0, 60_000, Some("shortest beat ≤ beat"));
        check(1_200, 2_399, Some("seal ≤ step"));
    }

    #[test]
    fn the_default_budget_gives_the_documented_limits() {
        let limits = Timeouts::derive(Duration::from_millis(1200), Duration::from_secs(60))
            .expect("default");
        let ms: Vec<_> = limits.table().iter().map(|(_, limit, _)| limit.as_millis()).collect();
        assert_eq!(ms, [50, 100, 700, 800, 500, 800, 2400, 2400, 60_000, 12_000, 3600, 1200]);
    }
}
