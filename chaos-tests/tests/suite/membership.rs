//! Nodes without a launcher, each started by itself: the loss of a majority, of
//! the founder and of everything (LG-3, LIVE-1), and nodes that do not fit (CG).

mod nodes;

use std::{
    fs,
    time::{Duration, Instant},
};

use chaos_tests::fake;

use crate::quiet;
use nodes::Nodes;

/// Timeouts of the default failure budget.
const LEASE: Duration = Duration::from_millis(700);

#[test]
fn lg_3_two_of_three_voters_lost_for_good() {
    let mut nodes = Nodes::new("majority");
    for node in ["n1", "n2", "n3"] {
        nodes.start(node, &[]);
    }
    nodes.wait("three voters and a checkpoint", |nodes| {
        let status = nodes.status("n3")?;
        let voters = status["status"]["voters"].as_array()?.len();
        let automatic = status["status"]["job"]["reforming"]["automatic"] == true;
        (voters == 3 && automatic && nodes.checkpoints() >= 1).then_some(())
    });
    for node in ["n1", "n2"] {
        nodes.kill(node);
        nodes.lose_store(node);
    }
    let lost = Instant::now();
    nodes.wait("a step of the next era", |nodes| {
        let resumed = |line: &&serde_json::Value| line["era"] == 1;
        nodes.history().of("resumed").find(resumed).map(|_| ())
    });
    let took = lost.elapsed();
    eprintln!("majority: two of three voters lost, trained again after {took:?}");
    assert!(took < LEASE + Duration::from_secs(10), "{took:?}");
    // One of the lost ones comes again with nothing but the folder.
    nodes.start("n2", &[]);
    let digests = nodes.finish(&["n2", "n3"]);
    assert_eq!(&digests, quiet(), "TRAJ-1");
}

#[test]
fn lg_3_the_founder_is_gone_for_good_and_a_node_joins() {
    let mut nodes = Nodes::new("founder");
    for node in ["n1", "n2", "n3"] {
        nodes.start(node, &[]);
    }
    nodes.wait("three voters", |nodes| {
        let status = nodes.status("n2")?;
        (status["status"]["voters"].as_array()?.len() == 3).then_some(())
    });
    nodes.kill("n1");
    nodes.lose_store("n1");
    nodes.wait("a leader among the others", |nodes| {
        let status = nodes.status("n2")?;
        status["status"]["leader"].as_str().filter(|leader| *leader != "n1").map(|_| ())
    });
    nodes.start("n4", &[]);
    nodes.wait("a mesh with the newcomer", |nodes| {
        let history = nodes.history();
        let with = |line: &&serde_json::Value| {
            line["mesh"].as_array().is_some_and(|mesh| mesh.iter().any(|node| node == "n4"))
        };
        history.of("planned").find(with).map(|_| ())
    });
    let era = nodes.history().of("planned").last().and_then(|line| line["era"].as_u64());
    assert_eq!(era, Some(0), "the others had a quorum");
    let digests = nodes.finish(&["n2", "n3", "n4"]);
    assert_eq!(&digests, quiet(), "TRAJ-1");
}

#[test]
fn lg_3_everything_is_killed_and_half_comes_back() {
    let mut nodes = Nodes::new("half");
    let all = ["n1", "n2", "n3", "n4"];
    all.iter().for_each(|node| nodes.start(node, &[]));
    nodes.wait("four nodes, three voters and a checkpoint", |nodes| {
        let status = nodes.status("n4")?;
        let voters = status["status"]["voters"].as_array()?.len();
        let automatic = status["status"]["job"]["reforming"]["automatic"] == true;
        (voters == 3 && automatic && nodes.checkpoints() >= 1).then_some(())
    });
    let voters = nodes.status("n4").expect("a status")["status"]["voters"].clone();
    let votes = |node: &&&str| voters.as_array().is_some_and(|all| all.iter().any(|v| v == **node));
    // One voter and the node without a vote come back: no quorum.
    let lost: Vec<&str> = all.iter().filter(votes).take(2).copied().collect();
    let back: Vec<&str> = all.iter().filter(|node| !lost.contains(node)).copied().collect();
    all.iter().for_each(|node| nodes.kill(node));
    lost.iter().for_each(|node| nodes.lose_store(node));
    back.iter().for_each(|node| nodes.start(node, &[]));
    let started = Instant::now();
    nodes.wait("a step of the next era", |nodes| {
        let resumed = |line: &&serde_json::Value| line["era"] == 1;
        nodes.history().of("resumed").find(resumed).map(|_| ())
    });
    eprintln!("half: {back:?} of {all:?} came back, trained after {:?}", started.elapsed());
    let digests = nodes.finish(&back);
    assert_eq!(&digests, quiet(), "TRAJ-1");
}

