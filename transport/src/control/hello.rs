//! The hello: a QUIC connection becomes a link only when both sides have said who
//! they are and each found it to fit the other's certificate (SEC-1). A client
//! whose certificate was refused still believes its connection is open, so
//! nothing earlier counts.
//!
//! On the wire: length (u32), protocol version (u16), then the hello itself. The
//! version stands outside so that any later release can read it.

use std::net::SocketAddr;

use job::{Incarnation, JobId, NodeId, StoreId, codec};
use quinn::{ReadError, ReadExactError, RecvStream, SendStream};
use serde::{Deserialize, Serialize};

use super::{
    certs::Subject,
    close::{self, Fault},
};

/// The version that this release speaks.
pub const PROTOCOL: u16 = 1;

/// The largest opaque part of a hello, in bytes.
pub const MAX_OPAQUE: usize = 4 << 10;
const MAX_HELLO: usize = MAX_OPAQUE + 1024;

/// Who speaks. The signature is the channel's: the certificate says the same.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) job: JobId,
    pub(super) node: NodeId,
    pub(super) store: StoreId,
    pub(super) incarnation: Incarnation,
    pub(super) boot: u64,
    /// The process (by its boot) that the speaker holds a link to in the store it
    /// speaks to.
    pub(super) linked: Option<u64>,
    pub(super) listen: Option<SocketAddr>,
    pub(super) opaque: Vec<u8>,
}

impl Hello {
    /// Holds the hello against the certificate it came under and this side's own.
    pub(super) fn check(&self, own: &Self, certificate: &Subject) -> Result<(), String> {
        if self.job != own.job {
            return Err(format!("its hello is for job {}, this is job {}", self.job, own.job));
        }
        if self.node != certificate.node || self.store != certificate.store {
            return Err(format!(
                "its hello says node {} with store {}, its certificate node {} with store {}",
                self.node, self.store, certificate.node, certificate.store
            ));
        }
        if self.store == own.store {
            return Err(format!(
                "store {} is this node's own: no two nodes may share or copy a data directory",
                own.store
            ));
        }
        Ok(())
    }
}

pub(super) async fn send(
    stream: &mut SendStream,
    protocol: u16,
    hello: &Hello,
) -> Result<(), Fault> {
    let body = codec::encode(hello);
    let mut frame = Vec::with_capacity(6 + body.len());
    frame.extend((body.len() as u32 + 2).to_le_bytes());
    frame.extend(protocol.to_le_bytes());
    frame.extend(body);
    stream.write_all(&frame).await.map_err(close::written)
}

pub(super) async fn receive(stream: &mut RecvStream, protocol: u16) -> Result<Hello, Fault> {
    let mut head = [0; 6];
    read(stream, &mut head).await?;
    let [a, b, c, d, low, high] = head;
    let theirs = u16::from_le_bytes([low, high]);
    if theirs != protocol {
        return Err(Fault::Protocol(other_version(protocol, theirs)));
    }
    let length = (u32::from_le_bytes([a, b, c, d]) as usize).saturating_sub(2);
    if length > MAX_HELLO {
        return Err(Fault::Protocol(format!(
            "a hello of {length} bytes is over the limit of {MAX_HELLO}"
        )));
    }
    let mut body = vec![0; length];
    read(stream, &mut body).await?;
    codec::decode(&body).map_err(|error| Fault::Protocol(error.to_string()))
}

/// Names both sides neutrally: the same text is shown on both.
pub(super) fn other_version(own: u16, theirs: u16) -> String {
    format!(
        "one side speaks protocol version {own}, the other {theirs}: install the same release of \
         elastic on every node"
    )
}

/// `read_exact` with the connection's own reason where it ended.
pub(super) async fn read(stream: &mut RecvStream, buffer: &mut [u8]) -> Result<(), Fault> {
    stream.read_exact(buffer).await.map_err(|error| match error {
        ReadExactError::ReadError(ReadError::ConnectionLost(error)) => Fault::Ended(error),
        ReadExactError::FinishedEarly(got) => {
            Fault::Protocol(format!("the stream ended {got} bytes into {}", buffer.len()))
        }
        ReadExactError::ReadError(error) => Fault::Protocol(error.to_string()),
    })
}
