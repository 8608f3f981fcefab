//! Strangers: everything that may knock at a node's ports and is no peer (SEC-1).
//!
//! [`knock`] makes one connection of a kind; a test counts on both sides.

mod quic;
mod tcp;

use std::{io, net::SocketAddr, time::Duration};

pub use quic::{Stranger, record};

use crate::harness::Random;

/// Who knocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Noise over TCP.
    Garbage,
    /// The beginning of a hello over TCP, and then the end.
    HalfHello,
    /// A whole hello over TCP that names nobody.
    WrongHello,
    /// TCP that says nothing for as long as it is let.
    Silent,
    /// Datagrams of noise.
    Datagrams,
    /// A QUIC handshake for a protocol that is not spoken here.
    OtherProtocol,
    /// A peer's handshake without a certificate.
    NoCertificate,
    /// A peer's handshake with a certificate of another job.
    ForeignCertificate,
    /// A peer's handshake with a certificate that is over.
    ExpiredCertificate,
    /// A join whose proof is made up.
    WrongToken,
    /// A join that says that four gigabytes follow.
    HugeLength,
    /// A join that stops in the middle.
    SlowJoin,
    /// The bytes of a join that was let in, once more.
    ReplayedJoin,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 13] = [
        Self::Garbage,
        Self::HalfHello,
        Self::WrongHello,
        Self::Silent,
        Self::Datagrams,
        Self::OtherProtocol,
        Self::NoCertificate,
        Self::ForeignCertificate,
        Self::ExpiredCertificate,
        Self::WrongToken,
        Self::HugeLength,
        Self::SlowJoin,
        Self::ReplayedJoin,
    ];

    /// Whether it speaks QUIC, at control ports only.
    #[must_use]
    pub fn is_quic(self) -> bool {
        self >= Self::OtherProtocol
    }
}

/// Where a node can be knocked at.
#[derive(Clone, Copy, Debug)]
pub enum Door {
    /// UDP and TCP of an agent.
    Control(SocketAddr),
    /// TCP of a worker.
    Tensors(SocketAddr),
}

impl Door {
    /// The address.
    #[must_use]
    pub fn address(self) -> SocketAddr {
        match self {
            Self::Control(address) | Self::Tensors(address) => address,
        }
    }
}

/// How long a silent one stays.
const HOLD: Duration = Duration::from_millis(1500);

/// Makes one connection; it is over when this returns. What the node does to it
/// is no error.
///
/// # Errors
/// When this machine cannot send.
pub async fn knock(
    kind: Kind,
    door: Door,
    stranger: &Stranger,
    random: &mut Random,
) -> io::Result<()> {
    if kind.is_quic() {
        stranger.knock(kind, door.address()).await;
        return Ok(());
    }
    tcp::knock(kind, door.address(), random).await
}
