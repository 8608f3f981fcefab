//! The exchange loop with a sink that makes room bit by bit.

use std::{
    io::Write,
    net::{TcpListener, TcpStream},
    time::{Duration, Instant},
};

use super::{
    super::{
        exchange::Wire,
        frame::{Header, Op},
        link::{Link, Party},
        outgoing::Outgoing,
        sink::Sink,
    },
    token,
};
use crate::collective::AbortHandle;

/// Takes a frame portion by portion: there is room for the next one only after
/// it has computed with the one before.
struct Portions {
    bytes: Vec<u8>,
    filled: usize,
    opened: usize,
    portion: usize,
}

impl Sink for Portions {
    fn expects(&self, peer: usize) -> bool {
        peer == 1
    }

    fn begin(&mut self, _: usize, bytes: u64) -> Result<(), String> {
        self.bytes = vec![0; bytes as usize];
        self.opened = self.portion.min(self.bytes.len());
        Ok(())
    }

    fn room(&mut self, _: usize) -> &mut [u8] {
        &mut self.bytes[self.filled..self.opened]
    }

    fn advance(&mut self, _: usize, bytes: usize) {
        self.filled += bytes;
    }

    /// Never more to compute at once: only bytes can go on.
    fn work(&mut self) -> bool {
        if self.filled == self.opened {
            self.opened = (self.opened + self.portion).min(self.bytes.len());
        }
        false
    }
}

/// Rank 1 has sent one frame, whole, and sends nothing more.
#[track_caller]
fn check(bytes: usize, portion: usize) {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(server.local_addr().unwrap()).unwrap();
    let (mut peer, _) = server.accept().unwrap();
    stream.set_nonblocking(true).unwrap();
    let body: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
    let header = Header::new(Op::Broadcast, token(1), 0, bytes).encode();
    peer.write_all(&[&header[..], &body].concat()).unwrap();

    let link = Link::new(Party { token: token(1), own: 0, peer: 1, at: 1, size: 2 });
    let mut wire = Wire {
        peers: vec![None, Some((stream, link))],
        names: vec![0, 1],
        abort: AbortHandle::new().unwrap(),
        segment: None,
        spins: false,
    };
    let mut sink = Portions { bytes: Vec::new(), filled: 0, opened: 0, portion };
    let outgoing = vec![Outgoing::nothing(), Outgoing::nothing()];
    let deadline = Instant::now() + Duration::from_secs(5);
    let ended = wire.exchange(Op::Broadcast, outgoing, &mut sink, deadline);
    assert_eq!(ended, Ok(()), "{bytes} bytes in portions of {portion}");
    assert_eq!(sink.bytes, body, "{bytes} bytes in portions of {portion}");
}

/// Bytes that were read ahead, while there was no room for them, move when room
/// opens: the socket has nothing more to announce.
#[test]
fn what_was_read_ahead_needs_no_further_event() {
    check(0, 1);
    check(100, 100);
    check(100, 60);
    check(100, 1);
    check(8000, 999);
    // More than is ever read ahead.
    check(100_000, 5000);
}
