//! The control endpoint of a process: one UDP port for everything that dials and
//! is dialled, the TCP port of the same number for liveness.

use std::{
    fmt, io,
    net::{SocketAddr, TcpListener, UdpSocket},
    sync::{Arc, PoisonError, RwLock, Weak},
    time::Duration,
};

use bytes::Bytes;
use job::{Incarnation, NodeId, StoreId};
use quinn::{
    Endpoint, EndpointConfig, Incoming, TokioRuntime, VarInt, crypto::rustls::HandshakeData,
};
use rustls::crypto::ring;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
    time::timeout,
};
use tracing::debug;

use super::{
    certs::{CertError, crypto},
    close::{self, Code},
    event::{self, LinkEvent, LinkEvents, Outbox, Peer},
    hello::{Hello, MAX_OPAQUE, PROTOCOL},
    identity::Identity,
    join::{self, Gate, JoinError, JoinGate, Joined},
    lane::{Lane, NotQueued},
    link::{self, LinkError},
    liveness::{self, Liveness},
    sessions::Sessions,
    tls,
    token::JoinToken,
    turned::{Counters, Reason, TurnedAway},
};

/// Says whether a peer whose identity is proven may have a link; the error is
/// shown on both sides. Runs for both, so it should be symmetric.
pub type PeerCheck = Arc<dyn Fn(&Peer) -> Result<(), String> + Send + Sync>;

/// How a process takes part. [`Default`] fits everything but tests.
#[derive(Clone)]
pub struct Options {
    /// Told to peers; [`Control::introduce`] changes it later.
    pub incarnation: Incarnation,
    /// The agent's own part of the hello, at most 4 KiB; likewise.
    pub opaque: Vec<u8>,
    /// Where others should dial, when packets arrive from elsewhere.
    pub advertise: Option<SocketAddr>,
    /// Looks at a peer's hello.
    pub check: Option<PeerCheck>,
    /// The longest a dial or an answer may take.
    pub handshake: Duration,
    /// A connection without a packet for this long is over. A backstop: the
    /// agents' own beats are faster.
    pub idle: Duration,
    /// How often an idle connection sends a packet.
    pub keep_alive: Duration,
    /// The most links at a time.
    pub max_links: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            incarnation: Incarnation::default(),
            opaque: Vec::new(),
            advertise: None,
            check: None,
            handshake: link::HANDSHAKE,
            idle: Duration::from_secs(4),
            keep_alive: Duration::from_secs(1),
            max_links: 4096,
        }
    }
}

/// The endpoint cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Somebody else has the port.
    #[error("port {} on {} is taken: choose another with --listen", .0.port(), .0.ip())]
    Taken(SocketAddr),
    /// The address belongs to another machine.
    #[error("{} is not an address of this machine: choose one with --listen", .0.ip())]
    NotOurs(SocketAddr),
    /// Any other reason of the system.
    #[error("cannot listen on {addr}: {error}")]
    System {
        /// The address.
        addr: SocketAddr,
        /// The system's reason.
        error: io::Error,
    },
    /// A hello part over the limit.
    #[error("the hello's own part has {0} bytes, the limit is {MAX_OPAQUE}")]
    Opaque(usize),
    /// The identity cannot be used.
    #[error(transparent)]
    Identity(#[from] CertError),
}

/// A frame that could not be queued, given back.
#[derive(thiserror::Error)]
pub enum SendError {
    /// The lane's queue is full: the peer or the network is slower than this.
    #[error("the {} lane to store {peer} is full: {} bytes not sent", lane.name(), bytes.len())]
    Full {
        /// The destination.
        peer: StoreId,
        /// The lane.
        lane: Lane,
        /// The frame.
        bytes: Bytes,
    },
    /// There is no link.
    #[error("there is no link to store {peer}: {} bytes not sent", bytes.len())]
    NotConnected {
        /// The destination.
        peer: StoreId,
        /// The frame.
        bytes: Bytes,
    },
    /// The frame is over the lane's limit: cut it up.
    #[error("a frame of {} bytes is over the {} lane's limit of {}", bytes.len(), lane.name(), lane.frame_limit())]
    TooLarge {
        /// The lane.
        lane: Lane,
        /// The frame.
        bytes: Bytes,
    },
}

/// Without the frame: its bytes are no business of a log.
impl fmt::Debug for SendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl SendError {
    /// The frame.
    #[must_use]
    pub fn into_bytes(self) -> Bytes {
        match self {
            Self::Full { bytes, .. }
            | Self::NotConnected { bytes, .. }
            | Self::TooLarge { bytes, .. } => bytes,
        }
    }
}

