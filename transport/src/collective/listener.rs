//! The one port of a worker process, over all its generations.
//!
//! A thread accepts connections and lets them prove that they belong to the
//! generation that is being formed. Others never reach a mesh:
//!
//! - strangers, wrong jobs and wrong keys are dropped without a word, late ones
//!   after [`PATIENCE`], and there is a cap on those that have not proven
//!   themselves;
//! - older tokens are told so, and refused (GEN-1);
//! - newer tokens are parked, bounded, until this process learns of the plan
//!   and calls [`Listener::connect`] (ID-3).

use std::{
    collections::VecDeque,
    fmt,
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use job::Token;

use super::{
    AbortHandle, Error, HostMesh,
    accept::{Acceptor, Expected},
    dial::{self, Wake},
    handshake::Key,
    mesh::Origin,
};

/// How long a connection may take to say hello, or to confirm.
pub(super) const PATIENCE: Duration = Duration::from_secs(1);

/// How long the connections of a failed mesh outlive it. Each survivor sees the
/// end of the dead rank's own connection in this time; if another survivor's
/// ended first, it would accuse that one.
const LINGER: Duration = Duration::from_millis(500);

/// Calls that the kernel may hold until the thread accepts them.
const BACKLOG: i32 = 1024;

/// Connections that may linger; the oldest give way.
const LINGERING: usize = 256;

/// The mesh to build: a committed plan, as one rank sees it.
#[derive(Clone)]
pub struct MeshSpec {
    /// The generation.
    pub token: Token,
    /// The secret that only its members know.
    pub key: [u8; 32],
    /// This rank.
    pub rank: usize,
    /// Where each rank listens; as many as there are ranks.
    pub addresses: Vec<SocketAddr>,
}

/// What has come to the port so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListenerStats {
    /// Connections that proved themselves and went into a mesh.
    pub welcomed: u64,
    /// Dropped: not the protocol, another job, a wrong key, a wrong rank.
    pub strangers: u64,
    /// Refused: an older token.
    pub stale: u64,
    /// Dropped: silent for too long.
    pub late: u64,
    /// Dropped: too many at once.
    pub crowded: u64,
}

/// A bound port and the thread that guards it. Dropping it closes the port and
/// joins the thread; meshes that were connected live on.
pub struct Listener {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    shares_memory: bool,
}

/// What the listener and its thread both see.
pub(super) struct Shared {
    pub(super) wake: Wake,
    state: Mutex<State>,
    counts: [AtomicU64; 5],
}

#[derive(Default)]
pub(super) struct State {
    /// The newest generation that was connected or is being so.
    pub(super) expected: Option<Expected>,
    pub(super) closing: bool,
    lingering: VecDeque<(Instant, TcpStream)>,
}

/// Where a failed mesh leaves its connections: they are closed a little later,
/// or at once where there is no listener any more.
#[derive(Clone, Default)]
pub(super) struct Lingering(Weak<Shared>);

/// Reads a listener's [`ListenerStats`] without keeping it open.
#[derive(Clone, Debug)]
pub struct ListenerWatch(Weak<Shared>);

/// A field of [`ListenerStats`].
#[derive(Clone, Copy, Debug)]
pub(super) enum Count {
    Welcomed,
    Strangers,
    Stale,
    Late,
    Crowded,
}

impl Listener {
    /// Binds the port; 0 picks a free one.
    ///
    /// # Errors
    /// [`Error::System`] when the address is taken or not of this machine.
    pub fn bind(address: SocketAddr) -> Result<Self, Error> {
        let at = |why: std::io::Error| Error::System {
            call: "bind",
            why: format!("{address}: {why}; choose another address for tensors"),
        };
        let socket = TcpListener::bind(address).map_err(at)?;
        socket.set_nonblocking(true).map_err(at)?;
        // Longer than what std asks for: a dropped call comes back after a second.
        rustix::net::listen(&socket, BACKLOG).map_err(|errno| at(errno.into()))?;
        let address = socket.local_addr().map_err(at)?;
        let shared = Arc::new(Shared {
            wake: Wake::new()?,
            state: Mutex::default(),
            counts: Default::default(),
        });
        let acceptor = Acceptor::new(socket, Arc::clone(&shared));
        let thread = std::thread::Builder::new()
            .name("mesh-accept".into())
            .spawn(|| acceptor.run())
            .map_err(|why| Error::system("spawn", why))?;
        Ok(Self { address, shared, thread: Some(thread), shares_memory: true })
    }

    /// Ranks of one machine talk over TCP as well: for measurements, and where
    /// memory must not be shared. It goes for this rank; others of the machine may
    /// share theirs.
    #[must_use]
    pub fn over_tcp_only(mut self) -> Self {
        self.shares_memory = false;
        self
    }

    /// The address, with the port that was bound.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// What has come to the port so far.
    #[must_use]
    pub fn stats(&self) -> ListenerStats {
        self.shared.stats()
    }

    /// For whoever reports the figures while another thread owns the listener.
    #[must_use]
    pub fn watch(&self) -> ListenerWatch {
        ListenerWatch(Arc::downgrade(&self.shared))
    }

