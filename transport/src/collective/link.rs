//! One connection to a peer: frames in, frames out, and what is known about
//! the peer. Nothing here blocks.

use std::{
    io::{IoSlice, IoSliceMut},
    net::TcpStream,
};

use job::Token;
use rustix::{
    io::{Errno, readv},
    net::{SendAncillaryBuffer, SendFlags, Shutdown, sendmsg, shutdown},
};

use super::{
    Error,
    frame::{HEADER, Header, Notice, Op},
    sink::Sink,
};

/// Bytes read at once beyond what has a destination: a small frame with its
/// header, and notices, whole.
const INBOX: usize = 8 << 10;

/// Slices and bytes handed to the kernel in one call: a copy short enough that
/// an abort is noticed in time.
const BATCH: usize = 64;
const PORTION: usize = 1 << 20;

/// Who talks to whom, in which generation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Party {
    pub(super) token: Token,
    pub(super) own: usize,
    pub(super) peer: usize,
    pub(super) size: usize,
}

#[derive(Debug)]
pub(super) struct Link {
    party: Party,
    // The operation in progress, which the next frame must belong to.
    op: Op,
    inbox: Inbox,
    frames_sent: u64,
    frames_received: u64,
    sending: bool,
    // Sending failed, while there may be more to read that explains why.
    severed: Option<Errno>,
    heard: Option<Notice>,
    end: End,
}

/// How much is known about the end of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// It is not in sight.
    Open,
    /// The peer sends no more, but what it sent last is still to be read.
    Near,
    /// The peer said farewell: it has done its part of everything before.
    Farewell,
}

/// A frame on its way out.
pub(super) struct Outgoing<'a> {
    header: Option<[u8; HEADER]>,
    parts: Vec<&'a [u8]>,
    // The part, and the bytes of it, that are gone; the header is part 0.
    part: usize,
    offset: usize,
}

/// A frame on its way in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Incoming {
    /// Its header has not come.
    Header,
    /// So many bytes are missing.
    Body(u64),
    /// It is complete, or none is expected.
    Done,
}

impl<'a> Outgoing<'a> {
    pub(super) fn nothing() -> Self {
        Self { header: None, parts: Vec::new(), part: 0, offset: 0 }
    }

    /// A frame of these parts, one after the other.
    pub(super) fn frame(parts: Vec<&'a [u8]>) -> Self {
        Self { header: Some([0; HEADER]), parts, part: 0, offset: 0 }
    }

    pub(super) fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.len()).sum()
    }

    pub(super) fn is_done(&self) -> bool {
        self.header.is_none() || self.part > self.parts.len()
    }

    fn advance(&mut self, mut bytes: usize) {
        loop {
            let length = match self.part {
                0 => HEADER,
                part if part > self.parts.len() => return,
                part => self.parts[part - 1].len(),
            };
            if self.offset + bytes < length {
                self.offset += bytes;
                return;
            }
            bytes -= length - self.offset;
            self.part += 1;
            self.offset = 0;
        }
    }
}

impl Link {
    pub(super) fn new(party: Party) -> Self {
        Self {
            party,
            op: Op::Barrier,
            inbox: Inbox { bytes: Box::new([0; INBOX]), start: 0, end: 0 },
            frames_sent: 0,
            frames_received: 0,
            sending: false,
            severed: None,
            heard: None,
            end: End::Open,
        }
    }

    /// Whether the end of the stream is still worth watching for.
    pub(super) fn is_open(&self) -> bool {
        self.end == End::Open
    }

    /// Enters an operation and gives the frame to send its header.
    pub(super) fn begin(&mut self, op: Op, out: &mut Outgoing) {
        self.op = op;
        let bytes = out.bytes();
        if let Some(header) = &mut out.header {
            *header = Header::new(op, self.party.token, self.frames_sent, bytes).encode();
        }
    }

