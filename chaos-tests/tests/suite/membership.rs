//! Nodes without a launcher, each started by itself: the loss of a majority, of
//! the founder and of everything (LG-3, LIVE-1), and nodes that do not fit (CG).

mod nodes;

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    time::{Duration, Instant},
};

use chaos_tests::fake;

use crate::quiet;
pub(crate) use nodes::Nodes;
use nodes::addresses;

/// Timeouts of the default failure budget.
const LEASE: Duration = Duration::from_millis(700);
/// After this, what a node showed as a fact it knows again when all are killed.
const FACTS: Duration = Duration::from_millis(300);

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
    std::thread::sleep(FACTS);
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

/// Nobody's address is what the others know.
#[test]
fn lg_3_half_comes_back_at_other_addresses() {
    let mut nodes = Nodes::new("addresses");
    let all = ["n1", "n2", "n3", "n4"];
    all.iter().for_each(|node| nodes.start(node, &[]));
    nodes.wait("four nodes, three voters and a checkpoint", |nodes| {
        let status = nodes.status("n4")?;
        let voters = status["status"]["voters"].as_array()?.len();
        let automatic = status["status"]["job"]["reforming"]["automatic"] == true;
        (voters == 3 && automatic && nodes.checkpoints() >= 1).then_some(())
    });
    std::thread::sleep(FACTS);
    all.iter().for_each(|node| nodes.kill_and_take_address(node));
    ["n1", "n2"].iter().for_each(|node| nodes.lose_store(node));
    let started = Instant::now();
    ["n3", "n4"].iter().for_each(|node| nodes.start(node, &[]));
    nodes.wait("a step of both nodes", |nodes| {
        let history = nodes.history();
        let both = |line: &&serde_json::Value| line["mesh"].as_array().map(Vec::len) == Some(2);
        let planned = history.of("planned").find(both)?;
        let later = |line: &&serde_json::Value| {
            (line["era"].as_u64(), line["generation"].as_u64())
                >= (planned["era"].as_u64(), planned["generation"].as_u64())
        };
        history.of("resumed").find(later).map(|_| ())
    });
    eprintln!("addresses: trained together after {:?}", started.elapsed());
    let digests = nodes.finish(&["n3", "n4"]);
    assert_eq!(&digests, quiet(), "TRAJ-1");
}

#[test]
fn lg_3_a_person_begins_an_era_and_the_batch_stays() {
    let mut nodes = Nodes::new("person");
    nodes.batch = -1;
    nodes.limits[0] = 2;
    ["n1", "n2"].iter().for_each(|node| nodes.start(node, &[]));
    nodes.wait("a checkpoint", |nodes| (nodes.checkpoints() >= 1).then_some(()));
    let reform = ["--reform".to_owned()];
    nodes.start_at("n3", addresses(1)[0], &reform);
    let (code, said) = nodes.ended("n3");
    eprintln!("person: while it runs: exit {code:?}: {}", said.trim());
    assert!(code == Some(2) && said.contains("belongs to a job that is running"), "{said}");
    let shares =
        |nodes: &Nodes| nodes.history().of("planned").last().map(|line| line["shares"].clone());
    assert_eq!(shares(&nodes), Some(serde_json::json!([1, 1])));
    for node in ["n1", "n2"] {
        nodes.kill(node);
        nodes.lose_store(node);
    }
    nodes.limits[0] = 1;
    nodes.start_at("n4", addresses(1)[0], &reform);
    let digests = nodes.finish(&["n4"]);
    assert_eq!(shares(&nodes), Some(serde_json::json!([2])), "DATA-2");
    let mut alone = Nodes::new("person-quiet");
    alone.batch = 2;
    alone.start("n1", &[]);
    assert_eq!(digests, alone.finish(&["n1"]), "TRAJ-1");
}

#[test]
fn founders_start_in_any_order() {
    let mut nodes = Nodes::new("order");
    nodes.limits[0] = 3;
    let addresses = addresses(3);
    let listed: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    let join = ["--join".to_owned(), listed.join(",")];
    for (node, listen) in ["n1", "n2", "n3"].iter().zip(&addresses).rev() {
        nodes.start_at(node, *listen, &join);
        std::thread::sleep(Duration::from_millis(500));
    }
    let digests = nodes.finish(&["n1", "n2", "n3"]);
    let mesh =
        nodes.history().of("planned").next().and_then(|line| line["mesh"].as_array().cloned());
    assert_eq!(mesh.map(|mesh| mesh.len()), Some(3));
    assert_eq!(&digests, quiet(), "TRAJ-1");
}

