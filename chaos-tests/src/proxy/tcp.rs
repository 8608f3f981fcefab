//! Streams: accepted at a face, carried to the node behind it. A direction that
//! is closed stalls; a connection made while either is, waits.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use super::{Condition, Plane, Shared, owner};

/// How often a thread looks whether the network is gone.
const LOOK: Duration = Duration::from_millis(200);
/// How long a listening thread rests between two looks.
const REST: Duration = Duration::from_millis(2);
/// The longest that the node behind a face may take to accept.
const CONNECT: Duration = Duration::from_secs(2);
const CHUNK: usize = 64 << 10;

/// Starts the threads of all faces.
pub(super) fn serve(shared: &Arc<Shared>) -> io::Result<()> {
    for to in 0..shared.nodes {
        for plane in [Plane::Control, Plane::Tensors] {
            let listener = TcpListener::bind(shared.face(to, plane))?;
            listener.set_nonblocking(true)?;
            let shared = Arc::clone(shared);
            std::thread::Builder::new()
                .name(format!("{plane:?} of {to}"))
                .spawn(move || accept(&shared, &listener, plane, to))?;
        }
    }
    Ok(())
}

fn accept(shared: &Arc<Shared>, listener: &TcpListener, plane: Plane, to: usize) {
    while !shared.rules.is_closed() {
        let Ok((stream, _)) = listener.accept() else {
            std::thread::sleep(REST);
            continue;
        };
        shared.streams.fetch_add(1, Relaxed);
        let shared = Arc::clone(shared);
        // Out of threads: the stream is dropped, as by an overloaded router.
        let _ = std::thread::Builder::new()
            .name("stream".into())
            .spawn(move || carry(&shared, &stream, plane, to));
    }
}

fn carry(shared: &Arc<Shared>, near: &TcpStream, plane: Plane, to: usize) -> Option<()> {
    near.set_nonblocking(false).ok()?;
    let from = owner::of(shared, near);
    let open = |condition: &Condition| condition.open;
    // A handshake needs both directions.
    shared.rules.wait(plane, from, Some(to), open)?;
    shared.rules.wait(plane, Some(to), from, open)?;
    let far = TcpStream::connect_timeout(&shared.real(to, plane), CONNECT).ok()?;
    for stream in [near, &far] {
        stream.set_nodelay(true).ok()?;
        stream.set_read_timeout(Some(LOOK)).ok()?;
    }
    let back = (far.try_clone().ok()?, near.try_clone().ok()?);
    let other = Arc::clone(shared);
    let answers = std::thread::Builder::new()
        .name("answers".into())
        .spawn(move || pump(&other, &back.0, &back.1, plane, (Some(to), from)))
        .ok()?;
    pump(shared, near, &far, plane, (from, Some(to)));
    answers.join().ok()
}

/// Carries one direction to its end.
fn pump(
    shared: &Shared,
    source: &TcpStream,
    target: &TcpStream,
    plane: Plane,
    (from, to): (Option<usize>, Option<usize>),
) {
    let mut buffer = vec![0; CHUNK];
    let (mut source_end, mut target_end) = (source, target);
    let reset = loop {
        if shared.rules.is_closed() {
            break true;
        }
        let length = match source_end.read(&mut buffer) {
            Ok(0) => break false,
            Ok(length) => length,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                continue;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(_) => break true,
        };
        let Some(condition) = shared.rules.wait(plane, from, to, |condition| condition.open) else {
            break true;
        };
        std::thread::sleep(condition.duration(length));
        if target_end.write_all(&buffer[..length]).is_err() {
            break true;
        }
    };
    // The end is news as well: it passes when news does.
    let _ = shared.rules.wait(plane, from, to, |condition| condition.open && !condition.half_open);
    let _ = target.shutdown(if reset { Shutdown::Both } else { Shutdown::Write });
    if reset {
        let _ = source.shutdown(Shutdown::Both);
    }
}
