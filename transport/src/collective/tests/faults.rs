//! What the others see when a rank dies, stops, leaves or is aborted.

use std::{
    net::{Shutdown, TcpListener, TcpStream},
    sync::{Arc, Mutex},
};

use job::shares::Shares;
use proptest::prelude::*;

use super::*;

#[test]
fn a_rank_that_nobody_waits_for_is_missed_all_the_same() {
    let died = Mutex::new(None);
    let ends = with_mesh(3, |mut mesh, _| match mesh.rank() {
        // The root of the broadcast never comes; rank 2 owes nothing.
        0 => {
            std::thread::sleep(Duration::from_millis(300));
            None
        }
        1 => {
            let error = mesh.broadcast(0, ViewMut::of(&mut [0_u8; 8]), soon()).unwrap_err();
            Some((error, Instant::now()))
        }
        _ => {
            std::thread::sleep(Duration::from_millis(50));
            *died.lock().unwrap() = Some(Instant::now());
            mesh.die();
            None
        }
    });
    let (error, at) = ends.into_iter().flatten().next().unwrap();
    assert_eq!(error.peer(), Some(2), "{error}");
    assert!(at - died.lock().unwrap().unwrap() < Duration::from_millis(100));
}

#[test]
fn a_broken_link_is_reported_to_those_who_do_not_see_it() {
    let listeners: Vec<_> = (0..3).map(|_| listener().over_tcp_only()).collect();
    let ends = with_listeners(&listeners, 1, |mut mesh, _| {
        if mesh.rank() == 0 {
            // Its streams are to ranks 1 and 2.
            mesh.barrier(soon()).unwrap();
            std::thread::sleep(Duration::from_millis(30));
            let _ = mesh.streams()[1].shutdown(Shutdown::Both);
            let error = mesh.barrier(soon()).unwrap_err();
            std::thread::sleep(Duration::from_millis(200));
            return error;
        }
        let error = During::Barrier.run(&mut mesh);
        std::thread::sleep(Duration::from_millis(200));
        error
    });
    assert_eq!(ends[0].peer(), Some(2), "{}", ends[0]);
    assert_eq!(ends[2].peer(), Some(0), "{}", ends[2]);
    assert!(matches!(ends[1], Error::PeerLost { .. }), "{}", ends[1]);
    assert!(ends[1].to_string().contains("reports"), "{}", ends[1]);
}

#[test]
fn a_rank_that_has_finished_is_not_lost() {
    // Rank 0 leaves after its last operation, which the others still need
    // each other for, several times over.
    with_mesh(4, |mut mesh, _| {
        if mesh.rank() > 0 {
            std::thread::sleep(Duration::from_millis(10 * mesh.rank() as u64));
        }
        mesh.barrier(soon()).unwrap();
        let mut data = vec![0; 1 << 20];
        mesh.broadcast(0, ViewMut::of(&mut data), soon()).unwrap();
    });
    let ends = with_mesh(2, |mut mesh, _| {
        mesh.barrier(soon()).unwrap();
        (mesh.rank() == 1).then(|| mesh.barrier(soon()).unwrap_err())
    });
    assert_eq!(ends[1].as_ref().unwrap().to_string(), "rank 0 is lost: it left the mesh");
}

#[test]
fn an_abort_ends_a_blocked_operation_within_10_ms() {
    for during in [During::Barrier, During::Sum] {
        let mut slowest = Duration::ZERO;
        let ends = with_mesh(3, |mut mesh, abort| {
            if mesh.rank() == 0 {
                // Never joins, but lives until the others have ended.
                std::thread::sleep(Duration::from_millis(400));
                return None;
            }
            let aborted = Arc::new(Mutex::new(None));
            if mesh.rank() == 1 {
                let aborted = Arc::clone(&aborted);
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(40));
                    *aborted.lock().unwrap() = Some(Instant::now());
                    abort.abort("plan 2 is committed");
                    abort.abort("again");
                });
            }
            let error = during.run(&mut mesh);
            let took = aborted.lock().unwrap().map(|at| at.elapsed());
            let again = mesh.barrier(soon()).unwrap_err();
            assert_eq!(again, error);
            // Stays, so that a partly sent frame does not end as a death.
            std::thread::sleep(Duration::from_millis(100));
            Some((error, took))
        });
        for (error, took) in ends.into_iter().flatten() {
            slowest = slowest.max(took.unwrap_or_default());
            if took.is_some() {
                assert_eq!(error.to_string(), "aborted: plan 2 is committed");
            } else if matches!(during, During::Barrier) {
                let expected = "aborted: rank 1 reports: plan 2 is committed";
                assert_eq!(error.to_string(), expected);
            }
        }
        println!("abort during {during:?}: {slowest:?}");
        assert!(slowest < Duration::from_millis(10), "{during:?}: {slowest:?}");
    }
}

