//! LS-2: a death is certain on the kernel's word only, and then known at once.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    process::{Command, Stdio},
    sync::mpsc,
    time::Instant,
};

use super::*;
use crate::control::liveness::{self, Liveness};

const CHILD: &str = "ELASTIC_TEST_CHILD";

/// Not a test of its own: the process that [`a_killed_process_is_noticed_at_once`]
/// starts and kills.
#[tokio::test]
async fn child() {
    let Ok(path) = std::env::var(CHILD) else { return };
    let identity = Identity::load(path.as_ref()).expect("an identity");
    let mut node = Node::bind(identity, Options::default());
    println!("\nlistening {}", node.addr());
    while node.events.recv().await.is_some() {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_process_is_noticed_at_once() {
    let authority = authority();
    let folder = tempfile::tempdir().expect("a folder");
    let mut a = Node::start(&authority, 1);
    let mut delays = Vec::new();
    for n in 2..7 {
        let path = folder.path().join(format!("{n}.pem"));
        let identity = Identity::found(&authority, name(n), store(n)).expect("an identity");
        identity.save(&path).expect("saved");
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "control::tests::liveness::child", "--nocapture"])
            .env(CHILD, &path)
            .stdout(Stdio::piped())
            .spawn()
            .expect("a child");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let addr = lines.find_map(|line| {
            let line = line.expect("text");
            line.strip_prefix("listening ").map(|addr| addr.parse().expect("an address"))
        });
        let peer = a.control.connect(addr.expect("the child says"), None).await.expect("a link");
        a.up().await;
        // The watch is up a moment after the link.
        tokio::time::sleep(A_WHILE).await;
        let killed = Instant::now();
        child.kill().expect("killed");
        match a.next().await {
            LinkEvent::Reset { peer: store, boot } => {
                assert_eq!((store, boot), (peer.store, peer.boot));
            }
            other => panic!("{other:?}"),
        }
        delays.push(killed.elapsed());
        assert_eq!(a.down().await, DownReason::Died);
        child.wait().expect("reaped");
    }
    delays.sort_unstable();
    println!("from SIGKILL to Reset: {delays:?}");
    // One of five may meet a busy machine.
    assert!(delays[3] < Duration::from_millis(50), "{delays:?}");
}

struct Watcher {
    liveness: Liveness,
    dead: mpsc::Receiver<(StoreId, u64)>,
}

fn watcher() -> Watcher {
    let (send, dead) = mpsc::channel();
    let report = move |store, boot| {
        let _ = send.send((store, boot));
    };
    let liveness = Liveness::new(1, Arc::new(report), Arc::default());
    liveness.set_store(store(1));
    Watcher { liveness, dead }
}

fn listener() -> (TcpListener, SocketAddr) {
    let listener = liveness::listen(loopback()).expect("a listener");
    let addr = listener.local_addr().expect("an address");
    (listener, addr)
}

/// Accepts one watcher as the process (2, boot).
fn accept(listener: &TcpListener, boot: u64) -> TcpStream {
    let (mut stream, _) = listener.accept().expect("a watcher");
    let mut name = [0; 24];
    stream.read_exact(&mut name).expect("its name");
    assert_eq!(&name[..16], store(1).0.as_bytes());
    stream
        .write_all(&[&store(2).0.as_bytes()[..], &boot.to_le_bytes()].concat())
        .expect("answered");
    stream
}

impl Watcher {
    fn hears(&self, within: Duration) -> Option<(StoreId, u64)> {
        let until = Instant::now() + within;
        while Instant::now() < until {
            if let Ok(dead) = self.dead.try_recv() {
                return Some(dead);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        None
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ended_and_refused_is_dead() {
    let (watcher, (listener, addr)) = (watcher(), listener());
    watcher.liveness.watch(store(2), 5, addr);
    let stream = accept(&listener, 5);
    assert_eq!(watcher.hears(Duration::from_millis(100)), None, "while it lives");
    drop((stream, listener));
    assert_eq!(watcher.hears(SOON), Some((store(2), 5)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ended_connection_alone_is_not_death() {
    let (watcher, (listener, addr)) = (watcher(), listener());
    watcher.liveness.watch(store(2), 5, addr);
    for _ in 0..3 {
        drop(accept(&listener, 5));
    }
    let _stream = accept(&listener, 5);
    assert_eq!(watcher.hears(A_WHILE), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_alone_is_not_death() {
    let (watcher, (listener, addr)) = (watcher(), listener());
    drop(listener);
    watcher.liveness.watch(store(2), 5, addr);
    assert_eq!(watcher.hears(A_WHILE), None, "it never answered there");
}

/// The port was taken by another process, or by the next one of the same store:
/// nothing is known about the one that was watched.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_process_on_the_port_is_not_a_death() {
    let (watcher, (listener, addr)) = (watcher(), listener());
    watcher.liveness.watch(store(2), 5, addr);
    drop(accept(&listener, 5));
    drop(accept(&listener, 6));
    drop(listener);
    assert_eq!(watcher.hears(A_WHILE), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ended_watch_is_silent() {
    let (watcher, (listener, addr)) = (watcher(), listener());
    watcher.liveness.watch(store(2), 5, addr);
    let stream = accept(&listener, 5);
    watcher.liveness.unwatch(store(2));
    drop((stream, listener));
    assert_eq!(watcher.hears(A_WHILE), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_on_the_port_changes_nothing() {
    let (mut a, mut b) = pair(&authority()).await;
    let mut strangers = Vec::new();
    for n in 0..200_usize {
        let mut stream = TcpStream::connect(b.addr()).expect("accepted");
        // Some say nothing, some a part of a name, some far too much.
        let _ = stream.write_all(&vec![n as u8; n * 5]);
        strangers.push(stream);
    }
    a.silence().await;
    b.silence().await;
    drop(strangers);
    a.silence().await;
    a.control.send(b.store, Lane::Control, "still here".into()).expect("queued");
    assert_eq!(b.frame().await.1, "still here");
}
