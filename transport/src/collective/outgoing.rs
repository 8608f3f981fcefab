//! A frame on its way out.

use super::frame::HEADER;

/// A header and the parts that follow it.
pub(super) struct Outgoing<'a> {
    header: Option<[u8; HEADER]>,
    parts: Vec<&'a [u8]>,
    // The part, and the bytes of it, that are gone; the header is part 0.
    part: usize,
    offset: usize,
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

    /// Writes the header, if this is a frame.
    pub(super) fn head(&mut self, header: impl FnOnce(usize) -> [u8; HEADER]) {
        let bytes = self.bytes();
        if let Some(place) = &mut self.header {
            *place = header(bytes);
        }
    }

    /// What is left of it, slice by slice.
    pub(super) fn rest(&self) -> impl Iterator<Item = &[u8]> {
        let header = self.header.iter().map(|header| &header[..]);
        let mut offset = self.offset;
        header.chain(self.parts.iter().copied()).skip(self.part).map(move |part| {
            let rest = &part[offset..];
            offset = 0;
            rest
        })
    }

    /// So many bytes are gone.
    pub(super) fn advance(&mut self, mut bytes: usize) {
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
