//! Lays out an archive around its payload: everything before it, and everything
//! after it. The payload itself streams past and is never copied; its CRC-32
//! comes behind it, as PyTorch writes it too, so that one pass is enough.

/// The name of the payload below the archive's folder.
const PAYLOAD: &str = "data/0";
pub(super) const FOLDER: &str = "archive";
/// Payload alignment in the file, so that it can be mapped or read directly.
const ALIGN: u64 = 64;
const LIMIT: u64 = u32::MAX as u64;
/// The date that every record carries: 1980-01-01, the zero of zip. Equal
/// states give equal bytes.
const DATE: u16 = 0x21;

/// Bytes that frame a payload.
pub(crate) struct Frame {
    /// Goes before the payload.
    pub(crate) before: Vec<u8>,
    directory: Vec<u8>,
    count: u64,
    payload: Option<Entry>,
}

impl Frame {
    /// Frames a payload of this many bytes behind the small records of
    /// `(name, bytes)`, for a file position of `file_at`.
    pub(crate) fn new(small: &[(&str, &[u8])], payload: Option<u64>, file_at: u64) -> Self {
        let (mut before, mut directory) = (Vec::new(), Vec::new());
        for (name, bytes) in small {
            let entry = Entry {
                name: format!("{FOLDER}/{name}"),
                crc: crc32fast::hash(bytes),
                size: bytes.len() as u64,
                header: before.len() as u64,
                late: false,
            };
            entry.local(&mut before, None);
            before.extend(*bytes);
            entry.central(&mut directory);
        }
        let count = small.len() as u64 + u64::from(payload.is_some());
        let payload = payload.map(|size| Entry {
            name: format!("{FOLDER}/{PAYLOAD}"),
            crc: 0,
            size,
            header: before.len() as u64,
            // An empty record needs no checksum.
            late: size > 0,
        });
        if let Some(entry) = &payload {
            entry.local(&mut before, Some(file_at));
        }
        Self { before, directory, count, payload }
    }

    /// What goes after the payload, whose checksum this is.
    pub(crate) fn finish(mut self, crc: u32) -> Vec<u8> {
        let mut out = Vec::new();
        let mut at = self.before.len() as u64;
        if let Some(mut entry) = self.payload {
            entry.crc = crc;
            entry.descriptor(&mut out);
            entry.central(&mut self.directory);
            at += entry.size + out.len() as u64;
        }
        end(&mut out, &self.directory, self.count, at);
        out
    }
}

/// What both headers of a record say.
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) crc: u32,
    pub(super) size: u64,
    pub(super) header: u64,
    /// The checksum is only known when the bytes are written.
    pub(super) late: bool,
}

impl Entry {
    fn wide(&self) -> bool {
        self.size >= LIMIT
    }

    fn narrow_size(&self) -> u32 {
        self.size.min(LIMIT) as u32
    }

    /// Version needed, flags (names are UTF-8; a descriptor follows), method,
    /// time, date, CRC, sizes and length of the name: the part that both headers
    /// share.
    fn common(&self, out: &mut Vec<u8>, crc: u32, size: u32) {
        let version: u16 = if self.wide() { 45 } else { 20 };
        let flags = if self.late { 0x0808 } else { 0x0800 };
        for field in [version, flags, 0, 0, DATE] {
            out.extend(field.to_le_bytes());
        }
        for field in [crc, size, size] {
            out.extend(field.to_le_bytes());
        }
        out.extend((self.name.len() as u16).to_le_bytes());
    }

    fn extra(&self, size: u64) -> Vec<u8> {
        let mut extra = Vec::new();
        if self.wide() {
            extra.extend([1, 0, 16, 0]);
            extra.extend(size.to_le_bytes());
            extra.extend(size.to_le_bytes());
        }
        extra
    }

    /// Checksum and sizes behind a record that had none before it.
    pub(super) fn descriptor(&self, out: &mut Vec<u8>) {
        if !self.late {
            return;
        }
        out.extend(*b"PK\x07\x08");
        out.extend(self.crc.to_le_bytes());
        for _ in 0..2 {
            if self.wide() {
                out.extend(self.size.to_le_bytes());
            } else {
                out.extend(self.narrow_size().to_le_bytes());
            }
        }
    }