/// The handle of the endpoint; clones share it. When the last one is dropped,
/// everything closes.
#[derive(Clone)]
pub struct Control {
    pub(super) inner: Arc<Inner>,
    _owner: Arc<Owner>,
}

/// What every task of the endpoint shares.
pub(super) struct Inner {
    pub(super) endpoint: Endpoint,
    pub(super) options: Options,
    pub(super) protocol: u16,
    pub(super) boot: u64,
    pub(super) sessions: Sessions,
    pub(super) outbox: Outbox,
    pub(super) liveness: Liveness,
    pub(super) gate: Gate,
    pub(super) turned: Arc<Counters>,
    introduction: RwLock<(Incarnation, Vec<u8>)>,
    local: RwLock<Option<Arc<Local>>>,
}

/// This node's identity and the configuration made from it.
pub(super) struct Local {
    pub(super) identity: Identity,
    pub(super) client: quinn::ClientConfig,
}

struct Owner(Arc<Inner>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.shut();
    }
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Control").field("addr", &self.local_addr()).finish_non_exhaustive()
    }
}

impl Control {
    /// Opens the UDP and the TCP port of the same number (any free one for port
    /// 0). Without an identity the endpoint can only [`Self::join`], until
    /// [`Self::set_identity`]. Must run inside a tokio runtime.
    ///
    /// # Errors
    /// [`BindError`].
    pub fn bind(
        listen: SocketAddr,
        identity: Option<Identity>,
        options: Options,
    ) -> Result<(Self, LinkEvents), BindError> {
        Self::bind_speaking(PROTOCOL, listen, identity, options)
    }

    pub(super) fn bind_speaking(
        protocol: u16,
        listen: SocketAddr,
        identity: Option<Identity>,
        options: Options,
    ) -> Result<(Self, LinkEvents), BindError> {
        if options.opaque.len() > MAX_OPAQUE {
            return Err(BindError::Opaque(options.opaque.len()));
        }
        let (udp, tcp) = sockets(listen)?;
        let system = |error| BindError::System { addr: listen, error };
        tcp.set_nonblocking(true).map_err(system)?;
        let tcp = tokio::net::TcpListener::from_std(tcp).map_err(system)?;
        let endpoint = Endpoint::new(EndpointConfig::default(), None, udp, Arc::new(TokioRuntime))
            .map_err(system)?;
        let boot = random()?;
        let turned = Arc::new(Counters::default());
        let (outbox, events) = event::channel();
        let inner = Arc::new_cyclic(|weak: &Weak<Inner>| {
            let weak = weak.clone();
            let dead = move |store, boot| {
                if let Some(inner) = weak.upgrade() {
                    inner.outbox.post(LinkEvent::Reset { peer: store, boot }, 0, None);
                    inner.sessions.died(store, boot);
                }
            };
            Inner {
                endpoint,
                protocol,
                boot,
                sessions: Sessions::new(outbox.clone(), options.max_links, options.handshake),
                outbox,
                liveness: Liveness::new(boot, Arc::new(dead), Arc::clone(&turned)),
                gate: Gate::default(),
                turned,
                introduction: RwLock::new((options.incarnation, options.opaque.clone())),
                local: RwLock::default(),
                options,
            }
        });
        let control = Self { _owner: Arc::new(Owner(Arc::clone(&inner))), inner };
        if let Some(identity) = identity {
            control.set_identity(identity)?;
        }
        control.inner.liveness.serve(tcp);
        tokio::spawn(accept(Arc::clone(&control.inner)));
        Ok((control, events))
    }

