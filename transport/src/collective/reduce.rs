//! The receiving side of the tree sum: pieces stream in, segment by segment,
//! and are summed while the next segment arrives.
//!
//! The element range that a rank owns is cut into segments. A peer sends, for
//! each segment in turn, that segment of each of its pieces. So memory is a few
//! segments for each piece, however large the tensor is, and a sum is short
//! enough to stay abortable.

use std::ops::Range;

use job::shares::Shares;

use super::{
    Error,
    sink::{Sink, expect},
    tree::Tree,
};

/// Elements of a segment, 512 KiB: both sides of a connection must agree.
pub(super) const SEGMENT: usize = 128 << 10;

/// Segments that may be in memory for each remote piece: one to sum, one to fill.
const WINDOW: usize = 2;

/// The sum over all pieces of a rank's range of elements.
pub(super) struct TreeSum<'a> {
    tree: Tree,
    own_rank: usize,
    own: Vec<&'a [f32]>,
    peers: Vec<Peer>,
    out: &'a mut [f32],
    arrived: &'a mut Vec<f32>,
    window: usize,
    slot: usize,
    summed: usize,
}

/// What has come from one rank.
struct Peer {
    pieces: usize,
    // Where its segments start within a slot, in elements.
    offset: usize,
    // The segment being received, and bytes of it received.
    segment: usize,
    filled: usize,
}

/// The segments of a range of elements, in order.
pub(super) fn segments(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(SEGMENT).map(move |at| at..end.min(at + SEGMENT))
}

impl<'a> TreeSum<'a> {
    /// `own` are this rank's pieces, each already cut to the range that `out`
    /// stands for; `arrived` is scratch memory that is grown as needed and whose
    /// content is of no interest.
    pub(super) fn new(
        shares: &Shares,
        own_rank: usize,
        own: Vec<&'a [f32]>,
        out: &'a mut [f32],
        arrived: &'a mut Vec<f32>,
    ) -> Result<Self, Error> {
        let longest = out.len().min(SEGMENT);
        let mut nodes = Vec::new();
        let mut slot = 0;
        let peers = (0..shares.ranks())
            .map(|rank| {
                let pieces = shares.pieces(rank);
                let peer = Peer { pieces: pieces.len(), offset: slot, segment: 0, filled: 0 };
                if rank != own_rank {
                    slot += pieces.len() * longest;
                }
                nodes.extend(pieces);
                peer
            })
            .collect();
        let tree = Tree::new(shares.total(), &nodes)?;
        let window = WINDOW.min(out.len().div_ceil(SEGMENT));
        if arrived.len() < window * slot {
            arrived.resize(window * slot, 0.0);
        }
        Ok(Self { tree, own_rank, own, peers, out, arrived, window, slot, summed: 0 })
    }

    fn segment(&self, index: usize) -> Range<usize> {
        let start = index * SEGMENT;
        start..self.out.len().min(start + SEGMENT)
    }

    fn count(&self) -> usize {
        self.out.len().div_ceil(SEGMENT)
    }
}

impl Sink for TreeSum<'_> {
    fn expects(&self, peer: usize) -> bool {
        peer != self.own_rank
    }

    fn begin(&mut self, peer: usize, bytes: u64) -> Result<(), String> {
        expect(bytes, self.peers[peer].pieces * size_of_val(self.out))
    }

    fn room(&mut self, peer: usize) -> &mut [u8] {
        let Peer { pieces, offset, segment, filled } = self.peers[peer];
        if segment >= self.count() || segment >= self.summed + self.window {
            return &mut [];
        }
        let start = segment % self.window * self.slot + offset;
        let length = pieces * self.segment(segment).len();
        &mut bytemuck::cast_slice_mut(&mut self.arrived[start..start + length])[filled..]
    }

    fn advance(&mut self, peer: usize, bytes: usize) {
        let length = self.segment(self.peers[peer].segment).len();
        let peer = &mut self.peers[peer];
        peer.filled += bytes;
        if peer.filled == peer.pieces * length * size_of::<f32>() {
            peer.segment += 1;
            peer.filled = 0;
        }
    }

    fn work(&mut self) -> bool {
        let own_rank = self.own_rank;
        let whole = |(rank, peer): (usize, &Peer)| {
            rank == own_rank || peer.pieces == 0 || peer.segment > self.summed
        };
        if self.summed == self.count() || !self.peers.iter().enumerate().all(whole) {
            return false;
        }
        let range = self.segment(self.summed);
        let slot = &self.arrived[self.summed % self.window * self.slot..];
        let mut pieces = Vec::new();
        for (rank, peer) in self.peers.iter().enumerate() {
            if rank == own_rank {
                pieces.extend(self.own.iter().map(|piece| &piece[range.clone()]));
            } else if peer.pieces > 0 {
                pieces.extend(slot[peer.offset..].chunks(range.len()).take(peer.pieces));
            }
        }
        self.tree.sum(&pieces, &mut self.out[range]);
        self.summed += 1;
        true
    }
}
