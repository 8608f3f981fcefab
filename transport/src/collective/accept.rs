//! The accepting side of the handshake: one thread, one poll loop, fixed-size
//! buffers.

use std::{
    io::{self, Read},
    net::{TcpListener, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use job::Token;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

use super::{
    dial::{Party, Wake, write_at_once},
    handshake::{ANSWER, CONFIRM, HELLO, Hello, Key, nonce, stale},
    listener::{Count, PATIENCE, Shared},
};

/// Connections that have not proven themselves. When one more comes, the oldest
/// goes: a real peer needs a millisecond, and tries again.
const GUESTS: usize = 256;

/// How long a hello of a newer token waits for the plan to arrive.
const PARKING: Duration = Duration::from_secs(30);

/// After the system ran out of descriptors or memory.
const RELIEF: Duration = Duration::from_millis(20);

/// Who may come in.
pub(super) struct Expected {
    pub(super) token: Token,
    pub(super) arrived: Vec<(usize, TcpStream)>,
    key: Key,
    rank: u32,
    size: u32,
    open: bool,
    arrivals: Arc<Wake>,
}

/// The thread's own state.
pub(super) struct Acceptor {
    socket: TcpListener,
    shared: Arc<Shared>,
    guests: Vec<Guest>,
}

/// A connection that has not proven itself.
struct Guest {
    stream: TcpStream,
    hello: [u8; HELLO],
    confirm: [u8; CONFIRM],
    filled: usize,
    since: Instant,
    // Whether there may be something to read.
    ready: bool,
    stage: Stage,
}

#[derive(Clone, Copy)]
enum Stage {
    Hello,
    /// It said a newer token, which proves nothing yet.
    Parked,
    Confirm {
        answer: [u8; ANSWER],
    },
}

/// What becomes of a guest.
enum Fate {
    Stays,
    Leaves(Option<Count>),
    Enters(usize),
}

impl Expected {
    pub(super) fn new(party: &Party, arrivals: Arc<Wake>) -> Self {
        Self {
            token: party.token,
            arrived: Vec::new(),
            key: party.key,
            rank: party.rank as u32,
            size: party.addresses.len() as u32,
            open: true,
            arrivals,
        }
    }

    /// The mesh is formed or given up: only the token stays, as a fence.
    pub(super) fn close(&mut self) {
        self.open = false;
        self.arrived.clear();
    }

    /// A newer one takes its place: whoever still forms this one has to learn it.
    pub(super) fn supersede(self) {
        self.arrivals.wake();
    }

    /// Lower ranks dial higher ones.
    fn fits(&self, hello: &Hello) -> bool {
        hello.token == self.token
            && hello.to == self.rank
            && hello.from < self.rank
            && hello.size == self.size
    }
}

impl Acceptor {
    pub(super) fn new(socket: TcpListener, shared: Arc<Shared>) -> Self {
        Self { socket, shared, guests: Vec::new() }
    }

    pub(super) fn run(mut self) {
        while !self.shared.lock().closing {
            if self.wait() {
                self.accept();
            }
            for at in (0..self.guests.len()).rev() {
                match self.attend(at) {
                    Fate::Stays => {}
                    Fate::Leaves(why) => {
                        why.into_iter().for_each(|why| self.shared.count(why));
                        self.guests.swap_remove(at);
                    }
                    Fate::Enters(rank) => self.enter(at, rank),
                }
            }
        }
    }

    /// Waits; finds out which guests have something to say, and whether someone
    /// new knocks.
    fn wait(&mut self) -> bool {
        let mut set = Vec::with_capacity(self.guests.len() + 2);
        set.push(PollFd::new(&self.shared.wake, PollFlags::IN));
        set.push(PollFd::new(&self.socket, PollFlags::IN));
        for guest in &self.guests {
            // A parked one has said all it has to say, but may go.
            let events = match guest.stage {
                Stage::Parked => PollFlags::RDHUP,
                _ => PollFlags::IN,
            };
            set.push(PollFd::new(&guest.stream, events));
        }
        let guests = self.guests.iter().map(Guest::left);
        let timeout = guests.chain(self.shared.reap()).min().map(|left| Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        });
        if poll(&mut set, timeout.as_ref()).is_err_and(|errno| errno != Errno::INTR) {
            // Out of memory: nothing is ready, and the loop comes back.
            std::thread::sleep(RELIEF);
        }
        let ready: Vec<_> = set.iter().map(|polled| !polled.revents().is_empty()).collect();
        self.shared.wake.clear();
        for (guest, ready) in self.guests.iter_mut().zip(&ready[2..]) {
            guest.ready = *ready;
        }
        ready[1]
    }

    fn accept(&mut self) {
        for _ in 0..GUESTS {
            let stream = match self.socket.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(_) => {
                    // Out of descriptors: the oldest guest gives its one back.
                    self.evict();
                    std::thread::sleep(RELIEF);
                    return;
                }
            };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            if self.guests.len() == GUESTS {
                self.evict();
            }
            self.guests.push(Guest {
                stream,
                hello: [0; HELLO],
                confirm: [0; CONFIRM],
                filled: 0,
                since: Instant::now(),
                ready: true,
                stage: Stage::Hello,
            });
        }
    }

    fn evict(&mut self) {
        let oldest = self.guests.iter().enumerate().min_by_key(|(_, guest)| guest.since);
        if let Some((at, _)) = oldest {
            self.guests.swap_remove(at);
            self.shared.count(Count::Crowded);
        }
    }

    fn attend(&mut self, at: usize) -> Fate {
        let guest = &mut self.guests[at];
        if guest.left().is_zero() {
            return Fate::Leaves(Some(Count::Late));
        }
        match guest.stage {
            Stage::Hello if guest.ready => match guest.read() {
                Ok(true) => self.decide(at),
                Ok(false) => Fate::Stays,
                Err(_) => Fate::Leaves(Some(Count::Strangers)),
            },
            Stage::Confirm { .. } if guest.ready => match guest.read() {
                Ok(true) => self.admit(at),
                Ok(false) => Fate::Stays,
                Err(_) => Fate::Leaves(None),
            },
            Stage::Parked if guest.ready => Fate::Leaves(None),
            Stage::Parked => self.decide(at),
            Stage::Hello | Stage::Confirm { .. } => Fate::Stays,
        }
    }

    /// A whole hello is here: is it of the generation being formed?
    fn decide(&mut self, at: usize) -> Fate {
        let guest = &mut self.guests[at];
        let Some(hello) = Hello::decode(&guest.hello) else {
            return Fate::Leaves(Some(Count::Strangers));
        };
        let state = self.shared.lock();
        let newer = match &state.expected {
            None => true,
            Some(expected) if expected.token.job != hello.token.job => {
                return Fate::Leaves(Some(Count::Strangers));
            }
            Some(expected) => hello.token > expected.token,
        };
        if newer {
            if !matches!(guest.stage, Stage::Parked) {
                guest.since = Instant::now();
                guest.stage = Stage::Parked;
            }
            return Fate::Stays;
        }
        let Some(expected) = &state.expected else { return Fate::Stays };
        if hello.token < expected.token {
            self.shared.count(Count::Stale);
            write_at_once(&guest.stream, &stale());
            return Fate::Leaves(None);
        }
        if !expected.open {
            return Fate::Leaves(None);
        }
        if !expected.fits(&hello) || !expected.key.knows(&guest.hello) {
            return Fate::Leaves(Some(Count::Strangers));
        }
        let Ok(nonce) = nonce() else { return Fate::Leaves(Some(Count::Crowded)) };
        let answer = expected.key.answer(&guest.hello, nonce);
        if !write_at_once(&guest.stream, &answer) {
            return Fate::Leaves(None);
        }
        guest.filled = 0;
        guest.since = Instant::now();
        guest.stage = Stage::Confirm { answer };
        Fate::Stays
    }

    /// The confirmation is here: does it hold, and is the mesh still wanted?
    fn admit(&self, at: usize) -> Fate {
        let guest = &self.guests[at];
        let (Stage::Confirm { answer }, Some(hello)) = (guest.stage, Hello::decode(&guest.hello))
        else {
            return Fate::Leaves(Some(Count::Strangers));
        };
        match &self.shared.lock().expected {
            Some(expected) if expected.open && expected.fits(&hello) => {
                match expected.key.confirmed(&guest.hello, &answer, &guest.confirm) {
                    true => Fate::Enters(hello.from as usize),
                    false => Fate::Leaves(Some(Count::Strangers)),
                }
            }
            _ => Fate::Leaves(None),
        }
    }

    fn enter(&mut self, at: usize, rank: usize) {
        let guest = self.guests.swap_remove(at);
        if let Some(expected) = &mut self.shared.lock().expected
            && expected.open
        {
            // The latest counts: its dialler gave earlier ones up.
            expected.arrived.retain(|(from, _)| *from != rank);
            expected.arrived.push((rank, guest.stream));
            expected.arrivals.wake();
            self.shared.count(Count::Welcomed);
        }
    }
}

impl Guest {
    fn left(&self) -> Duration {
        let limit = match self.stage {
            Stage::Parked => PARKING,
            Stage::Hello | Stage::Confirm { .. } => PATIENCE,
        };
        limit.saturating_sub(self.since.elapsed())
    }

    /// Reads on; true once the message of this stage is whole.
    fn read(&mut self) -> io::Result<bool> {
        let buffer = match self.stage {
            Stage::Confirm { .. } => &mut self.confirm[..],
            Stage::Hello | Stage::Parked => &mut self.hello[..],
        };
        match (&self.stream).read(&mut buffer[self.filled..]) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => {
                self.filled += bytes;
                Ok(self.filled == buffer.len())
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) =>
            {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}