    /// The address that both ports are bound to.
    ///
    /// # Errors
    /// The system's.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.endpoint.local_addr()
    }

    /// Drawn at random when this endpoint was bound.
    #[must_use]
    pub fn boot(&self) -> u64 {
        self.inner.boot
    }

    /// From now on the endpoint dials and accepts under this identity.
    ///
    /// # Errors
    /// [`CertError`].
    pub fn set_identity(&self, identity: Identity) -> Result<(), CertError> {
        let inner = &self.inner;
        let server = tls::server(&identity, &inner.options)?;
        let client = tls::peer_client(&identity, &inner.options)?;
        inner.liveness.set_store(identity.store());
        *inner.local.write().unwrap_or_else(PoisonError::into_inner) =
            Some(Arc::new(Local { identity, client }));
        inner.endpoint.set_server_config(Some(server));
        Ok(())
    }

    /// Changes what later links are told; those that are up are not.
    ///
    /// # Errors
    /// [`BindError::Opaque`] when `opaque` is over 4 KiB.
    pub fn introduce(&self, incarnation: Incarnation, opaque: Vec<u8>) -> Result<(), BindError> {
        if opaque.len() > MAX_OPAQUE {
            return Err(BindError::Opaque(opaque.len()));
        }
        *self.inner.introduction.write().unwrap_or_else(PoisonError::into_inner) =
            (incarnation, opaque);
        Ok(())
    }

    /// Dials a member once; whether to dial again is the caller's decision. With
    /// `expect`, a link that is up is returned at once, and another store at the
    /// address is refused.
    ///
    /// # Errors
    /// [`LinkError`].
    pub async fn connect(
        &self,
        addr: SocketAddr,
        expect: Option<StoreId>,
    ) -> Result<Peer, LinkError> {
        link::dial(&self.inner, addr, expect).await
    }

    /// Queues a frame, without waiting. An `Ok` promises nothing: a link that ends
    /// takes its queues along.
    ///
    /// # Errors
    /// [`SendError`], with the frame.
    pub fn send(&self, peer: StoreId, lane: Lane, bytes: Bytes) -> Result<(), SendError> {
        if bytes.len() > lane.frame_limit() {
            return Err(SendError::TooLarge { lane, bytes });
        }
        let Some(session) = self.inner.sessions.get(peer) else {
            return Err(SendError::NotConnected { peer, bytes });
        };
        session.queue(lane).push(bytes).map_err(|error| not_queued(peer, lane, error))
    }

    /// Queues a frame as soon as the lane has room. Cancel-safe: a dropped call
    /// has queued nothing.
    ///
    /// # Errors
    /// [`SendError`], with the frame; never [`SendError::Full`].
    pub async fn send_wait(
        &self,
        peer: StoreId,
        lane: Lane,
        bytes: Bytes,
    ) -> Result<(), SendError> {
        if bytes.len() > lane.frame_limit() {
            return Err(SendError::TooLarge { lane, bytes });
        }
        let Some(session) = self.inner.sessions.get(peer) else {
            return Err(SendError::NotConnected { peer, bytes });
        };
        let pushed = session.queue(lane).push_wait(bytes).await;
        pushed.map_err(|error| not_queued(peer, lane, error))
    }

    /// Ends the link to a store, which is told the reason.
    pub fn disconnect(&self, peer: StoreId, reason: &str) {
        if let Some(session) = self.inner.sessions.get(peer) {
            Code::Done.close(&session.connection, reason);
        }
    }

    /// The links that are up.
    #[must_use]
    pub fn peers(&self) -> Vec<Peer> {
        self.inner.sessions.peers()
    }

    /// Who was turned away so far.
    #[must_use]
    pub fn turned_away(&self) -> TurnedAway {
        self.inner.turned.read()
    }

    /// Stops watching a store's process: the group knows that it is gone.
    pub fn unwatch(&self, peer: StoreId) {
        self.inner.liveness.unwatch(peer);
    }

    /// Opens the gate for newcomers, replaces it (a new token), or shuts it.
    pub fn set_gate(&self, gate: Option<JoinGate>) {
        self.inner.gate.set(gate);
    }

    /// Joins a job through a member's gate. The caller saves the identity and
    /// hands it to [`Self::set_identity`].
    ///
    /// # Errors
    /// [`JoinError`].
    pub async fn join(
        &self,
        addr: SocketAddr,
        token: &JoinToken,
        node: NodeId,
        store: StoreId,
        opaque: Vec<u8>,
        limit: Duration,
    ) -> Result<Joined, JoinError> {
        join::join(&self.inner, addr, token, (node, store), opaque, limit).await
    }

    /// Says goodbye to every peer and waits at most `limit` until they know.
    pub async fn close(&self, limit: Duration) {
        self.inner.shut();
        // Past the limit the peers learn it from silence.
        let _ = timeout(limit, self.inner.endpoint.wait_idle()).await;
    }
}

