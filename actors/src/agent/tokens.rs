//! Who may come in: the gate follows the replicated tokens (CG), and people change
//! them through any node.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use job::{
    admission::{FOUNDING, MOST_TOKENS, TokenChange, TokenRecord},
    codec,
    command::Command,
    message::AgentMessage,
    plan::Timestamp,
    state::JobState,
};
use ractor::ActorRef;
use tokio::sync::{mpsc, oneshot};
use transport::control::{Authority, Control, JoinAsk, JoinGate, JoinToken, Lane};

use super::{
    admin::{Response, TokenLine, TokenRequest},
    node_agent::{Message, State},
};
use crate::clock;

/// Keeps an endpoint's gate to the tokens that are valid now.
pub(super) struct Gatekeeper {
    authority: Arc<Authority>,
    asks: mpsc::Sender<JoinAsk>,
    open: Vec<String>,
}

impl Gatekeeper {
    pub(super) fn new(authority: Authority, asks: mpsc::Sender<JoinAsk>) -> Self {
        Self { authority: Arc::new(authority), asks, open: Vec::new() }
    }

    /// Opens the gate to what is valid, and to nothing else.
    pub(super) fn keep(&mut self, control: &Control, state: &JobState, now: Timestamp) {
        let valid = state.tokens.values().filter(|token| token.is_valid(now));
        let open: Vec<String> = valid.map(|token| token.secret.clone()).collect();
        if open == self.open {
            return;
        }
        // A token that is none was refused when it was made.
        let tokens: Vec<JoinToken> = open.iter().filter_map(|text| text.parse().ok()).collect();
        let (authority, asks) = (Arc::clone(&self.authority), self.asks.clone());
        control.set_gate((!tokens.is_empty()).then_some(JoinGate { tokens, authority, asks }));
        self.open = open;
    }
}

/// A change that a person waits for.
pub(super) struct Awaited {
    id: String,
    /// Whether the token is to be there.
    there: bool,
    answer: String,
    reply: oneshot::Sender<Response>,
    until: Duration,
}

/// Changes that may wait at a time.
const MOST_AWAITED: usize = 16;

impl State {
    pub(super) fn token_asked(
        &mut self,
        myself: &ActorRef<Message>,
        request: TokenRequest,
        reply: oneshot::Sender<Response>,
    ) {
        let asked = match request {
            TokenRequest::List => Err(Response::Tokens(self.token_lines())),
            TokenRequest::Create { ttl_s } => self.new_token(ttl_s),
            TokenRequest::Revoke { id } if self.job().tokens.contains_key(&id) => {
                let answer =
                    format!("token {id} opens the gate no more; who came in with it stays");
                Ok((TokenChange::Revoke { id }, answer))
            }
            TokenRequest::Revoke { id } => {
                let known: Vec<&str> = self.job().tokens.keys().map(String::as_str).collect();
                let known = known.join(", ");
                Err(Response::Refused(format!("there is no token {id}; there are: {known}")))
            }
        };
        let (change, answer) = match asked {
            Ok(asked) if self.awaited.len() < MOST_AWAITED => asked,
            Ok(_) => return drop(reply.send(Response::Refused("too many wait already".into()))),
            Err(response) => return drop(reply.send(response)),
        };
        let (id, there) = match &change {
            TokenChange::Add { id, .. } => (id.clone(), true),
            TokenChange::Revoke { id } => (id.clone(), false),
        };
        let until = clock::now() + self.options.timeouts.reform;
        self.awaited.push(Awaited { id, there, answer, reply, until });
        self.change_tokens(myself, change);
    }

    fn new_token(&self, ttl_s: Option<u64>) -> Result<(TokenChange, String), Response> {
        if self.job().tokens.len() >= MOST_TOKENS {
            let why = format!("there are {MOST_TOKENS} tokens already: revoke one");
            return Err(Response::Refused(why));
        }
        let made = JoinToken::generate(None);
        let token = made.map_err(|error| Response::Refused(error.to_string()))?;
        let pinned = token.pinned(self.gate.authority.fingerprint()).to_string();
        let now = clock::timestamp();
        let expires =
            ttl_s.map(|ttl| Timestamp(now.0.saturating_add(ttl.saturating_mul(1_000_000))));
        let id = uuid::Uuid::new_v4().simple().to_string()[..8].to_owned();
        let token = TokenRecord { secret: token.to_string(), made: now, expires };
        Ok((TokenChange::Add { id, token }, pinned))
    }

    fn token_lines(&self) -> Vec<TokenLine> {
        let now = clock::timestamp();
        let line = |(id, token): (&String, &TokenRecord)| TokenLine {
            id: id.clone(),
            made: token.made,
            expires: token.expires,
            valid: token.is_valid(now),
        };
        self.job().tokens.iter().map(line).collect()
    }

    /// Proposes a change, or asks the leader to.
    pub(super) fn change_tokens(&mut self, myself: &ActorRef<Message>, change: TokenChange) {
        if self.leads() {
            return self.propose(myself, Command::ChangeTokens(change));
        }
        let leader = self.group.status().borrow().leader;
        let bytes = Bytes::from(codec::encode(&AgentMessage::Tokens(change)));
        for peer in self.linked.values() {
            if Some(peer.store.raft_id()) == leader {
                let _ = self.control.send(peer.store, Lane::Control, bytes.clone());
            }
        }
    }

    /// Opens and closes the gate, and answers who waited for that.
    pub(super) fn keep_gate(&mut self) {
        let job = Arc::clone(&self.job);
        self.gate.keep(&self.control, &job.state, clock::timestamp());
        let now = clock::now();
        for awaited in std::mem::take(&mut self.awaited) {
            let response = if job.state.tokens.contains_key(&awaited.id) == awaited.there {
                Response::Accepted(awaited.answer)
            } else if now > awaited.until {
                Response::Refused("no leader with a quorum took it up: try again".into())
            } else {
                self.awaited.push(awaited);
                continue;
            };
            // A person who went away needs no answer.
            let _ = awaited.reply.send(response);
        }
    }
}

/// What later eras let newcomers in with: those of this one, the founding one first.
pub(super) fn secrets(state: &JobState) -> Vec<String> {
    let mut secrets = vec![state.spec.join_secret.clone()];
    let others = state.tokens.iter().filter(|(id, _)| *id != FOUNDING);
    secrets.extend(others.map(|(_, token)| token.secret.clone()));
    secrets
}
