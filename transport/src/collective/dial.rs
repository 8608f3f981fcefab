//! The dialling side: this rank calls every higher one, all at once, again and
//! again until each has answered, while the lower ones arrive at the listener.

use std::{
    io::{self, Read},
    net::{SocketAddr, TcpStream},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use job::Token;
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    io::Errno,
    net::{AddressFamily, SendFlags, SocketFlags, SocketType, sockopt},
};

use super::{
    AbortHandle, Error, Listener,
    handshake::{ANSWER, Answer, HELLO, Hello, Key, nonce},
};

/// Pauses between attempts grow from the first to the last, doubling.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// The kernel's long stop for bytes that nobody takes. A vanished host is found
/// by the agents' beats and a hang by the deadline of a call, both sooner. It
/// must be longer than any stall that is none: Linux counts a receiver that is
/// alive but busy (a closed window) as well.
const USER_TIMEOUT: Duration = Duration::from_secs(600);

/// After this much silence, and then this often, the kernel asks an idle peer's
/// host whether it still knows the connection.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(2));

/// A rank and the mesh that it joins.
pub(super) struct Party {
    pub(super) token: Token,
    pub(super) key: Key,
    pub(super) rank: usize,
    pub(super) addresses: Vec<SocketAddr>,
}

/// Wakes a poll loop of another thread.
#[derive(Debug)]
pub(super) struct Wake(OwnedFd);

/// One peer to call.
struct Call {
    rank: usize,
    address: SocketAddr,
    pause: Duration,
    stage: Stage,
}

enum Stage {
    Pause { until: Instant },
    Connecting(TcpStream),
    Answering { stream: TcpStream, hello: Box<[u8; HELLO]>, answer: [u8; ANSWER], filled: usize },
    Connected,
}

/// Fills in a connection to every other rank.
pub(super) fn connect(
    party: &Party,
    arrivals: &Arc<Wake>,
    listener: &Listener,
    streams: &mut [Option<TcpStream>],
    deadline: Instant,
    abort: &AbortHandle,
) -> Result<(), Error> {
    let size = party.addresses.len();
    let mut calls: Vec<_> = (party.rank + 1..size)
        .map(|rank| Call {
            rank,
            address: party.addresses[rank],
            pause: PAUSES.0,
            stage: Stage::Pause { until: Instant::now() },
        })
        .collect();
    loop {
        abort.check()?;
        arrivals.clear();
        for (rank, stream) in listener.arrived(party.token)? {
            streams[rank] = Some(stream);
        }
        let mut next = deadline;
        for call in &mut calls {
            if let Some(stream) = call.proceed(party)? {
                streams[call.rank] = Some(stream);
            }
            if let Stage::Pause { until } = call.stage {
                next = next.min(until);
            }
        }
        let missing = |&rank: &usize| rank != party.rank && streams[rank].is_none();
        let mut waiting_for = (0..size).filter(missing).peekable();
        if waiting_for.peek().is_none() {
            break;
        }
        let now = Instant::now();
        if now >= deadline {
            return Err(Error::Deadline { op: "connect", waiting_for: waiting_for.collect() });
        }
        wait(&calls, arrivals, abort, next.saturating_duration_since(now))?;
    }
    for stream in streams.iter().flatten() {
        configure(stream).map_err(|errno| Error::system("setsockopt", errno))?;
    }
    Ok(())
}

/// Writes a message that a fresh connection's buffer holds whole.
pub(super) fn write_at_once(stream: &TcpStream, message: &[u8]) -> bool {
    rustix::net::send(stream, message, SendFlags::NOSIGNAL) == Ok(message.len())
}

fn wait(
    calls: &[Call],
    arrivals: &Wake,
    abort: &AbortHandle,
    timeout: Duration,
) -> Result<(), Error> {
    let mut set = Vec::with_capacity(calls.len() + 2);
    set.push(PollFd::new(abort, PollFlags::IN));
    set.push(PollFd::new(arrivals, PollFlags::IN));
    for call in calls {
        match &call.stage {
            Stage::Connecting(stream) => set.push(PollFd::new(stream, PollFlags::OUT)),
            Stage::Answering { stream, .. } => set.push(PollFd::new(stream, PollFlags::IN)),
            Stage::Pause { .. } | Stage::Connected => {}
        }
    }
    let timeout =
        Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) };
    match poll(&mut set, Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(Error::system("poll", errno)),
    }
}

