//! Bare TCP liveness. A process that is killed sends nothing over QUIC, but the
//! kernel ends its TCP connections at once: every agent keeps one to each peer.
//!
//! A death counts as certain (LS-2) only when a connection on which the peer's
//! own process answered has ended *and* its address refuses a new one. Silence, a
//! garbled answer or another process on the port are never reported. Each side
//! first sends who it is: store id (16 bytes), boot (8 bytes, little-endian);
//! nothing after that. There is no secrecy here and none is needed: a stranger
//! can neither end a listener nor make its port refuse. Only processes that have
//! or had a link are answered, so that strangers cannot use up descriptors.

use std::{
    collections::HashMap,
    io,
    net::{SocketAddr, TcpListener},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use super::turned::{Counters, Reason};
use job::StoreId;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::{Notify, Semaphore},
    task::{AbortHandle, JoinSet},
    time::{sleep, timeout},
};

/// The most connections at a time that have not named a peer yet.
const MAX_STRANGERS: usize = 64;
/// The longest that connecting or the exchange of names may take.
const PATIENCE: Duration = Duration::from_secs(1);
/// The shortest and the longest pause before connecting again. A dying process
/// closes its connections a moment before its listener.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_secs(1));

const NAME: usize = 24;

/// Called with the store and boot of a process that is certainly dead.
pub(super) type Dead = Arc<dyn Fn(StoreId, u64) + Send + Sync>;

/// Watches peers and lets itself be watched.
pub(super) struct Liveness {
    own: Arc<Own>,
    dead: Dead,
    server: Mutex<Option<AbortHandle>>,
}

/// What the answering side shares with the watching side.
struct Own {
    boot: u64,
    store: OnceLock<StoreId>,
    /// Per store the process that has or had a link, and the task that watches it.
    peers: Mutex<HashMap<StoreId, (u64, AbortHandle)>>,
    changes: Notify,
    turned: Arc<Counters>,
}

impl Liveness {
    pub(super) fn new(boot: u64, dead: Dead, turned: Arc<Counters>) -> Self {
        let (store, peers, changes) = (OnceLock::new(), Mutex::default(), Notify::new());
        let own = Arc::new(Own { boot, store, peers, changes, turned });
        Self { own, dead, server: Mutex::default() }
    }

    /// Whose process this is; nobody is answered before. The first call counts:
    /// a process has one store.
    pub(super) fn set_store(&self, store: StoreId) {
        let _ = self.own.store.set(store);
    }

    /// Answers watchers.
    pub(super) fn serve(&self, listener: tokio::net::TcpListener) {
        let task = tokio::spawn(serve(listener, Arc::clone(&self.own)));
        *self.server.lock().unwrap_or_else(PoisonError::into_inner) = Some(task.abort_handle());
    }

    /// Watches one process, instead of an earlier one of the same store.
    pub(super) fn watch(&self, store: StoreId, boot: u64, addr: SocketAddr) {
        let Some(own) = self.own.name() else { return };
        let mut peers = self.own.peers();
        if peers.get(&store).is_some_and(|(known, task)| *known == boot && !task.is_finished()) {
            return;
        }
        let dead = Arc::clone(&self.dead);
        let task = tokio::spawn(async move {
            if watch(addr, own, name(store, boot)).await == Outcome::Dead {
                dead(store, boot);
            }
        });
        if let Some((_, old)) = peers.insert(store, (boot, task.abort_handle())) {
            old.abort();
        }
        drop(peers);
        self.own.changes.notify_waiters();
    }

    pub(super) fn unwatch(&self, store: StoreId) {
        if let Some((_, task)) = self.own.peers().remove(&store) {
            task.abort();
        }
    }

    pub(super) fn stop(&self) {
        for (_, (_, task)) in self.own.peers().drain() {
            task.abort();
        }
        let server = self.server.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(server) = server {
            server.abort();
        }
    }
}

impl Own {
    fn name(&self) -> Option<[u8; NAME]> {
        self.store.get().map(|store| name(*store, self.boot))
    }

