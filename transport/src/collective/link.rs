//! One connection to a peer: frames in, frames out, and what is known about
//! the peer. Nothing here blocks.
//!
//! Frames go through the connection, or through the rings that two ranks of one
//! machine share; then the connection only tells why and that the peer left.

use std::{
    io::{IoSlice, IoSliceMut},
    net::TcpStream,
};

use job::Token;
use rustix::{
    event::PollFlags,
    io::{Errno, readv},
    net::{SendAncillaryBuffer, SendFlags, Shutdown, sendmsg, shutdown},
};

use super::{
    Error,
    frame::{HEADER, Header, Notice, Op},
    inbox::Inbox,
    outgoing::Outgoing,
    parcels::Parcels,
    shm::{Broken, Rings},
    sink::Sink,
};

/// Slices and bytes handed to the kernel in one call: a copy short enough that
/// an abort is noticed in time.
const BATCH: usize = 64;
const PORTION: usize = 1 << 20;

/// Who talks to whom, in which generation. Ranks are those of the generation's
/// mesh, `0..size`, but for `at`, which is the peer's rank in this mesh.
#[derive(Clone, Copy, Debug)]
pub(super) struct Party {
    pub(super) token: Token,
    pub(super) own: usize,
    pub(super) peer: usize,
    pub(super) at: usize,
    pub(super) size: usize,
}

#[derive(Debug)]
pub(super) struct Link {
    party: Party,
    // The operation in progress, which the next frame must belong to.
    op: Op,
    inbox: Inbox,
    parcels: Parcels,
    rings: Option<Rings>,
    // What the connection says where frames go through rings.
    aside: Inbox,
    frames_sent: u64,
    frames_received: u64,
    sending: bool,
    // Sending failed, while there may be more to read that explains why.
    severed: Option<Errno>,
    heard: Option<Notice>,
    end: End,
}

/// How much is known about the end of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    /// It is not in sight.
    Open,
    /// The peer sends no more, but what it sent last is still to be read.
    Near(String),
    /// The peer said farewell: it has done its part of everything before.
    Farewell,
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

impl Link {
    pub(super) fn new(party: Party) -> Self {
        Self {
            party,
            op: Op::Barrier,
            inbox: Inbox::new(),
            parcels: Parcels::default(),
            rings: None,
            aside: Inbox::new(),
            frames_sent: 0,
            frames_received: 0,
            sending: false,
            severed: None,
            heard: None,
            end: End::Open,
        }
    }

    /// From now on frames go through these rings.
    pub(super) fn share(&mut self, rings: Rings) {
        self.rings = Some(rings);
    }

    pub(super) fn has_rings(&self) -> bool {
        self.rings.is_some()
    }

    /// What the peer sent to this rank before it was asked for.
    pub(super) fn parcels(&mut self) -> &mut Parcels {
        &mut self.parcels
    }

    /// What to wait for on the connection.
    pub(super) fn interest(
        &mut self,
        out: &Outgoing,
        incoming: Incoming,
        sink: &mut impl Sink,
    ) -> PollFlags {
        let mut events = PollFlags::empty();
        let open = self.end == End::Open;
        events.set(PollFlags::RDHUP, open);
        if self.rings.is_some() {
            events.set(PollFlags::IN, open);
            return events;
        }
        let reads = match incoming {
            _ if self.parcels.is_arriving() => true,
            Incoming::Header => true,
            Incoming::Body(_) => !sink.room(self.party.at).is_empty(),
            // A peer may send what nobody waits for yet.
            Incoming::Done => open && self.inbox.filled().len() < HEADER,
        };
        events.set(PollFlags::IN, reads);
        events.set(PollFlags::OUT, !out.is_done() && self.severed.is_none());
        events
    }

    /// Enters an operation and gives the frame to send its header.
    pub(super) fn begin(&mut self, op: Op, out: &mut Outgoing) {
        self.op = op;
        out.head(|bytes| Header::new(op, self.party.token, self.frames_sent, bytes).encode());
    }

    /// Sends what fits into the socket.
    pub(super) fn send(
        &mut self,
        stream: &TcpStream,
        out: &mut Outgoing,
        incoming: Incoming,
    ) -> Result<(), Error> {
        if out.is_done() || self.rings.is_some() {
            return Ok(());
        }
        let mut slices = [IoSlice::new(&[]); BATCH];
        let mut used = 0;
        let mut portion = PORTION;
        for (slice, part) in slices.iter_mut().zip(out.rest()) {
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
                self.sent(out, bytes);
                Ok(())
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(errno) => {
                self.severed = Some(errno);
                self.explain(stream, incoming)
            }
        }
    }

    /// Moves what the rings have room and bytes for; whether anything moved.
    pub(super) fn pump(
        &mut self,
        out: &mut Outgoing,
        incoming: &mut Incoming,
        sink: &mut impl Sink,
    ) -> Result<bool, Error> {
        let Some(mut rings) = self.rings.take() else { return Ok(false) };
        let moved = self.pump_through(&mut rings, out, incoming, sink);
        self.rings = Some(rings);
        moved
    }

