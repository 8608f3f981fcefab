//! What peers sent to this rank before it asked for it.
//!
//! A rank that waits in an operation takes in what is sent to it meanwhile, so
//! that no sender waits for the matching call.

use std::collections::VecDeque;

/// Bytes that may wait for one peer's receiver; what is over it waits at the
/// sender.
const LIMIT: usize = 1 << 30;

#[derive(Debug, Default)]
pub(super) struct Parcels {
    whole: VecDeque<Vec<u8>>,
    // The one that is arriving, and the bytes of it that have.
    arriving: Option<(Vec<u8>, usize)>,
    bytes: usize,
}

impl Parcels {
    /// Whether one of this size may come in.
    pub(super) fn fits(&self, bytes: u64) -> bool {
        bytes <= (LIMIT - self.bytes.min(LIMIT)) as u64
    }

    pub(super) fn begin(&mut self, bytes: u64) {
        self.bytes += bytes as usize;
        self.arriving = Some((vec![0; bytes as usize], 0));
    }

    pub(super) fn is_arriving(&self) -> bool {
        self.arriving.is_some()
    }

    /// Where its next bytes go.
    pub(super) fn room(&mut self) -> &mut [u8] {
        self.arriving.as_mut().map_or(&mut [], |(parcel, filled)| &mut parcel[*filled..])
    }

    /// So many of them came; whether it is whole now.
    pub(super) fn advance(&mut self, bytes: usize) -> bool {
        let Some((parcel, filled)) = &mut self.arriving else { return false };
        *filled += bytes;
        if *filled < parcel.len() {
            return false;
        }
        self.whole.extend(self.arriving.take().map(|(parcel, _)| parcel));
        true
    }

    /// The oldest.
    pub(super) fn pop(&mut self) -> Option<Vec<u8>> {
        let parcel = self.whole.pop_front()?;
        self.bytes -= parcel.len();
        Some(parcel)
    }

    /// The one that is arriving and the bytes of it that have, for a receiver
    /// that has come before the rest.
    pub(super) fn hand_over(&mut self) -> Option<(Vec<u8>, usize)> {
        if !self.whole.is_empty() {
            return None;
        }
        let (parcel, filled) = self.arriving.take()?;
        self.bytes -= parcel.len();
        Some((parcel, filled))
    }
}
