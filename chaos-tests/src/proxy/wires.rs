//! Nodes in network namespaces of their own, each with a wire to one bridge that can
//! be unplugged: the kernel's network, for whoever may have it (root, and `ip`).

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    process::Command,
};

use super::{CONTROL, TENSORS};
use crate::harness::Place;

/// The namespaces and wires of one run, removed when dropped.
#[derive(Debug)]
pub struct Wires {
    nodes: usize,
    pid: u32,
}

impl Wires {
    /// Wires so many nodes, at most 200; `None` where that is not allowed.
    #[must_use]
    pub fn start(nodes: usize) -> Option<Self> {
        let wires = Self { nodes, pid: std::process::id() };
        wires.lay().then_some(wires)
    }

    /// How to start each node, n1 first.
    #[must_use]
    pub fn places(&self) -> Vec<Place> {
        let place = |node| Place {
            prefix: ["ip", "netns", "exec", &self.space(node)].map(str::to_owned).to_vec(),
            listen: SocketAddr::new(self.address(node), CONTROL),
            advertise: None,
            tensor_port: TENSORS,
        };
        (0..self.nodes).map(place).collect()
    }

    /// Unplugs these nodes, or plugs them in again; nodes count from 0.
    ///
    /// # Panics
    /// When a wire is gone.
    pub fn plug(&self, nodes: &[usize], plugged: bool) {
        for &node in nodes {
            let state = if plugged { "up" } else { "down" };
            assert!(ip(&["link", "set", &self.wire(node), state]), "{} is gone", self.wire(node));
        }
    }

    fn lay(&self) -> bool {
        let bridge = self.bridge();
        let laid =
            ip(&["link", "add", &bridge, "type", "bridge"]) && ip(&["link", "set", &bridge, "up"]);
        laid && (0..self.nodes).all(|node| {
            let (space, wire) = (self.space(node), self.wire(node));
            let address = format!("{}/24", self.address(node));
            ip(&["netns", "add", &space])
                && ip(&[
                    "link", "add", &wire, "type", "veth", "peer", "name", "eth0", "netns", &space,
                ])
                && ip(&["link", "set", &wire, "master", &bridge, "up"])
                && ip(&["-n", &space, "addr", "add", &address, "dev", "eth0"])
                && ip(&["-n", &space, "link", "set", "eth0", "up"])
                && ip(&["-n", &space, "link", "set", "lo", "up"])
        })
    }

    fn bridge(&self) -> String {
        format!("eb{}", self.pid)
    }

    fn wire(&self, node: usize) -> String {
        format!("e{}n{node}", self.pid)
    }

    fn space(&self, node: usize) -> String {
        format!("elastic-{}-{node}", self.pid)
    }

    /// Bridges do not meet, so that every run may have the same addresses.
    fn address(&self, node: usize) -> IpAddr {
        IpAddr::V4(Ipv4Addr::new(10, 231, 17, 1 + node as u8))
    }
}

impl Drop for Wires {
    fn drop(&mut self) {
        for node in 0..self.nodes {
            // The wire goes with its end in the namespace.
            ip(&["link", "del", &self.wire(node)]);
            ip(&["netns", "del", &self.space(node)]);
        }
        ip(&["link", "del", &self.bridge()]);
    }
}

/// Runs `ip`; false when it is not there or refuses.
fn ip(arguments: &[&str]) -> bool {
    Command::new("ip").args(arguments).output().is_ok_and(|output| output.status.success())
}
