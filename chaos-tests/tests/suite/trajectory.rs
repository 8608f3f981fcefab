//! TRAJ-1: the digests are those of a quiet run, whatever happened on the way.

use std::sync::OnceLock;

use chaos_tests::harness::{Digests, Run, Setup};

use crate::{LIMIT, fake};

const STEPS: u64 = 200;

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