    fn pump_through(
        &mut self,
        rings: &mut Rings,
        out: &mut Outgoing,
        incoming: &mut Incoming,
        sink: &mut impl Sink,
    ) -> Result<bool, Error> {
        let party = self.party;
        let broken = |Broken| {
            let detail = "a cursor in shared memory that cannot be right".to_owned();
            Error::Protocol { rank: party.peer, detail }
        };
        let mut moved = 0;
        if !out.is_done() {
            let sent = rings.write(out.rest()).map_err(broken)?;
            self.sent(out, sent);
            moved += sent;
        }
        loop {
            self.deliver(incoming, sink)?;
            let into = if self.parcels.is_arriving() {
                self.parcels.room()
            } else {
                match *incoming {
                    Incoming::Body(missing) => limited(sink.room(party.at), missing),
                    // A header and no more, so that bodies go straight where
                    // they belong.
                    _ => {
                        let missing = HEADER.saturating_sub(self.inbox.filled().len());
                        let space = self.inbox.space();
                        let missing = missing.min(space.len());
                        &mut space[..missing]
                    }
                }
            };
            let got = rings.read(into).map_err(broken)?;
            if got == 0 {
                break;
            }
            moved += got;
            if self.parcels.is_arriving() {
                self.stow(got);
            } else if let Incoming::Body(_) = incoming {
                self.take(got, incoming, sink);
            } else {
                self.inbox.fill(got);
            }
            if moved >= PORTION {
                return Ok(true);
            }
        }
        if moved == 0 && self.end != End::Open {
            // What the peer wrote before it left has been read now, unless it is
            // more than this operation awaits.
            let done = *incoming == Incoming::Done;
            let empty = rings.is_empty().map_err(broken)?;
            match &self.end {
                End::Near(why) if done || empty => return Err(self.lost(why)),
                End::Farewell if !(done && out.is_done()) && empty => {
                    return Err(self.lost("it left the mesh"));
                }
                _ => {}
            }
        }
        Ok(moved > 0)
    }

