//! Bytes that were read before their place was known.

/// Bytes read at once beyond what has a destination: a small frame with its
/// header, and notices, whole.
const INBOX: usize = 8 << 10;

#[derive(Debug)]
pub(super) struct Inbox {
    bytes: Box<[u8; INBOX]>,
    start: usize,
    end: usize,
}

impl Inbox {
    pub(super) fn new() -> Self {
        Self { bytes: Box::new([0; INBOX]), start: 0, end: 0 }
    }

    pub(super) fn filled(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    pub(super) fn space(&mut self) -> &mut [u8] {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        &mut self.bytes[self.end..]
    }

    /// The first bytes of the space were written.
    pub(super) fn fill(&mut self, bytes: usize) {
        self.end += bytes;
    }

    /// The first bytes have found their place.
    pub(super) fn take(&mut self, bytes: usize) {
        self.start += bytes;
    }
}
