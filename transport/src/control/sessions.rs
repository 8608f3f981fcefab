//! The table of links: at most one per store (ID-2: keyed by identity, never by
//! address).
//!
//! Two nodes may dial each other at once. The node with the lower store id is the
//! arbiter of the pair: it alone decides whether a new connection becomes their
//! link, the other follows. So both keep the same one, and no event tells of the
//! other.

use std::{
    collections::HashMap,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
    time::{Duration, Instant},
};

use job::{Incarnation, StoreId};
use quinn::Connection;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::{
    close::Code,
    event::{DownReason, LinkEvent, Outbox, Peer},
    lane::{self, Drain, Lane, Queue},
};

/// One link that is up.
pub(super) struct Session {
    /// The connection number: tells this link from earlier ones of the same store.
    pub(super) number: u64,
    pub(super) peer: Peer,
    pub(super) connection: Connection,
    queues: [Queue; 3],
    since: Instant,
    /// A link's slot, given back when its `Down` has been taken.
    slot: std::sync::Mutex<Option<OwnedSemaphorePermit>>,
}

pub(super) struct Sessions {
    table: RwLock<Table>,
    slots: Arc<Semaphore>,
    outbox: Outbox,
    /// Two dials that started within this time of each other are one attempt.
    window: Duration,
    changes: watch::Sender<()>,
}

#[derive(Default)]
struct Table {
    links: HashMap<StoreId, Arc<Session>>,
    last_number: u64,
}

/// Why a connection did not become a link.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum NotInstalled {
    /// There is a link already.
    Duplicate,
    /// The group knows a newer process of this store.
    Stale(String),
    /// Too many links.
    Full,
}

impl Session {
    pub(super) fn queue(&self, lane: Lane) -> &Queue {
        &self.queues[lane.index()]
    }
}

impl Sessions {
    pub(super) fn new(outbox: Outbox, max_links: usize, window: Duration) -> Self {
        Self {
            table: RwLock::default(),
            slots: Arc::new(Semaphore::new(max_links)),
            outbox,
            window,
            changes: watch::Sender::new(()),
        }
    }

    pub(super) fn get(&self, store: StoreId) -> Option<Arc<Session>> {
        self.read().links.get(&store).cloned()
    }

    pub(super) fn peers(&self) -> Vec<Peer> {
        self.read().links.values().map(|session| session.peer.clone()).collect()
    }

    /// Waits until a store has a link.
    pub(super) async fn wait(&self, store: StoreId) -> Arc<Session> {
        let mut changes = self.changes.subscribe();
        loop {
            if let Some(session) = self.get(store) {
                return session;
            }
            // The sender lives as long as `self`.
            let _ = changes.changed().await;
        }
    }

    /// Makes a connection the link of its store and posts `Up`, after `Down` for
    /// the one it replaces. Only the arbiter turns duplicates away. `linked`: the
    /// peer said that it still holds a link to this process.
    pub(super) fn install(
        &self,
        peer: Peer,
        connection: Connection,
        arbiter: bool,
        linked: bool,
    ) -> Result<(Arc<Session>, [Drain; 3]), NotInstalled> {
        let mut table = self.write();
        let existing = table.links.get(&peer.store).cloned();
        let mut ended = None;
        if let Some(existing) = &existing {
            let standing = Standing {
                boot: existing.peer.boot,
                incarnation: existing.peer.incarnation,
                wanted: linked || existing.since.elapsed() < self.window,
                open: existing.connection.close_reason().is_none(),
            };
            ended = Some(standing.judge(&peer, arbiter)?);
        }
        let slot = Arc::clone(&self.slots).try_acquire_owned().map_err(|_| NotInstalled::Full)?;
        if let (Some(existing), Some(reason)) = (existing, ended) {
            self.finish(&existing, reason);
        }
        table.last_number += 1;
        let lanes = Lane::ALL.map(lane::queue);
        let [(raft, a), (control, b), (bulk, c)] = lanes;
        let session = Arc::new(Session {
            number: table.last_number,
            peer: peer.clone(),
            connection,
            queues: [raft, control, bulk],
            since: Instant::now(),
            slot: std::sync::Mutex::new(Some(slot)),
        });
        table.links.insert(peer.store, Arc::clone(&session));
        self.outbox.post(LinkEvent::Up { peer }, session.number, None);
        drop(table);
        self.changes.send_replace(());
        Ok((session, [a, b, c]))
    }