impl Inner {
    pub(super) fn local(&self) -> Option<Arc<Local>> {
        self.local.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The hello for a node with this store.
    pub(super) fn hello(&self, local: &Local, to: StoreId) -> Hello {
        let subject = local.identity.subject();
        let (incarnation, opaque) =
            self.introduction.read().unwrap_or_else(PoisonError::into_inner).clone();
        let standing = self.sessions.get(to);
        let open = standing.filter(|session| session.connection.close_reason().is_none());
        Hello {
            job: subject.job,
            node: subject.node.clone(),
            store: subject.store,
            incarnation,
            boot: self.boot,
            linked: open.map(|session| session.peer.boot),
            listen: self.options.advertise,
            opaque,
        }
    }

    fn shut(&self) {
        self.endpoint.close(VarInt::from_u32(Code::Done as u32), b"it leaves");
        self.liveness.stop();
    }
}

/// How many connections may be in their handshake, hello or join at a time. Past
/// the half of it, a dialler has to show that its address is real.
const HANDSHAKES: usize = 128;

async fn accept(inner: Arc<Inner>) {
    let slots = Arc::new(Semaphore::new(HANDSHAKES));
    let mut tasks = JoinSet::new();
    loop {
        let incoming = tokio::select! {
            incoming = inner.endpoint.accept() => incoming,
            Some(_) = tasks.join_next() => continue,
        };
        let Some(incoming) = incoming else { break };
        if slots.available_permits() < HANDSHAKES / 2 && incoming.may_retry() {
            // May fail only where a retry is not allowed, which was just asked.
            let _ = incoming.retry();
            continue;
        }
        match Arc::clone(&slots).try_acquire_owned() {
            Ok(permit) => drop(tasks.spawn(serve(Arc::clone(&inner), incoming, permit))),
            Err(_) => {
                inner.turned.count(Reason::Crowded);
                incoming.refuse();
            }
        }
    }
}

async fn serve(inner: Arc<Inner>, incoming: Incoming, permit: OwnedSemaphorePermit) {
    let addr = incoming.remote_address();
    let connecting = match incoming.accept() {
        Ok(connecting) => connecting,
        // Its first flight already is no handshake of ours.
        Err(error) => {
            inner.turned.count(close::handshake_failure(&error));
            return debug!(%addr, %error, "no handshake began");
        }
    };
    let connection = match timeout(inner.options.handshake, connecting).await {
        Ok(Ok(connection)) => connection,
        Ok(Err(error)) => {
            inner.turned.count(close::handshake_failure(&error));
            return debug!(%addr, %error, "a handshake failed");
        }
        Err(_) => {
            inner.turned.count(Reason::Slow);
            return debug!(%addr, "a handshake took too long");
        }
    };
    let data = connection.handshake_data().and_then(|data| data.downcast::<HandshakeData>().ok());
    match data.and_then(|data| data.protocol).as_deref() {
        Some(tls::ALPN_PEER) => link::answer(&inner, &connection, permit).await,
        Some(tls::ALPN_JOIN) => join::answer(&inner, &connection).await,
        _ => {
            inner.turned.count(Reason::Handshake);
            Code::Refused.close(&connection, "no protocol of elastic");
        }
    }
}

fn not_queued(peer: StoreId, lane: Lane, error: NotQueued) -> SendError {
    match error {
        NotQueued::Full(bytes) => SendError::Full { peer, lane, bytes },
        NotQueued::Gone(bytes) => SendError::NotConnected { peer, bytes },
    }
}

fn random() -> Result<u64, CertError> {
    let mut bytes = [0; 8];
    let fill = ring::default_provider().secure_random.fill(&mut bytes);
    fill.map_err(|error| crypto("draw a random number")(format!("{error:?}")))?;
    Ok(u64::from_le_bytes(bytes))
}

/// Binds both ports. For port 0 the system chooses one that is free for TCP;
/// whether it is free for UDP too is tried.
fn sockets(listen: SocketAddr) -> Result<(UdpSocket, TcpListener), BindError> {
    const TRIES: usize = 16;
    let mut attempt = 0;
    loop {
        attempt += 1;
        let tcp = liveness::listen(listen).map_err(|error| bind_error(listen, error))?;
        let addr = tcp.local_addr().map_err(|error| bind_error(listen, error))?;
        match UdpSocket::bind(addr) {
            Ok(udp) => {
                enlarge(&udp);
                return Ok((udp, tcp));
            }
            Err(error)
                if listen.port() == 0
                    && error.kind() == io::ErrorKind::AddrInUse
                    && attempt < TRIES => {}
            Err(error) => return Err(bind_error(addr, error)),
        }
    }
}

/// The default buffers hold a millisecond or two of bulk. The system caps what it
/// gives; less is no error.
fn enlarge(socket: &UdpSocket) {
    const WANTED: usize = 4 << 20;
    let _ = rustix::net::sockopt::set_socket_recv_buffer_size(socket, WANTED);
    let _ = rustix::net::sockopt::set_socket_send_buffer_size(socket, WANTED);
}

fn bind_error(addr: SocketAddr, error: io::Error) -> BindError {
    match error.kind() {
        io::ErrorKind::AddrInUse => BindError::Taken(addr),
        io::ErrorKind::AddrNotAvailable => BindError::NotOurs(addr),
        _ => BindError::System { addr, error },
    }
}
