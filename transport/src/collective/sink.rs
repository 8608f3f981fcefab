//! Where the bytes of an exchange go, straight from the socket.

/// The receiving side of one exchange.
pub(super) trait Sink {
    /// Whether `peer` sends a frame in this exchange.
    fn expects(&self, peer: usize) -> bool;

    /// The frame of `peer` begins and has this size. Called once for each
    /// expected peer; an error is what is wrong with the size.
    fn begin(&mut self, peer: usize, bytes: u64) -> Result<(), String>;

    /// Where the next bytes of a frame that has begun go: not more than it
    /// still has, and empty while there is no room.
    fn room(&mut self, peer: usize) -> &mut [u8];

    /// The first `bytes` of the room were written.
    fn advance(&mut self, peer: usize, bytes: usize);

    /// Computes with what has arrived, a bounded time long. True when there is
    /// more to compute at once.
    fn work(&mut self) -> bool {
        false
    }
}

/// Frames of known sizes, each into its own slice.
pub(super) struct Slots<'a>(Vec<Option<&'a mut [u8]>>);

impl<'a> Slots<'a> {
    pub(super) fn none(ranks: usize) -> Self {
        Self((0..ranks).map(|_| None).collect())
    }

    pub(super) fn set(&mut self, peer: usize, slot: &'a mut [u8]) {
        self.0[peer] = Some(slot);
    }
}

impl Sink for Slots<'_> {
    fn expects(&self, peer: usize) -> bool {
        self.0[peer].is_some()
    }

    fn begin(&mut self, peer: usize, bytes: u64) -> Result<(), String> {
        expect(bytes, self.0[peer].as_ref().map_or(0, |slot| slot.len()))
    }

    fn room(&mut self, peer: usize) -> &mut [u8] {
        self.0[peer].as_deref_mut().unwrap_or_default()
    }

    fn advance(&mut self, peer: usize, bytes: usize) {
        let slot = self.0[peer].take().unwrap_or_default();
        self.0[peer] = Some(&mut slot[bytes..]);
    }
}

/// One frame of any size up to a limit from every peer.
pub(super) struct Gathered {
    limit: usize,
    own: usize,
    filled: Vec<usize>,
    pub(super) parts: Vec<Vec<u8>>,
}

impl Gathered {
    pub(super) fn new(ranks: usize, own: usize, bytes: &[u8], limit: usize) -> Self {
        let mut parts = vec![Vec::new(); ranks];
        parts[own] = bytes.to_vec();
        Self { limit, own, filled: vec![0; ranks], parts }
    }
}

impl Sink for Gathered {
    fn expects(&self, peer: usize) -> bool {
        peer != self.own
    }

    fn begin(&mut self, peer: usize, bytes: u64) -> Result<(), String> {
        match usize::try_from(bytes) {
            Ok(bytes) if bytes <= self.limit => {
                self.parts[peer] = vec![0; bytes];
                Ok(())
            }
            _ => Err(format!("a frame of {bytes} bytes, over the limit of {}", self.limit)),
        }
    }

    fn room(&mut self, peer: usize) -> &mut [u8] {
        &mut self.parts[peer][self.filled[peer]..]
    }

    fn advance(&mut self, peer: usize, bytes: usize) {
        self.filled[peer] += bytes;
    }
}

pub(super) fn expect(bytes: u64, expected: usize) -> Result<(), String> {
    if bytes == expected as u64 {
        return Ok(());
    }
    Err(format!("a frame of {bytes} bytes instead of {expected}"))
}
