//! An archive of many records, written front to back.

use super::write::{Entry, FOLDER, end};

/// Says which bytes frame the records; where they go is the caller's business.
#[derive(Default)]
pub(crate) struct Archive {
    at: u64,
    directory: Vec<u8>,
    count: u64,
    open: Option<Entry>,
}

impl Archive {
    /// A record with its bytes.
    pub(crate) fn small(&mut self, name: &str, bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let entry = Entry {
            name: format!("{FOLDER}/{name}"),
            crc: crc32fast::hash(bytes),
            size: bytes.len() as u64,
            header: self.at,
            late: false,
        };
        entry.local(&mut out, None);
        out.extend(bytes);
        self.at += out.len() as u64;
        entry.central(&mut self.directory);
        self.count += 1;
        out
    }

    /// What goes before the `size` bytes of a large record. [`end`](Self::end)
    /// follows them.
    pub(crate) fn begin(&mut self, name: &str, size: u64) -> Vec<u8> {
        let name = format!("{FOLDER}/{name}");
        let entry = Entry { name, crc: 0, size, header: self.at, late: size > 0 };
        let mut out = Vec::new();
        entry.local(&mut out, Some(0));
        self.at += out.len() as u64 + size;
        self.open = Some(entry);
        out
    }

    /// What goes after the bytes of a large record, whose checksum this is.
    pub(crate) fn end(&mut self, crc: u32) -> Vec<u8> {
        let mut out = Vec::new();
        if let Some(mut entry) = self.open.take() {
            entry.crc = crc;
            entry.descriptor(&mut out);
            entry.central(&mut self.directory);
            self.at += out.len() as u64;
            self.count += 1;
        }
        out
    }

    /// The end of the archive.
    pub(crate) fn finish(self) -> Vec<u8> {
        let mut out = Vec::new();
        end(&mut out, &self.directory, self.count, self.at);
        out
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::io;

    use super::*;
    use crate::storage::Object;
    use crate::zip::read::{find, records};

    /// Bytes with holes of zeros that take no memory.
    #[derive(Default)]
    struct Sparse {
        parts: Vec<(u64, Vec<u8>)>,
        length: u64,
    }

    impl Sparse {
        fn push(&mut self, bytes: Vec<u8>) {
            let at = self.length;
            self.length += bytes.len() as u64;
            self.parts.push((at, bytes));
        }
    }

    impl Object for Sparse {
        fn len(&self) -> u64 {
            self.length
        }

        fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
            for (at, byte) in (at..).zip(into) {
                let part = self.parts.iter().rev().find(|part| part.0 <= at);
                *byte = part
                    .and_then(|(from, bytes)| bytes.get((at - from) as usize))
                    .copied()
                    .unwrap_or_default();
            }
            Ok(())
        }
    }

    #[test]
    fn records_beyond_four_gigabytes_are_found() {
        let sizes = [3, (1 << 32) - 1, 5 << 32, 0, 64];
        let (mut archive, mut file) = (Archive::default(), Sparse::default());
        file.push(archive.small("data.pkl", b"abc"));
        for (n, size) in sizes.iter().enumerate() {
            file.push(archive.begin(&format!("data/{n}"), *size));
            file.length += size;
            file.push(archive.end(7));
        }
        file.push(archive.small("version", b"3\n"));
        file.push(archive.finish());
        let records = records(&file).unwrap();
        assert_eq!(records.len(), sizes.len() + 2);
        assert_eq!(find(&records, "version").unwrap().read(&file, 9).unwrap(), b"3\n");
        for (n, size) in sizes.iter().enumerate() {
            let record = find(&records, &format!("data/{n}")).unwrap();
            assert_eq!((record.size, record.crc), (*size, 7));
            assert_eq!(record.locate(&file).unwrap() % 64, 0);
        }
    }
}
