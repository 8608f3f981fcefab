//! From a connection to a link, and the life of a link.
//!
//! The dialler sends its hello, the acceptor answers with its own; where the
//! dialler is the arbiter of the pair, one more byte says that the connection
//! counts (see [`super::sessions`]).

use std::{
    net::SocketAddr,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use bytes::Bytes;
use job::StoreId;
use quinn::{ConnectError, Connection, ConnectionError};
use tokio::{sync::OwnedSemaphorePermit, task::JoinSet, time::timeout};
use tracing::debug;

use super::{
    certs::{CertError, Subject},
    close::{self, Code, Fault, readable},
    endpoint::{Inner, Local},
    event::{DownReason, LinkEvent, Peer},
    hello::{self, Hello},
    lane::{self, Drain, Lane},
    sessions::{NotInstalled, Session},
    tls,
    turned::Reason,
};

/// Why dialling did not lead to a link.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// There is no certificate yet.
    #[error("this node has no identity yet: it has to join a job or found one first")]
    NoIdentity,
    /// The endpoint was closed.
    #[error("the control endpoint is closed")]
    Closed,
    /// Nobody answered, or no connection came about.
    #[error("cannot reach {addr}: {reason}")]
    Unreachable {
        /// The dialled address.
        addr: SocketAddr,
        /// Why.
        reason: String,
    },
    /// The other side turned this node away.
    #[error("{addr} refused the link: {reason}")]
    Refused {
        /// The dialled address.
        addr: SocketAddr,
        /// What it said.
        reason: String,
    },
    /// This side turned the other away.
    #[error("{addr} does not fit: {reason}")]
    Mismatch {
        /// The dialled address.
        addr: SocketAddr,
        /// What does not fit; the other side was told the same.
        reason: String,
    },
}

/// The byte by which a dialling arbiter makes the connection count.
const GO: u8 = 1;

/// Dials a member. When both dialled at once this may be the other's connection.
pub(super) async fn dial(
    inner: &Arc<Inner>,
    addr: SocketAddr,
    expect: Option<StoreId>,
) -> Result<Peer, LinkError> {
    if let Some(session) = expect.and_then(|store| inner.sessions.get(store)) {
        return Ok(session.peer.clone());
    }
    let local = inner.local().ok_or(LinkError::NoIdentity)?;
    let limit = inner.options.handshake;
    let unreachable = |reason: String| LinkError::Unreachable { addr, reason };
    let connecting = inner
        .endpoint
        .connect_with(local.client.clone(), addr, tls::SERVER_NAME)
        .map_err(|error| match error {
            ConnectError::EndpointStopping => LinkError::Closed,
            error => unreachable(error.to_string()),
        })?;
    let work = async {
        let connection = connecting.await.map_err(|error| dial_error(addr, &error))?;
        dialled(inner, &local, &connection, addr, expect).await
    };
    let outcome = timeout(limit, work).await;
    outcome.unwrap_or_else(|_| Err(unreachable(format!("no link within {limit:?}"))))
}

async fn dialled(
    inner: &Arc<Inner>,
    local: &Local,
    connection: &Connection,
    addr: SocketAddr,
    expect: Option<StoreId>,
) -> Result<Peer, LinkError> {
    let mismatch = |reason: String| {
        Code::Refused.close(connection, &reason);
        LinkError::Mismatch { addr, reason }
    };
    let subject = subject(connection, local).map_err(mismatch)?;
    if let Some(expected) = expect.filter(|expected| *expected != subject.store) {
        return Err(mismatch(format!(
            "store {expected} was expected here, this is node {} with store {}",
            subject.node, subject.store
        )));
    }
    let exchange = async {
        let (mut send, mut receive) = connection.open_bi().await.map_err(Fault::Ended)?;
        hello::send(&mut send, inner.protocol, &inner.hello(local, subject.store)).await?;
        let hello = hello::receive(&mut receive, inner.protocol).await?;
        Ok((send, hello))
    };
    let (mut send, hello) = match exchange.await {
        Ok(done) => done,
        Err(Fault::Ended(error)) if Code::Duplicate.is(&error) => {
            return Ok(inner.sessions.wait(subject.store).await.peer.clone());
        }
        Err(Fault::Ended(error)) => return Err(dial_error(addr, &error)),
        Err(Fault::Protocol(reason)) => return Err(mismatch(reason)),
    };
    let linked = hello.linked == Some(inner.boot);
    let peer = welcome(inner, local, connection, &subject, hello).map_err(mismatch)?;
    let arbiter = local.identity.store() < peer.store;
    match inner.sessions.install(peer.clone(), connection.clone(), arbiter, linked) {
        Ok((session, drains)) => {
            if arbiter
                && let Err(Fault::Ended(error)) =
                    send.write_all(&[GO]).await.map_err(close::written)
            {
                inner.sessions.remove(&session, close::down_reason(&error));
                return Err(dial_error(addr, &error));
            }
            start(inner, session, drains);
            Ok(peer)
        }
        Err(NotInstalled::Duplicate) => {
            Code::Duplicate.close(connection, "there is a link already");
            Ok(inner.sessions.wait(peer.store).await.peer.clone())
        }
        Err(NotInstalled::Stale(reason)) => Err(mismatch(reason)),
        Err(NotInstalled::Full) => Err(mismatch(TOO_MANY.into())),
    }
}

