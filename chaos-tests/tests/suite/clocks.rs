//! Clocks of people that jump: decisions take another one (LS-1).

use std::time::{Duration, UNIX_EPOCH};

use chaos_tests::{
    clock::Clock,
    harness::{Line, wall_clock},
};

use crate::{membership::Nodes, quiet};

const HOUR: Duration = Duration::from_secs(3600);

fn applied(nodes: &Nodes) -> u64 {
    nodes.history().steps.iter().map(|line| line.step).max().unwrap_or(0)
}

/// Three nodes train, and the clock of the last, which leads or does not, jumps.
#[track_caller]
fn check(name: &str, jumps: &str) {
    let mut nodes = Nodes::new(name);
    let clock = Clock::new(&nodes.folder).expect("a clock");
    let environment = clock.environment();
    let environment = environment.each_ref().map(|(key, value)| (*key, value.as_str()));
    for node in ["n1", "n2", "n3"] {
        nodes.start(node, if node == jumps { &environment } else { &[] });
    }
    nodes.wait("a mesh of three", |nodes| {
        let history = nodes.history();
        let all = |line: &&serde_json::Value| line["mesh"].as_array().map(Vec::len) == Some(3);
        history.of("planned").find(all).map(|_| ())
    });
    let trains_on = |nodes: &mut Nodes| {
        let from = applied(nodes);
        nodes.wait("further steps", |nodes| (applied(nodes) >= from + 10).then_some(()));
    };
    clock.ahead(HOUR).expect("it jumps");
    trains_on(&mut nodes);
    let soon =
        (wall_clock() + HOUR / 2).duration_since(UNIX_EPOCH).expect("after 1970").as_micros();
    let saw = |line: &Line| line.node == jumps && u128::from(line.seen) > soon;
    assert!(nodes.history().steps.iter().any(saw), "{jumps} believes its clock");
    clock.behind(HOUR).expect("it jumps");
    trains_on(&mut nodes);
    // Its certificate is from the future of that node, and it is let in all the same.
    nodes.start("n4", &[]);
    nodes.wait("a mesh with the newcomer", |nodes| {
        let history = nodes.history();
        let all = |line: &&serde_json::Value| line["mesh"].as_array().map(Vec::len) == Some(4);
        history.of("planned").find(all).map(|_| ())
    });
    clock.ahead(HOUR).expect("it jumps");
    let digests = nodes.finish(&["n1", "n2", "n3", "n4"]);
    assert_eq!(nodes.history().of("node_evicted").count(), 0, "nobody was lost");
    assert_eq!(&digests, quiet(), "TRAJ-1");
}

#[test]
fn ls_1_the_clock_of_a_follower_jumps() {
    check("clock-follower", "n3");
}

#[test]
fn ls_1_the_clock_of_the_leader_jumps() {
    check("clock-leader", "n1");
}
