//! SEC-1, GEN-1 and ID-3 at the port: who gets in, and who does not.

use std::{
    io::{Read, Write},
    net::TcpStream,
};

use super::*;
use crate::collective::handshake::{ANSWER, HELLO, Hello, Key, nonce};

/// A mesh forms while all this is going on, and not slowly.
#[track_caller]
fn check_forms(listeners: &[Listener], generation: u64) {
    let start = Instant::now();
    with_listeners(listeners, generation, |mut mesh, _| mesh.barrier(soon()).unwrap());
    assert!(start.elapsed() < Duration::from_millis(700), "took {:?}", start.elapsed());
}

fn dial(listener: &Listener) -> TcpStream {
    let stream = TcpStream::connect(listener.local_addr()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    stream
}

/// Reads until the end; what came, and how long it took.
fn until_dropped(mut stream: TcpStream) -> (Vec<u8>, Duration) {
    let start = Instant::now();
    let mut all = Vec::new();
    // A reset is an end as well.
    let _ = stream.read_to_end(&mut all);
    (all, start.elapsed())
}

fn pair_of_listeners() -> [Listener; 2] {
    [listener(), listener()]
}

#[test]
fn garbage_gets_no_answer_and_does_no_harm() {
    #[track_caller]
    fn check(bytes: &[u8]) {
        let listeners = pair_of_listeners();
        let mut stream = dial(&listeners[1]);
        stream.write_all(bytes).unwrap();
        check_forms(&listeners, 1);
        let (answer, took) = until_dropped(stream);
        assert!(answer.is_empty());
        assert!(took < Duration::from_secs(2), "held for {took:?}");
        let stats = listeners[1].stats();
        assert_eq!((stats.welcomed, stats.strangers + stats.late), (1, 1), "{stats:?}");
    }
    check(b"GET / HTTP/1.1\r\nHost: elastic\r\nUser-Agent: curl/8.0\r\nAccept: */*\r\nX: yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n\r\n");
    check(&[0xff; 4096]);
    check(b"elasmesh");
    check(b"");
}

#[test]
fn a_crowd_of_silent_strangers_keeps_nobody_out() {
    let listeners = pair_of_listeners();
    let crowd: Vec<_> = (0..400).map(|_| dial(&listeners[1])).collect();
    check_forms(&listeners, 1);
    let stats = listeners[1].stats();
    assert!(stats.crowded + stats.late > 0, "{stats:?}");
    drop(crowd);
    check_forms(&listeners, 2);
}

#[test]
fn a_wrong_key_gets_no_answer() {
    let listeners = pair_of_listeners();
    let deadline = Instant::now() + Duration::from_millis(200);
    let ends: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2)
            .map(|rank| {
                let listeners = &listeners;
                scope.spawn(move || {
                    let mut spec = spec(1, rank, listeners);
                    spec.key[31] ^= rank as u8;
                    listeners[rank].connect(spec, deadline, &AbortHandle::new().unwrap())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap().unwrap_err()).collect()
    });
    for (rank, error) in ends.into_iter().enumerate() {
        assert_eq!(error, Error::Deadline { op: "connect", waiting_for: vec![1 - rank] });
    }
    let stats = listeners[1].stats();
    assert!(stats.strangers > 0 && stats.welcomed == 0, "{stats:?}");
}

#[test]
fn an_older_generation_is_refused_and_told() {
    let listeners = pair_of_listeners();
    check_forms(&listeners, 5);
    let abort = AbortHandle::new().unwrap();
    // By its own listener.
    let error = listeners[0].connect(spec(4, 0, &listeners), soon(), &abort).unwrap_err();
    assert_eq!(error.to_string(), "refused: generation 1.4 is over, this process is in 1.5");
    // By a peer's, in a process that has not heard of the newer one.
    let late = listener();
    let start = Instant::now();
    let error = late.connect(spec(4, 0, &listeners), soon(), &abort).unwrap_err();
    assert!(error.to_string().contains("generation 1.4 is over, rank 1 at"), "{error}");
    assert!(start.elapsed() < Duration::from_millis(500));
    assert_eq!(listeners[1].stats().stale, 1);
}

#[test]
fn a_newer_generation_is_parked_until_the_plan_arrives() {
    let listeners = pair_of_listeners();
    check_forms(&listeners, 5);
    std::thread::scope(|scope| {
        let early = scope.spawn(|| {
            let abort = AbortHandle::new().unwrap();
            let mut mesh = listeners[0].connect(spec(6, 0, &listeners), soon(), &abort).unwrap();
            mesh.barrier(soon()).unwrap();
        });
        std::thread::sleep(Duration::from_millis(150));
        assert_eq!(listeners[1].stats().welcomed, 1);
        let start = Instant::now();
        let abort = AbortHandle::new().unwrap();
        let mut mesh = listeners[1].connect(spec(6, 1, &listeners), soon(), &abort).unwrap();
        mesh.barrier(soon()).unwrap();
        assert!(start.elapsed() < Duration::from_millis(50), "{:?}", start.elapsed());
        early.join().unwrap();
    });
    assert_eq!(listeners[1].stats(), ListenerStats { welcomed: 2, ..Default::default() });
}

#[test]
fn a_newer_plan_ends_the_forming_of_an_older_one() {
    let listeners = pair_of_listeners();
    std::thread::scope(|scope| {
        let old = scope.spawn(|| {
            let abort = AbortHandle::new().unwrap();
            listeners[1].connect(spec(1, 1, &listeners), soon(), &abort).unwrap_err()
        });
        std::thread::sleep(Duration::from_millis(50));
        check_forms(&listeners, 2);
        let start = Instant::now();
        let error = old.join().unwrap();
        assert!(start.elapsed() < Duration::from_millis(100));
        assert!(error.to_string().contains("generation 1.1 is over"), "{error}");
    });
}

#[test]
fn a_recorded_hello_does_not_get_in() {
    let listeners = pair_of_listeners();
    let hello = Hello { token: token(1), from: 0, to: 1, size: 2 };
    let recorded = hello.encode(nonce().unwrap(), &Key([1; 32]));
    std::thread::scope(|scope| {
        let forming = scope.spawn(|| {
            let deadline = Instant::now() + Duration::from_millis(300);
            let abort = AbortHandle::new().unwrap();
            listeners[1].connect(spec(1, 1, &listeners), deadline, &abort).unwrap_err()
        });
        let mut thief = dial(&listeners[1]);
        thief.write_all(&recorded).unwrap();
        thief.read_exact(&mut [0; ANSWER]).unwrap();
        thief.write_all(&[7; 32]).unwrap();
        assert!(until_dropped(thief).0.is_empty());
        let error = forming.join().unwrap();
        assert_eq!(error, Error::Deadline { op: "connect", waiting_for: vec![0] });
    });
    assert_eq!(listeners[1].stats().strangers, 1);
}

#[test]
fn a_hello_for_another_rank_size_or_job_is_a_stranger() {
    #[track_caller]
    fn check(change: impl Fn(&mut Hello)) {
        let listeners = pair_of_listeners();
        check_forms(&listeners, 1);
        // Formed meshes admit nobody; a forming one checks.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let deadline = Instant::now() + Duration::from_millis(200);
                let abort = AbortHandle::new().unwrap();
                listeners[1].connect(spec(2, 1, &listeners), deadline, &abort).unwrap_err()
            });
            std::thread::sleep(Duration::from_millis(20));
            let mut hello = Hello { token: token(2), from: 0, to: 1, size: 2 };
            change(&mut hello);
            let mut stream = dial(&listeners[1]);
            stream.write_all(&hello.encode(nonce().unwrap(), &Key([2; 32]))).unwrap();
            assert!(until_dropped(stream).0.is_empty());
        });
        assert_eq!(listeners[1].stats().strangers, 1);
    }
    check(|hello| hello.to = 0);
    check(|hello| hello.from = 1);
    check(|hello| hello.from = u32::MAX);
    check(|hello| hello.size = 3);
    check(|hello| hello.token.job = JobId(uuid::Uuid::from_u128(8)));
}

#[test]
fn every_flipped_bit_of_a_hello_is_noticed() {
    let key = Key([3; 32]);
    let hello = Hello { token: token(9), from: 1, to: 2, size: 4 };
    let bytes = hello.encode([5; 32], &key);
    assert_eq!(Hello::decode(&bytes), Some(hello));
    assert!(key.knows(&bytes));
    for bit in 0..HELLO * 8 {
        let mut flipped = bytes;
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(Hello::decode(&flipped).is_none() || !key.knows(&flipped), "bit {bit}");
    }
}

#[test]
fn a_dropped_listener_frees_its_port_and_leaves_meshes_alone() {
    let listeners = pair_of_listeners();
    let address = listeners[0].local_addr();
    let taken = Listener::bind(address).unwrap_err().to_string();
    assert!(taken.contains("choose another address"), "{taken}");
    let mut meshes = with_listeners(&listeners, 1, |mesh, _| mesh);
    drop(listeners);
    std::thread::scope(|scope| {
        for mesh in &mut meshes {
            scope.spawn(|| mesh.barrier(soon()).unwrap());
        }
    });
    drop(meshes);
    assert!(Listener::bind(address).is_ok());
}
