//! Messages between members: bytes in, a message that cannot make Raft stop the
//! process out (SEC-1). The peer is authenticated, yet it may be broken.

use job::codec::MAX_MESSAGE;
use protobuf::Message as _;
use raft::eraftpb::{Message, MessageType};

use super::error::StepError;

/// A snapshot's message is a little larger than the state in it.
const MOST_BYTES: usize = MAX_MESSAGE + (1 << 20);

/// Decodes and checks all that can be checked without the log.
pub(super) fn decode(bytes: &[u8], to: u64) -> Result<Message, StepError> {
    if bytes.len() > MOST_BYTES {
        return Err(StepError::TooLarge { bytes: bytes.len(), limit: MOST_BYTES });
    }
    // The decoder follows nested groups by recursion without a limit, and these
    // messages have none.
    if !without_groups(bytes, Kind::Message) {
        return Err(StepError::Malformed("not a Raft message".into()));
    }
    let message =
        Message::parse_from_bytes(bytes).map_err(|e| StepError::Malformed(e.to_string()))?;
    if message.to != to {
        return Err(StepError::Misrouted { to: message.to });
    }
    if message.from == 0 || message.from == to {
        return Err(StepError::Malformed(format!("from member {}", message.from)));
    }
    match message.get_msg_type() {
        MessageType::MsgAppend
        | MessageType::MsgAppendResponse
        | MessageType::MsgRequestVote
        | MessageType::MsgRequestVoteResponse
        | MessageType::MsgSnapshot
        | MessageType::MsgHeartbeat
        | MessageType::MsgHeartbeatResponse
        | MessageType::MsgTimeoutNow
        | MessageType::MsgRequestPreVote
        | MessageType::MsgRequestPreVoteResponse => {}
        kind => {
            return Err(StepError::Malformed(format!("{kind:?} is not for other members")));
        }
    }
    if message.term == 0 {
        return Err(StepError::Malformed("a message without a term".into()));
    }
    let mut before = (message.index, message.log_term);
    for entry in &message.entries {
        if before.0.checked_add(1) != Some(entry.index) || entry.term < before.1 {
            return Err(StepError::Malformed(format!("entry {} after {}", entry.index, before.0)));
        }
        before = (entry.index, entry.term);
    }
    Ok(message)
}

/// Which fields of a message hold messages.
#[derive(Clone, Copy)]
enum Kind {
    Message,
    Entry,
    Snapshot,
    Metadata,
    ConfState,
}

impl Kind {
    fn within(self, field: u64) -> Option<Kind> {
        match (self, field) {
            (Kind::Message, 7) => Some(Kind::Entry),
            (Kind::Message, 9) => Some(Kind::Snapshot),
            (Kind::Snapshot, 2) => Some(Kind::Metadata),
            (Kind::Metadata, 1) => Some(Kind::ConfState),
            _ => None,
        }
    }
}

/// Whether the bytes are a sequence of fields without groups, at every level.
fn without_groups(mut bytes: &[u8], kind: Kind) -> bool {
    while !bytes.is_empty() {
        let Some(tag) = varint(&mut bytes) else {
            return false;
        };
        let length = match tag & 7 {
            0 => {
                if varint(&mut bytes).is_none() {
                    return false;
                }
                0
            }
            1 => 8,
            2 => match varint(&mut bytes) {
                Some(length) => length,
                None => return false,
            },
            5 => 4,
            _ => return false,
        };
        let Some((value, rest)) =
            usize::try_from(length).ok().and_then(|n| bytes.split_at_checked(n))
        else {
            return false;
        };
        bytes = rest;
        let nested = kind.within(tag >> 3).filter(|_| tag & 7 == 2);
        if nested.is_some_and(|kind| !without_groups(value, kind)) {
            return false;
        }
    }
    true
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use raft::eraftpb::{Entry, Snapshot};

    use super::*;

    fn message(kind: MessageType) -> Message {
        let mut message =
            Message { to: 2, from: 1, term: 3, index: 4, log_term: 3, ..Message::default() };
        message.set_msg_type(kind);
        message
    }

    fn bytes(message: &Message) -> Vec<u8> {
        message.write_to_bytes().expect("writes")
    }

    #[track_caller]
    fn check(bytes: &[u8], expected: &str) {
        let got = match decode(bytes, 2) {
            Ok(_) => "ok".to_owned(),
            Err(e) => e.to_string(),
        };
        assert!(got.contains(expected), "{got:?} does not say {expected:?}");
    }

    #[test]
    fn only_sound_messages_for_this_member_pass() {
        check(&bytes(&message(MessageType::MsgHeartbeat)), "ok");
        let mut snapshot = message(MessageType::MsgSnapshot);
        snapshot.set_snapshot(Snapshot { data: vec![7; 300].into(), ..Snapshot::default() });
        snapshot.mut_snapshot().mut_metadata().mut_conf_state().voters = vec![1, 2];
        check(&bytes(&snapshot), "ok");
        check(&bytes(&Message { to: 9, ..message(MessageType::MsgHeartbeat) }), "member 9");
        check(&bytes(&Message { from: 0, ..message(MessageType::MsgHeartbeat) }), "from member 0");
        check(&bytes(&Message { from: 2, ..message(MessageType::MsgHeartbeat) }), "from member 2");
        check(&bytes(&Message { term: 0, ..message(MessageType::MsgHeartbeat) }), "term");
        for kind in [MessageType::MsgPropose, MessageType::MsgHup, MessageType::MsgReadIndex] {
            check(&bytes(&message(kind)), "not for other members");
        }
        let entry = |index, term| Entry { index, term, ..Entry::default() };
        for (entries, expected) in [
            (vec![entry(5, 3), entry(6, 3)], "ok"),
            (vec![entry(5, 3), entry(7, 3)], "entry 7 after 5"),
            (vec![entry(5, 2)], "entry 5 after 4"),
            (vec![entry(4, 3)], "entry 4 after 4"),
        ] {
            let mut append = message(MessageType::MsgAppend);
            append.set_entries(entries.into());
            check(&bytes(&append), expected);
        }
        check(&[], "member 0");
        check(&[0xff; 40], "not a Raft message");
        check(&vec![0x0b; 1 << 20], "not a Raft message");
        check(&vec![0; MOST_BYTES + 1], "limit");
        // A group inside an entry is found as well.
        let mut nested = bytes(&message(MessageType::MsgAppend));
        nested.extend([0x3a, 2, 0x0b, 0x0c]);
        check(&nested, "not a Raft message");
    }

    #[test]
    fn a_cut_or_flipped_message_is_an_error_or_another_message_but_no_panic() {
        let mut append = message(MessageType::MsgAppend);
        let entry = Entry { index: 5, term: 3, data: vec![1; 20].into(), ..Entry::default() };
        append.set_entries(vec![entry].into());
        let whole = bytes(&append);
        for at in 0..whole.len() {
            let _ = decode(&whole[..at], 2);
            for bit in 0..8 {
                let mut flipped = whole.clone();
                flipped[at] ^= 1 << bit;
                let _ = decode(&flipped, 2);
            }
        }
    }
}