fn configure(stream: &TcpStream) -> rustix::io::Result<()> {
    sockopt::set_tcp_nodelay(stream, true)?;
    sockopt::set_tcp_user_timeout(stream, USER_TIMEOUT.as_millis() as u32)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEP_ALIVE.0)?;
    sockopt::set_tcp_keepintvl(stream, KEEP_ALIVE.1)
}

impl Call {
    /// Goes on as far as possible without waiting; the stream, once proven.
    fn proceed(&mut self, party: &Party) -> Result<Option<TcpStream>, Error> {
        loop {
            match std::mem::replace(&mut self.stage, Stage::Connected) {
                Stage::Pause { until } if until > Instant::now() => {
                    self.stage = Stage::Pause { until };
                }
                Stage::Pause { .. } => match start(self.address) {
                    Ok(stream) => self.stage = Stage::Connecting(stream),
                    Err(errno) => self.pause(&errno),
                },
                Stage::Connecting(stream) => match is_connected(&stream) {
                    Ok(false) => self.stage = Stage::Connecting(stream),
                    Ok(true) => {
                        self.greet(stream, party)?;
                        continue;
                    }
                    Err(errno) => self.pause(&errno),
                },
                Stage::Answering { stream, hello, mut answer, mut filled } => {
                    match (&stream).read(&mut answer[filled..]) {
                        Ok(0) => self.pause(&"it closed the connection"),
                        Ok(bytes) => {
                            filled += bytes;
                            if filled == ANSWER {
                                return self.judge(stream, &hello, &answer, party);
                            }
                            self.stage = Stage::Answering { stream, hello, answer, filled };
                            continue;
                        }
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                            self.stage = Stage::Answering { stream, hello, answer, filled };
                        }
                        Err(error) => self.pause(&error),
                    }
                }
                Stage::Connected => {}
            }
            return Ok(None);
        }
    }

    fn greet(&mut self, stream: TcpStream, party: &Party) -> Result<(), Error> {
        let hello = Hello {
            token: party.token,
            from: party.rank as u32,
            to: self.rank as u32,
            size: party.addresses.len() as u32,
        };
        let hello = Box::new(hello.encode(nonce()?, &party.key));
        if write_at_once(&stream, &hello[..]) {
            self.stage = Stage::Answering { stream, hello, answer: [0; ANSWER], filled: 0 };
        } else {
            self.pause(&"it takes no hello");
        }
        Ok(())
    }

    fn judge(
        &mut self,
        stream: TcpStream,
        hello: &[u8; HELLO],
        answer: &[u8; ANSWER],
        party: &Party,
    ) -> Result<Option<TcpStream>, Error> {
        match party.key.read(hello, answer) {
            Answer::Genuine(confirm) if write_at_once(&stream, &confirm) => Ok(Some(stream)),
            Answer::Genuine(_) => {
                self.pause(&"it takes no confirmation");
                Ok(None)
            }
            Answer::Foreign => {
                self.pause(&"it does not hold the key of this generation");
                Ok(None)
            }
            Answer::Stale => Err(Error::refused(format!(
                "generation {} is over, rank {} at {} is in a newer one",
                party.token, self.rank, self.address
            ))),
        }
    }

    fn pause(&mut self, why: &dyn std::fmt::Display) {
        tracing::trace!(rank = self.rank, address = %self.address, %why, "calling again");
        self.stage = Stage::Pause { until: Instant::now() + self.pause };
        self.pause = (self.pause * 2).min(PAUSES.1);
    }
}

fn start(address: SocketAddr) -> rustix::io::Result<TcpStream> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket.into()),
        Err(errno) => Err(errno),
    }
}

fn is_connected(stream: &TcpStream) -> rustix::io::Result<bool> {
    sockopt::socket_error(stream)??;
    match rustix::net::getpeername(stream) {
        Ok(_) => Ok(true),
        Err(Errno::NOTCONN) => Ok(false),
        Err(errno) => Err(errno),
    }
}

impl Wake {
    pub(super) fn new() -> Result<Self, Error> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map(Self)
            .map_err(|errno| Error::system("eventfd", errno))
    }

    pub(super) fn wake(&self) {
        // Fails only when the counter is full, and then the loop is awake.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    pub(super) fn clear(&self) {
        // Fails when there is nothing to clear.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
