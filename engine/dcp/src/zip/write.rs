//! Lays out an archive around its payload: everything before it, and everything
//! after it. The payload itself streams past and is never copied.

/// The last and largest record of an archive.
pub(crate) struct Payload {
    /// The name below the archive's folder.
    pub(crate) name: &'static str,
    /// CRC-32 of the bytes.
    pub(crate) crc: u32,
    /// Number of bytes.
    pub(crate) size: u64,
}

/// Bytes that frame a payload.
pub(crate) struct Frame {
    /// Goes before the payload.
    pub(crate) before: Vec<u8>,
    /// Goes after it.
    pub(crate) after: Vec<u8>,
}

const FOLDER: &str = "archive";
/// Payload alignment in the file, so that it can be mapped or read directly.
const ALIGN: u64 = 64;
const LIMIT: u64 = u32::MAX as u64;
/// The date that every record carries: 1980-01-01, the zero of zip. Equal
/// states give equal bytes.
const DATE: u16 = 0x21;

/// Frames `payload` behind the small records of `(name, bytes)`, for a file
/// position of `file_at`.
pub(crate) fn frame(small: &[(&str, &[u8])], payload: Option<&Payload>, file_at: u64) -> Frame {
    let mut before = Vec::new();
    let mut directory = Vec::new();
    let mut count = 0;
    for (name, bytes) in small {
        let entry = Entry {
            name: format!("{FOLDER}/{name}"),
            crc: crc32fast::hash(bytes),
            size: bytes.len() as u64,
            header: before.len() as u64,
        };
        entry.local(&mut before, None);
        before.extend(*bytes);
        entry.central(&mut directory);
        count += 1;
    }
    let mut at = before.len() as u64;
    if let Some(payload) = payload {
        let entry = Entry {
            name: format!("{FOLDER}/{}", payload.name),
            crc: payload.crc,
            size: payload.size,
            header: at,
        };
        entry.local(&mut before, Some(file_at));
        entry.central(&mut directory);
        at = before.len() as u64 + payload.size;
        count += 1;
    }
    let after = end(directory, count, at);
    Frame { before, after }
}

struct Entry {
    name: String,
    crc: u32,
    size: u64,
    header: u64,
}

impl Entry {
    fn wide(&self) -> bool {
        self.size >= LIMIT
    }

    fn narrow_size(&self) -> u32 {
        self.size.min(LIMIT) as u32
    }

    /// Version needed, flags (names are UTF-8), method, time, date, CRC, sizes
    /// and length of the name: the part that both headers share.
    fn common(&self, out: &mut Vec<u8>) {
        let version: u16 = if self.wide() { 45 } else { 20 };
        for field in [version, 0x0800, 0, 0, DATE] {
            out.extend(field.to_le_bytes());
        }
        for field in [self.crc, self.narrow_size(), self.narrow_size()] {
            out.extend(field.to_le_bytes());
        }
        out.extend((self.name.len() as u16).to_le_bytes());
    }

    fn extra(&self) -> Vec<u8> {
        let mut extra = Vec::new();
        if self.wide() {
            extra.extend([1, 0, 16, 0]);
            extra.extend(self.size.to_le_bytes());
            extra.extend(self.size.to_le_bytes());
        }
        extra
    }

    /// The header before the record, padded so that the record begins aligned
    /// in the file when the archive's own position there is given.
    fn local(&self, out: &mut Vec<u8>, file_at: Option<u64>) {
        let mut extra = self.extra();
        if let Some(file_at) = file_at {
            let unpadded = self.header + 30 + (self.name.len() + extra.len()) as u64 + 4;
            let pad = (ALIGN - (file_at + unpadded) % ALIGN) % ALIGN;
            extra.extend(*b"FB");
            extra.extend((pad as u16).to_le_bytes());
            extra.resize(extra.len() + pad as usize, b'Z');
        }
        out.extend(*b"PK\x03\x04");
        self.common(out);
        out.extend((extra.len() as u16).to_le_bytes());
        out.extend(self.name.as_bytes());
        out.extend(extra);
    }

    /// The header in the directory. Only the last record is large, so that the
    /// position of every header fits in 32 bits.
    fn central(&self, out: &mut Vec<u8>) {
        let extra = self.extra();
        out.extend(*b"PK\x01\x02");
        out.extend(45u16.to_le_bytes());
        self.common(out);
        out.extend((extra.len() as u16).to_le_bytes());
        out.extend([0; 10]); // comment length, disk, attributes
        out.extend((self.header as u32).to_le_bytes());
        out.extend(self.name.as_bytes());
        out.extend(extra);
    }
}

/// The directory and the end records, for a directory at `at`.
fn end(directory: Vec<u8>, count: u16, at: u64) -> Vec<u8> {
    let size = directory.len() as u64;
    let mut out = directory;
    if at >= LIMIT {
        out.extend(*b"PK\x06\x06");
        out.extend(44u64.to_le_bytes());
        out.extend([45, 0, 45, 0]);
        out.extend([0; 8]); // disks
        for field in [count.into(), count.into(), size, at] {
            out.extend(field.to_le_bytes());
        }
        out.extend(*b"PK\x06\x07");
        out.extend([0; 4]);
        out.extend((at + size).to_le_bytes());
        out.extend(1u32.to_le_bytes());
    }
    out.extend(*b"PK\x05\x06");
    out.extend([0; 4]);
    out.extend(count.to_le_bytes());
    out.extend(count.to_le_bytes());
    out.extend((size as u32).to_le_bytes());
    out.extend((at.min(LIMIT) as u32).to_le_bytes());
    out.extend([0; 2]);
    out
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
        frame: Frame,
        payload: u64,
    }

    impl Object for Sparse {
        fn len(&self) -> u64 {
            (self.frame.before.len() + self.frame.after.len()) as u64 + self.payload
        }

        fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
            let before = self.frame.before.len() as u64;
            for (at, byte) in (at..).zip(into) {
                *byte = if at < before {
                    self.frame.before[at as usize]
                } else {
                    let after = at.checked_sub(before + self.payload);
                    after.map_or(0, |at| self.frame.after[at as usize])
                };
            }
            Ok(())
        }
    }

    #[track_caller]
    fn check(size: u64, file_at: u64) {
        let payload = Payload { name: "data/0", crc: 7, size };
        let frame = frame(&[("data.pkl", b"abc"), ("version", b"3\n")], Some(&payload), file_at);
        let archive = Sparse { frame, payload: size };
        let records = records(&archive).unwrap();
        assert_eq!(records.len(), 3);
        assert_eq!(find(&records, "version").unwrap().read(&archive, 9).unwrap(), b"3\n");
        let data = find(&records, "data/0").unwrap();
        assert_eq!((data.size, data.crc), (size, 7));
        let at = data.locate(&archive).unwrap();
        assert_eq!(at, archive.frame.before.len() as u64);
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
