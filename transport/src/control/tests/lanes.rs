//! Frames: order, limits, backpressure, and that bulk delays no beat.

use std::time::Instant;

use bytes::Bytes;

use super::*;
use crate::control::{PROTOCOL, SendError, close, hello};

#[tokio::test]
async fn frames_arrive_in_order_on_every_lane() {
    let (a, mut b) = pair(&authority()).await;
    for n in 0..1000_u32 {
        for lane in Lane::ALL {
            a.control.send(b.store, lane, n.to_le_bytes().to_vec().into()).expect("queued");
        }
    }
    let mut due = [0_u32; 3];
    while due != [1000; 3] {
        let (lane, bytes) = b.frame().await;
        assert_eq!(bytes, due[lane as usize].to_le_bytes().as_ref());
        due[lane as usize] += 1;
    }
}

#[tokio::test]
async fn frames_of_every_size() {
    let (mut a, mut b) = pair(&authority()).await;
    for (lane, size) in [
        (Lane::Control, 0),
        (Lane::Control, 1),
        (Lane::Raft, 8 << 20),
        (Lane::Control, 8 << 20),
        (Lane::Bulk, 64 << 20),
    ] {
        let sent = Bytes::from((0..size).map(|i: usize| ((i * 7) >> 3) as u8).collect::<Vec<_>>());
        b.control.send(a.store, lane, sent.clone()).expect("queued");
        let (got, bytes) = a.frame().await;
        assert!(got == lane && bytes == sent, "{size} bytes on {lane:?}");
    }
    b.silence().await;
}

#[tokio::test]
async fn what_cannot_be_sent_comes_back() {
    let (a, _b) = pair(&authority()).await;
    let large = Bytes::from(vec![1; Lane::Control.frame_limit() + 1]);
    let error = a.control.send(store(2), Lane::Control, large.clone()).expect_err("too large");
    assert!(matches!(error, SendError::TooLarge { .. }));
    assert!(error.into_bytes() == large, "it comes back whole");
    let error = a.control.send(store(9), Lane::Raft, "lost".into()).expect_err("nobody");
    assert!(matches!(error, SendError::NotConnected { .. }));
    assert_eq!(error.into_bytes(), "lost");
}

/// The peer's agent does not read: the sender's queue fills up and says so, the
/// other lanes go on, and everything arrives once the agent reads.
#[tokio::test]
async fn a_full_queue_gives_the_frame_back() {
    let (a, mut b) = pair(&authority()).await;
    let frame = Bytes::from(vec![7; 1 << 20]);
    let mut queued = 0_usize;
    let full = loop {
        match a.control.send(b.store, Lane::Raft, frame.clone()) {
            Ok(()) => queued += 1,
            Err(SendError::Full { .. }) => {
                // The streams and the receiver take some more; wait until they are full.
                tokio::time::sleep(A_WHILE).await;
                match a.control.send(b.store, Lane::Raft, frame.clone()) {
                    Ok(()) => queued += 1,
                    Err(error) => break error,
                }
            }
            Err(error) => panic!("{error}"),
        }
        assert!(queued < 100, "the queue has no end");
    };
    assert!(full.to_string().contains("raft lane to store"), "{full}");
    assert!(full.into_bytes() == frame, "it comes back whole");
    a.control.send(b.store, Lane::Control, "beat".into()).expect("another lane");
    // It overtakes what waits at the receiver, once it is there.
    tokio::time::sleep(A_WHILE).await;
    assert_eq!(b.frame().await, (Lane::Control, "beat".into()));
    let more = a.control.send_wait(b.store, Lane::Raft, frame.clone());
    let read = async {
        for _ in 0..=queued {
            assert_eq!(b.frame().await.0, Lane::Raft);
        }
    };
    let (sent, ()) = tokio::join!(more, read);
    sent.expect("room came");
}

