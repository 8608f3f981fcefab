//! A network in user space between the nodes of one machine.
//!
//! Each node listens on a loopback address of its own and advertises another, its
//! *face*, where this network listens in its place. So every datagram and every
//! stream between two nodes passes here, and can be dropped, delayed, throttled,
//! cut in one direction or held half open, for control and for tensors apart.
//!
//! [`Wires`] is the other way: the kernel's own network, for root.
//!
//! What a real network does and this one does not: an address whose node is down
//! accepts a stream and then ends it, instead of refusing it. So a dead agent is
//! found by its silence, not by its reset connection.

mod owner;
mod rules;
mod tcp;
mod udp;
mod wires;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use crate::harness::Place;
use rules::Rules;
pub use rules::{Condition, Plane};
pub use wires::Wires;

/// Both planes.
pub const BOTH: [Plane; 2] = [Plane::Control, Plane::Tensors];

/// The ports of all nodes.
const CONTROL: u16 = 29_400;
const TENSORS: u16 = 29_500;
/// Hosts of faces begin here.
const FACES: u8 = 100;

/// The network of one run; nothing passes after it is dropped.
#[derive(Debug)]
pub struct Network(Arc<Shared>);

/// What its threads share.
#[derive(Debug)]
struct Shared {
    nodes: usize,
    folder: PathBuf,
    subnet: [u8; 2],
    rules: Rules,
    dropped: AtomicU64,
    streams: AtomicU64,
}

impl Network {
    /// A network of so many nodes, at most 50, for the run in `folder`.
    ///
    /// # Errors
    /// When a face cannot be bound.
    pub fn start(nodes: usize, folder: &Path) -> io::Result<Self> {
        // Tests of two checkouts at once do not meet, and neither do two networks of
        // one test: the threads of the first may still hold its addresses.
        static STARTED: AtomicU64 = AtomicU64::new(0);
        let number = u64::from(std::process::id()) + 97 * STARTED.fetch_add(1, Relaxed);
        let subnet = [1 + (number >> 8) as u8 % 254, number as u8];
        let shared = Arc::new(Shared {
            nodes,
            folder: folder.to_owned(),
            subnet,
            rules: Rules::default(),
            dropped: AtomicU64::new(0),
            streams: AtomicU64::new(0),
        });
        let network = Self(shared);
        udp::serve(&network.0)?;
        tcp::serve(&network.0)?;
        Ok(network)
    }

    /// How to start each node, n1 first.
    #[must_use]
    pub fn places(&self) -> Vec<Place> {
        let place = |node| Place {
            prefix: Vec::new(),
            listen: self.0.real(node, Plane::Control),
            advertise: Some(self.0.face(node, Plane::Control)),
            tensor_port: TENSORS,
        };
        (0..self.0.nodes).map(place).collect()
    }

    /// From now on traffic from one node to another fares so; nodes count from 0.
    pub fn set(&self, plane: Plane, from: usize, to: usize, condition: Condition) {
        self.0.rules.set(plane, from, to, condition);
    }

    /// Sets a condition for every direction between `these` and the others.
    pub fn between(&self, planes: &[Plane], these: &[usize], way: Way, condition: Condition) {
        for &plane in planes {
            for &inner in these {
                for outer in (0..self.0.nodes).filter(|node| !these.contains(node)) {
                    if way != Way::Inward {
                        self.set(plane, inner, outer, condition);
                    }
                    if way != Way::Outward {
                        self.set(plane, outer, inner, condition);
                    }
                }
            }
        }
    }

    /// Everything passes again; what streams held goes on its way.
    pub fn heal(&self) {
        self.0.rules.clear();
    }

    /// Datagrams that were dropped, and streams that were accepted.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        (self.0.dropped.load(Relaxed), self.0.streams.load(Relaxed))
    }
}

/// Which directions, seen from the nodes that are named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// To and from them.
    Each,
    /// Only what they send.
    Outward,
    /// Only what they receive.
    Inward,
}

impl Drop for Network {
    fn drop(&mut self) {
        self.0.rules.close();
    }
}

impl Shared {
    /// Where a node listens.
    fn real(&self, node: usize, plane: Plane) -> SocketAddr {
        self.address(1 + node as u8, plane)
    }

    /// Where the others reach it.
    fn face(&self, node: usize, plane: Plane) -> SocketAddr {
        self.address(FACES + node as u8, plane)
    }

    fn address(&self, host: u8, plane: Plane) -> SocketAddr {
        let [high, low] = self.subnet;
        let port = match plane {
            Plane::Control => CONTROL,
            Plane::Tensors => TENSORS,
        };
        SocketAddr::new(IpAddr::V4(Ipv4Addr::new(127, high, low, host)), port)
    }
}