#[test]
fn an_abort_ends_a_sum_under_way_within_10_ms() {
    let mut times: Vec<_> = (0..7).flat_map(|_| abort_a_sum()).collect();
    times.sort_unstable();
    println!("abort of a sum under way: median {:?}, worst {:?}", times[7], times[13]);
    assert!(times[7] < Duration::from_millis(10), "{times:?}");
}

fn abort_a_sum() -> Vec<Duration> {
    with_mesh(2, |mut mesh, abort| {
        let shares = Shares::even(2, 2);
        let piece = vec![1.0_f32; 16 << 20];
        let mut out = vec![0.0_f32; 16 << 20];
        mesh.barrier(soon()).unwrap();
        let aborter = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(25));
            abort.abort("now");
            Instant::now()
        });
        let error = mesh
            .all_reduce_tree(&shares, &[View::of(&piece)], ViewMut::of(&mut out), soon())
            .unwrap_err();
        let ended = Instant::now();
        assert!(matches!(error, Error::Aborted { .. }), "{error}");
        ended.saturating_duration_since(aborter.join().unwrap())
    })
}

#[test]
fn an_aborted_handle_refuses_the_next_operation_and_the_next_mesh() {
    let listeners = [listener(), listener()];
    let abort = AbortHandle::new().unwrap();
    abort.abort("over");
    let error = listeners[0].connect(spec(1, 0, &listeners), soon(), &abort).unwrap_err();
    assert_eq!(error.to_string(), "aborted: over");
    let ends = with_mesh(2, |mut mesh, abort| {
        abort.abort("over");
        mesh.barrier(soon()).unwrap_err()
    });
    assert!(ends.iter().all(|error| matches!(error, Error::Aborted { .. })), "{ends:?}");
}

#[test]
fn a_deadline_names_who_is_missing() {
    let ends = with_mesh(3, |mut mesh, _| {
        if mesh.rank() == 2 {
            std::thread::sleep(Duration::from_millis(300));
            return None;
        }
        let start = Instant::now();
        let error = mesh.barrier(start + Duration::from_millis(60)).unwrap_err();
        let took = start.elapsed();
        std::thread::sleep(Duration::from_millis(200));
        Some((error, took, mesh.recorder().records()))
    });
    for (error, took, records) in ends.into_iter().flatten() {
        // Whichever rank is first reports it to the other.
        assert_eq!(error.peer(), Some(2), "{error}");
        assert!(took < Duration::from_millis(160), "{took:?}");
        assert!(matches!(records[records.len() - 1].state, State::Failed(_)), "{records:?}");
    }
}

/// Two ranks over one connection, each with a token of its own.
fn pair(generations: [u64; 2]) -> [HostMesh; 2] {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let dialled = TcpStream::connect(server.local_addr().unwrap()).unwrap();
    let (accepted, _) = server.accept().unwrap();
    let mesh = |rank: usize, stream: TcpStream| {
        stream.set_nonblocking(true).unwrap();
        let mut streams = vec![None, None];
        streams[1 - rank] = Some(stream);
        HostMesh::new(
            token(generations[rank]),
            rank,
            streams,
            AbortHandle::new().unwrap(),
            Default::default(),
            mesh::Origin {
                key: handshake::Key([7; 32]),
                addresses: vec![([127, 0, 0, 1], 0).into(); 2],
                bind: [127, 0, 0, 1].into(),
                names: vec![0, 1],
                shares_memory: false,
                children: 0,
            },
        )
    };
    [mesh(0, dialled), mesh(1, accepted)]
}

#[track_caller]
fn check_protocol(
    generations: [u64; 2],
    one: impl FnOnce(&mut HostMesh) -> Result<(), Error> + Send,
    two: impl FnOnce(&mut HostMesh) -> Result<(), Error> + Send,
    expected: &str,
) {
    let [mut first, mut second] = pair(generations);
    let seen = std::thread::scope(|scope| {
        let other = scope.spawn(move || two(&mut second));
        let seen = one(&mut first).unwrap_err();
        drop(first);
        let _ = other.join().unwrap();
        seen
    });
    assert!(seen.to_string().contains(expected), "{seen}");
    assert_eq!(seen.peer(), Some(1));
}

