//! What travels between two ranks once they trust each other: frames of a fixed
//! header and the bytes that it announces.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 2 | magic |
//! | 2 | 1 | operation |
//! | 3 | 1 | zero |
//! | 4 | 4 | era |
//! | 8 | 8 | generation |
//! | 16 | 8 | sequence: frames sent before on this connection, in this direction |
//! | 24 | 8 | bytes that follow |
//!
//! All little-endian. The token fences (GEN-1); sequence, operation and size
//! prove that both ranks are in the same call.

use job::{Era, Generation, Token};

use super::Error;

pub(super) const HEADER: usize = 32;

/// Ranks that a notice accuses, at most; with more it accuses nobody.
const ROOTS: usize = 32;

/// The largest notice, so that it fits an inbox whole.
const NOTICE: usize = 512;

const MAGIC: u16 = 0x3e1a;

/// What a frame belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Op {
    AllGatherBytes = 1,
    AllGather,
    ReduceScatterTree,
    AllReduceTree,
    Broadcast,
    Barrier,
    Send,
    AllToAll,
    ReduceScatter,
    AllReduce,
    ReduceScatterWave,
    Connect,
    Split,
    Allocate,
    /// The sender's mesh failed; the reason follows.
    Fault,
    /// The sender has finished all it had to do and leaves.
    Farewell,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) op: Op,
    pub(super) era: Era,
    pub(super) generation: Generation,
    pub(super) sequence: u64,
    pub(super) bytes: u64,
}

impl Op {
    const ALL: [Self; 16] = [
        Self::AllGatherBytes,
        Self::AllGather,
        Self::ReduceScatterTree,
        Self::AllReduceTree,
        Self::Broadcast,
        Self::Barrier,
        Self::Send,
        Self::AllToAll,
        Self::ReduceScatter,
        Self::AllReduce,
        Self::ReduceScatterWave,
        Self::Connect,
        Self::Split,
        Self::Allocate,
        Self::Fault,
        Self::Farewell,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::AllGatherBytes => "all_gather_bytes",
            Self::AllGather => "all_gather",
            Self::ReduceScatterTree => "reduce_scatter_tree",
            Self::AllReduceTree => "all_reduce_tree",
            Self::Broadcast => "broadcast",
            Self::Barrier => "barrier",
            Self::Send => "send",
            Self::AllToAll => "all_to_all",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllReduce => "all_reduce",
            Self::ReduceScatterWave => "reduce_scatter_wave",
            Self::Connect => "connect",
            Self::Split => "split",
            Self::Allocate => "allocate",
            Self::Fault => "fault",
            Self::Farewell => "farewell",
        }
    }
}

impl Header {
    pub(super) fn new(op: Op, token: Token, sequence: u64, bytes: usize) -> Self {
        let Token { era, generation, .. } = token;
        Self { op, era, generation, sequence, bytes: bytes as u64 }
    }

    pub(super) fn encode(self) -> [u8; HEADER] {
        let mut to = [0; HEADER];
        to[..2].copy_from_slice(&MAGIC.to_le_bytes());
        to[2] = self.op as u8;
        to[4..8].copy_from_slice(&self.era.0.to_le_bytes());
        to[8..16].copy_from_slice(&self.generation.0.to_le_bytes());
        to[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        to[24..].copy_from_slice(&self.bytes.to_le_bytes());
        to
    }

    /// `None` for bytes that are no header.
    pub(super) fn decode(from: &[u8; HEADER]) -> Option<Self> {
        let long = |at: usize| u64::from_le_bytes(from[at..at + 8].try_into().unwrap_or_default());
        let op = Op::ALL.into_iter().find(|op| *op as u8 == from[2])?;
        let header = Self {
            op,
            era: Era((long(0) >> 32) as u32),
            generation: Generation(long(8)),
            sequence: long(16),
            bytes: long(24),
        };
        (header.encode() == *from).then_some(header)
    }

    /// Compares with what has to come next from `rank`.
    pub(super) fn check(self, rank: usize, token: Token, sequence: u64) -> Result<(), Error> {
        let detail = if (self.era, self.generation) != (token.era, token.generation) {
            format!("a frame of {}.{} in generation {token}", self.era, self.generation)
        } else if self.sequence != sequence {
            format!("frame {} instead of {sequence}", self.sequence)
        } else if self.op == Op::Fault && self.bytes > NOTICE as u64 {
            format!("a notice of {} bytes, over the limit of {NOTICE}", self.bytes)
        } else {
            return Ok(());
        };
        Err(Error::Protocol { rank, detail })
    }
}

/// Why a mesh failed, as told to a peer. Layout: how many ranks may be at the
/// root and which, the rank that saw it, the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Notice {
    pub(super) error: Error,
    /// The rank that saw it first-hand; passing it on changes nothing.
    pub(super) reporter: usize,
}

impl Notice {
    pub(super) fn encode(&self) -> Vec<u8> {
        let roots = self.error.peers();
        let roots = if roots.len() > ROOTS { &[] } else { roots };
        let mut bytes = (roots.len() as u32).to_le_bytes().to_vec();
        roots.iter().for_each(|root| bytes.extend((*root as u32).to_le_bytes()));
        bytes.extend((self.reporter as u32).to_le_bytes());
        let reason = match &self.error {
            Error::PeerLost { why: reason, .. } | Error::Aborted { reason } => reason.clone(),
            error => error.to_string(),
        };
        bytes.extend(reason.bytes().take(NOTICE - bytes.len()));
        bytes
    }