#[tokio::test]
async fn waiting_for_room_ends_with_the_link() {
    let (a, b) = pair(&authority()).await;
    let frame = Bytes::from(vec![7; 8 << 20]);
    let fill = async {
        loop {
            if let Err(error) = a.control.send_wait(store(2), Lane::Raft, frame.clone()).await {
                break error;
            }
        }
    };
    let end = async {
        tokio::time::sleep(A_WHILE).await;
        b.control.close(Duration::from_secs(1)).await;
    };
    let (error, ()) = timeout(SOON, async { tokio::join!(fill, end) }).await.expect("it ends");
    assert!(matches!(error, SendError::NotConnected { .. }), "{error}");
}

/// Whatever a peer with a good certificate sends, the link ends with a reason.
#[tokio::test]
async fn a_broken_rule_closes_the_link() {
    let huge = |lane: u8| [&[lane][..], &u32::MAX.to_le_bytes()].concat();
    check(&[&huge(1)], "a control frame of 4294967295 bytes is over the limit of 8388608").await;
    check(&[&huge(2)], "a bulk frame of 4294967295 bytes is over the limit of 67108864").await;
    check(&[&[9]], "there is no lane 9").await;
    check(&[&[1], &[1]], "a second control stream on one link").await;

    async fn check(streams: &[&[u8]], part: &str) {
        let authority = authority();
        let (a, mut b) = (Node::start(&authority, 1), Node::start(&authority, 2));
        let local = a.control.inner.local().expect("an identity");
        let endpoint = &a.control.inner.endpoint;
        let dialled = endpoint.connect_with(local.client.clone(), b.addr(), "x").expect("dialled");
        let connection = dialled.await.expect("connected");
        let (mut send, mut receive) = connection.open_bi().await.expect("a stream");
        let own = a.control.inner.hello(&local, b.store);
        hello::send(&mut send, PROTOCOL, &own).await.expect("sent");
        hello::receive(&mut receive, PROTOCOL).await.expect("received");
        send.write_all(&[1]).await.expect("it counts");
        b.up().await;
        let mut open = Vec::new();
        for bytes in streams {
            let mut stream = connection.open_uni().await.expect("a stream");
            stream.write_all(bytes).await.expect("sent");
            open.push(stream);
        }
        match b.down().await {
            DownReason::Protocol(text) => assert_eq!(text, part),
            other => panic!("{other:?}"),
        }
        let ended = timeout(SOON, connection.closed()).await.expect("closed");
        assert!(close::readable(&ended).contains(part), "{ended}");
    }
}

/// A beat every 2 ms while 200 MiB of bulk cross the same link.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bulk_does_not_delay_beats() {
    let (a, mut b) = pair(&authority()).await;
    let start = Instant::now();
    let bulk = a.control.clone();
    let sender = tokio::spawn(async move {
        let frame = Bytes::from(vec![3; 1 << 20]);
        for _ in 0..200 {
            bulk.send_wait(store(2), Lane::Bulk, frame.clone()).await.expect("queued");
        }
    });
    let beats = a.control.clone();
    let beat = tokio::spawn(async move {
        let mut tick = tokio::time::interval(Duration::from_millis(2));
        loop {
            tick.tick().await;
            let now = start.elapsed().as_nanos() as u64;
            let sent = beats.send(store(2), Lane::Control, now.to_le_bytes().to_vec().into());
            sent.expect("queued");
        }
    });
    let (mut delays, mut bulk_frames) = (Vec::new(), 0);
    while bulk_frames < 200 {
        match b.frame().await {
            (Lane::Bulk, _) => bulk_frames += 1,
            (_, bytes) => {
                let sent = u64::from_le_bytes(bytes.as_ref().try_into().expect("8 bytes"));
                delays.push(start.elapsed() - Duration::from_nanos(sent));
            }
        }
    }
    let took = start.elapsed();
    beat.abort();
    sender.await.expect("the sender ends");
    delays.sort_unstable();
    let (p50, p99) = (delays[delays.len() / 2], delays[delays.len() * 99 / 100]);
    println!(
        "{:.0} MiB/s; {} beats: p50 {p50:?}, p99 {p99:?}, max {:?}",
        200.0 / took.as_secs_f64(),
        delays.len(),
        delays.last()
    );
    // In a queue behind the bulk it would be most of the whole time.
    assert!(p99 < Duration::from_millis(150), "p99 {p99:?}");
}
