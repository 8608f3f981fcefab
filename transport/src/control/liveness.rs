//! Bare TCP liveness. A process that is killed sends nothing over QUIC, but the
//! kernel ends its TCP connections at once: every agent keeps one to each peer.
//!
//! A death counts as certain (LS-2) only when a connection on which the peer's
//! own process answered has ended *and* its address refuses a new one. Silence, a
//! garbled answer or another process on the port are never reported. Each side
//! first sends who it is: store id (16 bytes), boot (8 bytes, little-endian);
//! nothing after that. There is no secrecy here and none is needed: a stranger
//! can neither end a listener nor make its port refuse.

use std::{
    collections::HashMap,
    io,
    net::{SocketAddr, TcpListener},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use job::StoreId;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::Semaphore,
    task::{AbortHandle, JoinSet},
    time::{sleep, timeout},
};

/// The most connections that are answered at a time.
const MAX_WATCHERS: usize = 4096;
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
    boot: u64,
    store: Arc<OnceLock<StoreId>>,
    dead: Dead,
    tasks: Mutex<Tasks>,
}

#[derive(Default)]
struct Tasks {
    watches: HashMap<StoreId, (u64, AbortHandle)>,
    server: Option<AbortHandle>,
}

impl Liveness {
    pub(super) fn new(boot: u64, dead: Dead) -> Self {
        Self { boot, store: Arc::default(), dead, tasks: Mutex::default() }
    }

    /// Whose process this is; nobody is answered before. The first call counts:
    /// a process has one store.
    pub(super) fn set_store(&self, store: StoreId) {
        let _ = self.store.set(store);
    }

    /// Answers watchers.
    pub(super) fn serve(&self, listener: tokio::net::TcpListener) {
        let task = tokio::spawn(serve(listener, Arc::clone(&self.store), self.boot));
        self.tasks().server = Some(task.abort_handle());
    }

    /// Watches one process, instead of an earlier one of the same store.
    pub(super) fn watch(&self, store: StoreId, boot: u64, addr: SocketAddr) {
        let Some(own) = self.store.get() else { return };
        let own = name(*own, self.boot);
        let mut tasks = self.tasks();
        if tasks.watches.get(&store).is_some_and(|(b, task)| *b == boot && !task.is_finished()) {
            return;
        }
        let dead = Arc::clone(&self.dead);
        let task = tokio::spawn(async move {
            if watch(addr, own, name(store, boot)).await == Outcome::Dead {
                dead(store, boot);
            }
        });
        if let Some((_, old)) = tasks.watches.insert(store, (boot, task.abort_handle())) {
            old.abort();
        }
    }

    pub(super) fn unwatch(&self, store: StoreId) {
        if let Some((_, task)) = self.tasks().watches.remove(&store) {
            task.abort();
        }
    }

    pub(super) fn stop(&self) {
        let mut tasks = self.tasks();
        for (_, (_, task)) in tasks.watches.drain() {
            task.abort();
        }
        if let Some(server) = tasks.server.take() {
            server.abort();
        }
    }

    fn tasks(&self) -> MutexGuard<'_, Tasks> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
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

async fn serve(listener: tokio::net::TcpListener, store: Arc<OnceLock<StoreId>>, boot: u64) {
    let slots = Arc::new(Semaphore::new(MAX_WATCHERS));
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
        let (Ok(slot), Some(store)) = (Arc::clone(&slots).try_acquire_owned(), store.get()) else {
            continue;
        };
        let own = name(*store, boot);
        watchers.spawn(async move {
            // A stranger that does not name itself in time is dropped.
            if let Ok(Ok(stream)) = timeout(PATIENCE, answer(stream, own)).await {
                ended(stream).await;
            }
            drop(slot);
        });
    }
}

async fn answer(mut stream: TcpStream, own: [u8; NAME]) -> io::Result<TcpStream> {
    let mut name = [0; NAME];
    stream.read_exact(&mut name).await?;
    stream.write_all(&own).await?;
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