    /// Receives once, as much as there is and has a place.
    pub(super) fn receive(
        &mut self,
        stream: &TcpStream,
        incoming: &mut Incoming,
        sink: &mut impl Sink,
    ) -> Result<(), Error> {
        if self.rings.is_some() {
            return self.listen(stream, *incoming);
        }
        self.deliver(incoming, sink)?;
        let stowing = self.parcels.is_arriving();
        let room = match *incoming {
            _ if stowing => limited(self.parcels.room(), u64::MAX),
            Incoming::Done => return self.look_ahead(stream, false),
            Incoming::Header => &mut [],
            Incoming::Body(missing) => {
                let room = limited(sink.room(self.party.at), missing);
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
            Ok(0) if *incoming == Incoming::Header && !stowing => {
                return Err(self.lost("connection closed"));
            }
            Ok(0) => return Err(self.lost("connection closed in the middle of a frame")),
            Ok(got) => got,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(errno) => return Err(self.lost(errno)),
        };
        self.inbox.fill(got.saturating_sub(direct));
        if stowing {
            self.stow(got.min(direct));
        } else if let Incoming::Body(_) = incoming {
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
                self.look_ahead(stream, true)?;
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
        let peer = self.party.at;
        loop {
            if self.parcels.is_arriving() && !self.adopt(incoming, sink)? {
                let room = self.parcels.room();
                let length = room.len().min(self.inbox.filled().len());
                room[..length].copy_from_slice(&self.inbox.filled()[..length]);
                self.inbox.take(length);
                if !self.stow(length) {
                    return Ok(());
                }
                continue;
            }
            let Incoming::Body(missing) = *incoming else {
                let Some(header) = self.header_at(0, 0)? else { return Ok(()) };
                let expected = *incoming == Incoming::Header;
                match header.op {
                    Op::Fault if expected => return self.fault_at(0, header),
                    Op::Farewell if expected => return Err(self.lost("it left the mesh")),
                    op if expected && op == self.op => {}
                    Op::Send if self.parcels.fits(header.bytes) => {
                        self.inbox.take(HEADER);
                        self.parcels.begin(header.bytes);
                        continue;
                    }
                    _ if !expected => return Ok(()),
                    op => {
                        let detail = format!("{} instead of {}", op.name(), self.op.name());
                        return Err(self.broken(detail));
                    }
                }
                self.inbox.take(HEADER);
                sink.begin(peer, header.bytes).map_err(|detail| self.broken(detail))?;
                *incoming = Incoming::Body(header.bytes);
                self.take(0, incoming, sink);
                continue;
            };
            let room = limited(sink.room(peer), missing);
            let length = room.len().min(self.inbox.filled().len());
            if length == 0 {
                return Ok(());
            }
            room[..length].copy_from_slice(&self.inbox.filled()[..length]);
            self.inbox.take(length);
            self.take(length, incoming, sink);
        }
    }

    /// A parcel is arriving, and its receiver has come: the rest goes there.
    fn adopt(&mut self, incoming: &mut Incoming, sink: &mut impl Sink) -> Result<bool, Error> {
        if self.op != Op::Send || *incoming != Incoming::Header {
            return Ok(false);
        }
        let Some((parcel, filled)) = self.parcels.hand_over() else { return Ok(false) };
        let (peer, bytes) = (self.party.at, parcel.len() as u64);
        sink.begin(peer, bytes).map_err(|detail| self.broken(detail))?;
        *incoming = Incoming::Body(bytes);
        let mut rest = &parcel[..filled];
        while !rest.is_empty() {
            let room = sink.room(peer);
            let length = room.len().min(rest.len());
            room[..length].copy_from_slice(&rest[..length]);
            rest = &rest[length..];
            self.take(length, incoming, sink);
        }
        self.take(0, incoming, sink);
        Ok(true)
    }

    /// Bytes of the arriving parcel came; whether it is whole.
    fn stow(&mut self, bytes: usize) -> bool {
        let whole = self.parcels.advance(bytes);
        self.frames_received += u64::from(whole);
        whole
    }

    /// The peer hung up while nothing is expected from it: was it a farewell, a
    /// failure with a reason, or death?
    pub(super) fn hung_up(&mut self, stream: &TcpStream, incoming: Incoming) -> Result<(), Error> {
        if self.rings.is_some() {
            return self.listen(stream, incoming);
        }
        if incoming != Incoming::Done {
            // It is in the middle of a frame that there is no room for yet.
            self.end = End::Near("connection closed".to_owned());
            return Ok(());
        }
        self.look_ahead(stream, true)
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
        if (self.sending && self.rings.is_none()) || self.severed.is_some() {
            return;
        }
        let header = Header::new(op, self.party.token, self.frames_sent, payload.len()).encode();
        let slices = [IoSlice::new(&header), IoSlice::new(payload)];
        // Best effort: a peer that does not get it sees the stream end.
        let mut control = SendAncillaryBuffer::default();
        let sent = sendmsg(stream, &slices, &mut control, SendFlags::NOSIGNAL);
        self.severed = Some(Errno::SHUTDOWN);
        if sent == Ok(HEADER + payload.len()) {
            let _ = shutdown(stream, Shutdown::Write);
        }
    }

    /// Reads what a peer with rings says on the connection.
    fn listen(&mut self, stream: &TcpStream, incoming: Incoming) -> Result<(), Error> {
        let ended = read_ahead(stream, &mut self.aside);
        if let Some(bytes) = self.aside.filled().first_chunk() {
            let Some(header) = Header::decode(bytes) else {
                return Err(self.broken("bytes that are no frame".into()));
            };
            header.check(self.party.peer, self.party.token, header.sequence)?;
            let payload = &self.aside.filled()[HEADER..];
            match header.op {
                Op::Farewell => {
                    self.end = End::Farewell;
                    return Ok(());
                }
                Op::Fault if payload.len() as u64 >= header.bytes => {
                    let Party { own, peer, size, .. } = self.party;
                    let notice = Notice::decode(&payload[..header.bytes as usize], peer, own, size);
                    return Err(self.heard.insert(notice).error.clone());
                }
                Op::Fault => {}
                op => return Err(self.broken(format!("{} beside the rings", op.name()))),
            }
        }
        match ended {
            Some(why) if incoming == Incoming::Done => Err(self.lost(why)),
            // It may have written all that is awaited before it went.
            Some(why) => {
                self.end = End::Near(why);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Reads ahead, as far as the inbox goes, for what explains a hang-up.
    fn look_ahead(&mut self, stream: &TcpStream, hung_up: bool) -> Result<(), Error> {
        let ended = read_ahead(stream, &mut self.inbox);
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
            Some(why) => {
                self.end = End::Near(why);
                Ok(())
            }
            None if hung_up && self.inbox.space().is_empty() => {
                self.end = End::Near("connection closed".to_owned());
                Ok(())
            }
            None => Ok(()),
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

    fn sent(&mut self, out: &mut Outgoing, bytes: usize) {
        out.advance(bytes);
        self.sending = !out.is_done();
        self.frames_sent += u64::from(!self.sending);
    }

    fn take(&mut self, bytes: usize, incoming: &mut Incoming, sink: &mut impl Sink) {
        if let Incoming::Body(missing) = incoming {
            sink.advance(self.party.at, bytes);
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

/// Reads as far as the inbox goes; why the stream ended, if it did.
fn read_ahead(stream: &TcpStream, inbox: &mut Inbox) -> Option<String> {
    loop {
        let space = inbox.space();
        if space.is_empty() {
            return None;
        }
        match rustix::io::read(stream, space) {
            Ok(0) => return Some("connection closed".to_owned()),
            Ok(got) => inbox.fill(got),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return None,
            Err(errno) => return Some(errno.to_string()),
        }
    }
}

fn limited(room: &mut [u8], missing: u64) -> &mut [u8] {
    let length = room.len().min(usize::try_from(missing).unwrap_or(usize::MAX)).min(PORTION);
    &mut room[..length]
}
