//! The other nodes: links to them, beats to the leader, and what they say.

use std::{collections::BTreeSet, net::SocketAddr, time::Duration};

use bytes::Bytes;
use job::{StoreId, codec, message::AgentMessage, report::NodeReport};
use ractor::ActorRef;
use transport::control::{Lane, LinkEvent};

use super::{
    discovery,
    duty::Done,
    enter,
    node_agent::{Message, State},
};
use crate::clock;

impl State {
    pub(super) fn link(&mut self, myself: &ActorRef<Message>, event: LinkEvent) {
        match event {
            LinkEvent::Up { peer } => {
                tracing::debug!(peer = %peer.node, "link up");
                self.group.peer_reachable(peer.store.raft_id());
                self.dead.retain(|(node, _)| *node != peer.node);
                self.linked.insert(peer.store, peer);
                self.beat(myself);
            }
            LinkEvent::Down { peer, reason } => {
                tracing::debug!(peer = %peer.node, %reason, "link down");
                self.linked.remove(&peer.store);
                self.group.peer_unreachable(peer.store.raft_id());
                self.finish_ending();
            }
            LinkEvent::Reset { peer, boot } => self.reset(myself, peer, boot),
            LinkEvent::Refused { addr, reason } => {
                tracing::warn!(%addr, reason, "a peer was turned away");
            }
            LinkEvent::Frame { from, bytes, .. } => match codec::decode::<AgentMessage>(&bytes) {
                Ok(message) => self.peer_says(myself, from, message),
                Err(error) => tracing::warn!(%error, "a peer's message is malformed"),
            },
        }
    }

    /// LS-2: a process is certainly dead.
    pub(super) fn reset(&mut self, myself: &ActorRef<Message>, peer: StoreId, boot: u64) {
        let raft_id = peer.raft_id();
        let leader = self.group.status().borrow().leader;
        if leader == Some(raft_id) {
            self.group.leader_died(raft_id);
        }
        let known = self.job().nodes.iter().find(|(_, n)| n.store == peer && n.boot == boot);
        if let Some((name, _)) = known {
            self.dead.insert((name.clone(), boot));
            self.beat(myself);
        }
    }

    pub(super) fn peer_says(
        &mut self,
        myself: &ActorRef<Message>,
        from: StoreId,
        message: AgentMessage,
    ) {
        match message {
            AgentMessage::Beat { sent_micros, report } => {
                if report.store == from {
                    self.hear_beat(myself, Some(from), sent_micros, report);
                }
            }
            AgentMessage::Answer { sent_micros, pulse } => {
                pulse.into_iter().for_each(|pulse| self.witness.told(pulse));
                self.renew_lease(sent_micros);
            }
            AgentMessage::Orphan { reaches } => {
                if let Some(peer) = self.linked.get(&from) {
                    self.witness.orphan(peer.node.clone(), reaches, clock::now());
                }
            }
            AgentMessage::Drain(node) => self.drain(myself, &node),
            AgentMessage::Tokens(change) => {
                if self.leads() {
                    self.change_tokens(myself, change);
                }
            }
            AgentMessage::Fenced { boot, cause, refused } => {
                if boot == self.boot {
                    self.gone(myself, cause, refused);
                }
            }
        }
    }

    /// LS-1: the lease runs from the send time of the answered beat.
    pub(super) fn renew_lease(&mut self, sent_micros: u64) {
        if self.is_overtaken() {
            return;
        }
        let length = u64::try_from(self.options.timeouts.lease.as_micros()).unwrap_or(u64::MAX);
        self.lease_until = self.lease_until.max(sent_micros.saturating_add(length));
        self.slots.lease(self.lease_until);
    }

    /// Dials known nodes without a link, one try per beat limit.
    pub(super) fn dial(&mut self) {
        let now = clock::now();
        let pause = self.options.timeouts.beat * 2;
        let mut wanted: Vec<(String, Option<StoreId>)> = self
            .job()
            .live_nodes()
            .filter(|(_, node)| node.store != self.store && !self.linked.contains_key(&node.store))
            .map(|(_, node)| (node.address.to_string(), Some(node.store)))
            .collect();
        if self.linked.is_empty() {
            wanted.extend(self.seeds.iter().map(|name| (name.clone(), None)));
        }
        let linked: BTreeSet<SocketAddr> = self.linked.values().map(|peer| peer.addr).collect();
        let met = self.witness.met.iter().filter(|address| !linked.contains(address));
        wanted.extend(met.map(|address| (address.to_string(), None)));
        for (name, store) in wanted {
            let due = self.dialled.get(&name).copied().unwrap_or_default();
            if now >= due {
                self.dialled.insert(name.clone(), now + pause);
                let (control, own) = (self.control.clone(), self.address);
                tokio::spawn(async move {
                    let found = enter::resolve(&name).await;
                    for address in found.into_iter().filter(|address| *address != own) {
                        match control.connect(address, store).await {
                            Ok(_) => return,
                            Err(error) => tracing::debug!(%address, %error, "no link"),
                        }
                    }
                });
            }
        }
        self.dialled.retain(|_, due| now < *due + Duration::from_secs(60));
    }

    /// Asks the discovery script again while nobody is reached.
    pub(super) fn discover(&mut self, myself: &ActorRef<Message>) {
        let now = clock::now();
        let Some(script) = self.options.discovery.clone() else { return };
        if self.linked.is_empty() && now >= self.next_ask {
            // Until it has answered it is not asked again.
            self.next_ask = Duration::MAX;
            self.offload(myself, move || Done::Discovered(script.ask()));
        }
    }

    pub(super) fn discovered(&mut self, hosts: Result<Vec<String>, String>) {
        self.next_ask = clock::now() + discovery::PAUSE;
        match hosts {
            Ok(hosts) => self.seeds = hosts,
            Err(why) => tracing::warn!(why, "no further nodes are known"),
        }
    }

    pub(super) fn report(&self) -> NodeReport {
        NodeReport {
            node: self.options.node.clone(),
            store: self.store,
            boot: self.boot,
            incarnation: self.incarnation(),
            address: self.address,
            slots: self.options.slots,
            leaving: self.leaving,
            stop_job: self.stop_job,
            recorded: self.recorder.newest(),
            shared: self.witness.shared(),
            dead_peers: self.dead.iter().cloned().collect(),
            workers: self.slots.reports(),
        }
    }

    /// Tells the leader how things are; everybody, while none is known.
    pub(super) fn beat(&mut self, myself: &ActorRef<Message>) {
        let sent_micros = clock::now_micros();
        let report = self.report();
        if self.leads() {
            self.hear_beat(myself, None, sent_micros, report);
            return;
        }
        let leader = self.group.status().borrow().leader;
        let bytes = Bytes::from(codec::encode(&AgentMessage::Beat { sent_micros, report }));
        for peer in self.linked.values() {
            if leader.is_none_or(|leader| peer.store.raft_id() == leader) {
                // A full lane means that older beats are still on their way.
                let _ = self.control.send(peer.store, Lane::Control, bytes.clone());
            }
        }
    }
}
