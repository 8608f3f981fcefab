//! Several endpoints in one process, on loopback.

mod certs;
mod join;
mod lanes;
mod links;
mod liveness;

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use ::job::{JobId, NodeId, StoreId};
use tokio::time::timeout;
use uuid::Uuid;

use super::{
    Authority, BindError, Control, DownReason, Identity, Lane, LinkError, LinkEvent, LinkEvents,
    Options, Peer,
};

/// Far longer than anything here takes on a busy machine.
const SOON: Duration = Duration::from_secs(20);
/// Long enough for an event that should not come.
const A_WHILE: Duration = Duration::from_millis(300);

struct Node {
    control: Control,
    events: LinkEvents,
    store: StoreId,
}

fn authority() -> Arc<Authority> {
    Arc::new(Authority::generate(job(1)).expect("an authority"))
}

fn job(n: u128) -> JobId {
    JobId(Uuid::from_u128(n))
}

/// Stores are ordered like their numbers: the lower one is the arbiter.
fn store(n: u128) -> StoreId {
    StoreId(Uuid::from_u128(n))
}

fn name(n: u128) -> NodeId {
    NodeId::new(format!("node-{n}")).expect("a name")
}

fn loopback() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 0))
}

impl Node {
    fn start(authority: &Authority, n: u128) -> Self {
        Self::start_with(authority, n, Options::default())
    }

    fn start_with(authority: &Authority, n: u128, options: Options) -> Self {
        let identity = Identity::found(authority, name(n), store(n)).expect("an identity");
        Self::bind(identity, options)
    }

    fn bind(identity: Identity, options: Options) -> Self {
        let store = identity.store();
        let (control, events) =
            Control::bind(loopback(), Some(identity), options).expect("an endpoint");
        Self { control, events, store }
    }

    fn addr(&self) -> SocketAddr {
        self.control.local_addr().expect("an address")
    }

    async fn dial(&self, other: &Self) -> Result<Peer, LinkError> {
        self.control.connect(other.addr(), None).await
    }

    async fn next(&mut self) -> LinkEvent {
        let event = timeout(SOON, self.events.recv()).await.expect("an event in time");
        event.expect("the endpoint lives")
    }

    async fn up(&mut self) -> Peer {
        match self.next().await {
            LinkEvent::Up { peer } => peer,
            other => panic!("Up was due, not {other:?}"),
        }
    }

    async fn down(&mut self) -> DownReason {
        loop {
            match self.next().await {
                LinkEvent::Down { reason, .. } => return reason,
                LinkEvent::Reset { .. } | LinkEvent::Frame { .. } => {}
                other => panic!("Down was due, not {other:?}"),
            }
        }
    }

    async fn frame(&mut self) -> (Lane, bytes::Bytes) {
        match self.next().await {
            LinkEvent::Frame { lane, bytes, .. } => (lane, bytes),
            other => panic!("a frame was due, not {other:?}"),
        }
    }

    async fn silence(&mut self) {
        if let Ok(event) = timeout(A_WHILE, self.events.recv()).await {
            panic!("nothing was due, not {event:?}");
        }
    }
}

/// Two nodes with a link.
async fn pair(authority: &Authority) -> (Node, Node) {
    let (mut a, mut b) = (Node::start(authority, 1), Node::start(authority, 2));
    a.dial(&b).await.expect("a link");
    assert_eq!(a.up().await.store, b.store);
    assert_eq!(b.up().await.store, a.store);
    (a, b)
}

#[tokio::test]
async fn a_taken_port_is_named() {
    let authority = authority();
    let first = Node::start(&authority, 1);
    let error = Control::bind(first.addr(), None, Options::default()).expect_err("taken");
    assert!(matches!(error, BindError::Taken(_)));
    let expected =
        format!("port {} on 127.0.0.1 is taken: choose another with --listen", first.addr().port());
    assert_eq!(error.to_string(), expected);
    let error = Control::bind("192.0.2.1:0".parse().expect("an address"), None, Options::default());
    assert!(matches!(error, Err(BindError::NotOurs(_))));
}
