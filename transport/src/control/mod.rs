//! Control links between the agents of a job: QUIC with mutual TLS.
//!
//! Start with [`Control`]: it binds one UDP port, joins ([`Control::join`]),
//! dials ([`Control::connect`]), sends ([`Control::send`]) and reports everything
//! that happens on one queue ([`LinkEvents`]).
//!
//! *Invariants.* A link is up only when both sides hold a certificate of the
//! job's authority and their hellos fit it (SEC-1). There is at most one link per
//! store, keyed by identity, never by address (ID-2). Bytes from anybody else are
//! bounded and reach no decoder. No lane waits for another: beats are not
//! delayed by bulk. A death is called certain only on the kernel's word (LS-2,
//! [`LinkEvent::Reset`]).
//!
//! *Absent on purpose.* Nothing here dials again, decides who is a member, or
//! looks into a frame. Delivery is not promised: a link that ends takes its
//! queues along, and what must survive that belongs into the replicated log.

mod certs;
mod close;
mod endpoint;
mod event;
mod hello;
mod identity;
mod join;
mod lane;
mod link;
mod liveness;
mod sessions;
mod tls;
mod token;
mod turned;

#[cfg(test)]
mod tests;

pub use certs::{Authority, CertError, Fingerprint, Issued, NodeKey, Subject};
pub use endpoint::{BindError, Control, Options, PeerCheck, SendError};
pub use event::{DownReason, LinkEvent, LinkEvents, Peer};
pub use hello::{MAX_OPAQUE, PROTOCOL};
pub use identity::Identity;
pub use join::{JoinAsk, JoinError, JoinGate, JoinRequest, Joined, MAX_REQUEST, MAX_WELCOME};
pub use lane::Lane;
pub use link::LinkError;
pub use token::{JoinToken, MIN_SECRET, TokenError};
pub use turned::TurnedAway;
