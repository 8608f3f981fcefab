//! SEC-1 and ID-2: who gets a link, and that there is one.

use ::job::Incarnation;
use quinn::VarInt;

use super::*;
use crate::control::{PROTOCOL, close, tls};

#[tokio::test]
async fn a_link_knows_its_peer() {
    let authority = authority();
    let options =
        Options { incarnation: Incarnation(3), opaque: b"config".to_vec(), ..Options::default() };
    let (mut a, mut b) = (Node::start(&authority, 1), Node::start_with(&authority, 2, options));
    let peer = a.dial(&b).await.expect("a link");
    assert_eq!(a.up().await, peer);
    let expected = Peer {
        node: name(2),
        store: store(2),
        incarnation: Incarnation(3),
        boot: b.control.boot(),
        addr: b.addr(),
        opaque: "config".into(),
    };
    assert_eq!(peer, expected);
    assert_eq!(b.up().await.addr, a.addr());
    assert_eq!(a.control.peers(), std::slice::from_ref(&peer));
    assert_eq!(a.control.connect(b.addr(), Some(store(2))).await.expect("the same"), peer);
    a.silence().await;
    b.silence().await;
}

#[tokio::test]
async fn a_stranger_gets_no_link() {
    let (job_one, other_authority) = (authority(), authority());
    let other_job = Authority::generate(job(2)).expect("an authority");
    check(&job_one, &other_authority, "not of this job").await;
    check(&job_one, &other_job, "not of this job").await;

    async fn check(ours: &Authority, theirs: &Authority, part: &str) {
        let (mut a, mut b) = (Node::start(ours, 1), Node::start(theirs, 2));
        let error = a.dial(&b).await.expect_err("strangers").to_string();
        assert!(error.contains(part), "{error}");
        a.silence().await;
        b.silence().await;
    }
}

/// The same authority's key, but certificates for another job: only the name in
/// the certificate tells.
#[tokio::test]
async fn another_job_is_refused_by_name() {
    let ours = authority();
    let mut theirs = Authority::from_pem(&ours.to_pem()).expect("a copy");
    theirs.job = job(2);
    let (a, mut b) = (Node::start(&ours, 1), Node::start(&theirs, 2));
    let error = a.dial(&b).await.expect_err("another job").to_string();
    assert!(error.contains(&format!("of job {}", job(2))), "{error}");
    b.silence().await;
}

/// A client without a certificate believes it is connected: no link comes of it.
#[tokio::test]
async fn a_client_without_a_certificate_gets_no_link() {
    let authority = authority();
    let mut b = Node::start(&authority, 2);
    let (control, _events) = Control::bind(loopback(), None, Options::default()).expect("bound");
    let config = tls::stranger_client(None, tls::ALPN_PEER, &Options::default()).expect("TLS");
    let endpoint = &control.inner.endpoint;
    let connection = endpoint.connect_with(config, b.addr(), "x").expect("dialled").await;
    let connection = connection.expect("connected, as far as it knows");
    let ended = timeout(SOON, connection.closed()).await.expect("turned away");
    assert!(close::readable(&ended).contains("needs a certificate of this job"), "{ended}");
    b.silence().await;
    let without = control.connect(b.addr(), None).await;
    assert!(matches!(without, Err(LinkError::NoIdentity)));
}

