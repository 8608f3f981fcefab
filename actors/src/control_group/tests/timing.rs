//! What a commit costs. Printed, with a generous bound: the machine is shared.

use std::io::Write;
use std::time::{Duration, Instant};

use super::cluster::Cluster;

#[track_caller]
fn report(what: &str, mut took: Vec<Duration>) -> Duration {
    took.sort();
    let at = |q: usize| took[took.len() * q / 100].as_secs_f64() * 1e3;
    println!("{what}: p50 {:.2} ms, p90 {:.2}, p99 {:.2}", at(50), at(90), at(99));
    took[took.len() / 2]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_proposals() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut file = std::fs::File::create(dir.path().join("plain")).expect("a file");
    let mut took = Vec::new();
    for _ in 0..200 {
        let begun = Instant::now();
        file.write_all(&[7; 256]).expect("writes");
        file.sync_data().expect("syncs");
        took.push(begun.elapsed());
    }
    report("plain append and fdatasync", took);

    for members in [1, 3] {
        let (cluster, _) = Cluster::of(members).await;
        let leader = cluster.leader().await;
        let mut took = Vec::new();
        for command in 0..1000 {
            let begun = Instant::now();
            leader.propose(command).await.unwrap_or_else(|e| panic!("{command}: {e}"));
            took.push(begun.elapsed());
        }
        let median = report(&format!("one at a time, {members} members"), took);
        assert!(median < Duration::from_millis(200), "{median:?}");

        let begun = Instant::now();
        let tasks: Vec<_> = (0..1000)
            .map(|command| {
                let leader = leader.clone();
                tokio::spawn(async move { leader.propose(command).await })
            })
            .collect();
        for task in tasks {
            task.await.expect("runs").expect("commits");
        }
        println!("a thousand at once, {members} members: {:?}", begun.elapsed());
        assert_eq!(leader.state().borrow().state.0.len(), 2000);
    }
}
