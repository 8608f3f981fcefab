//! What links report, and the one queue it arrives on.
//!
//! The queue is bounded where the bytes enter: every inbound stream has a byte
//! budget and every link a slot, and both are given back when the event is taken
//! out. A peer that floods one lane thus stalls that lane of its own link, and
//! nothing else. Beats and deaths overtake Raft, Raft overtakes bulk.

use std::{collections::HashMap, fmt, net::SocketAddr};

use bytes::Bytes;
use job::{Incarnation, NodeId, StoreId};
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::lane::Lane;

/// The process at the other end of a link, as its certificate and hello said.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Peer {
    /// Its node.
    pub node: NodeId,
    /// Its store: the key of its link.
    pub store: StoreId,
    /// Its incarnation (ID-2), zero before it was admitted.
    pub incarnation: Incarnation,
    /// Drawn at random when its process started: tells two processes of one store
    /// apart before the group has numbered them.
    pub boot: u64,
    /// Where it listens: what it advertises, else where its packets come from.
    pub addr: SocketAddr,
    /// What its agent put into the hello.
    pub opaque: Bytes,
}

/// Something happened on a link. Between `Up` and `Down` of a store, frames of
/// one lane arrive in the order sent; lanes overtake each other.
pub enum LinkEvent {
    /// A link is up, in both directions.
    Up {
        /// The other end.
        peer: Peer,
    },
    /// A frame arrived.
    Frame {
        /// The sender.
        from: StoreId,
        /// The lane it came on.
        lane: Lane,
        /// The payload.
        bytes: Bytes,
    },
    /// A link ended. Frames not yet delivered are gone.
    Down {
        /// The other end.
        peer: Peer,
        /// Why.
        reason: DownReason,
    },
    /// A process is certainly dead (LS-2): its connection ended and its own
    /// address refuses new ones.
    Reset {
        /// Its store.
        peer: StoreId,
        /// Which process of that store.
        boot: u64,
    },
    /// A peer with a certificate of this job was turned away.
    Refused {
        /// Where it dialled from.
        addr: SocketAddr,
        /// Why; the peer was told the same.
        reason: String,
    },
}

/// Frames show their length: their bytes are no business of a log.
impl fmt::Debug for LinkEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Up { peer } => write!(f, "Up({peer:?})"),
            Self::Frame { from, lane, bytes } => {
                write!(f, "Frame({} bytes from {from} on {})", bytes.len(), lane.name())
            }
            Self::Down { peer, reason } => write!(f, "Down({peer:?}: {reason})"),
            Self::Reset { peer, boot } => write!(f, "Reset({peer}, boot {boot:x})"),
            Self::Refused { addr, reason } => write!(f, "Refused({addr}: {reason})"),
        }
    }
}

/// Why a link ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DownReason {
    /// The peer closed it and said why.
    Closed(String),
    /// Nothing was heard for the idle limit.
    Silent,
    /// The peer's process died ([`LinkEvent::Reset`]).
    Died,
    /// A new process of the same store took over: the old one is gone.
    Restarted,
    /// The same process dialled again: it had lost the old connection.
    Replaced,
    /// The peer broke the protocol.
    Protocol(String),
    /// The connection failed.
    Lost(String),
    /// This side closed.
    Shutdown,
}

impl fmt::Display for DownReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed(why) => write!(f, "closed by the peer: {why}"),
            Self::Silent => f.write_str("silent beyond the idle limit"),
            Self::Died => f.write_str("its process died"),
            Self::Restarted => f.write_str("its process was restarted"),
            Self::Replaced => f.write_str("replaced by a newer connection of the same process"),
            Self::Protocol(why) => write!(f, "broke the protocol: {why}"),
            Self::Lost(why) => write!(f, "lost: {why}"),
            Self::Shutdown => f.write_str("closed here"),
        }
    }
}

/// The receiving end of everything that links report.
#[derive(Debug)]
pub struct LinkEvents {
    urgent: mpsc::UnboundedReceiver<Queued>,
    raft: mpsc::UnboundedReceiver<Queued>,
    bulk: mpsc::UnboundedReceiver<Queued>,
    /// The link that is up for each store, as far as the reader has been told.
    current: HashMap<StoreId, u64>,
}

/// The sending end. Unbounded channels, because what is in them is bounded by the
/// permits that travel along.
#[derive(Clone)]
pub(super) struct Outbox {
    urgent: mpsc::UnboundedSender<Queued>,
    raft: mpsc::UnboundedSender<Queued>,
    bulk: mpsc::UnboundedSender<Queued>,
}

#[derive(Debug)]
struct Queued {
    event: LinkEvent,
    link: u64,
    /// Given back when the reader takes the event.
    _permit: Option<OwnedSemaphorePermit>,
}

pub(super) fn channel() -> (Outbox, LinkEvents) {
    let (urgent, urgent_end) = mpsc::unbounded_channel();
    let (raft, raft_end) = mpsc::unbounded_channel();
    let (bulk, bulk_end) = mpsc::unbounded_channel();
    let events =
        LinkEvents { urgent: urgent_end, raft: raft_end, bulk: bulk_end, current: HashMap::new() };
    (Outbox { urgent, raft, bulk }, events)
}

impl LinkEvents {
    /// The next event; `None` once the control endpoint is gone. Cancel-safe.
    pub async fn recv(&mut self) -> Option<LinkEvent> {
        loop {
            let queued = tokio::select! {
                biased;
                queued = self.urgent.recv() => queued,
                Some(queued) = self.raft.recv() => Some(queued),
                Some(queued) = self.bulk.recv() => Some(queued),
            }?;
            if self.admit(&queued) {
                return Some(queued.event);
            }
        }
    }

    /// A frame that a lifecycle event overtook belongs to no link any more.
    fn admit(&mut self, queued: &Queued) -> bool {
        match &queued.event {
            LinkEvent::Up { peer } => {
                self.current.insert(peer.store, queued.link);
            }
            LinkEvent::Down { peer, .. } => {
                self.current.remove(&peer.store);
            }
            LinkEvent::Frame { from, .. } => return self.current.get(from) == Some(&queued.link),
            LinkEvent::Reset { .. } | LinkEvent::Refused { .. } => {}
        }
        true
    }
}

impl Outbox {
    /// Queues an event of link number `link`. A reader that is gone is no error:
    /// the endpoint is about to go too.
    pub(super) fn post(&self, event: LinkEvent, link: u64, permit: Option<OwnedSemaphorePermit>) {
        let queue = match &event {
            LinkEvent::Frame { lane: Lane::Raft, .. } => &self.raft,
            LinkEvent::Frame { lane: Lane::Bulk, .. } => &self.bulk,
            _ => &self.urgent,
        };
        let _ = queue.send(Queued { event, link, _permit: permit });
    }
}
