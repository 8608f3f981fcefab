//! LS-2, LIVE-1: networks that are bad and not cut. What is only slow accuses
//! nobody; what never ends is noticed all the same.

use std::time::{Duration, Instant};

use chaos_tests::{
    harness::{Run, Setup, send},
    proxy::{BOTH, Condition, Network, Plane, Way},
};
use nix::sys::signal::Signal::SIGKILL;

use crate::{LIMIT, fake, quiet};

const NODES: usize = 4;

fn start(name: &'static str, millis: u64) -> (Run, Network) {
    let arguments = ["--elastic.step_timeout_s=5", "--elastic.tensor_transport=tcp"];
    let arguments = arguments.map(str::to_owned).to_vec();
    let setup = Setup { arguments, ..fake(name, NODES as u32, millis) };
    let mut network = None;
    let mut run = Run::start_each(setup, |folder| {
        let proxy = Network::start(NODES, folder).expect("loopback addresses");
        let places = proxy.places();
        network = Some(proxy);
        places
    });
    run.settle();
    (run, network.expect("it was started"))
}

/// Ten milliseconds each way, one datagram of twenty lost, two megabytes a second.
#[test]
fn ls_2_a_slow_and_lossy_network_accuses_nobody() {
    let (mut run, network) = start("lossy", 10);
    let plans = run.history().of("planned").count();
    let control =
        Condition { delay: Duration::from_millis(10), lost_per_mille: 50, ..Condition::FINE };
    let tensors = Condition {
        delay: Duration::from_millis(2),
        bytes_per_s: Some(2_000_000),
        ..Condition::FINE
    };
    for from in 0..NODES {
        for to in (0..NODES).filter(|to| *to != from) {
            network.set(Plane::Control, from, to, control);
            network.set(Plane::Tensors, from, to, tensors);
        }
    }
    let from = run.step();
    run.wait_step(from + 60, LIMIT);
    assert_eq!(run.history().of("planned").count(), plans, "nobody was accused\n{}", run.report());
    assert!(network.counts().0 > 0, "datagrams were lost");
    network.heal();
    let digests = run.finish(LIMIT);
    assert_eq!(&digests, quiet(), "TRAJ-1");
}

/// A node dies, and its connections never end for the others.
#[test]
fn ls_2_a_death_that_no_connection_tells_is_noticed_by_its_silence() {
    let (mut run, network) = start("half-open", 20);
    let leader = run.wait("a leader", LIMIT, Run::leader);
    let name = (1..=NODES).map(|n| format!("n{n}")).find(|name| *name != leader).expect("others");
    let index = name[1..].parse::<usize>().expect("a number") - 1;
    let half_open = Condition { half_open: true, ..Condition::FINE };
    network.between(&BOTH, &[index], Way::Outward, half_open);
    let generation = run.history().generation();
    let killed = Instant::now();
    assert!(send(run.agent(&name), SIGKILL));
    run.wait("a generation without it", LIMIT, |run| {
        let history = run.history();
        let later = |line: &&serde_json::Value| line["generation"].as_u64() > Some(generation);
        history.of("resumed").find(later).map(|_| ())
    });
    eprintln!("half-open: went on after {:.0} ms", killed.elapsed().as_secs_f64() * 1e3);
    network.heal();
    run.settle();
    let digests = run.finish(LIMIT);
    assert_eq!(&digests, quiet(), "TRAJ-1");
}
