//! Going on without a quorum (LG-3). A node that no quorum has answered, and that
//! sees no pulse, for longer than all leases says so to the nodes that it
//! reaches; enough of them begin a new era in the ledger. Whoever finds an era
//! above its own there stops at once and enters it.

use std::{collections::BTreeSet, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use bytes::Bytes;
use job::{
    Era, NodeId, codec,
    message::{AgentMessage, Welcome},
    reforming::{self, Muster, Pulse},
    replicated::StateMachine,
    state::JobState,
};
use ractor::ActorRef;
use transport::control::{Authority, Control, Identity, JoinToken, Lane};

use super::{
    Notice,
    duty::Done,
    enter, home,
    ledger::{self, Begun, Contest},
    meeting,
    node_agent::{Message, State},
    pulse, tokens,
};
use crate::{
    clock,
    control_group::{Founding, Store},
};

/// What a look at the checkpoint folder found.
pub(super) struct Look {
    pulse: Option<Pulse>,
    records: Result<Vec<(u64, dcp::folder::Record)>, String>,
    met: Vec<SocketAddr>,
}

/// How an attempt to move into a later era ended.
pub(super) enum Moved {
    /// This node has a store in it.
    In,
    /// Not now; the text says why.
    Not(String),
}

impl State {
    /// Whether the ledger knows an era above this node's own: then nothing is
    /// trained, answered or decided in this one any more.
    pub(super) fn is_overtaken(&self) -> bool {
        self.witness.newer.is_some()
    }

    /// The part of a tick that concerns other eras.
    pub(super) fn watch_ledger(&mut self, myself: &ActorRef<Message>) {
        let now = clock::now();
        if !self.witness.looking && now >= self.witness.next_look {
            self.witness.looking = true;
            // LG-3: the ledger is read again every lease period.
            self.witness.next_look = now + self.options.timeouts.lease;
            let (folder, from) = (Arc::clone(&self.checkpoints), self.witness.next_record);
            let me = self.options.node.clone();
            let alone = self.alone_for() > self.options.timeouts.lease;
            self.offload(myself, move || {
                let records = folder.records_since(from).map_err(|error| error.to_string());
                let met = if alone { meeting::read(&folder, &me) } else { Vec::new() };
                Done::Looked(Look { pulse: pulse::read(&folder), records, met })
            });
        }
        self.orphaned(myself);
        self.enter_newer(myself);
    }

    pub(super) fn looked(&mut self, myself: &ActorRef<Message>, look: Look) {
        self.witness.looking = false;
        self.witness.met = look.met;
        let now = clock::now();
        let own = self.job().era;
        let records = match look.records {
            Ok(records) => records,
            Err(why) => return self.notice(Notice::Warning(why)),
        };
        if let Some((last, _)) = records.last() {
            self.witness.next_record = last + 1;
        }
        self.witness.finished |=
            records.iter().any(|(_, record)| matches!(record, dcp::folder::Record::Finish { .. }));
        if let Some(begun) = ledger::begun(&records).filter(|begun| begun.era > own) {
            let first = !self.is_overtaken();
            self.witness.overtaken(begun.clone(), now);
            if first {
                self.stop_for(&begun);
            }
        }
        // A pulse of an era that is over shows nobody's life.
        let newest = self.witness.newer.as_ref().map_or(own, |newer| newer.era);
        let pulse = look.pulse.filter(|pulse| pulse.era >= newest);
        self.witness.seen(pulse, now, self.options.timeouts.reform);
        self.enter_newer(myself);
    }

    fn stop_for(&mut self, begun: &Begun) {
        let line = format!("era {} of the job was begun: this node leaves its own", begun.era);
        self.notice(Notice::Warning(line));
        for worker in self.slots.workers() {
            worker.handle.kill();
        }
    }

    /// A leader shows in the folder that it has a quorum; to be called when a
    /// round of one has just passed.
    pub(super) fn beat_pulse(&mut self, myself: &ActorRef<Message>) {
        let now = clock::now();
        if now < self.witness.next_pulse || self.is_overtaken() {
            return;
        }
        self.witness.next_pulse = now + self.options.timeouts.lease;
        let count = self.witness.written + 1;
        let pulse = Pulse { era: self.job().era, boot: self.boot, count };
        let folder = Arc::clone(&self.checkpoints);
        self.offload(myself, move || {
            Done::Pulsed(pulse::write(&folder, pulse).map(|()| pulse).map_err(|error| {
                format!("cannot write into the ledger of {}: {error}", folder.root().display())
            }))
        });
    }

    pub(super) fn pulsed(&mut self, pulse: Result<Pulse, String>) {
        match pulse {
            Ok(pulse) => {
                self.witness.written = pulse.count;
                self.witness.told(pulse);
            }
            Err(why) => tracing::warn!(why, "no pulse"),
        }
    }

    /// What this leader wrote last.
    pub(super) fn own_pulse(&self) -> Option<Pulse> {
        let (era, boot, count) = (self.job().era, self.boot, self.witness.written);
        (count > 0).then_some(Pulse { era, boot, count })
    }

    /// Since when no sign of a quorum was seen.
    fn alone_for(&self) -> Duration {
        let lease = self.options.timeouts.lease;
        let answered = Duration::from_micros(self.lease_until).saturating_sub(lease);
        clock::now().saturating_sub(self.witness.quorum_at(answered))
    }

    /// Tells others that no quorum answers, and begins an era when enough of them
    /// say the same.
    fn orphaned(&mut self, myself: &ActorRef<Message>) {
        let timeouts = self.options.timeouts;
        let now = clock::now();
        let alone_for = self.alone_for();
        if alone_for <= timeouts.reform || self.witness.finished || !self.job().is_going() {
            return;
        }
        let orphans = self.witness.orphans(now, timeouts.suspect);
        let reaches: Vec<NodeId> = orphans.keys().cloned().collect();
        let bytes = Bytes::from(codec::encode(&AgentMessage::Orphan { reaches }));
        for peer in self.linked.values() {
            let _ = self.control.send(peer.store, Lane::Control, bytes.clone());
        }
        if !self.job().reforming.automatic || self.witness.moving {
            return;
        }
        let me = &self.options.node;
        let Some(Muster { members, turn }) =
            reforming::muster(me, &orphans, self.job().spec.min_nodes)
        else {
            return;
        };
        // Those that hear each other need a moment to say so, and take turns.
        if alone_for <= timeouts.reform + timeouts.suspect + timeouts.budget * turn {
            return;
        }
        self.begin_era(myself, members);
    }

    fn begin_era(&mut self, myself: &ActorRef<Message>, members: BTreeSet<NodeId>) {
        self.witness.moving = true;
        let newest = self.witness.newer.as_ref().map_or(self.job().era, |newer| newer.era);
        let era = Era(newest.0 + 1);
        let names: Vec<&str> = members.iter().map(NodeId::as_str).collect();
        let line = format!("no quorum: beginning era {era} with {}", names.join(", "));
        self.notice(Notice::Warning(line));
        let state = self.job().clone();
        let (node, address) = (self.options.node.clone(), self.address.to_string());
        let home = home::of_era(&self.node_folder(), era);
        let folder = Arc::clone(&self.checkpoints);
        self.offload(myself, move || {
            let members = members.iter().map(NodeId::to_string).collect();
            let begun = begin(&folder, era, &state, (node, address, members), home);
            Done::Moved(match begun {
                Ok(Some(())) => Moved::In,
                Ok(None) => Moved::Not("another node was faster".into()),
                Err(why) => Moved::Not(why),
            })
        });
    }

    /// Asks the founder of a newer era to let this node in.
    fn enter_newer(&mut self, myself: &ActorRef<Message>) {
        let Some(begun) = self.witness.newer.clone() else { return };
        if self.witness.moving || self.is_ending() || clock::now() < self.witness.next_try {
            return;
        }
        self.witness.moving = true;
        let home = home::of_era(&self.node_folder(), begun.era);
        let mut tokens = tokens::secrets(self.job());
        tokens.extend(self.options.token.clone());
        let ask = Ask {
            begun,
            home,
            tokens,
            node: self.options.node.clone(),
            digest: self.options.proposal.config_digest,
            limit: self.options.timeouts.connect,
        };
        let (control, mailbox) = (self.control.clone(), myself.clone());
        tokio::spawn(async move {
            let moved = match ask.enter(&control).await {
                Ok(()) => Moved::In,
                Err(why) => Moved::Not(why),
            };
            let _ = mailbox.send_message(Message::Done(Done::Moved(moved)));
        });
    }

    pub(super) fn moved(&mut self, moved: Moved) {
        self.witness.moving = false;
        self.witness.next_try = clock::now() + self.options.timeouts.lease;
        match moved {
            Moved::In => self.leave_era(),
            Moved::Not(why) => tracing::warn!(why, "this node is in no newer era yet"),
        }
    }

    fn node_folder(&self) -> PathBuf {
        enter::node_folder(&self.options)
    }
}

/// Claims an era and makes this node's store in it. None when another node has
/// claimed it.
fn begin(
    folder: &dcp::Folder,
    era: Era,
    old: &JobState,
    (node, address, nodes): (NodeId, String, Vec<String>),
    home: PathBuf,
) -> Result<Option<()>, String> {
    let authority = Authority::generate(old.spec.job).map_err(|error| error.to_string())?;
    let ca_pin = authority.fingerprint().to_string();
    let founder = ledger::Founder { nodes, address, ca_pin };
    let Contest::Won { checkpoints } = ledger::reform(folder, era, &founder)? else {
        return Ok(None);
    };
    let mut spec = old.spec.clone();
    // No checkpoint may tell it yet.
    spec.micro_batches = old.micro_batches;
    spec.authority = authority.to_pem();
    let mut state =
        JobState::found(spec, era, clock::timestamp()).going_on(enter::committed(checkpoints));
    state.digests = old.digests;
    state.tokens.clone_from(&old.tokens);
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let mut store = Store::open(&home).map_err(|error| text(&error))?;
    let identity = Identity::found(&authority, node, store.id()).map_err(|error| text(&error))?;
    let (founder, snapshot) = (store.id().raft_id(), StateMachine::snapshot(&state));
    store
        .found(Founding { job: state.spec.job, founder, state: snapshot })
        .map_err(|error| text(&error))?;
    identity.save(&home.join(home::IDENTITY)).map_err(|error| text(&error))?;
    Ok(Some(()))
}

/// One round of asking to be let into a newer era.
struct Ask {
    begun: Begun,
    home: PathBuf,
    tokens: Vec<String>,
    node: NodeId,
    digest: [u8; 32],
    limit: Duration,
}

impl Ask {
    async fn enter(&self, control: &Control) -> Result<(), String> {
        fn text(error: impl std::fmt::Display) -> String {
            error.to_string()
        }
        let Begun { address, ca_pin, era } = &self.begun;
        let addresses = enter::resolve(address).await;
        let mut store = Store::open(&self.home).map_err(text)?;
        let mut last = format!("founder of era {era} at {address:?} has no address");
        let of = |address| self.tokens.iter().map(move |token| (address, token.clone()));
        let tries: Vec<(SocketAddr, String)> = addresses.into_iter().flat_map(of).collect();
        for (address, token) in tries {
            let mut token: JoinToken = token.parse().map_err(text)?;
            if let Ok(pin) = ca_pin.parse() {
                token = token.pinned(pin);
            }
            let (node, id) = (self.node.clone(), store.id());
            let joined = control.join(address, &token, node, id, Vec::new(), self.limit).await;
            let joined = match joined {
                Ok(joined) => joined,
                Err(error) => {
                    last = error.to_string();
                    continue;
                }
            };
            let welcome: Welcome = codec::decode(&joined.welcome).map_err(text)?;
            let founding: Founding = codec::decode(&welcome.founding).map_err(text)?;
            let state = JobState::restore(&founding.state)?;
            if state.spec.config_digest != self.digest || state.era != *era {
                return Err(format!("at {address} is another job, or another era of it"));
            }
            store.found(founding).map_err(text)?;
            home::note_founder(&self.home, &self.begun.address).map_err(text)?;
            return joined.identity.save(&self.home.join(home::IDENTITY)).map_err(text);
        }
        Err(last)
    }
}