    /// Ends a link, unless it has been replaced already.
    pub(super) fn remove(&self, session: &Session, reason: DownReason) {
        let mut table = self.write();
        let current = table.links.get(&session.peer.store);
        if current.is_some_and(|current| current.number == session.number) {
            table.links.remove(&session.peer.store);
            self.finish(session, reason);
        }
    }

    /// Ends the link to a process that is known to be dead.
    pub(super) fn died(&self, store: StoreId, boot: u64) {
        if let Some(session) = self.get(store).filter(|session| session.peer.boot == boot) {
            self.remove(&session, DownReason::Died);
        }
    }

    /// Posts `Down` and closes. The table is locked, so events keep their order.
    fn finish(&self, session: &Session, reason: DownReason) {
        for lane in Lane::ALL {
            session.queue(lane).close();
        }
        let text = reason.to_string();
        let code = match reason {
            DownReason::Replaced | DownReason::Restarted => Code::Replaced,
            DownReason::Protocol(_) => Code::Protocol,
            _ => Code::Done,
        };
        code.close(&session.connection, &text);
        let slot = session.slot.lock().unwrap_or_else(PoisonError::into_inner).take();
        let event = LinkEvent::Down { peer: session.peer.clone(), reason };
        self.outbox.post(event, session.number, slot);
    }

    fn read(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Table> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The link that a store has when a new connection of that store comes up.
struct Standing {
    boot: u64,
    incarnation: Incarnation,
    /// The peer still holds it, or it is so young that both just dialled.
    wanted: bool,
    open: bool,
}

impl Standing {
    /// Whether the newcomer takes over, and what then ended the standing link.
    fn judge(&self, newcomer: &Peer, arbiter: bool) -> Result<DownReason, NotInstalled> {
        if newcomer.boot != self.boot {
            let numbered = newcomer.incarnation.0 != 0;
            if numbered && newcomer.incarnation < self.incarnation {
                return Err(NotInstalled::Stale(format!(
                    "incarnation {} of node {} is over, {} is running",
                    newcomer.incarnation, newcomer.node, self.incarnation
                )));
            }
            return Ok(DownReason::Restarted);
        }
        // A peer that dials without holding the standing link has lost it, unless
        // both dialled at the same time.
        if arbiter && self.open && self.wanted {
            return Err(NotInstalled::Duplicate);
        }
        Ok(DownReason::Replaced)
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use job::NodeId;
    use uuid::Uuid;

    use super::*;

    #[test]
    fn one_link_per_store() {
        use DownReason::{Replaced, Restarted};
        // boot and incarnation of the standing link and of the newcomer
        check((1, 5), (1, 5), "arbiter open wanted", Err("duplicate"));
        check((1, 5), (1, 5), "follower open wanted", Ok(Replaced));
        check((1, 5), (1, 5), "arbiter open", Ok(Replaced));
        check((1, 5), (1, 5), "arbiter wanted", Ok(Replaced));
        check((1, 0), (2, 0), "arbiter open wanted", Ok(Restarted));
        check((1, 5), (2, 6), "arbiter open wanted", Ok(Restarted));
        check((1, 5), (2, 0), "arbiter open wanted", Ok(Restarted));
        check((1, 5), (2, 4), "arbiter open wanted", Err("stale"));
        check((1, 5), (2, 4), "follower", Err("stale"));
    }

    #[track_caller]
    fn check(
        standing: (u64, u64),
        newcomer: (u64, u64),
        state: &str,
        expected: Result<DownReason, &str>,
    ) {
        let standing = Standing {
            boot: standing.0,
            incarnation: Incarnation(standing.1),
            wanted: state.contains("wanted"),
            open: state.contains("open"),
        };
        let peer = Peer {
            node: NodeId::new("a").expect("a name"),
            store: StoreId(Uuid::nil()),
            incarnation: Incarnation(newcomer.1),
            boot: newcomer.0,
            addr: SocketAddr::from((Ipv4Addr::LOCALHOST, 1)),
            opaque: bytes::Bytes::new(),
        };
        let got = standing.judge(&peer, state.contains("arbiter")).map_err(|error| match error {
            NotInstalled::Duplicate => "duplicate",
            NotInstalled::Stale(_) => "stale",
            NotInstalled::Full => "full",
        });
        assert_eq!(got, expected);
    }
}