    fn peers(&self) -> MutexGuard<'_, HashMap<StoreId, (u64, AbortHandle)>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a process of this name has a link: its watcher may be faster
    /// than the last byte of the hello.
    async fn linked(&self, wanted: [u8; NAME]) {
        loop {
            let changed = self.changes.notified();
            tokio::pin!(changed);
            // Registered before looking, so that no change is missed.
            changed.as_mut().enable();
            if self.peers().iter().any(|(store, (boot, _))| name(*store, *boot) == wanted) {
                return;
            }
            changed.await;
        }
    }
}

/// A listener that a restarted process can open although old connections linger.
pub(super) fn listen(addr: SocketAddr) -> io::Result<TcpListener> {
    // std sets SO_REUSEADDR on Unix, which never lets two listeners share a port.
    TcpListener::bind(addr)
}

#[derive(PartialEq, Eq, Debug)]
enum Outcome {
    /// Its connection ended and its address refuses.
    Dead,
    /// Somebody else answers there: nothing is known.
    Other,
}

async fn watch(addr: SocketAddr, own: [u8; NAME], peer: [u8; NAME]) -> Outcome {
    let mut seen = false;
    let mut pause = PAUSES.0;
    loop {
        match timeout(PATIENCE, greet(addr, own)).await {
            Ok(Ok((stream, answer))) if answer == peer => {
                seen = true;
                pause = PAUSES.0;
                ended(stream).await;
                continue;
            }
            Ok(Ok(_)) => return Outcome::Other,
            Ok(Err(error)) if seen && error.kind() == io::ErrorKind::ConnectionRefused => {
                return Outcome::Dead;
            }
            Ok(Err(_)) | Err(_) => {}
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSES.1);
    }
}

async fn greet(addr: SocketAddr, own: [u8; NAME]) -> io::Result<(TcpStream, [u8; NAME])> {
    let mut stream = TcpStream::connect(addr).await?;
    stream.set_nodelay(true)?;
    // A refusal is `connect`'s alone: nothing later may look like one.
    let exchange = async {
        stream.write_all(&own).await?;
        let mut answer = [0; NAME];
        stream.read_exact(&mut answer).await.map(|_| answer)
    };
    match exchange.await {
        Ok(answer) => Ok((stream, answer)),
        Err(error) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, error)),
    }
}

async fn serve(listener: tokio::net::TcpListener, own: Arc<Own>) {
    let strangers = Arc::new(Semaphore::new(MAX_STRANGERS));
    let mut watchers = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = watchers.join_next() => continue,
        };
        let Ok((stream, _)) = accepted else {
            // Out of descriptors, or a connection that was gone already.
            sleep(Duration::from_millis(50)).await;
            continue;
        };
        let Ok(slot) = Arc::clone(&strangers).try_acquire_owned() else {
            own.turned.count(Reason::Crowded);
            continue;
        };
        let own = Arc::clone(&own);
        watchers.spawn(async move {
            let answered = timeout(PATIENCE, answer(stream, &own)).await;
            drop(slot);
            match answered {
                Ok(Ok(stream)) => ended(stream).await,
                Ok(Err(_)) | Err(_) => own.turned.count(Reason::Watcher),
            }
        });
    }
}

async fn answer(mut stream: TcpStream, own: &Own) -> io::Result<TcpStream> {
    let mut theirs = [0; NAME];
    stream.read_exact(&mut theirs).await?;
    own.linked(theirs).await;
    let name = own.name().ok_or(io::ErrorKind::NotConnected)?;
    stream.write_all(&name).await?;
    Ok(stream)
}

/// Until the connection ends. A byte that nobody should send ends it too.
async fn ended(mut stream: TcpStream) {
    let _ = stream.read(&mut [0; 1]).await;
}

fn name(store: StoreId, boot: u64) -> [u8; NAME] {
    let mut name = [0; NAME];
    name[..16].copy_from_slice(store.0.as_bytes());
    name[16..].copy_from_slice(&boot.to_le_bytes());
    name
}