    /// Sends what fits into the socket.
    pub(super) fn send(
        &mut self,
        stream: &TcpStream,
        out: &mut Outgoing,
        incoming: Incoming,
    ) -> Result<(), Error> {
        let Some(header) = &out.header else { return Ok(()) };
        if out.is_done() {
            return Ok(());
        }
        let mut slices = [IoSlice::new(&[]); BATCH];
        let whole = std::iter::once(&header[..]).chain(out.parts.iter().copied());
        let mut used = 0;
        let mut portion = PORTION;
        for (slice, part) in slices.iter_mut().zip(whole.skip(out.part)) {
            let part = if used == 0 { &part[out.offset..] } else { part };
            let part = &part[..part.len().min(portion)];
            *slice = IoSlice::new(part);
            used += 1;
            portion -= part.len();
            if portion == 0 {
                break;
            }
        }
        let mut control = SendAncillaryBuffer::default();
        match sendmsg(stream, &slices[..used], &mut control, SendFlags::NOSIGNAL) {
            Ok(bytes) => {
                out.advance(bytes);
                self.sending = !out.is_done();
                self.frames_sent += u64::from(!self.sending);
                Ok(())
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(errno) => {
                self.severed = Some(errno);
                self.explain(stream, incoming)
            }
        }
    }

    /// Whether sending is possible.
    pub(super) fn is_sending(&self, out: &Outgoing) -> bool {
        !out.is_done() && self.severed.is_none()
    }

    /// Receives once, as much as there is and has a place.
    pub(super) fn receive(
        &mut self,
        stream: &TcpStream,
        incoming: &mut Incoming,
        sink: &mut impl Sink,
    ) -> Result<(), Error> {
        self.deliver(incoming, sink)?;
        let room = match *incoming {
            Incoming::Done => return Ok(()),
            Incoming::Header => &mut [],
            Incoming::Body(missing) => {
                let room = limited(sink.room(self.party.peer), missing);
                if room.is_empty() {
                    return Ok(());
                }
                room
            }
        };
        let direct = room.len();
        let spill = self.inbox.space();
        let mut into = [IoSliceMut::new(room), IoSliceMut::new(spill)];
        let got = match readv(stream, &mut into) {
            Ok(0) if *incoming == Incoming::Header => return Err(self.lost("connection closed")),
            Ok(0) => return Err(self.lost("connection closed in the middle of a frame")),
            Ok(got) => got,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(errno) => return Err(self.lost(errno)),
        };
        self.inbox.end += got.saturating_sub(direct);
        if let Incoming::Body(_) = incoming {
            self.take(got.min(direct), incoming, sink);
        }
        self.deliver(incoming, sink)?;
        self.explain(stream, *incoming)
    }

    /// After sending failed: the peer may have said why before it went, which
    /// shows once the frame that it was sending is read.
    fn explain(&mut self, stream: &TcpStream, incoming: Incoming) -> Result<(), Error> {
        match self.severed {
            Some(errno) if !matches!(incoming, Incoming::Body(_)) => {
                self.look_ahead(stream)?;
                Err(self.lost(errno))
            }
            _ => Ok(()),
        }
    }

    /// Moves what lies in the inbox to where it belongs.
    pub(super) fn deliver(
        &mut self,
        incoming: &mut Incoming,
        sink: &mut impl Sink,
    ) -> Result<(), Error> {
        let peer = self.party.peer;
        loop {
            match *incoming {
                Incoming::Done => return Ok(()),
                Incoming::Header => {
                    let Some(header) = self.header_at(0, 0)? else { return Ok(()) };
                    match header.op {
                        Op::Farewell => return Err(self.lost("it left the mesh")),
                        Op::Fault => return self.fault_at(0, header),
                        op if op == self.op => {}
                        op => {
                            let detail = format!("{} instead of {}", op.name(), self.op.name());
                            return Err(self.broken(detail));
                        }
                    }
                    self.inbox.start += HEADER;
                    sink.begin(peer, header.bytes).map_err(|detail| self.broken(detail))?;
                    *incoming = Incoming::Body(header.bytes);
                    self.take(0, incoming, sink);
                }
                Incoming::Body(missing) => {
                    let room = limited(sink.room(peer), missing);
                    let length = room.len().min(self.inbox.filled().len());
                    if length == 0 {
                        return Ok(());
                    }
                    room[..length].copy_from_slice(&self.inbox.filled()[..length]);
                    self.inbox.start += length;
                    self.take(length, incoming, sink);
                }
            }
        }
    }

    /// The peer hung up while nothing is expected from it: was it a farewell, a
    /// failure with a reason, or death?
    pub(super) fn hung_up(&mut self, stream: &TcpStream, incoming: Incoming) -> Result<(), Error> {
        if incoming != Incoming::Done {
            // It is in the middle of a frame that there is no room for yet.
            self.end = End::Near;
            return Ok(());
        }
        self.look_ahead(stream)
    }

    /// Tells the peer why this mesh is over, if the stream is between frames
    /// and has room; it will not hear more.
    pub(super) fn give_up(&mut self, stream: &TcpStream, notice: &Notice) {
        self.last_frame(stream, Op::Fault, &notice.encode());
    }

    /// Why the peer gave its mesh up, if it said so.
    pub(super) fn heard(&self) -> Option<&Notice> {
        self.heard.as_ref()
    }

    /// Tells the peer that all went well.
    pub(super) fn farewell(&mut self, stream: &TcpStream) {
        self.last_frame(stream, Op::Farewell, &[]);
    }

    fn last_frame(&mut self, stream: &TcpStream, op: Op, payload: &[u8]) {
        if self.sending || self.severed.is_some() {
            return;
        }
        let mut out = Outgoing::frame(vec![payload]);
        self.begin(op, &mut out);
        let Some(header) = &out.header else { return };
        let slices = [IoSlice::new(header), IoSlice::new(payload)];
        // Best effort: a peer that does not get it sees the stream end.
        let mut control = SendAncillaryBuffer::default();
        let sent = sendmsg(stream, &slices, &mut control, SendFlags::NOSIGNAL);
        self.sending = true;
        if sent == Ok(HEADER + payload.len()) {
            let _ = shutdown(stream, Shutdown::Write);
        }
    }

    /// Reads ahead, as far as the inbox goes, for what explains a hang-up.
    fn look_ahead(&mut self, stream: &TcpStream) -> Result<(), Error> {
        let ended = loop {
            let space = self.inbox.space();
            if space.is_empty() {
                break None;
            }
            match rustix::io::read(stream, space) {
                Ok(0) => break Some("connection closed".to_owned()),
                Ok(got) => self.inbox.end += got,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(errno) => break Some(errno.to_string()),
            }
        };
        let mut at = 0;
        let mut ahead = 0;
        while let Some(header) = self.header_at(at, ahead)? {
            match header.op {
                Op::Farewell => {
                    self.end = End::Farewell;
                    return Ok(());
                }
                Op::Fault => return self.fault_at(at, header),
                // A later operation of a peer that is ahead.
                _ => {
                    at = at.saturating_add(HEADER).saturating_add(header.bytes as usize);
                    ahead += 1;
                }
            }
        }
        match ended {
            Some(why) if at <= self.inbox.filled().len() => Err(self.lost(why)),
            _ => {
                self.end = End::Near;
                Ok(())
            }
        }
    }

    /// The header at this place of the inbox, so many frames ahead of the next.
    fn header_at(&self, at: usize, ahead: u64) -> Result<Option<Header>, Error> {
        let Some(bytes) = self.inbox.filled().get(at..).and_then(<[u8]>::first_chunk) else {
            return Ok(None);
        };
        let Some(header) = Header::decode(bytes) else {
            return Err(self.broken("bytes that are no frame".into()));
        };
        header.check(self.party.peer, self.party.token, self.frames_received + ahead)?;
        Ok(Some(header))
    }

    /// The error that a notice carries, once it is here whole.
    fn fault_at(&mut self, at: usize, header: Header) -> Result<(), Error> {
        let Party { own, peer, size, .. } = self.party;
        let start = at + HEADER;
        match self.inbox.filled().get(start..start + header.bytes as usize) {
            Some(bytes) => {
                let notice = Notice::decode(bytes, peer, own, size);
                Err(self.heard.insert(notice).error.clone())
            }
            None => Ok(()),
        }
    }

    fn take(&mut self, bytes: usize, incoming: &mut Incoming, sink: &mut impl Sink) {
        if let Incoming::Body(missing) = incoming {
            sink.advance(self.party.peer, bytes);
            *missing -= bytes as u64;
            if *missing == 0 {
                *incoming = Incoming::Done;
                self.frames_received += 1;
            }
        }
    }

    fn lost(&self, why: impl ToString) -> Error {
        Error::PeerLost { rank: self.party.peer, why: why.to_string() }
    }

    fn broken(&self, detail: String) -> Error {
        Error::Protocol { rank: self.party.peer, detail }
    }
}

/// Bytes that were read before their place was known.
#[derive(Debug)]
struct Inbox {
    bytes: Box<[u8; INBOX]>,
    start: usize,
    end: usize,
}

impl Inbox {
    fn filled(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    fn space(&mut self) -> &mut [u8] {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        &mut self.bytes[self.end..]
    }
}

fn limited(room: &mut [u8], missing: u64) -> &mut [u8] {
    let length = room.len().min(usize::try_from(missing).unwrap_or(usize::MAX)).min(PORTION);
    &mut room[..length]
}
