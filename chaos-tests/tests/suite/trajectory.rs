//! TRAJ-1: the digests are those of a quiet run, whatever happened on the way.

use std::{collections::BTreeMap, sync::OnceLock, time::Duration};

use chaos_tests::harness::{Digests, Fault, Random, Run, Setup};

use crate::{LIMIT, fake};

const STEPS: u64 = 400;

/// What one quiet node computes.
fn quiet() -> &'static Digests {
    static QUIET: OnceLock<Digests> = OnceLock::new();
    QUIET.get_or_init(|| quietly(fake("quiet-1", 1, STEPS)))
}

fn quietly(setup: Setup) -> Digests {
    let mut run = Run::start(setup);
    let digests = run.finish(LIMIT);
    eprintln!("{}: {:.1} s, {digests:?}", run.setup.name, run.age());
    digests
}

#[test]
fn traj_1_the_number_of_nodes_does_not_show() {
    for (name, nodes) in [("quiet-3", 3), ("quiet-4", 4)] {
        assert_eq!(&quietly(fake(name, nodes, STEPS)), quiet(), "{nodes} nodes");
    }
}

#[test]
fn traj_1_another_seed_shows() {
    let other = quietly(Setup { seed: 43, ..fake("seed-43", 2, STEPS) });
    assert_ne!(other.weights, quiet().weights);
    assert_ne!(other.losses, quiet().losses);
}

/// Four nodes slow enough that faults have time to happen.
fn four(name: &'static str) -> Setup {
    paced(fake(name, 4, STEPS), 25)
}

fn paced(mut setup: Setup, millis: u64) -> Setup {
    if let Some((_, time)) = &mut setup.fake {
        *time = Duration::from_millis(millis);
    }
    setup
}

#[test]
fn traj_1_kills_at_random_moments_do_not_show() {
    use Fault::{Agent, Both, Fresh, Leader, Pair, Worker};
    let mut faults = [
        Worker, Worker, Worker, Agent, Agent, Agent, Both, Both, Leader, Leader, Fresh, Fresh,
        Fresh, Pair,
    ];
    let mut random = Random::seeded();
    random.shuffle(&mut faults);
    let expected = quiet();
    let mut run = Run::start(four("kills"));
    run.wait_step(3, LIMIT);
    for fault in faults {
        std::thread::sleep(random.pause(0, 500));
        if fault == Fresh {
            // Two lost disks within one change of voters are a lost majority.
            run.settle();
        }
        run.inject(fault, &mut random);
    }
    let at = run.step();
    let digests = run.finish(LIMIT);
    let history = run.history();
    history.check_shared();
    eprintln!(
        "kills: {} faults until step {at} of {STEPS}, {:.1} s, tiers {:?}, {} steps redone",
        faults.len(),
        run.age(),
        counts(&history.tiers()),
        history.redone()
    );
    assert_eq!(&digests, expected);
}

#[test]
fn traj_1_the_death_of_everything_does_not_show() {
    for (name, nodes_after) in [("all-4-4", 4), ("all-4-3", 3)] {
        let expected = quiet();
        let mut run = Run::start(paced(four(name), 10));
        let saved =
            run.wait("checkpoint", LIMIT, |run| run.history().checkpoints().last().copied());
        run.wait_step(saved + 4, LIMIT);
        run.kill_all();
        let (at, seals) = (run.step(), run.history().tiers().len());
        run.setup.nodes = nodes_after;
        run.launch();
        let digests = run.finish(LIMIT);
        let history = run.history();
        let tiers = history.tiers();
        eprintln!(
            "{name}: everything killed at step {at}, {} redone, tiers {tiers:?}, {:.1} s",
            history.redone(),
            run.age()
        );
        assert!(history.redone() >= 1, "steps after the checkpoint were lost and redone");
        assert_eq!(tiers.get(seals), Some(&"checkpoint"), "{tiers:?}");
        assert_eq!(&digests, expected, "{name}");
    }
}

/// Counts equal words.
fn counts<'a>(words: &[&'a str]) -> BTreeMap<&'a str, usize> {
    let mut counts = BTreeMap::new();
    for word in words {
        *counts.entry(*word).or_default() += 1;
    }
    counts
}
