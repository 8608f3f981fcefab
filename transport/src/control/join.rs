//! How a newcomer gets its certificate (CG). It has the token and an address,
//! nothing else. Both sides prove that they know the secret, bound to this very
//! TLS channel by its exporter: whoever sits in between has two channels and can
//! forward neither proof. With a pin in the token the server's certificate is
//! checked first.
//!
//! Request: length (u32), protocol version (u16), proof (32 bytes), body; in all
//! at most [`MAX_REQUEST`]. Answer: length (u32), proof, body; then the welcome,
//! whose length the body gives. No body is decoded before its proof was checked.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use job::{NodeId, StoreId, codec};
use quinn::{Connection, ConnectionError, SendStream};
use serde::{Deserialize, Serialize};
use tokio::{
    sync::{Semaphore, mpsc, oneshot},
    time::timeout,
};
use tracing::{debug, info, warn};

use super::{
    certs::{Authority, CertError, Fingerprint, NodeKey},
    close::{self, Code, Fault, harmless, readable},
    endpoint::Inner,
    hello::{other_version, read},
    identity::Identity,
    tls,
    token::JoinToken,
};

/// The largest request, in bytes.
pub const MAX_REQUEST: usize = 4 << 10;
/// The largest welcome, in bytes.
pub const MAX_WELCOME: usize = 16 << 20;
const MAX_ANSWER: usize = 16 << 10;
const CONCURRENT: usize = 8;
const PER_SECOND: f64 = 20.0;
/// Admission is a command of the group, which may just be electing a leader.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
const WELCOME_LIMIT: Duration = Duration::from_secs(60);

/// What lets newcomers in.
#[derive(Clone)]
pub struct JoinGate {
    /// What they have to know.
    pub token: JoinToken,
    /// What signs their certificates.
    pub authority: Arc<Authority>,
    /// Who decides about each of them. A full queue reads as "busy".
    pub asks: mpsc::Sender<JoinAsk>,
}

/// One newcomer that knows the token, waiting for a decision.
#[derive(Debug)]
pub struct JoinAsk {
    /// Who asks.
    pub request: JoinRequest,
    /// The welcome (at most 16 MiB), or why not: a text for the user. Dropping it
    /// reads as "busy".
    pub reply: oneshot::Sender<Result<Vec<u8>, String>>,
}

/// Who asks to join.
#[derive(Clone, Debug)]
pub struct JoinRequest {
    /// The name it wants. Whether it is free is the group's to know.
    pub node: NodeId,
    /// Its store.
    pub store: StoreId,
    /// Where it asks from.
    pub addr: SocketAddr,
    /// What its agent has to say.
    pub opaque: Vec<u8>,
}

/// What a newcomer gets.
#[derive(Debug)]
pub struct Joined {
    /// For [`super::Control::set_identity`] and for [`Identity::save`].
    pub identity: Identity,
    /// What the group's agent has to say.
    pub welcome: Vec<u8>,
}

/// Why joining failed.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// No connection came about, or it ended early.
    #[error("cannot reach {addr}: {reason}")]
    Unreachable {
        /// The dialled address.
        addr: SocketAddr,
        /// Why.
        reason: String,
    },
    /// The authority is not the one whose fingerprint the token carries.
    #[error(
        "{addr} does not belong to the job that the join token is for: {reason}; check the \
         address and the token"
    )]
    WrongPin {
        /// The dialled address.
        addr: SocketAddr,
        /// What the certificate check said.
        reason: String,
    },
    /// The secrets differ.
    #[error("{addr} refused the join token: copy the token of the job that runs there")]
    WrongToken {
        /// The dialled address.
        addr: SocketAddr,
    },
    /// The server does not know the secret.
    #[error("{0} could not prove that it knows the join token: somebody else answers there")]
    Unproven(SocketAddr),
    /// A member that may not let anybody in, or not now: try again or elsewhere.
    #[error("{addr} cannot admit nodes now: {reason}")]
    Busy {
        /// The dialled address.
        addr: SocketAddr,
        /// Its reason.
        reason: String,
    },
    /// The job does not want this node.
    #[error("{addr} refused this node: {reason}")]
    Refused {
        /// The dialled address.
        addr: SocketAddr,
        /// Its reason.
        reason: String,
    },
    /// The request does not fit.
    #[error("a join request of {0} bytes is over the limit of {MAX_REQUEST}")]
    RequestTooLarge(usize),
    /// No answer in time.
    #[error("{addr} did not let this node in within {limit:?}")]
    Timeout {
        /// The dialled address.
        addr: SocketAddr,
        /// How long was waited.
        limit: Duration,
    },
    /// The answer breaks the protocol.
    #[error("{addr} answered against the protocol: {reason}")]
    Protocol {
        /// The dialled address.
        addr: SocketAddr,
        /// How.
        reason: String,
    },
    /// A certificate that cannot be made or does not fit.
    #[error(transparent)]
    Certificate(#[from] CertError),
}

