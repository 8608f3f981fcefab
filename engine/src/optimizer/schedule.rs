//! The learning rate of a step: warm-up, stable, decay, as torchtitan computes
//! it (`components/lr_scheduler.py`, v0.2.2), one virtual stable step included,
//! which keeps the last step's rate above the floor.
//!
//! The rate is a function of the step alone (TRAJ-1). Square roots and basic
//! operations are exact by IEEE 754; the cosine is our own series, because the
//! bits of a library's differ by platform.

use std::f64::consts::{FRAC_PI_2, PI};

use job::Step;
use serde::{Deserialize, Serialize};

/// The shape of the decay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// 1 − p, over progress p.
    #[default]
    Linear,
    /// 1 − √p.
    Sqrt,
    /// (1 + cos πp)/2.
    Cosine,
}

/// The schedule of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    lr: f64,
    warmup: u64,
    /// First step of the decay.
    decay_from: u64,
    decay_steps: u64,
    decay: Decay,
    min_factor: f64,
}

/// The configuration of a schedule, torchtitan's keys.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Options {
    /// Steps of linear warm-up; more than the run has are cut to it.
    pub warmup_steps: u64,
    /// Steps of the schedule.
    pub total_steps: u64,
    /// Part of the steps to decay over, cut to what warm-up leaves; none decays
    /// from the end of warm-up on.
    pub decay_ratio: Option<f64>,
    /// The shape of the decay.
    pub decay_type: Decay,
    /// The decay ends at this part of the base rate.
    pub min_lr_factor: f64,
}

impl Schedule {
    /// The schedule with base learning rate `lr`.
    #[must_use]
    pub fn new(lr: f64, options: &Options) -> Self {
        let total = options.total_steps;
        let warmup = options.warmup_steps.min(total);
        let rest = total - warmup;
        let decay_steps = options.decay_ratio.map_or(rest, |ratio| {
            // Python rounds halves to even; out of range saturates.
            ((total as f64 * ratio).round_ties_even() as u64).min(rest)
        });
        Self {
            lr,
            warmup,
            decay_from: total + 1 - decay_steps,
            decay_steps,
            decay: options.decay_type,
            min_factor: options.min_lr_factor,
        }
    }

    /// The learning rate with which step `step` (0 for the first) is applied.
    #[must_use]
    pub fn lr(&self, step: Step) -> f64 {
        self.lr * self.factor(step)
    }

    /// The factor of the base rate: within 0 and 1. After the end it stays.
    #[must_use]
    pub fn factor(&self, Step(step): Step) -> f64 {
        if step < self.warmup {
            return (step + 1) as f64 / self.warmup as f64;
        }
        if step < self.decay_from || self.decay_steps == 0 {
            return 1.0;
        }
        let progress = ((step + 1 - self.decay_from) as f64 / self.decay_steps as f64).min(1.0);
        let left = match self.decay {
            Decay::Linear => 1.0 - progress,
            Decay::Sqrt => 1.0 - progress.sqrt(),
            Decay::Cosine => 0.5 * (1.0 + cos_pi(progress)),
        };
        self.min_factor + (1.0 - self.min_factor) * left
    }
}

/// cos(πp) for p in [0, 1], as the sine of the distance to a right angle.
fn cos_pi(p: f64) -> f64 {
    let x = FRAC_PI_2 - PI * p;
    let square = x * x;
    // |x| ≤ π/2: the term of power 23 is below 2⁻⁵⁸.
    let series = (1..=11).rev().fold(1.0, |sum, k| {
        let k = f64::from(2 * k);
        1.0 - sum * square / (k * (k + 1.0))
    });
    x * series
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(warmup_steps: u64, total_steps: u64, decay_ratio: Option<f64>) -> Options {
        let (decay_type, min_lr_factor) = (Decay::Linear, 0.0);
        Options { warmup_steps, total_steps, decay_ratio, decay_type, min_lr_factor }
    }

    #[track_caller]
    fn check(options: Options, expected: &[f64]) {
        let schedule = Schedule::new(1.0, &options);
        for (step, expected) in (0..).zip(expected) {
            let factor = schedule.factor(Step(step));
            assert!((factor - expected).abs() < 1e-12, "step {step}: {factor}, not {expected}");
        }
    }

    /// torchtitan v0.2.2, `tests/unit_tests/test_lr_scheduler.py`.
    #[test]
    fn factors_are_those_of_torchtitan() {
        let eighths = [7., 6., 5., 4., 3., 2., 1.].map(|n| n / 8.);
        check(options(2, 10, None), &[&[0.5, 1.0, 1.0][..], &eighths].concat());
        check(options(2, 10, Some(0.5)), &[0.5, 1., 1., 1., 1., 1., 0.8, 0.6, 0.4, 0.2]);
        let floor = Options { min_lr_factor: 0.2, ..options(2, 10, None) };
        check(floor, &[&[0.5, 1.0, 1.0][..], &eighths.map(|n| 0.2 + 0.8 * n)].concat());
        check(options(10, 5, None), &[0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0]);
        check(options(0, 4, Some(0.0)), &[1.0; 8]);
        check(options(5, 10, Some(0.8)), &[0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0]);
        check(options(0, 0, None), &[1.0; 3]);
    }

    #[test]
    fn other_decays() {
        let with = |decay_type| Options { decay_type, ..options(0, 4, None) };
        check(with(Decay::Sqrt), &[1.0, 0.5, 1.0 - 0.5f64.sqrt(), 1.0 - 0.75f64.sqrt(), 0.0, 0.0]);
        let root = 0.5f64.sqrt();
        check(with(Decay::Cosine), &[1.0, (1. + root) / 2., 0.5, (1. - root) / 2., 0.0, 0.0]);
    }

    #[test]
    fn the_cosine_is_exact_to_a_unit_or_two() {
        for i in 0..=10_000 {
            let p = f64::from(i) / 10_000.0;
            assert!((cos_pi(p) - (PI * p).cos()).abs() < 4e-16, "{p}: {}", cos_pi(p));
        }
    }

    /// The rates of a 30-step PyTorch reference run: base 3e-3, warm-up 5,
    /// decay ratio ½.
    #[test]
    fn rates_of_the_reference_run() {
        let schedule = Schedule::new(3e-3, &options(5, 30, Some(0.5)));
        let reference = |step: u64| match step {
            0..5 => 3e-3 * (step + 1) as f64 / 5.0,
            5..16 => 3e-3,
            _ => 3e-3 * (1.0 - (step - 15) as f64 / 15.0),
        };
        for step in 0..30 {
            let (rate, expected) = (schedule.lr(Step(step)), reference(step));
            assert!((rate - expected).abs() < 1e-17, "step {step}: {rate}, not {expected}");
        }
    }

    #[test]
    fn nonsense_does_not_overflow() {
        for ratio in [-1.0, 2.0, f64::NAN, f64::INFINITY] {
            let factor = Schedule::new(1.0, &options(1, 3, Some(ratio))).factor(Step(u64::MAX - 1));
            assert!((0.0..=1.0).contains(&factor), "{ratio}: {factor}");
        }
    }
}