    /// Connects this rank with all others of a generation. Peers that are not
    /// there yet are tried again until the deadline. From now on the process
    /// belongs to this token: older ones are refused.
    ///
    /// # Errors
    /// [`Error::Deadline`] names the ranks that did not come, and
    /// [`Error::Refused`] says that the generation is over.
    pub fn connect(
        &self,
        spec: MeshSpec,
        deadline: Instant,
        abort: &AbortHandle,
    ) -> Result<HostMesh, Error> {
        let names = (0..spec.addresses.len()).collect();
        let lingering = Lingering(Arc::downgrade(&self.shared));
        self.connect_as(spec, names, lingering, deadline, abort)
    }

    /// [`Self::connect`], with the ranks' names in errors and the place where
    /// the connections of a failed mesh stay a little.
    pub(super) fn connect_as(
        &self,
        spec: MeshSpec,
        names: Vec<usize>,
        lingering: Lingering,
        deadline: Instant,
        abort: &AbortHandle,
    ) -> Result<HostMesh, Error> {
        let MeshSpec { token, key, rank, addresses } = spec;
        let size = addresses.len();
        if rank >= size || u32::try_from(size).is_err() {
            return Err(Error::refused(format!("rank {rank} of {size} addresses")));
        }
        let party = dial::Party { token, key: Key(key), rank, addresses };
        let arrivals = self.expect(&party)?;
        let mut streams: Vec<_> = (0..size).map(|_| None).collect();
        let connected = dial::connect(&party, &arrivals, self, &mut streams, deadline, abort);
        self.shared.expect_nothing(token);
        match connected {
            Ok(()) => {
                let dial::Party { key, addresses, .. } = party;
                let bind = self.address.ip();
                let shares_memory = self.shares_memory;
                let origin = Origin { key, addresses, bind, names, shares_memory, children: 0 };
                let mut mesh =
                    HostMesh::new(token, rank, streams, abort.clone(), lingering, origin);
                mesh.find_neighbours(deadline)?;
                Ok(mesh)
            }
            Err(error) => {
                // Some peers may take the mesh for formed.
                lingering.keep(streams.into_iter().flatten());
                Err(error)
            }
        }
    }

    /// Tells the thread whom to let in.
    fn expect(&self, party: &dial::Party) -> Result<Arc<Wake>, Error> {
        let arrivals = Arc::new(Wake::new()?);
        let mut state = self.shared.lock();
        if let Some(Expected { token, .. }) = &state.expected
            && token.job == party.token.job
            && *token > party.token
        {
            let what = format!("generation {} is over, this process is in {token}", party.token);
            return Err(Error::Refused { what });
        }
        if let Some(older) = state.expected.replace(Expected::new(party, Arc::clone(&arrivals))) {
            older.supersede();
        }
        drop(state);
        // Some may be parked already.
        self.shared.wake.wake();
        Ok(arrivals)
    }

    /// Connections that have proven themselves since the last call.
    pub(super) fn arrived(&self, token: Token) -> Result<Vec<(usize, TcpStream)>, Error> {
        match &mut self.shared.lock().expected {
            Some(expected) if expected.token == token => Ok(std::mem::take(&mut expected.arrived)),
            _ => Err(Error::refused(format!("generation {token} is over, a newer one is formed"))),
        }
    }
}

impl ListenerWatch {
    /// What has come to the port so far; `None` once it is closed.
    #[must_use]
    pub fn stats(&self) -> Option<ListenerStats> {
        self.0.upgrade().map(|shared| shared.stats())
    }
}

impl Shared {
    fn stats(&self) -> ListenerStats {
        let [welcomed, strangers, stale, late, crowded] =
            self.counts.each_ref().map(|count| count.load(Relaxed));
        ListenerStats { welcomed, strangers, stale, late, crowded }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock with a half-made change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn count(&self, what: Count) {
        self.counts[what as usize].fetch_add(1, Relaxed);
    }

    /// Closes what has lingered long enough; when to come back for the rest.
    pub(super) fn reap(&self) -> Option<Duration> {
        let mut state = self.lock();
        loop {
            let (since, _) = state.lingering.front()?;
            let left = LINGER.saturating_sub(since.elapsed());
            if !left.is_zero() {
                return Some(left);
            }
            state.lingering.pop_front();
        }
    }

    fn expect_nothing(&self, token: Token) {
        if let Some(expected) = &mut self.lock().expected
            && expected.token == token
        {
            expected.close();
        }
    }
}

impl Lingering {
    pub(super) fn keep(&self, streams: impl Iterator<Item = TcpStream>) {
        let Some(shared) = self.0.upgrade() else { return };
        let mut state = shared.lock();
        if state.closing {
            return;
        }
        state.lingering.extend(streams.map(|stream| (Instant::now(), stream)));
        let surplus = state.lingering.len().saturating_sub(LINGERING);
        state.lingering.drain(..surplus);
        drop(state);
        shared.wake.wake();
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.closing = true;
        state.lingering.clear();
        drop(state);
        self.shared.wake.wake();
        if let Some(thread) = self.thread.take() {
            // It does not panic; if it did, the port is closed all the same.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Listener({}, {:?})", self.address, self.stats())
    }
}

impl fmt::Debug for MeshSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { token, rank, addresses, key: _ } = self;
        write!(f, "MeshSpec({token}, rank {rank} of {addresses:?})")
    }
}
