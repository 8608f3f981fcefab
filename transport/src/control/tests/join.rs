//! The gate: who gets a certificate, and how refusals read.

use tokio::sync::mpsc;

use super::*;
use crate::control::{JoinError, JoinGate, JoinToken, Joined, PROTOCOL, close, tls};

const SECRET: &str = "a secret of the user";

fn token(text: &str) -> JoinToken {
    text.parse().expect("a token")
}

/// A member with an open gate whose agent welcomes everybody but "bad" ones.
fn gate(authority: &Arc<Authority>, welcome: usize) -> Node {
    let node = Node::start(authority, 1);
    let (asks, mut queue) = mpsc::channel(4);
    let gate = JoinGate { tokens: vec![token(SECRET)], authority: Arc::clone(authority), asks };
    node.control.set_gate(Some(gate));
    tokio::spawn(async move {
        while let Some(ask) = queue.recv().await {
            let answer = match ask.request.opaque.as_slice() {
                b"bad" => Err(format!("{} has another configuration", ask.request.node)),
                _ => Ok(vec![5; welcome]),
            };
            // A joiner that left is none of the agent's concern.
            let _ = ask.reply.send(answer);
        }
    });
    node
}

async fn join(addr: SocketAddr, token: &JoinToken, opaque: &str) -> Result<Joined, JoinError> {
    let (control, _events) = Control::bind(loopback(), None, Options::default()).expect("bound");
    control.join(addr, token, name(2), store(2), opaque.into(), SOON).await
}

#[tokio::test]
async fn a_newcomer_joins_and_links() {
    let authority = authority();
    let mut founder = gate(&authority, 3 << 20);
    for pinned in [false, true] {
        let mut token = token(SECRET);
        if pinned {
            token = token.pinned(authority.fingerprint());
        }
        let (control, events) = Control::bind(loopback(), None, Options::default()).expect("bound");
        let mut node = Node { control, events, store: store(2) };
        let joined = node
            .control
            .join(founder.addr(), &token, name(2), store(2), vec![], SOON)
            .await
            .expect("joined");
        assert_eq!(joined.welcome, vec![5; 3 << 20]);
        assert_eq!(joined.identity.job(), job(1));
        node.control.set_identity(joined.identity).expect("usable");
        node.dial(&founder).await.expect("a link");
        assert_eq!(node.up().await.node, name(1));
        assert_eq!(founder.up().await.node, name(2));
        node.control.close(Duration::from_secs(1)).await;
        founder.down().await;
        while timeout(A_WHILE, founder.events.recv()).await.is_ok() {}
    }
}

