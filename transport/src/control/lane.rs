//! Lanes: three independent ordered streams per link and direction, so that a
//! beat never waits behind a checkpoint shard. A frame is its length (u32,
//! little-endian) and its bytes; the first byte of a stream names its lane.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use job::StoreId;
use quinn::{Connection, ReadError, ReadExactError, RecvStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError, mpsc};

use super::{
    close::{self, Fault},
    event::{LinkEvent, Outbox},
};

/// One of the ordered streams of a link.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Lane {
    /// Raft messages. A full queue may drop them: Raft sends again.
    Raft,
    /// Beats, commands, plans: first on the wire.
    Control,
    /// Snapshots and shards: last on the wire.
    Bulk,
}

impl Lane {
    /// Every lane, in the order of their wire numbers.
    pub const ALL: [Self; 3] = [Self::Raft, Self::Control, Self::Bulk];

    /// The largest frame, in bytes.
    #[must_use]
    pub const fn frame_limit(self) -> usize {
        match self {
            Self::Raft | Self::Control => 8 << 20,
            Self::Bulk => 64 << 20,
        }
    }

    /// How many bytes may wait in one direction of a link, here and again at the
    /// receiver; a frame counts as at least 1 KiB.
    #[must_use]
    pub const fn queue_limit(self) -> usize {
        2 * self.frame_limit()
    }

    /// The lane's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Raft => "raft",
            Self::Control => "control",
            Self::Bulk => "bulk",
        }
    }

    const fn priority(self) -> i32 {
        match self {
            Self::Control => 2,
            Self::Raft => 1,
            Self::Bulk => 0,
        }
    }

    pub(super) const fn index(self) -> usize {
        self as usize
    }

    fn of(tag: u8) -> Option<Self> {
        Self::ALL.get(usize::from(tag)).copied()
    }

    fn budget(self) -> Arc<Semaphore> {
        Arc::new(Semaphore::new(self.queue_limit() / UNIT))
    }
}

/// Budgets count in KiB: a semaphore's permits are 32 bits wide.
const UNIT: usize = 1024;

fn cost(bytes: usize) -> u32 {
    // A frame is at most 64 MiB, which is 65,536 units.
    u32::try_from(bytes.div_ceil(UNIT).max(1)).unwrap_or(u32::MAX)
}

/// A frame waiting to be written, with its share of the budget.
type Waiting = (Bytes, OwnedSemaphorePermit);

/// The sending end of one lane of one link.
pub(super) struct Queue {
    sender: mpsc::UnboundedSender<Waiting>,
    budget: Arc<Semaphore>,
}

/// Why a frame did not get into a [`Queue`].
pub(super) enum NotQueued {
    Full(Bytes),
    Gone(Bytes),
}

pub(super) type Drain = mpsc::UnboundedReceiver<Waiting>;

pub(super) fn queue(lane: Lane) -> (Queue, Drain) {
    let (sender, drain) = mpsc::unbounded_channel();
    (Queue { sender, budget: lane.budget() }, drain)
}

impl Queue {
    pub(super) fn push(&self, bytes: Bytes) -> Result<(), NotQueued> {
        match Arc::clone(&self.budget).try_acquire_many_owned(cost(bytes.len())) {
            Ok(permit) => self.enqueue(bytes, permit),
            Err(TryAcquireError::NoPermits) => Err(NotQueued::Full(bytes)),
            Err(TryAcquireError::Closed) => Err(NotQueued::Gone(bytes)),
        }
    }

    /// Waits for room.
    pub(super) async fn push_wait(&self, bytes: Bytes) -> Result<(), NotQueued> {
        match Arc::clone(&self.budget).acquire_many_owned(cost(bytes.len())).await {
            Ok(permit) => self.enqueue(bytes, permit),
            Err(_) => Err(NotQueued::Gone(bytes)),
        }
    }

