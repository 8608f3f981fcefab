//! The receiving side of a reduction: pieces stream in, segment by segment, and
//! are combined while the next segment arrives.
//!
//! The range that a rank owns is cut into segments. A peer sends, for each
//! segment in turn, that segment of each of its pieces. So memory is a few
//! segments for each piece, however large the tensor is, and combining is short
//! enough to stay abortable.

use std::ops::Range;

use job::shares::Shares;

use super::{
    Counter, Dtype, Error, Reduce, kernels,
    sink::{Sink, expect},
    tree::Tree,
};

/// Bytes of a segment: both sides of a connection must agree.
pub(super) const SEGMENT: usize = 128 << 10;

/// Segments that may be in memory for each remote piece: one to combine, one to
/// fill.
const WINDOW: usize = 2;

/// What is done with the same bytes of every piece.
pub(super) trait Combine {
    /// Bytes of each piece.
    fn length(&self) -> usize;

    /// `pieces` in rank order, each `range` of the whole piece.
    fn combine(&mut self, range: Range<usize>, pieces: &[&[u8]]);
}

/// The pieces of all ranks for this rank's range.
pub(super) struct Pieces<'a, C> {
    combine: C,
    own_rank: usize,
    own: Vec<&'a [u8]>,
    peers: Vec<Peer>,
    arrived: &'a mut [u8],
    window: usize,
    slot: usize,
    combined: usize,
}

/// What has come from one rank.
struct Peer {
    pieces: usize,
    // Where its segments start within a slot.
    offset: usize,
    // The segment being received, and bytes of it received.
    segment: usize,
    filled: usize,
}

/// The segments of a range of bytes, in order.
pub(super) fn segments(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(SEGMENT).map(move |at| at..end.min(at + SEGMENT))
}

impl<'a, C: Combine> Pieces<'a, C> {
    /// `own` are this rank's pieces, each already cut to the range that it
    /// owns, and `counts` the numbers of pieces by rank; `arrived` is scratch
    /// memory that is grown as needed and whose content is of no interest.
    pub(super) fn new(
        combine: C,
        own_rank: usize,
        own: Vec<&'a [u8]>,
        counts: impl Iterator<Item = usize>,
        arrived: &'a mut Vec<u64>,
    ) -> Self {
        // Rounded up, so that every piece of a slot is aligned.
        let longest = combine.length().min(SEGMENT).next_multiple_of(64);
        let mut slot = 0;
        let peers = counts
            .enumerate()
            .map(|(rank, pieces)| {
                let peer = Peer { pieces, offset: slot, segment: 0, filled: 0 };
                if rank != own_rank {
                    slot += pieces * longest;
                }
                peer
            })
            .collect();
        let window = WINDOW.min(combine.length().div_ceil(SEGMENT));
        let words = window * slot / size_of::<u64>();
        if arrived.len() < words {
            arrived.resize(words, 0);
        }
        let arrived = bytemuck::cast_slice_mut(arrived);
        Self { combine, own_rank, own, peers, arrived, window, slot, combined: 0 }
    }

    fn segment(&self, index: usize) -> Range<usize> {
        let start = index * SEGMENT;
        start..self.combine.length().min(start + SEGMENT)
    }

    fn count(&self) -> usize {
        self.combine.length().div_ceil(SEGMENT)
    }
}

