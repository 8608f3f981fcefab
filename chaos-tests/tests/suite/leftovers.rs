//! LIVE-2: dozens of deaths leave no process, descriptor, thread, shared memory
//! or growth behind.

use std::{collections::BTreeSet, fs, process::Command, time::Duration};

use chaos_tests::harness::{Process, Random, Run, Setup, elastic, send};
use nix::sys::signal::Signal::SIGKILL;

use crate::{LIMIT, fake};

const KILLS: usize = 50;
/// Kills after which pools and caches have their size.
const WARM: usize = 10;

/// Descriptors, threads and KiB of those that live through all of it.
fn survivors(run: &Run) -> Option<[(usize, u64, u64); 2]> {
    let launcher =
        run.processes().into_iter().find(|process| Some(process.pid) == run.launcher())?;
    let resources = |process: Process| process.resources();
    Some([resources(launcher)?, resources(run.agent("n1")?)?])
}

fn shared_memory() -> BTreeSet<String> {
    let entries = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn live_2_fifty_deaths_leave_nothing_behind() {
    let mut random = Random::seeded();
    let shared = shared_memory();
    let mut run = Run::start(Setup { steps: 1_000_000, ..fake("leftovers", 3, 5) });
    run.wait_step(3, LIMIT);
    let mut warm = None;
    for number in 0..KILLS {
        // The agent of n1 lives on: it is the one that would collect.
        let hit = match random.below(3) {
            0 => send(run.worker("n1"), SIGKILL),
            1 => send(run.worker("n2"), SIGKILL),
            _ => send(run.agent("n3"), SIGKILL),
        };
        if number == WARM {
            run.settle();
            warm = survivors(&run);
        }
        let at = run.step();
        assert!(hit || number > 0, "the first victim runs");
        run.wait_step(at + 3, Duration::from_secs(30));
        std::thread::sleep(random.pause(0, 100));
    }
    run.settle();
    let (warm, after) = (warm.expect("measured"), survivors(&run).expect("both run"));
    for (who, (before, after)) in ["launcher", "agent"].iter().zip(warm.iter().zip(&after)) {
        eprintln!("{who}: descriptors, threads, KiB {before:?} -> {after:?}");
        assert!(after.0 <= before.0 + 4, "{who}: descriptors {} -> {}", before.0, after.0);
        assert!(after.1 <= before.1 + 2, "{who}: threads {} -> {}", before.1, after.1);
        assert!(after.2 <= before.2 + (16 << 10), "{who}: KiB {} -> {}", before.2, after.2);
    }
    let count = run.processes().len();
    assert_eq!(count, 1 + 3 + 3, "a launcher, three agents, three workers: {:?}", run.processes());
    let zombies = run.zombies();
    assert!(zombies.is_empty(), "nobody waited for {zombies:?}");

    let stop = Command::new(elastic()).arg("stop").arg("--dump-folder").arg(run.folder()).output();
    assert!(stop.expect("elastic starts").status.success());
    run.end(LIMIT);
    assert!(run.processes().is_empty(), "{:?}", run.processes());
    let new: Vec<_> = shared_memory().difference(&shared).cloned().collect();
    assert!(new.is_empty(), "shared memory left: {new:?}");
    eprintln!("leftovers: none after {KILLS} kills in {:.1} s, step {}", run.age(), run.step());
}