#[derive(Serialize, Deserialize)]
struct Request {
    csr: Vec<u8>,
    opaque: Vec<u8>,
}

#[derive(Serialize, Deserialize)]
enum Answer {
    Admitted { certificate: Vec<u8>, authority: Vec<u8>, welcome: u32 },
    Refused(String),
}

const JOIN: &str = "join";
const ACCEPT: &str = "accept";
const PROOF: usize = 32;

/// The newcomer's side.
pub(super) async fn join(
    inner: &Inner,
    addr: SocketAddr,
    token: &JoinToken,
    (node, store): (NodeId, StoreId),
    opaque: Vec<u8>,
    limit: Duration,
) -> Result<Joined, JoinError> {
    let key = NodeKey::generate(node, store)?;
    let body = codec::encode(&Request { csr: key.request()?, opaque });
    let size = 4 + 2 + PROOF + body.len();
    if size > MAX_REQUEST {
        return Err(JoinError::RequestTooLarge(size));
    }
    let config = tls::stranger_client(token.pin(), tls::ALPN_JOIN, &inner.options)?;
    let connecting = inner
        .endpoint
        .connect_with(config, addr, tls::SERVER_NAME)
        .map_err(|error| JoinError::Unreachable { addr, reason: error.to_string() })?;
    let work = async {
        let connection = connecting.await.map_err(|error| ended(addr, token, &error))?;
        let outcome = ask(inner.protocol, &connection, addr, token, key, &body).await;
        Code::Done.close(&connection, "joined");
        outcome
    };
    timeout(limit, work).await.unwrap_or(Err(JoinError::Timeout { addr, limit }))
}

async fn ask(
    protocol: u16,
    connection: &Connection,
    addr: SocketAddr,
    token: &JoinToken,
    key: NodeKey,
    body: &[u8],
) -> Result<Joined, JoinError> {
    let fault = |fault| match fault {
        Fault::Ended(error) => ended(addr, token, &error),
        Fault::Protocol(reason) => JoinError::Protocol { addr, reason },
    };
    let broken = |reason: String| JoinError::Protocol { addr, reason };
    let exporter = exporter(connection).map_err(broken)?;
    let proof = token.proof(JOIN, &exporter, body);
    let mut request = ((2 + PROOF + body.len()) as u32).to_le_bytes().to_vec();
    request.extend(protocol.to_le_bytes());
    request.extend(proof);
    request.extend(body);
    let (mut send, mut receive) =
        connection.open_bi().await.map_err(|error| ended(addr, token, &error))?;
    send.write_all(&request).await.map_err(close::written).map_err(fault)?;

    let mut length = [0; 4];
    read(&mut receive, &mut length).await.map_err(fault)?;
    let length = u32::from_le_bytes(length) as usize;
    if !(PROOF..=MAX_ANSWER).contains(&length) {
        return Err(broken(format!("an answer of {length} bytes")));
    }
    let mut answer = vec![0; length];
    read(&mut receive, &mut answer).await.map_err(fault)?;
    let (proof, body) = answer.split_at(PROOF);
    if !token.proves(proof, ACCEPT, &exporter, body) {
        return Err(JoinError::Unproven(addr));
    }
    match codec::decode(body).map_err(|error| broken(error.to_string()))? {
        Answer::Refused(reason) => Err(JoinError::Refused { addr, reason }),
        Answer::Admitted { certificate, authority, welcome } => {
            let shown = Fingerprint::of(&authority);
            if token.pin().is_some_and(|pin| pin != shown) {
                let reason = format!("the fingerprint of its authority is {shown}");
                return Err(JoinError::WrongPin { addr, reason });
            }
            let identity = Identity::new(key, &certificate, &authority)?;
            let size = welcome as usize;
            if size > MAX_WELCOME {
                return Err(broken(format!("a welcome of {size} bytes")));
            }
            let mut welcome = vec![0; size];
            read(&mut receive, &mut welcome).await.map_err(fault)?;
            Ok(Joined { identity, welcome })
        }
    }
}