    /// The header before the record, padded so that the record begins aligned
    /// in the file when the archive's own position there is given.
    pub(super) fn local(&self, out: &mut Vec<u8>, file_at: Option<u64>) {
        let known = !self.late;
        let mut extra = self.extra(if known { self.size } else { 0 });
        if let Some(file_at) = file_at {
            let unpadded = self.header + 30 + (self.name.len() + extra.len()) as u64 + 4;
            let pad = (ALIGN - (file_at + unpadded) % ALIGN) % ALIGN;
            extra.extend(*b"FB");
            extra.extend((pad as u16).to_le_bytes());
            extra.resize(extra.len() + pad as usize, b'Z');
        }
        out.extend(*b"PK\x03\x04");
        match (known, self.wide()) {
            (true, _) => self.common(out, self.crc, self.narrow_size()),
            (false, true) => self.common(out, 0, u32::MAX),
            (false, false) => self.common(out, 0, 0),
        }
        out.extend((extra.len() as u16).to_le_bytes());
        out.extend(self.name.as_bytes());
        out.extend(extra);
    }

    /// The header in the directory.
    pub(super) fn central(&self, out: &mut Vec<u8>) {
        // The zip64 field has what does not fit elsewhere, in this order.
        let mut wide = Vec::new();
        if self.wide() {
            wide.extend(self.size.to_le_bytes());
            wide.extend(self.size.to_le_bytes());
        }
        if self.header >= LIMIT {
            wide.extend(self.header.to_le_bytes());
        }
        let mut extra = Vec::new();
        if !wide.is_empty() {
            extra.extend(1u16.to_le_bytes());
            extra.extend((wide.len() as u16).to_le_bytes());
            extra.extend(wide);
        }
        out.extend(*b"PK\x01\x02");
        out.extend(45u16.to_le_bytes());
        self.common(out, self.crc, self.narrow_size());
        out.extend((extra.len() as u16).to_le_bytes());
        out.extend([0; 10]); // comment length, disk, attributes
        out.extend((self.header.min(LIMIT) as u32).to_le_bytes());
        out.extend(self.name.as_bytes());
        out.extend(extra);
    }
}

/// The directory and the end records, for a directory at `at`.
pub(super) fn end(out: &mut Vec<u8>, directory: &[u8], count: u64, at: u64) {
    let size = directory.len() as u64;
    out.extend(directory);
    if at >= LIMIT || size >= LIMIT || count >= u64::from(u16::MAX) {
        out.extend(*b"PK\x06\x06");
        out.extend(44u64.to_le_bytes());
        out.extend([45, 0, 45, 0]);
        out.extend([0; 8]); // disks
        for field in [count, count, size, at] {
            out.extend(field.to_le_bytes());
        }
        out.extend(*b"PK\x06\x07");
        out.extend([0; 4]);
        out.extend((at + size).to_le_bytes());
        out.extend(1u32.to_le_bytes());
    }
    out.extend(*b"PK\x05\x06");
    out.extend([0; 4]);
    let narrow = count.min(u16::MAX.into()) as u16;
    out.extend(narrow.to_le_bytes());
    out.extend(narrow.to_le_bytes());
    out.extend((size.min(LIMIT) as u32).to_le_bytes());
    out.extend((at.min(LIMIT) as u32).to_le_bytes());
    out.extend([0; 2]);
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::io;

    use super::*;
    use crate::storage::Object;
    use crate::zip::read::{find, records};

    /// An archive whose payload is zeros that are not there.
    struct Sparse {
        before: Vec<u8>,
        payload: u64,
        after: Vec<u8>,
    }

    impl Object for Sparse {
        fn len(&self) -> u64 {
            (self.before.len() + self.after.len()) as u64 + self.payload
        }

        fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
            let before = self.before.len() as u64;
            for (at, byte) in (at..).zip(into) {
                *byte = if at < before {
                    self.before[at as usize]
                } else {
                    let after = at.checked_sub(before + self.payload);
                    after.map_or(0, |at| self.after[at as usize])
                };
            }
            Ok(())
        }
    }

    #[track_caller]
    fn check(size: u64, file_at: u64) {
        let frame = Frame::new(&[("data.pkl", b"abc"), ("version", b"3\n")], Some(size), file_at);
        let before = frame.before.clone();
        let archive = Sparse { before, payload: size, after: frame.finish(7) };
        let records = records(&archive).unwrap();
        assert_eq!(records.len(), 3);
        assert_eq!(find(&records, "version").unwrap().read(&archive, 9).unwrap(), b"3\n");
        let data = find(&records, "data/0").unwrap();
        assert_eq!((data.size, data.crc), (size, 7));
        let at = data.locate(&archive).unwrap();
        assert_eq!(at, archive.before.len() as u64);
        assert_eq!((file_at + at) % 64, 0);
    }

    #[test]
    fn payloads_of_every_size_are_framed_and_aligned() {
        for file_at in [0, 1, 63, 64, 1261] {
            for size in [0, 24, LIMIT - 1, LIMIT, LIMIT + 1, 5 << 30] {
                check(size, file_at);
            }
        }
    }
}
