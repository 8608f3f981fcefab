//! Ranks in processes of their own, killed as the kernel kills.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, Command, Stdio},
};

use super::*;

/// Set in the children: the rank, and what to do, as an index of [`During::ALL`].
const RANK: &str = "ELASTIC_TEST_RANK";
const DURING: &str = "ELASTIC_TEST_DURING";
const RANKS: usize = 4;

/// The whole life of a child: its address out, all addresses in, then the same
/// operation until it fails.
#[test]
fn a_child_of_the_test_below() {
    let number = |name| std::env::var(name).ok()?.parse::<usize>().ok();
    let (Some(rank), Some(during)) = (number(RANK), number(DURING)) else { return };
    let listener = listener();
    println!("\naddress {}", listener.local_addr());
    let lines = std::io::stdin().lines().take(RANKS);
    let addresses = lines.map(|line| line.unwrap().parse().unwrap()).collect();
    let spec = MeshSpec { token: token(1), key: [1; 32], rank, addresses };
    // The first rank may be through, and the kill done, before this one is.
    let error = match listener.connect(spec, soon(), &AbortHandle::new().unwrap()) {
        Ok(mut mesh) => During::ALL[during].run(&mut mesh),
        Err(error) => error,
    };
    println!("end {error}");
    // Until the parent has seen enough: a failed mesh lingers in its process.
    let _ = std::io::stdin().lines().next();
}

#[test]
fn survivors_name_a_killed_process_within_100_ms() {
    for (index, during) in During::ALL.into_iter().enumerate() {
        let mut times: Vec<_> = (0..5).map(|_| check(index)).collect();
        times.sort_unstable();
        println!("SIGKILL during {during:?}: median {:?}, worst {:?}", times[2], times[4]);
        assert!(times[2] < Duration::from_millis(100), "{during:?}: {times:?}");
    }
}

/// Kills the last rank; how long until the first, which is here, notices.
#[track_caller]
fn check(during: usize) -> Duration {
    let own = listener();
    let mut children: Vec<_> = (1..RANKS).map(|rank| spawn(rank, during)).collect();
    let mut addresses = vec![own.local_addr()];
    for (_, lines) in &mut children {
        addresses.push(lines("address ").parse().unwrap());
    }
    let all: String = addresses.iter().map(|address| format!("{address}\n")).collect();
    for (child, _) in &mut children {
        child.stdin.as_mut().unwrap().write_all(all.as_bytes()).unwrap();
    }
    let spec = MeshSpec { token: token(1), key: [1; 32], rank: 0, addresses };
    let mut mesh = own.connect(spec, soon(), &AbortHandle::new().unwrap()).unwrap();
    let (mut victim, _) = children.pop().unwrap();
    let killer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(20));
        let at = Instant::now();
        victim.kill().unwrap();
        victim.wait().unwrap();
        at
    });
    let error = During::ALL[during].run(&mut mesh);
    let took = killer.join().unwrap().elapsed();
    drop(mesh);
    let what = During::ALL[during];
    assert_eq!(error.peer(), Some(RANKS - 1), "rank 0 in {what:?}: {error}");
    for (_, lines) in &mut children {
        let end = lines("end ");
        assert!(end.starts_with("rank 3 is lost: "), "in {what:?}: {end}");
    }
    // Only now: an end of theirs would be one more death to be seen.
    for (mut survivor, _) in children {
        drop(survivor.stdin.take());
        assert!(survivor.wait().unwrap().success());
    }
    took
}

/// A child, and what follows a word at the start of one of its next lines.
fn spawn(rank: usize, during: usize) -> (Child, impl FnMut(&str) -> String) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "collective::tests::process::a_child_of_the_test_below", "--nocapture"])
        .env(RANK, rank.to_string())
        .env(DURING, during.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let after = move |word: &str| {
        let mut found =
            lines.by_ref().filter_map(|line| Some(line.ok()?.strip_prefix(word)?.to_owned()));
        found.next().unwrap()
    };
    (child, after)
}