/// The gate of an endpoint: what is asked for, and how often.
pub(super) struct Gate {
    gate: Mutex<Option<JoinGate>>,
    slots: Semaphore,
    throttle: Mutex<Throttle>,
}

impl Default for Gate {
    fn default() -> Self {
        Self {
            gate: Mutex::default(),
            slots: Semaphore::new(CONCURRENT),
            throttle: Mutex::new(Throttle { left: PER_SECOND, at: Instant::now() }),
        }
    }
}

impl Gate {
    pub(super) fn set(&self, gate: Option<JoinGate>) {
        *self.gate.lock().unwrap_or_else(PoisonError::into_inner) = gate;
    }

    fn get(&self) -> Option<JoinGate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn admits(&self) -> bool {
        let mut throttle = self.throttle.lock().unwrap_or_else(PoisonError::into_inner);
        throttle.take(Instant::now())
    }
}

/// A bucket that refills with time: at most [`PER_SECOND`] guesses at the token.
struct Throttle {
    left: f64,
    at: Instant,
}

impl Throttle {
    fn take(&mut self, now: Instant) -> bool {
        let refill = now.saturating_duration_since(self.at).as_secs_f64() * PER_SECOND;
        self.left = (self.left + refill).min(PER_SECOND);
        self.at = now;
        let some = self.left >= 1.0;
        if some {
            self.left -= 1.0;
        }
        some
    }
}

/// The gate's side: one newcomer, from its request to its goodbye.
pub(super) async fn answer(inner: &Inner, connection: &Connection) {
    let addr = connection.remote_address();
    let Some(gate) = inner.gate.get() else {
        return Code::NoGate.close(connection, "it admits no nodes: ask another member");
    };
    let Ok(_slot) = inner.gate.slots.try_acquire() else {
        return Code::Busy.close(connection, "others are joining: try again in a second");
    };
    if !inner.gate.admits() {
        return Code::Busy.close(connection, "too many joins: try again in a second");
    }
    let limit = inner.options.handshake;
    let asked = timeout(limit, receive(inner.protocol, connection, &gate, addr)).await;
    let asked = asked.unwrap_or_else(|_| Err((Code::Refused, "no request in time".into())));
    let (mut send, exporter, csr, request) = match asked {
        Ok(asked) => asked,
        Err((code, reason)) => {
            if code == Code::Token {
                warn!(%addr, "a node with a wrong join token");
            }
            debug!(%addr, reason, "refused to let a node in");
            return code.close(connection, &reason);
        }
    };
    let node = request.node.clone();
    let (answer, welcome) = match decide(&gate, request, &csr).await {
        Ok(Ok(admitted)) => {
            info!(%addr, peer = %node, "a node joins");
            admitted
        }
        Ok(Err(reason)) => (Answer::Refused(reason), Vec::new()),
        Err(reason) => return Code::Busy.close(connection, &reason),
    };
    let body = codec::encode(&answer);
    let mut frame = ((PROOF + body.len()) as u32).to_le_bytes().to_vec();
    frame.extend(gate.token.proof(ACCEPT, &exporter, &body));
    frame.extend(body);
    let deliver = async {
        send.write_all(&frame).await?;
        send.write_all(&welcome).await?;
        Ok::<_, quinn::WriteError>(connection.closed().await)
    };
    // The newcomer closes when it has everything.
    match timeout(WELCOME_LIMIT, deliver).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => debug!(%addr, %error, "a newcomer left before its answer"),
        Err(_) => Code::Busy.close(connection, "the welcome was not taken in time"),
    }
}

type Asked = (SendStream, [u8; 32], Vec<u8>, JoinRequest);

