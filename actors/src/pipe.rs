//! Envelopes over the socket pair between an agent and its worker. Its end is
//! death noticed at once (LS-3).

use std::{io, marker::PhantomData};

use job::codec;
use serde::{Serialize, de::DeserializeOwned};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
};

/// The largest envelope. Shard indexes are the biggest; one of 100,000 entries
/// stays below.
const MAX_ENVELOPE: usize = 32 << 20;

/// Splits a connected stream into a sender and a receiver of messages.
#[must_use]
pub(crate) fn split<O: Serialize, I: DeserializeOwned>(
    stream: UnixStream,
) -> (Sender<O>, Receiver<I>) {
    let (read, write) = stream.into_split();
    (Sender { write, message: PhantomData }, Receiver { read, message: PhantomData })
}

/// The sending half.
#[derive(Debug)]
pub(crate) struct Sender<O> {
    write: OwnedWriteHalf,
    message: PhantomData<fn(O)>,
}

/// The receiving half.
#[derive(Debug)]
pub(crate) struct Receiver<I> {
    read: OwnedReadHalf,
    message: PhantomData<fn() -> I>,
}

impl<O: Serialize> Sender<O> {
    /// Sends one message.
    ///
    /// # Errors
    /// When the other side is gone.
    pub(crate) async fn send(&mut self, message: &O) -> io::Result<()> {
        let body = codec::encode(message);
        let length = u32::try_from(body.len())
            .ok()
            .filter(|length| *length as usize <= MAX_ENVELOPE)
            .ok_or_else(|| io::Error::other("message too large for the worker's pipe"))?;
        let mut frame = Vec::with_capacity(4 + body.len());
        frame.extend_from_slice(&length.to_le_bytes());
        frame.extend_from_slice(&body);
        self.write.write_all(&frame).await
    }
}

impl<I: DeserializeOwned> Receiver<I> {
    /// Receives one message; `None` when the other side is gone. Not
    /// cancel-safe: give it a task of its own.
    ///
    /// # Errors
    /// When the bytes are no message.
    pub(crate) async fn receive(&mut self) -> io::Result<Option<I>> {
        let mut length = [0; 4];
        match self.read.read_exact(&mut length).await {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            Err(error) => return Err(error),
        }
        let length = u32::from_le_bytes(length) as usize;
        if length > MAX_ENVELOPE {
            return Err(io::Error::other(format!("envelope of {length} bytes is over the limit")));
        }
        let mut body = vec![0; length];
        self.read.read_exact(&mut body).await?;
        codec::decode(&body).map(Some).map_err(io::Error::other)
    }
}
