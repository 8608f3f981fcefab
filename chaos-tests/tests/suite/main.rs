//! The promises under real faults. Runs take turns: see
//! [`chaos_tests::harness::Run`].

mod trajectory;

use std::{path::PathBuf, time::Duration};

use chaos_tests::harness::Setup;

/// A run of the fake trainer whose micro-batches take 2 ms.
fn fake(name: &'static str, nodes: u32, steps: u64) -> Setup {
    Setup {
        name,
        nodes,
        steps,
        micro_batches: 8,
        seed: 42,
        checkpoint_interval: 20,
        fake: Some((PathBuf::from(env!("CARGO_BIN_EXE_fake-worker")), Duration::from_millis(2))),
        arguments: Vec::new(),
    }
}

/// Longest time for a run of this suite, on a busy machine.
const LIMIT: Duration = Duration::from_secs(90);