#[test]
fn a_script_says_where_the_others_are() {
    let mut nodes = Nodes::new("script");
    let addresses = addresses(2);
    let script = nodes.folder.join("hosts");
    let names = |count: usize| {
        let lines: Vec<String> = addresses[..count].iter().map(ToString::to_string).collect();
        let text = format!("#!/bin/sh\nprintf '{}\\n'\n", lines.join("\\n"));
        let draft = script.with_extension("draft");
        fs::write(&draft, text).expect("a script");
        fs::set_permissions(&draft, fs::Permissions::from_mode(0o755)).expect("its mode");
        fs::rename(&draft, &script).expect("a script");
    };
    let arguments = ["--host-discovery-script".to_owned(), script.display().to_string()];
    names(1);
    nodes.start_at("n1", addresses[0], &arguments);
    nodes.wait("a first step", |nodes| nodes.history().of("resumed").next().map(|_| ()));
    names(2);
    nodes.start_at("n2", addresses[1], &arguments);
    nodes.wait("a mesh of two", |nodes| {
        let history = nodes.history();
        let two = |line: &&serde_json::Value| line["mesh"].as_array().map(Vec::len) == Some(2);
        history.of("planned").find(two).map(|_| ())
    });
    let digests = nodes.finish(&["n1", "n2"]);
    assert_eq!(&digests, quiet(), "TRAJ-1");
}

#[test]
fn heal_1_a_standby_replaces_a_lost_node_at_once() {
    let mut nodes = Nodes::new("standby");
    nodes.limits[1] = 2;
    nodes.start("n1", &[]);
    nodes.start("n2", &[]);
    nodes.wait("a mesh of two", |nodes| {
        let history = nodes.history();
        let two = |line: &&serde_json::Value| line["mesh"].as_array().map(Vec::len) == Some(2);
        history.of("planned").find(two).map(|_| ())
    });
    nodes.start("n3", &[]);
    nodes.wait("a standby that is ready", |nodes| {
        let status = nodes.status("n3")?;
        let ready = status["status"]["workers"][0]["state"] == "Ready";
        ready.then_some(())
    });
    let before = nodes.history().of("planned").count();
    nodes.kill("n2");
    let lost = Instant::now();
    let mesh = nodes.wait("a plan without the lost node", |nodes| {
        nodes.history().of("planned").nth(before).map(|line| line["mesh"].clone())
    });
    eprintln!("standby: planned {:?} after the loss", lost.elapsed());
    assert_eq!(mesh, serde_json::json!(["n1", "n3"]), "in the very next generation");
    let digests = nodes.finish(&["n1", "n3"]);
    assert_eq!(&digests, quiet(), "TRAJ-1");
}

#[test]
fn ls_2_a_node_that_comes_and_goes_is_held_back() {
    let mut nodes = Nodes::new("flapping");
    ["n1", "n2"].iter().for_each(|node| nodes.start(node, &[]));
    // Generations with n3 that trained.
    let stays = |nodes: &Nodes| {
        let history = nodes.history();
        let with = |line: &&serde_json::Value| {
            line["mesh"].as_array().is_some_and(|mesh| mesh.iter().any(|node| node == "n3"))
        };
        let planned: Vec<_> =
            history.of("planned").filter(with).map(|line| &line["generation"]).collect();
        history.of("resumed").filter(|line| planned.contains(&&line["generation"])).count()
    };
    for stay in 1..=5 {
        nodes.start("n3", &[]);
        nodes.wait("a mesh with n3", |nodes| (stays(nodes) >= stay).then_some(()));
        nodes.kill("n3");
    }
    nodes.start("n3", &[]);
    let held =
        nodes.wait("n3 is held back", |nodes| nodes.history().of("node_held_back").next().cloned());
    assert_eq!((&held["node"], &held["stays"]), (&"n3".into(), &5.into()), "{held}");
    assert_eq!(stays(&nodes), 5, "the others train without it");
    nodes.wait("a mesh with n3 when its time is over", |nodes| (stays(nodes) >= 6).then_some(()));
    let digests = nodes.finish(&["n1", "n2", "n3"]);
    assert_eq!(&digests, quiet(), "TRAJ-1");
}

#[test]
fn a_crash_loop_is_not_to_be_requeued() {
    let mut nodes = Nodes::new("crashes");
    nodes.limits[2] = 2;
    let traps = nodes.folder.join("traps");
    fs::create_dir(&traps).expect("a folder");
    nodes.start("n1", &[(fake::TRAPS, &traps.display().to_string())]);
    let name = fake::Point::Open.name();
    nodes.wait("an end", |nodes| {
        // Every worker that comes finds one.
        fs::write(traps.join(&name), "").expect("a trap");
        nodes.has_ended("n1").then_some(())
    });
    let (code, said) = nodes.ended("n1");
    eprintln!("crashes: exit {code:?}: {}", said.trim());
    assert_eq!(code, Some(3), "do not requeue: {said}");
    assert!(said.contains("elastic.max_failures = 2"), "{said}");
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