#[tokio::test]
async fn refusals_read_well() {
    let authority = authority();
    let founder = gate(&authority, 10);
    let other = Authority::generate(job(2)).expect("an authority");
    let good = token(SECRET);
    let wrong = token("another secret of 26 chars");
    let wrong_pin = good.pinned(other.fingerprint());
    check(&founder, &wrong, "", "refused the join token").await;
    check(&founder, &wrong_pin, "", "does not belong to the job").await;
    check(&founder, &good, "bad", "refused this node: node-2 has another configuration").await;
    check(&founder, &good, &"x".repeat(4000), "is over the limit of 4096").await;
    founder.control.set_gate(None);
    check(&founder, &good, "", "cannot admit nodes now: it admits no nodes").await;

    async fn check(founder: &Node, token: &JoinToken, opaque: &str, part: &str) {
        let error = join(founder.addr(), token, opaque).await.expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[tokio::test]
async fn a_rotated_token_opens_a_running_gate() {
    let authority = authority();
    let founder = gate(&authority, 0);
    let (asks, mut queue) = mpsc::channel(1);
    let new = JoinToken::generate(Some(authority.fingerprint())).expect("a token");
    let authority = Arc::clone(&authority);
    founder.control.set_gate(Some(JoinGate { tokens: vec![new.clone()], authority, asks }));
    let old = join(founder.addr(), &token(SECRET), "").await;
    assert!(matches!(old, Err(JoinError::WrongToken { .. })));
    let decide = async {
        let ask = queue.recv().await.expect("an ask");
        assert_eq!((&ask.request.node, ask.request.store), (&name(2), store(2)));
        ask.reply.send(Ok(vec![])).expect("the gate waits");
    };
    let (joined, ()) = tokio::join!(join(founder.addr(), &new, ""), decide);
    joined.expect("the new token is good");
}

#[tokio::test]
async fn another_version_reads_well() {
    let founder = gate(&authority(), 0);
    let (newer, _events) =
        Control::bind_speaking(PROTOCOL + 1, loopback(), None, Options::default()).expect("bound");
    let joined = newer.join(founder.addr(), &token(SECRET), name(2), store(2), vec![], SOON).await;
    let error = joined.expect_err("another version").to_string();
    assert!(error.contains("install the same release of elastic on every node"), "{error}");
}

/// Whoever answers without knowing the secret sees one proof, good on this channel
/// only, and cannot make a newcomer believe its answer.
#[tokio::test]
async fn a_server_that_does_not_know_the_secret_is_not_believed() {
    let identity = Identity::found(&authority(), name(1), store(1)).expect("an identity");
    let config = tls::server(&identity, &Options::default()).expect("TLS");
    let impostor = quinn::Endpoint::server(config, loopback()).expect("bound");
    let addr = impostor.local_addr().expect("an address");
    let pretend = async {
        let connection = impostor.accept().await.expect("dialled").await.expect("connected");
        let (mut send, _receive) = connection.accept_bi().await.expect("a request");
        let mut answer = 40_u32.to_le_bytes().to_vec();
        answer.extend([7; 40]);
        send.write_all(&answer).await.expect("sent");
        connection.closed().await
    };
    let pinless = token(SECRET);
    let (joined, _) = tokio::join!(join(addr, &pinless, ""), pretend);
    assert!(matches!(joined, Err(JoinError::Unproven(_))), "{joined:?}");
}

#[tokio::test]
async fn a_busy_agent_and_a_flood_are_told_to_wait() {
    let authority = authority();
    let founder = Node::start(&authority, 1);
    let (asks, queue) = mpsc::channel(1);
    founder.control.set_gate(Some(JoinGate { tokens: vec![token(SECRET)], authority, asks }));
    drop(queue);
    let wrong = token("another secret of 26 chars");
    let (mut guesses, mut busy) = (0, 0);
    for _ in 0..60 {
        match join(founder.addr(), &wrong, "").await.expect_err("refused") {
            JoinError::WrongToken { .. } => guesses += 1,
            JoinError::Busy { .. } => busy += 1,
            other => panic!("{other}"),
        }
    }
    assert!(guesses >= 20 && busy >= 1, "{guesses} guesses, {busy} turned away");
    tokio::time::sleep(Duration::from_millis(200)).await;
    let error = join(founder.addr(), &token(SECRET), "").await.expect_err("busy").to_string();
    assert!(error.contains("its agent is busy"), "{error}");
}

/// Requests that break the protocol reach no decoder.
#[tokio::test]
async fn garbage_requests_are_refused() {
    let founder = gate(&authority(), 0);
    let long = u32::MAX.to_le_bytes();
    check(&founder, &[&long[..], &[1, 0]].concat(), "the limit is 4096").await;
    check(&founder, &[3, 0, 0, 0, 1, 0, 9], "a request of 3 bytes").await;
    check(&founder, &[&[44, 0, 0, 0, 1, 0][..], &[7; 42]].concat(), "token is wrong").await;
    check(&founder, &[9, 0, 0, 0, 77, 0], "the other 77").await;
    join(founder.addr(), &token(SECRET), "").await.expect("the gate still works");

    async fn check(founder: &Node, request: &[u8], part: &str) {
        let (control, _events) =
            Control::bind(loopback(), None, Options::default()).expect("bound");
        let config = tls::stranger_client(None, tls::ALPN_JOIN, &Options::default()).expect("TLS");
        let endpoint = &control.inner.endpoint;
        let connecting = endpoint.connect_with(config, founder.addr(), "x").expect("dialled");
        let connection = connecting.await.expect("connected");
        let (mut send, _receive) = connection.open_bi().await.expect("a stream");
        send.write_all(request).await.expect("sent");
        let ended = timeout(SOON, connection.closed()).await.expect("refused");
        assert!(close::readable(&ended).contains(part), "{ended}");
    }
}