#[test]
fn cg_a_node_that_computes_other_bits_is_refused() {
    let mut nodes = Nodes::new("processor");
    nodes.start("n1", &[]);
    nodes.start("n2", &[]);
    nodes.wait("a mesh of two", |nodes| {
        let history = nodes.history();
        let two = |line: &&serde_json::Value| line["mesh"].as_array().map(Vec::len) == Some(2);
        history.of("resumed").next().and(history.of("planned").find(two)).map(|_| ())
    });
    nodes.start("n3", &[(fake::PROCESSOR, "another")]);
    let (code, said) = nodes.ended("n3");
    eprintln!("processor: exit {code:?}: {}", said.trim());
    assert_eq!(code, Some(3), "do not requeue: {said}");
    for word in ["refused", "canned training step", "processor"] {
        assert!(said.contains(word), "no {word:?} in {said}");
    }
    let history = nodes.history();
    assert_eq!(history.of("node_refused").count(), 1);
    let with = |line: &&serde_json::Value| {
        line["mesh"].as_array().is_some_and(|mesh| mesh.iter().any(|node| node == "n3"))
    };
    assert_eq!(history.of("planned").filter(with).count(), 0, "it never trained");
    // Other tokens are as bad as another processor.
    let data = nodes.other_dataset();
    nodes.start_with("n4", &[format!("--training.dataset_path={}", data.display())]);
    let (code, said) = nodes.ended("n4");
    eprintln!("dataset: exit {code:?}: {}", said.trim());
    assert_eq!(code, Some(3), "{said}");
    assert!(said.contains("dataset") && said.contains("training.dataset_path"), "{said}");
    let _ = fs::remove_dir_all(data);
    let digests = nodes.finish(&["n1", "n2"]);
    assert_eq!(&digests, quiet(), "TRAJ-1");
}

#[test]
fn cg_a_token_opens_the_gate_until_it_expires_or_is_revoked() {
    let mut nodes = Nodes::new("tokens");
    nodes.start("n1", &[]);
    nodes.wait("a first step", |nodes| nodes.history().of("resumed").next().map(|_| ()));
    let (code, token) = nodes.ask(&["token", "create", "--ttl", "1h"]);
    assert_eq!(code, Some(0), "{token}");
    let (_, short) = nodes.ask(&["token", "create", "--ttl", "1s"]);
    std::thread::sleep(Duration::from_millis(1500));
    nodes.start_as("n2", short.trim());
    let (code, said) = nodes.ended("n2");
    eprintln!("tokens: expired: exit {code:?}: {}", said.trim());
    assert!(code == Some(2) && said.contains("refused the join token"), "{said}");
    let (code, said) = nodes.ask(&["token", "revoke", "founding"]);
    assert_eq!(code, Some(0), "{said}");
    nodes.start("n3", &[]);
    let (code, said) = nodes.ended("n3");
    assert!(code == Some(2) && said.contains("refused the join token"), "revoked: {said}");
    nodes.start_as("n4", token.trim());
    nodes.wait("a mesh with the newcomer", |nodes| {
        let history = nodes.history();
        let two = |line: &&serde_json::Value| line["mesh"].as_array().map(Vec::len) == Some(2);
        history.of("planned").find(two).map(|_| ())
    });
    let digests = nodes.finish(&["n1", "n4"]);
    assert_eq!(&digests, quiet(), "TRAJ-1");
}
