//! TRAJ-1 with the real engine: workers, agents, both, leaders and disks are lost
//! while a Llama trains, and its bits are those of an undisturbed run.

use std::collections::BTreeMap;

use chaos_tests::harness::{Fault, Random, Run, Setup};

use crate::{LIMIT, quietly, real};

/// How long the steps should take in all: enough for every fault, on any machine.
const TRAINING_SECONDS: f64 = 20.0;

/// The smallest steps that still split unevenly over three nodes.
fn small(name: &'static str, nodes: u32, steps: u64) -> Setup {
    Setup { steps, micro_batches: 4, seq_len: 16, checkpoint_interval: 25, ..real(name, nodes) }
}

/// As many steps as fill the time at this machine's present pace.
fn steps_that_fit() -> u64 {
    let mut run = Run::start(small("real-pace", 1, 12));
    run.finish(LIMIT);
    let pace = run.history().pace().as_secs_f64();
    ((TRAINING_SECONDS / pace.max(1e-4)) as u64).clamp(90, 1200)
}

#[test]
fn traj_1_a_dozen_kills_do_not_show_in_the_engine() {
    use Fault::{Agent, Both, Fresh, Leader, Pair, Worker};
    let mut faults =
        [Worker, Worker, Agent, Agent, Both, Both, Leader, Leader, Fresh, Fresh, Fresh, Pair];
    let mut random = Random::seeded();
    random.shuffle(&mut faults);
    let steps = steps_that_fit();
    let expected = quietly(small("real-long-quiet", 1, steps));
    let mut run = Run::start(small("real-dozen", 4, steps));
    run.wait_step(1, LIMIT);
    let mut kills = BTreeMap::new();
    for fault in faults {
        // Two lost ranks of three leave a step to one alone.
        run.settle_mesh(if fault == Pair { 4 } else { 3 });
        if fault == Fresh {
            run.settle_voters();
        }
        run.inject(fault, &mut random);
        *kills.entry(format!("{fault:?}")).or_insert(0) += 1;
    }
    let at = run.step();
    let digests = run.finish(LIMIT);
    let history = run.history();
    eprintln!(
        "real-dozen: {kills:?} by step {at} of {steps}, {:.1} s, tiers {:?}, {} steps computed again",
        run.age(),
        history.tiers_counted(),
        history.redone()
    );
    assert!(at < steps, "the last kill came after the last step");
    history.check_shared();
    assert!(history.shares_seen(3).contains(&vec![2, 1, 1]), "uneven shares at three nodes");
    assert_eq!(digests, expected);
}