#[tokio::test]
async fn another_version_reads_well_on_both_sides() {
    let authority = authority();
    let identity = Identity::found(&authority, name(1), store(1)).expect("an identity");
    let (newer, _events) =
        Control::bind_speaking(PROTOCOL + 1, loopback(), Some(identity), Options::default())
            .expect("an endpoint");
    let mut b = Node::start(&authority, 2);
    let error = newer.connect(b.addr(), None).await.expect_err("another version").to_string();
    let part = "install the same release of elastic on every node";
    assert!(error.contains(part), "{error}");
    match b.next().await {
        LinkEvent::Refused { reason, .. } => assert!(reason.contains(part), "{reason}"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_check_of_the_agent_reads_well_on_both_sides() {
    let authority = authority();
    let check = |peer: &Peer| match peer.opaque.as_ref() {
        b"one" => Ok(()),
        _ => Err(format!("the configuration of {} differs", peer.node)),
    };
    let options = |opaque: &str| Options {
        opaque: opaque.into(),
        check: Some(Arc::new(check)),
        ..Options::default()
    };
    let a = Node::start_with(&authority, 1, options("two"));
    let mut b = Node::start_with(&authority, 2, options("one"));
    let error = a.dial(&b).await.expect_err("another configuration").to_string();
    assert!(error.contains("the configuration of node-1 differs"), "{error}");
    assert!(matches!(b.next().await, LinkEvent::Refused { .. }));
}

#[tokio::test]
async fn the_store_at_an_address_must_be_the_expected_one() {
    let authority = authority();
    let (a, b) = (Node::start(&authority, 1), Node::start(&authority, 2));
    let error = a.control.connect(b.addr(), Some(store(3))).await.expect_err("another store");
    assert!(matches!(error, LinkError::Mismatch { .. }), "{error}");
    let error = a.control.connect(a.addr(), None).await.expect_err("itself").to_string();
    assert!(error.contains("this node's own"), "{error}");
    drop(b);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn simultaneous_dials_leave_one_link() {
    let authority = authority();
    for _ in 0..20 {
        let (mut a, mut b) = (Node::start(&authority, 1), Node::start(&authority, 2));
        let (from_a, from_b) = tokio::join!(a.dial(&b), b.dial(&a));
        assert_eq!(from_a.expect("a link").store, b.store);
        assert_eq!(from_b.expect("a link").store, a.store);
        a.up().await;
        b.up().await;
        // It is the same connection on both sides: frames cross it both ways.
        for (from, to) in [(&a, store(2)), (&b, store(1))] {
            from.control.send(to, Lane::Control, "one".into()).expect("queued");
        }
        assert_eq!(a.frame().await.1, "one");
        assert_eq!(b.frame().await.1, "one");
        let quiet = Duration::from_millis(20);
        assert!(timeout(quiet, a.events.recv()).await.is_err(), "no other event");
        assert!(timeout(quiet, b.events.recv()).await.is_err(), "no other event");
    }
}

#[tokio::test]
async fn dialling_again_keeps_the_link() {
    let authority = authority();
    for (dialler, other) in [(1, 2), (2, 1)] {
        let mut a = Node::start(&authority, dialler);
        let mut b = Node::start(&authority, other);
        let first = a.dial(&b).await.expect("a link");
        a.up().await;
        b.up().await;
        assert_eq!(a.dial(&b).await.expect("the same link"), first);
        a.silence().await;
        b.silence().await;
    }
}

#[tokio::test]
async fn a_restarted_process_takes_over() {
    let authority = authority();
    for (standing, restarting) in [(1, 2), (2, 1)] {
        let mut a = Node::start(&authority, standing);
        let mut old = Node::start(&authority, restarting);
        old.dial(&a).await.expect("a link");
        a.up().await;
        old.up().await;
        let mut new = Node::start(&authority, restarting);
        new.dial(&a).await.expect("a link");
        assert_eq!(a.down().await, DownReason::Restarted);
        assert_eq!(a.up().await.boot, new.control.boot());
        assert_eq!(old.down().await, DownReason::Replaced);
        new.up().await;
    }
}

#[tokio::test]
async fn the_end_of_a_peer_is_reported() {
    let (mut a, mut b) = pair(&authority()).await;
    a.control.disconnect(b.store, "evicted");
    assert_eq!(b.down().await, DownReason::Closed("evicted".into()));
    assert_eq!(a.down().await, DownReason::Shutdown);
    a.dial(&b).await.expect("a new link");
    a.up().await;
    b.up().await;
    b.control.close(Duration::from_secs(2)).await;
    assert!(matches!(a.down().await, DownReason::Closed(_) | DownReason::Died));
    assert!(matches!(b.dial(&a).await, Err(LinkError::Closed | LinkError::Unreachable { .. })));
}

#[tokio::test]
async fn a_dropped_handle_closes_everything() {
    let (mut a, b) = pair(&authority()).await;
    let addr = b.addr();
    drop(b);
    a.down().await;
    let rebind = async {
        while Control::bind(addr, None, Options::default()).is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(SOON, rebind).await.expect("both ports are free again");
}

#[tokio::test]
async fn garbage_datagrams_change_nothing() {
    let (mut a, mut b) = pair(&authority()).await;
    let socket = std::net::UdpSocket::bind(loopback()).expect("a socket");
    for n in 0..2000_usize {
        let garbage: Vec<u8> = (0..n % 1400).map(|i| (i * 31 + n * 17) as u8).collect();
        socket.send_to(&garbage, b.addr()).expect("sent");
    }
    // Something that looks like the first packet of a handshake.
    let mut initial = vec![0xc3, 0, 0, 0, 1, 8, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0x44, 0x90];
    initial.resize(1200, 7);
    for _ in 0..500 {
        socket.send_to(&initial, b.addr()).expect("sent");
    }
    a.control.send(b.store, Lane::Control, "still here".into()).expect("queued");
    assert_eq!(b.frame().await.1, "still here");
    let c = Node::start(&authority(), 3);
    assert!(c.dial(&b).await.is_err(), "and it still answers");
    a.silence().await;
}

#[tokio::test]
async fn nobody_at_the_address() {
    let a = Node::start_with(
        &authority(),
        1,
        Options { handshake: Duration::from_millis(200), ..Options::default() },
    );
    let free = std::net::UdpSocket::bind(loopback()).expect("a socket");
    let addr = free.local_addr().expect("an address");
    let error = a.control.connect(addr, None).await.expect_err("nobody").to_string();
    assert_eq!(error, format!("cannot reach {addr}: no link within 200ms"));
}

#[tokio::test]
async fn a_silent_connection_is_turned_away() {
    let authority = authority();
    let options = Options { handshake: Duration::from_millis(200), ..Options::default() };
    let mut b = Node::start_with(&authority, 2, options);
    let a = Node::start(&authority, 1);
    let local = a.control.inner.local().expect("an identity");
    let endpoint = &a.control.inner.endpoint;
    let connection = endpoint.connect_with(local.client.clone(), b.addr(), "x").expect("dialled");
    let connection = connection.await.expect("connected");
    let ended = timeout(SOON, connection.closed()).await.expect("turned away");
    assert!(close::readable(&ended).contains("no hello in time"), "{ended}");
    assert!(matches!(b.next().await, LinkEvent::Refused { .. }));
    assert_eq!(b.control.turned_away().total(), 1);
    connection.close(VarInt::from_u32(0), b"");
}

/// A machine that vanishes says nothing: the idle limit is the backstop.
#[tokio::test]
async fn a_vanished_peer_is_silent() {
    let authority = authority();
    let options = || Options {
        idle: Duration::from_millis(500),
        keep_alive: Duration::from_millis(100),
        ..Options::default()
    };
    let mut a = Node::start_with(&authority, 1, options());
    let mut b = Node::start_with(&authority, 2, options());
    let cable = Cable::to(b.addr()).await;
    a.control.connect(cable.addr, Some(b.store)).await.expect("a link");
    assert_eq!(a.up().await.addr, cable.addr);
    b.up().await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    a.silence().await;
    drop(cable);
    assert_eq!(a.down().await, DownReason::Silent);
    assert_eq!(b.down().await, DownReason::Silent);
}

/// Forwards datagrams between one dialler and one address, until dropped.
struct Cable {
    addr: SocketAddr,
    task: tokio::task::JoinHandle<()>,
}

impl Cable {
    async fn to(far: SocketAddr) -> Self {
        let near = tokio::net::UdpSocket::bind(loopback()).await.expect("a socket");
        let out = tokio::net::UdpSocket::bind(loopback()).await.expect("a socket");
        out.connect(far).await.expect("connected");
        let addr = near.local_addr().expect("an address");
        let task = tokio::spawn(async move {
            let (mut there, mut back) = (vec![0; 65_536], vec![0; 65_536]);
            let mut dialler = None;
            loop {
                tokio::select! {
                    Ok((size, from)) = near.recv_from(&mut there) => {
                        dialler = Some(from);
                        let _ = out.send(&there[..size]).await;
                    }
                    Ok(size) = out.recv(&mut back) => if let Some(dialler) = dialler {
                        let _ = near.send_to(&back[..size], dialler).await;
                    }
                }
            }
        });
        Self { addr, task }
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A certificate of the job is no licence to send anything as a hello.
#[tokio::test]
async fn a_broken_hello_is_refused() {
    check(&[255, 255, 255, 255, 1, 0], "a hello of 4294967293 bytes is over the limit").await;
    check(
        &[22, 0, 0, 0, 1, 0, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9],
        "decode",
    )
    .await;

    async fn check(bytes: &[u8], part: &str) {
        let authority = authority();
        let (a, mut b) = (Node::start(&authority, 1), Node::start(&authority, 2));
        let local = a.control.inner.local().expect("an identity");
        let endpoint = &a.control.inner.endpoint;
        let dialled = endpoint.connect_with(local.client.clone(), b.addr(), "x").expect("dialled");
        let connection = dialled.await.expect("connected");
        let (mut send, _receive) = connection.open_bi().await.expect("a stream");
        send.write_all(bytes).await.expect("sent");
        match b.next().await {
            LinkEvent::Refused { reason, .. } => assert!(reason.contains(part), "{reason}"),
            other => panic!("{other:?}"),
        }
        let ended = timeout(SOON, connection.closed()).await.expect("closed");
        assert!(close::readable(&ended).contains(part), "{ended}");
    }
}