/// Answers a dialler. `permit` bounds how many are being answered; it stays taken
/// until a refusal that is reported has been read.
pub(super) async fn answer(
    inner: &Arc<Inner>,
    connection: &Connection,
    permit: OwnedSemaphorePermit,
) {
    let addr = connection.remote_address();
    let outcome = timeout(inner.options.handshake, answered(inner, connection)).await;
    let outcome = outcome.unwrap_or(Err(Turned::Slow));
    match outcome {
        Ok((session, drains)) => start(inner, session, drains),
        Err(Turned::Slow) => {
            inner.turned.count(Reason::Slow);
            let reason = "no hello in time";
            Code::Refused.close(connection, reason);
            // One of this job that falls silent is worth an event.
            if inner.local().is_some_and(|local| subject(connection, &local).is_ok()) {
                let reason = reason.into();
                inner.outbox.post(LinkEvent::Refused { addr, reason }, 0, Some(permit));
            }
        }
        Err(Turned::Stranger(reason)) => {
            inner.turned.count(Reason::Certificate);
            debug!(%addr, reason, "turned a stranger away");
            Code::Refused.close(connection, &reason);
        }
        Err(Turned::Away(reason)) => {
            inner.turned.count(Reason::Hello);
            debug!(%addr, reason, "refused a link");
            Code::Refused.close(connection, &reason);
            inner.outbox.post(LinkEvent::Refused { addr, reason }, 0, Some(permit));
        }
        Err(Turned::Duplicate) => Code::Duplicate.close(connection, "there is a link already"),
        Err(Turned::Gone(error)) => debug!(%addr, %error, "a dialler left"),
    }
}

enum Turned {
    /// No certificate of this job: worth no event, since anybody can do it.
    Stranger(String),
    Slow,
    Away(String),
    Duplicate,
    Gone(ConnectionError),
}

impl From<Fault> for Turned {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Ended(error) => Self::Gone(error),
            Fault::Protocol(reason) => Self::Away(reason),
        }
    }
}

async fn answered(
    inner: &Arc<Inner>,
    connection: &Connection,
) -> Result<(Arc<Session>, [Drain; 3]), Turned> {
    let local = inner.local().ok_or(Turned::Stranger("it is not ready".into()))?;
    let subject = subject(connection, &local).map_err(Turned::Stranger)?;
    let (mut send, mut receive) = connection.accept_bi().await.map_err(Turned::Gone)?;
    let hello = hello::receive(&mut receive, inner.protocol).await?;
    let linked = hello.linked == Some(inner.boot);
    let own = inner.hello(&local, subject.store);
    let peer = welcome(inner, &local, connection, &subject, hello).map_err(Turned::Away)?;
    let arbiter = local.identity.store() < peer.store;
    let install = || {
        let installed = inner.sessions.install(peer.clone(), connection.clone(), arbiter, linked);
        installed.map_err(|error| match error {
            NotInstalled::Duplicate => Turned::Duplicate,
            NotInstalled::Stale(reason) => Turned::Away(reason),
            NotInstalled::Full => Turned::Away(TOO_MANY.into()),
        })
    };
    if arbiter {
        let installed = install()?;
        // Should this fail, the link's own task sees the connection's end.
        if let Err(error) = hello::send(&mut send, inner.protocol, &own).await {
            debug!(?error, "a dialler left before its answer");
        }
        return Ok(installed);
    }
    hello::send(&mut send, inner.protocol, &own).await?;
    let mut go = [0];
    hello::read(&mut receive, &mut go).await?;
    if go != [GO] {
        return Err(Turned::Away(format!("byte {} where {GO} was due", go[0])));
    }
    install()
}

