//! What is logged: every line says where its process stands, and an incident is
//! told by phase (OBS-1).

use std::{fs, path::Path};

use chaos_tests::harness::{Run, Setup, send};
use nix::sys::signal::Signal::SIGKILL;
use serde_json::Value;

use crate::{LIMIT, fake, quiet};

/// The lines of a log; each has to be a JSON object.
#[track_caller]
fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
    let parse = |line: &str| {
        serde_json::from_str(line).unwrap_or_else(|error| panic!("{path:?}: {line}: {error}"))
    };
    text.lines().map(parse).collect()
}

/// All lines name the node, and once a line has one of `keys`, the later lines of
/// that process have it too: what is known stays known.
#[track_caller]
fn check(path: &Path, node: &str, keys: &[&str]) {
    let lines = lines(path);
    let mut whole = 0;
    for line in &lines {
        assert_eq!(line["node"], node, "{path:?}: {line}");
        let known: Vec<_> = keys.iter().filter(|key| line[**key].is_u64()).collect();
        assert!(known.len() == keys.len() || whole == 0, "{path:?}: only {known:?} in {line}");
        whole += usize::from(known.len() == keys.len());
    }
    eprintln!("{path:?}: {} lines, {whole} with {keys:?}", lines.len());
    assert!(whole > 0, "{path:?}: no line has all of {keys:?}");
}

#[test]
fn obs_1_every_line_says_where_its_process_stands() {
    let expected = quiet();
    let environment = vec![("ELASTIC_LOG_FORMAT", "json".into()), ("ELASTIC_LOG", "debug".into())];
    let mut run = Run::start(Setup { environment, ..fake("logs", 3, 5) });
    run.wait_step(20, LIMIT);
    assert!(send(run.worker("n2"), SIGKILL), "a worker runs");
    let digests = run.finish(LIMIT);
    for number in 1..=3 {
        let node = format!("n{number}");
        let folder = run.folder().join("nodes").join(&node);
        check(&folder.join("agent.log"), &node, &["generation"]);
        // The log of n2 holds two lives.
        if number != 2 {
            check(&folder.join("worker-0.log"), &node, &["generation", "rank", "step"]);
        }
        let agent = lines(&folder.join("agent.log"));
        let said = |line: &&Value| line["message"].as_str().is_some_and(|m| m.contains("resumed"));
        let told = agent.iter().find(said).unwrap_or_else(|| panic!("{node} tells no incident"));
        eprintln!("{node}: {}", told["message"]);
    }
    assert_eq!(&digests, expected);
}
