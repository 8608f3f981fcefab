//! LS-4 with real processes: this test program starts itself as the worker.

use std::{
    io::{BufRead, BufReader, Write},
    os::fd::AsRawFd,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::{FdFlags, fcntl_setfd},
    process::{Pid, PidfdFlags, pidfd_open},
};

use super::*;

const CHILD: &str = "ELASTIC_TEST_LIFELINE";
/// The dirty memory of the worker.
const MEMORY: usize = 300 << 20;

/// The worker's part, in the process that the other test starts.
#[test]
fn child() {
    let Some(memory) = crate::worker::inherited(CHILD) else { return };
    hold(memory).expect("the kernel knows robust futexes");
    let dirty = vec![1_u8; MEMORY];
    println!("held {}", std::hint::black_box(&dirty).len());
    std::io::stdout().flush().expect("a parent");
    loop {
        std::thread::park();
    }
}

fn start() -> (Lifeline, Child) {
    let (lifeline, memory) = Lifeline::new().expect("a page");
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "lifeline::tests::child", "--nocapture"]).stdout(Stdio::piped());
    fcntl_setfd(&memory, FdFlags::empty()).expect("an open descriptor");
    command.env(CHILD, memory.as_raw_fd().to_string());
    let mut child = command.spawn().expect("this program starts");
    let output = BufReader::new(child.stdout.take().expect("a pipe"));
    let held = output.lines().map_while(Result::ok).any(|line| line.contains("held"));
    assert!(held, "the worker holds its page");
    (lifeline, child)
}

/// From the kill to the futex and to the pidfd.
fn kill_and_watch() -> (Duration, Duration) {
    let (lifeline, mut child) = start();
    let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).expect("a pidfd");
    let by_futex = std::thread::spawn(move || {
        lifeline.wait();
        Instant::now()
    });
    let by_pidfd = std::thread::spawn(move || {
        let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
        poll(&mut fds, None).expect("a pidfd can be polled");
        Instant::now()
    });
    // Both wait by then.
    std::thread::sleep(Duration::from_millis(100));
    let killed = Instant::now();
    child.kill().expect("it lives");
    let seen = [by_futex, by_pidfd].map(|seen| seen.join().expect("it was seen") - killed);
    child.wait().expect("a child");
    (seen[0], seen[1])
}

#[test]
fn ls_4_the_death_of_a_big_worker_is_seen_by_its_futex_first() {
    let mut rounds: Vec<_> = (0..5).map(|_| kill_and_watch()).collect();
    eprintln!("300 MiB killed, by futex and by pidfd: {rounds:.1?}");
    rounds.sort();
    let futex = rounds[2].0;
    rounds.sort_by_key(|round| round.1);
    let pidfd = rounds[2].1;
    eprintln!("medians {futex:.1?} and {pidfd:.1?}");
    assert!(futex <= pidfd, "the futex is later");
}

#[test]
fn a_worker_that_never_held_it_is_no_dead_worker() {
    let (lifeline, memory) = Lifeline::new().expect("a page");
    let (seen, died) = mpsc::channel();
    let waiting = lifeline.clone();
    std::thread::spawn(move || {
        waiting.wait();
        let _ = seen.send(());
    });
    drop(memory);
    let quiet = died.recv_timeout(Duration::from_millis(100));
    assert_eq!(quiet, Err(mpsc::RecvTimeoutError::Timeout));
    lifeline.cut();
    died.recv_timeout(Duration::from_secs(10)).expect("the wait ends");
}