async fn receive(
    protocol: u16,
    connection: &Connection,
    gate: &JoinGate,
    addr: SocketAddr,
) -> Result<Asked, (Code, String)> {
    let fault = |fault| match fault {
        Fault::Ended(error) => (Code::Refused, readable(&error)),
        Fault::Protocol(reason) => (Code::Refused, reason),
    };
    let refuse = |reason: String| (Code::Refused, reason);
    let (send, mut receive) =
        connection.accept_bi().await.map_err(|error| refuse(readable(&error)))?;
    let mut head = [0; 6];
    read(&mut receive, &mut head).await.map_err(fault)?;
    let [a, b, c, d, low, high] = head;
    let theirs = u16::from_le_bytes([low, high]);
    if theirs != protocol {
        return Err(refuse(other_version(protocol, theirs)));
    }
    let length = u32::from_le_bytes([a, b, c, d]) as usize;
    if !(2 + PROOF..=MAX_REQUEST - 4).contains(&length) {
        return Err(refuse(format!("a request of {length} bytes, the limit is {MAX_REQUEST}")));
    }
    let mut rest = vec![0; length - 2];
    read(&mut receive, &mut rest).await.map_err(fault)?;
    let (proof, body) = rest.split_at(PROOF);
    let exporter = exporter(connection).map_err(refuse)?;
    if !gate.token.proves(proof, JOIN, &exporter, body) {
        return Err((Code::Token, "the join token is wrong".into()));
    }
    let Request { csr, opaque } = codec::decode(body).map_err(|error| refuse(error.to_string()))?;
    let (node, store) = Authority::requester(&csr).map_err(|error| refuse(error.to_string()))?;
    Ok((send, exporter, csr, JoinRequest { node, store, addr, opaque }))
}

/// Asks the agent, then signs. `Err` is for "not now", `Ok(Err)` for "never".
async fn decide(
    gate: &JoinGate,
    request: JoinRequest,
    csr: &[u8],
) -> Result<Result<(Answer, Vec<u8>), String>, String> {
    let (reply, decision) = oneshot::channel();
    let busy = |_| String::from("its agent is busy: try again in a second");
    gate.asks.try_send(JoinAsk { request, reply }).map_err(|_| busy(()))?;
    let welcome = match timeout(ANSWER_LIMIT, decision).await {
        Ok(Ok(Ok(welcome))) => welcome,
        Ok(Ok(Err(reason))) => return Ok(Err(harmless(reason.as_bytes()))),
        Ok(Err(_)) => return Err(busy(())),
        Err(_) => return Err("the group did not decide in time: try again".into()),
    };
    if welcome.len() > MAX_WELCOME {
        return Err(format!("its welcome has {} bytes, the limit is {MAX_WELCOME}", welcome.len()));
    }
    let issued = match gate.authority.issue(csr) {
        Ok(issued) => issued,
        Err(error) => return Ok(Err(error.to_string())),
    };
    let answer = Answer::Admitted {
        certificate: issued.certificate,
        authority: issued.authority,
        welcome: welcome.len() as u32,
    };
    Ok(Ok((answer, welcome)))
}

/// A value that both ends of this TLS channel share and nobody else (RFC 8446
/// section 7.5): proofs over it cannot be forwarded.
fn exporter(connection: &Connection) -> Result<[u8; 32], String> {
    let mut value = [0; 32];
    connection
        .export_keying_material(&mut value, b"EXPORTER-elastic-join", b"")
        .map_err(|error| format!("no channel binding: {error:?}"))?;
    Ok(value)
}

fn ended(addr: SocketAddr, token: &JoinToken, error: &ConnectionError) -> JoinError {
    let reason = readable(error);
    match error {
        _ if Code::Token.is(error) => JoinError::WrongToken { addr },
        _ if Code::Busy.is(error) || Code::NoGate.is(error) => JoinError::Busy { addr, reason },
        ConnectionError::ApplicationClosed(_) | ConnectionError::ConnectionClosed(_) => {
            JoinError::Refused { addr, reason }
        }
        ConnectionError::TransportError(_) if token.pin().is_some() => {
            JoinError::WrongPin { addr, reason }
        }
        _ => JoinError::Unreachable { addr, reason },
    }
}
