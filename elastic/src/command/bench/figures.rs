//! From samples to figures.

use std::collections::BTreeMap;

use super::{
    record::{Micros, Record},
    round::{Kind, Sample},
};

/// The recoveries of one kind, in microseconds without the step that would have
/// been done anyway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Figures {
    pub(super) kind: Kind,
    /// Ascending.
    pub(super) net: Vec<Micros>,
    /// Medians, each of its own: they need not add up.
    pub(super) phases: Vec<(&'static str, Micros)>,
}

impl Figures {
    /// `quiet` is the median step by number of ranks.
    pub(super) fn of(
        kind: Kind,
        samples: &[Sample],
        quiet: &BTreeMap<usize, Micros>,
    ) -> Option<Self> {
        let samples: Vec<&Sample> = samples.iter().filter(|sample| sample.kind == kind).collect();
        let net = |sample: &&Sample| {
            sample.gross().saturating_sub(quiet.get(&sample.ranks).copied().unwrap_or_default())
        };
        let net = sorted(samples.iter().map(net));
        let mut phases = Vec::new();
        for (at, (name, _)) in samples.first()?.phases().into_iter().enumerate() {
            let spent = sorted(samples.iter().map(|sample| sample.phases()[at].1));
            phases.push((name, percentile(&spent, 50)));
        }
        Some(Self { kind, net, phases })
    }

    pub(super) fn percentile(&self, percent: usize) -> Micros {
        percentile(&self.net, percent)
    }

    pub(super) fn met(&self) -> bool {
        u128::from(self.percentile(50)) <= self.kind.target().as_micros()
    }
}

/// The median step by number of ranks, over all generations with that many.
pub(super) fn quiet_steps(record: &Record) -> BTreeMap<usize, Micros> {
    let mut times: BTreeMap<usize, Vec<Micros>> = BTreeMap::new();
    for (generation, plan) in &record.plans {
        times.entry(plan.ranks).or_default().extend(steps_of(record, *generation));
    }
    let medians = times.into_iter().map(|(ranks, times)| (ranks, sorted(times.into_iter())));
    medians.filter(|(_, t)| !t.is_empty()).map(|(ranks, t)| (ranks, percentile(&t, 50))).collect()
}

/// The median step of one generation.
pub(super) fn quiet_step(record: &Record, generation: u64) -> Option<Micros> {
    let times = sorted(steps_of(record, generation).into_iter());
    (!times.is_empty()).then(|| percentile(&times, 50))
}

/// From one step's commit to the next one's: what the first step of the
/// generation took is not among them.
fn steps_of(record: &Record, generation: u64) -> Vec<Micros> {
    let seen: Vec<(u64, Micros)> =
        record.steps.get(&generation).into_iter().flatten().map(|(s, t)| (*s, *t)).collect();
    let next = |pair: &&[(u64, Micros)]| pair[1].0 == pair[0].0 + 1;
    let took = |pair: &[(u64, Micros)]| pair[1].1.saturating_sub(pair[0].1);
    seen.windows(2).filter(next).map(took).collect()
}

fn sorted(values: impl Iterator<Item = Micros>) -> Vec<Micros> {
    let mut values: Vec<Micros> = values.collect();
    values.sort_unstable();
    values
}

/// The smallest value that so many percent of the values do not exceed; zero of
/// none.
fn percentile(ascending: &[Micros], percent: usize) -> Micros {
    let rank = (ascending.len() * percent).div_ceil(100).max(1);
    ascending.get(rank - 1).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_seen() {
        #[track_caller]
        fn check(values: &[Micros], percent: usize, expected: Micros) {
            assert_eq!(percentile(values, percent), expected, "{percent} of {values:?}");
        }
        check(&[], 50, 0);
        check(&[7], 50, 7);
        check(&[7], 99, 7);
        check(&[1, 2], 50, 1);
        check(&[1, 2, 3], 50, 2);
        check(&[1, 2, 3], 99, 3);
        let hundred: Vec<Micros> = (1..=100).collect();
        check(&hundred, 99, 99);
        check(&hundred, 100, 100);
    }

    #[test]
    fn phases_add_up_and_a_step_is_taken_off() {
        let sample = Sample {
            kind: Kind::Node,
            victim: "n2".into(),
            ranks: 3,
            killed: 1000,
            noticed: 1010,
            planned: 1030,
            sealed: 1060,
            restoring: 7,
            stepping: 50,
            stepped: 1160,
        };
        let phases = sample.phases();
        let spent: Vec<Micros> = phases.iter().map(|(_, spent)| *spent).collect();
        assert_eq!(spent, [10, 20, 30, 43, 7, 50]);
        assert_eq!(spent.iter().sum::<Micros>(), sample.gross());
        let quiet = BTreeMap::from([(3, 60), (4, 1)]);
        let figures = Figures::of(Kind::Node, std::slice::from_ref(&sample), &quiet).unwrap();
        assert_eq!(figures.net, [100]);
        assert!(figures.met());
        assert_eq!(Figures::of(Kind::Worker, &[sample], &quiet), None);
    }
}
