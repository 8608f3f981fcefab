//! LIVE-2: dozens of deaths leave no process, descriptor, socket, thread, shared
//! memory or growth behind.

use std::{collections::BTreeSet, process::Command, time::Duration};

use chaos_tests::harness::{
    Process, Random, Resources, Run, Setup, Sockets, elastic, send, shared_memory,
};
use nix::sys::signal::Signal::SIGKILL;

use crate::{LIMIT, fake};

const KILLS: usize = 50;
/// Kills after which pools and caches have their size.
const WARM: usize = 10;

/// What those hold that live through all of it.
fn survivors(run: &Run) -> Option<[Resources; 2]> {
    let launcher =
        run.processes().into_iter().find(|process| Some(process.pid) == run.launcher())?;
    let resources = |process: Process| process.resources();
    Some([resources(launcher)?, resources(run.agent("n1")?)?])
}

#[test]
fn live_2_fifty_deaths_leave_nothing_behind() {
    let mut random = Random::seeded();
    let shared = shared_memory();
    let mut run = Run::start(Setup { steps: 1_000_000, ..fake("leftovers", 3, 5) });
    run.wait_step(3, LIMIT);
    let (mut warm, mut ports) = (None, BTreeSet::new());
    for number in 0..KILLS {
        // The agent of n1 lives on: it is the one that would collect.
        let victim = match random.below(3) {
            0 => run.worker("n1"),
            1 => run.worker("n2"),
            _ => run.agent("n3"),
        };
        ports.extend(victim.iter().flat_map(Process::ports));
        let hit = send(victim, SIGKILL);
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
    let warm = warm.expect("measured");
    // What the last recovery still holds goes within moments.
    run.wait("no growth", Duration::from_secs(5), |run| {
        let after = survivors(run)?;
        let grown =
            warm.iter().zip(&after).any(|(before, after)| !after.grown(before, 2).is_empty());
        (!grown).then_some(())
    });
    let after = survivors(&run).expect("both run");
    for (who, (before, after)) in ["launcher", "agent"].iter().zip(warm.iter().zip(&after)) {
        eprintln!(
            "{who}: {} -> {} descriptors {:?}, {} -> {} threads {:?}, {} shared, {} -> {} KiB",
            before.open(),
            after.open(),
            after.descriptors,
            before.running(),
            after.running(),
            after.threads,
            after.shared,
            before.kib,
            after.kib
        );
        assert!(after.open() <= before.open() + 4, "{who}: descriptors");
        assert!(after.running() <= before.running() + 2, "{who}: threads");
        assert!(after.kib <= before.kib + (16 << 10), "{who}: memory");
    }
    let processes = run.processes();
    assert_eq!(processes.len(), 1 + 3 + 3, "launcher, agents, workers: {processes:?}");
    let zombies = run.zombies();
    assert!(zombies.is_empty(), "nobody waited for {zombies:?}");
    ports.extend(processes.iter().flat_map(Process::ports));

    let stop = Command::new(elastic()).arg("stop").arg("--dump-folder").arg(run.folder()).output();
    assert!(stop.expect("elastic starts").status.success());
    run.end(LIMIT);
    assert!(run.processes().is_empty(), "{:?}", run.processes());
    let orphans = Sockets::all().orphans(&ports);
    assert!(orphans.is_empty(), "connections without an owner at the ports {orphans:?}");
    let new: Vec<_> = shared_memory().difference(&shared).cloned().collect();
    assert!(new.is_empty(), "shared memory left: {new:?}");
    eprintln!(
        "leftovers: none after {KILLS} kills in {:.1} s, step {}, {} ports were used",
        run.age(),
        run.step(),
        ports.len()
    );
}