    /// Ends the wait of everybody in [`Self::push_wait`].
    pub(super) fn close(&self) {
        self.budget.close();
    }

    fn enqueue(&self, bytes: Bytes, permit: OwnedSemaphorePermit) -> Result<(), NotQueued> {
        self.sender
            .send((bytes, permit))
            .map_err(|mpsc::error::SendError((bytes, _))| NotQueued::Gone(bytes))
    }
}

/// Writes one lane until its queue or the connection ends.
pub(super) async fn write(connection: Connection, lane: Lane, mut drain: Drain) -> Fault {
    let mut stream = match connection.open_uni().await {
        Ok(stream) => stream,
        Err(error) => return Fault::Ended(error),
    };
    // Fails only for a stream that is gone, as the first write will tell.
    let _ = stream.set_priority(lane.priority());
    if let Err(error) = stream.write_all(&[lane as u8]).await {
        return close::written(error);
    }
    while let Some((bytes, permit)) = drain.recv().await {
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes();
        let mut chunks = [Bytes::copy_from_slice(&length), bytes];
        if let Err(error) = stream.write_all_chunks(&mut chunks).await {
            return close::written(error);
        }
        drop(permit);
    }
    Fault::Ended(connection.closed().await)
}

/// Reads one inbound stream: the lane's tag, then frames, until the connection
/// ends or a rule is broken. `taken` tells lanes that already have a stream.
pub(super) async fn read(
    mut stream: RecvStream,
    from: StoreId,
    link: u64,
    outbox: Outbox,
    taken: Arc<[std::sync::atomic::AtomicBool; 3]>,
) -> Fault {
    let mut tag = [0];
    if let Err(error) = stream.read_exact(&mut tag).await {
        return ended(error);
    }
    let Some(lane) = Lane::of(tag[0]) else {
        return Fault::Protocol(format!("there is no lane {}", tag[0]));
    };
    if taken[lane.index()].swap(true, std::sync::atomic::Ordering::Relaxed) {
        return Fault::Protocol(format!("a second {} stream on one link", lane.name()));
    }
    let budget = lane.budget();
    loop {
        let mut length = [0; 4];
        if let Err(error) = stream.read_exact(&mut length).await {
            return ended(error);
        }
        let length = u32::from_le_bytes(length) as usize;
        if length > lane.frame_limit() {
            return Fault::Protocol(format!(
                "a {} frame of {length} bytes is over the limit of {}",
                lane.name(),
                lane.frame_limit()
            ));
        }
        // Backpressure: nothing is read before the reader has taken what is due.
        let Ok(permit) = Arc::clone(&budget).acquire_many_owned(cost(length)).await else {
            return Fault::Protocol("the budget of a lane was closed".into());
        };
        match body(&mut stream, length).await {
            Ok(bytes) => outbox.post(LinkEvent::Frame { from, lane, bytes }, link, Some(permit)),
            Err(fault) => return fault,
        }
    }
}

async fn body(stream: &mut RecvStream, length: usize) -> Result<Bytes, Fault> {
    let mut bytes = BytesMut::with_capacity(length);
    while bytes.len() < length {
        match stream.read_chunk(length - bytes.len(), true).await {
            Ok(Some(chunk)) => bytes.extend_from_slice(&chunk.bytes),
            Ok(None) => return Err(cut()),
            Err(ReadError::ConnectionLost(error)) => return Err(Fault::Ended(error)),
            Err(error) => return Err(Fault::Protocol(error.to_string())),
        }
    }
    Ok(bytes.freeze())
}

fn ended(error: ReadExactError) -> Fault {
    match error {
        ReadExactError::ReadError(ReadError::ConnectionLost(error)) => Fault::Ended(error),
        ReadExactError::FinishedEarly(_) => cut(),
        ReadExactError::ReadError(error) => Fault::Protocol(error.to_string()),
    }
}

fn cut() -> Fault {
    Fault::Protocol("a lane ended before its link".into())
}
