//! Leaving, stopping and going on: nothing is lost, and nothing shows (LIVE-2,
//! TRAJ-1).

use std::{
    process::Command,
    time::{Duration, Instant},
};

use chaos_tests::harness::{Run, Setup, elastic, send};
use nix::sys::signal::{
    Signal::{SIGINT, SIGKILL, SIGTERM},
    kill,
};

use crate::{LIMIT, fake, quiet};

fn ask(run: &Run, arguments: &[&str]) {
    let output = Command::new(elastic())
        .args(arguments)
        .arg("--dump-folder")
        .arg(run.folder())
        .output()
        .expect("elastic starts");
    eprint!("elastic {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A node that is told to leave takes no step with it.
#[track_caller]
fn check_leave(name: &'static str, node: &str, leave: fn(&Run, &str)) {
    let expected = quiet();
    let mut run = Run::start(fake(name, 4, 10));
    run.wait_step(5, LIMIT);
    leave(&run, node);
    let told = Instant::now();
    // The failure budget: it has nothing to wait for but its worker.
    run.wait("agent's end", Duration::from_millis(1200), |run| {
        run.agent(node).is_none().then_some(())
    });
    let (at, gone) = (run.step(), told.elapsed().as_secs_f64() * 1e3);
    let digests = run.finish(LIMIT);
    let history = run.history();
    let left = history.of("node_leaving").any(|line| line["node"] == node);
    let failures = history.of("planned").filter(|line| line["failure"] == true).count();
    eprintln!(
        "{name}: {node} left by step {at}, {gone:.0} ms after it was told to, \
         {failures} failures, {} steps redone",
        history.redone()
    );
    assert!(left, "no node_leaving in the events");
    assert_eq!((failures, history.redone()), (0, 0), "leaving costs nothing");
    let last = history.of("planned").last().expect("a plan");
    assert_eq!(last["mesh"].as_array().map(Vec::len), Some(3), "it does not come back: {last}");
    assert_eq!(&digests, expected, "{name}");
}

#[test]
fn traj_1_a_node_that_leaves_does_not_show() {
    check_leave("sigterm", "n3", |run, node| {
        assert!(send(run.agent(node), SIGTERM), "{node} runs");
    });
    check_leave("drain", "n2", |run, node| ask(run, &["drain", node]));
}

#[test]
fn traj_1_a_drained_leader_does_not_show() {
    check_leave("drain-founder", "n1", |run, node| ask(run, &["drain", node]));
}

#[test]
fn traj_1_a_stop_and_a_start_do_not_show() {
    let expected = quiet();
    let mut run = Run::start(fake("stop", 3, 5));
    for (round, how) in ["elastic stop", "SIGINT"].iter().enumerate() {
        run.wait_step(30 * (round as u64 + 1), LIMIT);
        match *how {
            "SIGINT" => {
                let launcher = run.launcher().expect("the launcher runs");
                kill(launcher, SIGINT).expect("it takes a signal");
            }
            _ => ask(&run, &["stop"]),
        }
        let status = run.end(Duration::from_secs(30));
        let saved = run.history().checkpoints().last().copied();
        eprintln!("{how}: exit {:?} at step {}, checkpoint {saved:?}", status.code(), run.step());
        assert_eq!(status.code(), Some(130), "{}", run.report());
        assert_eq!(saved, Some(run.step()), "a stop saves where it stands");
        assert!(run.processes().is_empty(), "{:?}", run.processes());
        run.launch();
    }
    let digests = run.finish(LIMIT);
    assert_eq!(run.history().redone(), 0, "a stop costs no step");
    assert_eq!(&digests, expected);
}

#[test]
fn traj_1_a_stop_below_min_nodes_saves_what_is_left() {
    let expected = quiet();
    let mut run = Run::start(Setup { min_nodes: 2, ..fake("stop-below", 2, 5) });
    run.wait_step(5, LIMIT);
    ask(&run, &["drain", "n2"]);
    run.wait("empty mesh", LIMIT, |run| {
        run.history().of("planned").last()?["mesh"].as_array()?.is_empty().then_some(())
    });
    ask(&run, &["stop"]);
    let status = run.end(Duration::from_secs(30));
    let saved = run.history().checkpoints().last().copied();
    eprintln!("stop-below: exit {:?} at step {}, checkpoint {saved:?}", status.code(), run.step());
    assert_eq!(status.code(), Some(130), "{}", run.report());
    assert_eq!(saved, Some(run.step()), "a stop saves where it stands");
    run.launch();
    let digests = run.finish(LIMIT);
    assert_eq!(run.history().redone(), 0, "a stop costs no step");
    assert_eq!(&digests, expected);
}

#[test]
fn live_2_the_launcher_takes_everything_with_it() {
    let mut run = Run::start(fake("launcher", 3, 5));
    run.wait_step(5, LIMIT);
    kill(run.launcher().expect("the launcher runs"), SIGKILL).expect("it takes a signal");
    let status = run.end(Duration::from_secs(5));
    let started = Instant::now();
    while !run.processes().is_empty() {
        assert!(started.elapsed() < Duration::from_secs(3), "orphans: {:?}", run.processes());
        std::thread::sleep(Duration::from_millis(5));
    }
    eprintln!(
        "launcher: {status}, nothing left after {:.0} ms",
        started.elapsed().as_secs_f64() * 1e3
    );
}

#[test]
fn live_2_a_worker_ends_with_its_agent() {
    let mut run = Run::start(fake("orphan", 2, 5));
    run.wait_step(5, LIMIT);
    let worker = run.worker("n2").expect("a worker");
    assert!(send(run.agent("n2"), SIGKILL), "n2 runs");
    run.wait("end of the worker", Duration::from_secs(2), |run| {
        run.processes().iter().all(|process| process.pid != worker.pid).then_some(())
    });
    run.settle();
    let agreed = run.wait("status of both nodes", LIMIT, |run| {
        let status = run.status()?;
        let agents = status["agents"].as_array()?;
        let pid = |node: &str| run.agent(node).map(|agent| i64::from(agent.pid.as_raw()));
        let agree = |agent: &serde_json::Value| {
            agent["node"].as_str().is_some_and(|node| agent["pid"].as_i64() == pid(node))
        };
        (agents.len() == 2 && agents.iter().all(agree)).then_some(agents.len())
    });
    eprintln!("orphan: status and /proc agree on {agreed} agents");
}
