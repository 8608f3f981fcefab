//! The promises under real faults. Runs take turns: see
//! [`chaos_tests::harness::Run`].
//!
//! The long ones use the fake trainer, whose run costs no compute; the engine's
//! own are few and short.

mod bad_input;
mod bad_machine;
mod clocks;
mod data;
mod leftovers;
mod lifecycle;
mod logs;
mod membership;
mod networks;
mod partitions;
mod phases;
mod real_kills;
mod recovery;
mod scrape;
mod sleepers;
mod strangers;
mod tidy;
mod trajectory;

use std::{sync::OnceLock, time::Duration};

use chaos_tests::harness::{Digests, Run, Setup, release};

/// Longest time for a run of this suite, on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// Steps of a run of the fake trainer.
const STEPS: u64 = 400;

/// Steps of a run of the real engine.
const REAL_STEPS: u64 = 30;

/// The fake trainer, with micro-batches of this many milliseconds.
fn fake(name: &'static str, nodes: u32, millis: u64) -> Setup {
    // Beside the programs that speak its protocol; cargo builds it for this suite.
    let program = release().join("fake-worker");
    Setup {
        name,
        nodes,
        min_nodes: 1,
        steps: STEPS,
        micro_batches: 8,
        seq_len: 64,
        seed: 42,
        checkpoint_interval: 20,
        fake: Some((program, Duration::from_millis(millis))),
        arguments: Vec::new(),
        environment: Vec::new(),
    }
}

/// The real engine.
fn real(name: &'static str, nodes: u32) -> Setup {
    Setup { steps: REAL_STEPS, checkpoint_interval: 10, fake: None, ..fake(name, nodes, 0) }
}

/// A run without faults.
#[track_caller]
fn quietly(setup: Setup) -> Digests {
    let mut run = Run::start(setup);
    let digests = run.finish(LIMIT);
    eprintln!("{}: {:.1} s, {digests:?}", run.setup.name, run.age());
    digests
}

/// What one undisturbed node computes with the fake trainer.
fn quiet() -> &'static Digests {
    static QUIET: OnceLock<Digests> = OnceLock::new();
    QUIET.get_or_init(|| quietly(fake("quiet-1", 1, 0)))
}

/// What one undisturbed node computes with the real engine.
fn quiet_real() -> &'static Digests {
    static QUIET: OnceLock<Digests> = OnceLock::new();
    QUIET.get_or_init(|| quietly(real("real-quiet-1", 1)))
}
