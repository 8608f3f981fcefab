//! A simulated world around the planner: agents, workers and a control group in
//! one thread, on one clock, out of one seed. The decisions are the real ones;
//! around them processes die, hang and come back, links break, beats are late or
//! come twice, and leaders change and forget.
//!
//! What must hold whatever happens: at most one generation commits a step
//! (GEN-1), all ranks go on from one official state (STEP-1, HEAL-1), every step
//! is in the history exactly once (DATA-1), and once the faults stop the job
//! reaches its end (LIVE-1).
//!
//! [`sim`] is the clock and the group, [`agent`] and [`rank`] are the processes,
//! [`leader`] is the shell around the planner, [`faults`] is what goes wrong, and
//! [`history`] is what must be true. A failure prints its seed: put it into
//! `PINNED` and it stays found.

mod agent;
mod faults;
mod history;
mod leader;
mod random;
mod rank;
mod sim;

/// Worlds that once showed a mistake. 171: a checkpoint was committed after a seal
/// that goes behind it was decided, and later restored off the official history.
/// 1707: a rank that had stood by while the job went back behind its state donated.
const PINNED: [u64; 2] = [171, 1707];

#[track_caller]
fn check(seeds: impl IntoIterator<Item = u64>) {
    for seed in seeds {
        sim::Sim::new(seed).run();
    }
}

#[test]
fn worlds_that_were_wrong_once() {
    check(PINNED);
}

#[test]
fn worlds_1() {
    check(0..150);
}

#[test]
fn worlds_2() {
    check(150..300);
}

#[test]
fn one_seed_is_one_world() {
    let world = |seed| sim::Sim::new(seed).run();
    assert_eq!(world(7), world(7));
    assert_ne!(world(7), world(8));
}