    /// What rank `own` of `size` makes of a notice from rank `from`. Nobody can
    /// make a rank accuse itself: then it is the reporter that is out of reach.
    pub(super) fn decode(bytes: &[u8], from: usize, own: usize, size: usize) -> Self {
        let word = |at: usize| {
            let chunk = bytes.get(4 * at..)?.first_chunk()?;
            Some(u32::from_le_bytes(*chunk) as usize)
        };
        let count = word(0).filter(|count| *count <= ROOTS).unwrap_or(0);
        let roots: Option<Vec<_>> = (1..=count).map(word).collect();
        let (roots, reporter) = match (roots, word(1 + count)) {
            (Some(roots), Some(reporter)) if reporter < size && reporter != own => {
                (roots, reporter)
            }
            _ => {
                let error = Error::Protocol { rank: from, detail: "a notice without sense".into() };
                return Self { error, reporter: from };
            }
        };
        let mut why = String::from_utf8_lossy(&bytes[4 * (count + 2)..]).into_owned();
        if reporter == from {
            why = format!("rank {from} reports: {why}");
        }
        let accused: Vec<_> =
            roots.iter().copied().filter(|root| *root != own && *root < size).collect();
        let error = match (&accused[..], roots.contains(&own)) {
            (&[rank], _) => Error::PeerLost { rank, why },
            ([], true) => Error::PeerLost { rank: reporter, why },
            _ => Error::Aborted { reason: why },
        };
        Self { error, reporter }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(era: u32, generation: u64) -> Token {
        let job = job::JobId(Default::default());
        Token { job, era: Era(era), generation: Generation(generation) }
    }

    #[test]
    fn headers_round_trip_and_any_flipped_constant_is_noticed() {
        for op in Op::ALL {
            let header = Header::new(op, token(3, 1 << 40), u64::MAX - 1, usize::MAX);
            assert_eq!(Header::decode(&header.encode()), Some(header));
        }
        for at in [0, 1, 2, 3] {
            let mut bytes = Header::new(Op::Barrier, token(0, 1), 0, 0).encode();
            bytes[at] ^= 0x40;
            assert_eq!(Header::decode(&bytes), None, "byte {at}");
        }
    }

    #[test]
    fn a_frame_of_another_generation_or_place_is_refused() {
        #[track_caller]
        fn check(token_: Token, sequence: u64, op: Op, bytes: usize, expected: &str) {
            let header = Header::new(op, token_, sequence, bytes);
            match header.check(2, token(1, 7), 5) {
                Ok(()) => assert_eq!(expected, "ok"),
                Err(error) => assert!(error.to_string().contains(expected), "{error}"),
            }
        }
        check(token(1, 7), 5, Op::Barrier, 0, "ok");
        check(token(1, 6), 5, Op::Barrier, 0, "rank 2 broke the protocol: a frame of 1.6 in gen");
        check(token(0, 7), 5, Op::Barrier, 0, "a frame of 0.7 in generation 1.7");
        check(token(1, 7), 4, Op::Barrier, 0, "frame 4 instead of 5");
        check(token(1, 7), 5, Op::Fault, 1 << 30, "over the limit of 512");
    }

    #[track_caller]
    fn check_notice(error: Error, reporter: usize, own: usize, peer: Option<usize>, text: &str) {
        let bytes = Notice { error, reporter }.encode();
        assert!(bytes.len() <= NOTICE);
        let notice = Notice::decode(&bytes, 1, own, 4);
        assert_eq!(notice.error.peer(), peer);
        assert!(notice.error.to_string().starts_with(text), "{}", notice.error);
    }

    #[test]
    fn a_notice_names_the_root_and_never_the_reader() {
        let lost = |why: &str| Error::PeerLost { rank: 3, why: why.into() };
        check_notice(lost("reset"), 1, 0, Some(3), "rank 3 is lost: rank 1 reports: reset");
        check_notice(lost(&"x".repeat(2000)), 1, 0, Some(3), "rank 3 is lost: rank 1 reports: x");
        check_notice(lost("reset"), 1, 3, Some(1), "rank 1 is lost: rank 1 reports: reset");
        // Passed on by rank 1, it is still what rank 2 saw.
        let relayed = lost("rank 2 reports: reset");
        check_notice(relayed.clone(), 2, 0, Some(3), "rank 3 is lost: rank 2 reports: reset");
        check_notice(relayed, 2, 3, Some(2), "rank 2 is lost: rank 2 reports: reset");
        // Of several that may be, the reader at least knows of itself.
        let late = |waiting_for| Error::Deadline { op: "barrier", waiting_for };
        check_notice(late(vec![0, 3]), 1, 0, Some(3), "rank 3 is lost: rank 1 reports: barrier");
        check_notice(late(vec![2, 3]), 1, 0, None, "aborted: rank 1 reports: barrier");
        let aborted = Error::Aborted { reason: "plan 8".into() };
        check_notice(aborted, 1, 0, None, "aborted: rank 1 reports: plan 8");
        let nonsense = "rank 1 broke the protocol: a notice without sense";
        check_notice(lost("reset"), 9, 0, Some(1), nonsense);
        check_notice(lost("reset"), 0, 0, Some(1), nonsense);
        assert_eq!(Notice::decode(&[1], 2, 0, 4).error.peer(), Some(2));
    }
}