const TOO_MANY: &str = "too many links: raise the limit of links, or run fewer nodes";

/// Whom the certificate speaks for. Its signature was verified in the handshake.
fn subject(connection: &Connection, local: &Local) -> Result<Subject, String> {
    let chain = tls::shown(connection).unwrap_or_default();
    let Some(certificate) = chain.first() else {
        return Err("a link needs a certificate of this job: join first".into());
    };
    let subject = Subject::of(certificate).map_err(|error| error.to_string())?;
    let (wanted, found) = (local.identity.job(), subject.job);
    match found == wanted {
        true => Ok(subject),
        false => Err(CertError::OtherJob { wanted, found }.to_string()),
    }
}

/// Checks a hello and makes a peer of it.
fn welcome(
    inner: &Inner,
    local: &Local,
    connection: &Connection,
    subject: &Subject,
    hello: Hello,
) -> Result<Peer, String> {
    hello.check(&inner.hello(local, subject.store), subject)?;
    let remote = connection.remote_address();
    let seen = SocketAddr::new(remote.ip().to_canonical(), remote.port());
    let addr = match hello.listen {
        // It listens on every address: the one we see is one of them.
        Some(listen) if listen.ip().is_unspecified() => SocketAddr::new(seen.ip(), listen.port()),
        Some(listen) => listen,
        None => seen,
    };
    let peer = Peer {
        node: hello.node,
        store: hello.store,
        incarnation: hello.incarnation,
        boot: hello.boot,
        addr,
        opaque: Bytes::from(hello.opaque),
    };
    match &inner.options.check {
        Some(check) => check(&peer).map(|()| peer),
        None => Ok(peer),
    }
}

fn start(inner: &Arc<Inner>, session: Arc<Session>, drains: [Drain; 3]) {
    tls::trust(&session.connection);
    inner.liveness.watch(session.peer.store, session.peer.boot, session.peer.addr);
    let inner = Arc::clone(inner);
    tokio::spawn(async move {
        let reason = live(&inner, &session, drains).await;
        inner.sessions.remove(&session, reason);
    });
}

/// Moves frames until the link ends.
async fn live(inner: &Arc<Inner>, session: &Session, drains: [Drain; 3]) -> DownReason {
    let connection = &session.connection;
    let mut tasks = JoinSet::new();
    for (lane, drain) in Lane::ALL.into_iter().zip(drains) {
        tasks.spawn(lane::write(connection.clone(), lane, drain));
    }
    let taken = Arc::new([const { AtomicBool::new(false) }; 3]);
    loop {
        let fault = tokio::select! {
            biased;
            error = connection.closed() => return close::down_reason(&error),
            stream = connection.accept_uni() => match stream {
                Ok(stream) => {
                    let (store, number) = (session.peer.store, session.number);
                    let (outbox, taken) = (inner.outbox.clone(), Arc::clone(&taken));
                    tasks.spawn(lane::read(stream, store, number, outbox, taken));
                    continue;
                }
                Err(error) => Fault::Ended(error),
            },
            Some(ended) = tasks.join_next() => match ended {
                Ok(fault) => fault,
                Err(error) => Fault::Protocol(error.to_string()),
            },
        };
        return match fault {
            Fault::Ended(error) => close::down_reason(&error),
            Fault::Protocol(text) => DownReason::Protocol(text),
        };
    }
}

fn dial_error(addr: SocketAddr, error: &ConnectionError) -> LinkError {
    let reason = readable(error);
    match error {
        ConnectionError::ApplicationClosed(_) | ConnectionError::ConnectionClosed(_) => {
            LinkError::Refused { addr, reason }
        }
        ConnectionError::TransportError(_) => LinkError::Mismatch { addr, reason },
        ConnectionError::LocallyClosed => LinkError::Closed,
        _ => LinkError::Unreachable { addr, reason },
    }
}

/// How long a handshake may take by default; dials closer together than this
/// count as simultaneous.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(5);