#[test]
fn a_peer_in_another_call_or_generation_is_named() {
    check_protocol(
        [5, 4],
        |mesh| mesh.barrier(soon()),
        |mesh| mesh.barrier(soon()),
        "rank 1 broke the protocol: a frame of 1.4 in generation 1.5",
    );
    check_protocol(
        [1, 1],
        |mesh| mesh.barrier(soon()),
        |mesh| mesh.broadcast(1, ViewMut::of(&mut [0_u8; 4]), soon()),
        "rank 1 broke the protocol: broadcast instead of barrier",
    );
    check_protocol(
        [1, 1],
        |mesh| mesh.all_gather_bytes(&[0; 4], 4, soon()).map(drop),
        |mesh| mesh.all_gather_bytes(&[0; 5], 5, soon()).map(drop),
        "a frame of 5 bytes, over the limit of 4",
    );
    check_protocol(
        [1, 1],
        |mesh| mesh.receive(1, ViewMut::of(&mut [0_u8; 4]), soon()),
        |mesh| mesh.send(0, View::of(&[0_u8; 3]), soon()),
        "a frame of 3 bytes instead of 4",
    );
}

#[test]
fn a_frame_that_claims_too_much_allocates_nothing() {
    let [mut mesh, other] = pair([1, 1]);
    let claim = frame::Header::new(frame::Op::AllGatherBytes, token(1), 0, usize::MAX).encode();
    rustix::io::write(&other.streams()[0], &claim).unwrap();
    let error = mesh.all_gather_bytes(&[], 1 << 20, soon()).unwrap_err();
    assert!(error.to_string().contains("over the limit of 1048576"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..Default::default() })]
    /// Whatever a peer sends, a call ends, with an error unless it was a frame.
    #[test]
    fn no_bytes_of_a_peer_do_harm(
        op in 0..14_u8, sequence in 0..3_u64, bytes in 0..40_u64, flip in 0..1000_usize,
        tail in prop::collection::vec(any::<u8>(), 0..9000),
    ) {
        let mut claim = frame::Header::new(frame::Op::AllGatherBytes, token(1), sequence, 0).encode();
        claim[2] = op;
        claim[24..].copy_from_slice(&bytes.to_le_bytes());
        if let Some(byte) = claim.get_mut(flip) {
            *byte ^= 0x81;
        }
        let [mut mesh, other] = pair([1, 1]);
        for part in [&claim[..], &tail] {
            rustix::io::write(&other.streams()[0], part).unwrap();
        }
        other.die();
        let start = Instant::now();
        let first = mesh.all_gather_bytes(&[], 30, start + Duration::from_secs(5));
        if let Ok(parts) = &first {
            prop_assert_eq!(&parts[1][..], &tail[..bytes as usize]);
        }
        prop_assert!(mesh.barrier(start + Duration::from_secs(5)).is_err());
        prop_assert!(start.elapsed() < Duration::from_secs(4));
    }
}

#[test]
fn wrong_arguments_are_refused_and_end_the_mesh() {
    #[track_caller]
    fn check(run: impl Fn(&mut HostMesh) -> Result<(), Error>, expected: &str) {
        let [mut mesh, _other] = pair([1, 1]);
        let error = run(&mut mesh).unwrap_err();
        assert!(matches!(error, Error::Refused { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(mesh.barrier(soon()), Err(error));
    }
    let shares = Shares::even(2, 2);
    check(
        |mesh| mesh.broadcast(2, ViewMut::of::<u8>(&mut []), soon()),
        "rank 2 is not one of the 2",
    );
    check(|mesh| mesh.send(0, View::of::<u8>(&[]), soon()), "rank 0 is this rank");
    check(|mesh| mesh.all_gather_bytes(&[0; 2], 1, soon()).map(drop), "over the limit of 1");
    check(
        |mesh| mesh.all_gather(ViewMut::of(&mut [0.0_f32; 4]), &[0..3, 2..4], soon()),
        "split 2..4 of rank 1",
    );
    check(
        |mesh| mesh.all_gather(ViewMut::of(&mut [0.0_f32; 4]), &[0..2, 2..5], soon()),
        "leaves the 4 elements",
    );
    check(
        |mesh| mesh.all_gather(ViewMut::of(&mut [0.0_f32; 4]), &[], soon()),
        "0 splits for 2 ranks",
    );
    check(
        |mesh| mesh.all_reduce_tree(&shares, &[], ViewMut::of::<f32>(&mut []), soon()),
        "0 pieces for the 1 nodes",
    );
    check(
        |mesh| {
            mesh.all_reduce_tree(
                &shares,
                &[View::of(&[0.0_f32])],
                ViewMut::of::<f32>(&mut []),
                soon(),
            )
        },
        "a piece has 1 f32 instead of 0 f32",
    );
    check(
        |mesh| mesh.all_to_all(View::of::<u8>(&[]), &[], ViewMut::of::<u8>(&mut []), &[], soon()),
        "0 splits for 2 ranks",
    );
}