impl<C: Combine> Sink for Pieces<'_, C> {
    fn expects(&self, peer: usize) -> bool {
        peer != self.own_rank
    }

    fn begin(&mut self, peer: usize, bytes: u64) -> Result<(), String> {
        expect(bytes, self.peers[peer].pieces * self.combine.length())
    }

    fn room(&mut self, peer: usize) -> &mut [u8] {
        let Peer { pieces, offset, segment, filled } = self.peers[peer];
        if segment >= self.count() || segment >= self.combined + self.window {
            return &mut [];
        }
        let start = segment % self.window * self.slot + offset;
        let length = pieces * self.segment(segment).len();
        &mut self.arrived[start..start + length][filled..]
    }

    fn advance(&mut self, peer: usize, bytes: usize) {
        let length = self.segment(self.peers[peer].segment).len();
        let peer = &mut self.peers[peer];
        peer.filled += bytes;
        if peer.filled == peer.pieces * length {
            peer.segment += 1;
            peer.filled = 0;
        }
    }

    fn work(&mut self) -> bool {
        let own_rank = self.own_rank;
        let whole = |(rank, peer): (usize, &Peer)| {
            rank == own_rank || peer.pieces == 0 || peer.segment > self.combined
        };
        if self.combined == self.count() || !self.peers.iter().enumerate().all(whole) {
            return false;
        }
        let range = self.segment(self.combined);
        let slot = &self.arrived[self.combined % self.window * self.slot..];
        let mut pieces = Vec::new();
        for (rank, peer) in self.peers.iter().enumerate() {
            if rank == own_rank {
                pieces.extend(self.own.iter().map(|piece| &piece[range.clone()]));
            } else if peer.pieces > 0 {
                pieces.extend(slot[peer.offset..].chunks(range.len()).take(peer.pieces));
            }
        }
        self.combine.combine(range, &pieces);
        self.combined += 1;
        true
    }
}

/// The tree sum (TRAJ-1) of the pieces of all nodes.
pub(super) struct TreeSum<'a> {
    tree: Tree,
    out: &'a mut [f32],
}

impl<'a> TreeSum<'a> {
    pub(super) fn new(shares: &Shares, out: &'a mut [f32]) -> Result<Self, Error> {
        let nodes: Vec<_> = (0..shares.ranks()).flat_map(|rank| shares.pieces(rank)).collect();
        Ok(Self { tree: Tree::new(shares.total(), &nodes)?, out })
    }
}

impl Combine for TreeSum<'_> {
    fn length(&self) -> usize {
        size_of_val(self.out)
    }

    fn combine(&mut self, range: Range<usize>, pieces: &[&[u8]]) {
        let pieces: Vec<&[f32]> = pieces.iter().map(|piece| bytemuck::cast_slice(piece)).collect();
        self.tree.sum(&pieces, &mut self.out[range.start / 4..range.end / 4]);
    }
}

/// One input of each rank, folded in rank order.
pub(super) struct Fold<'a> {
    pub(super) how: Reduce,
    pub(super) dtype: Dtype,
    pub(super) out: &'a mut [u8],
    /// This rank, where its input is what lies in `out` and not a piece.
    pub(super) own: Option<usize>,
}

impl Combine for Fold<'_> {
    fn length(&self) -> usize {
        self.out.len()
    }

    fn combine(&mut self, range: Range<usize>, pieces: &[&[u8]]) {
        kernels::reduce(self.how, self.dtype, pieces, self.own, &mut self.out[range]);
    }
}

/// One leaf of each of the first ranks, into a counter.
pub(super) struct Wave<'a> {
    pub(super) dtype: Dtype,
    pub(super) sum: &'a mut Counter,
}

impl Combine for Wave<'_> {
    fn length(&self) -> usize {
        self.sum.len() * self.dtype.size()
    }

    fn combine(&mut self, range: Range<usize>, pieces: &[&[u8]]) {
        let elements = range.start / self.dtype.size()..range.end / self.dtype.size();
        let mut wide = Vec::new();
        for (index, piece) in pieces.iter().enumerate() {
            let leaf = match self.dtype {
                Dtype::Bf16 => {
                    let short = bytemuck::cast_slice::<u8, half::bf16>(piece);
                    wide.clear();
                    wide.extend(short.iter().map(|value| value.to_f32()));
                    &wide
                }
                _ => bytemuck::cast_slice(piece),
            };
            self.sum.add(index as u32, elements.clone(), leaf);
        }
    }
}
