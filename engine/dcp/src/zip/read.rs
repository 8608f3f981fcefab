//! Finds the records of an archive from its end, as PyTorch does: local headers
//! may hold no sizes at all.

use std::collections::HashSet;

use super::Error;
use crate::storage::Object;

/// One stored record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// The name below the archive's folder.
    pub(crate) name: String,
    /// Zero when the writer computed none.
    pub(crate) crc: u32,
    /// Bytes.
    pub(crate) size: u64,
    header: u64,
}

/// Most archives fit whole, and one read then serves for all of them.
const TAIL: u64 = 4096;
/// The end record may carry a comment of up to 65,535 bytes.
const LONGEST_TAIL: u64 = 22 + 65_535;
/// A tensor's archive has about 400 bytes of directory.
const LONGEST_DIRECTORY: u64 = 16 << 20;

/// The records of an archive that fills `from` exactly.
pub(crate) fn records(from: &dyn Object) -> Result<Vec<Record>, Error> {
    let (mut tail, mut end) = (Vec::new(), None);
    for length in [TAIL, LONGEST_TAIL] {
        tail = vec![0; length.min(from.len()) as usize];
        from.read_at(from.len() - tail.len() as u64, &mut tail)?;
        end = find_end(&tail);
        if end.is_some() || tail.len() as u64 == from.len() {
            break;
        }
    }
    let end = end.ok_or(Error::NoEnd)?;
    let end_at = from.len() - (tail.len() - end) as u64;
    let directory = Directory::read(from, &tail[end..], end_at)?;
    if directory.size > LONGEST_DIRECTORY
        || directory.at.checked_add(directory.size).is_none_or(|end| end > end_at)
    {
        return Err(Error::Damaged("the directory lies outside the archive"));
    }
    let mut bytes = vec![0; directory.size as usize];
    from.read_at(directory.at, &mut bytes)?;
    let mut rest = bytes.as_slice();
    let mut records: Vec<Record> = Vec::new();
    let (mut names, mut total) = (HashSet::new(), 0u64);
    for _ in 0..directory.count {
        let (record, next) = entry(rest)?;
        if !names.insert(record.name.clone()) {
            return Err(Error::Damaged("two records have one name"));
        }
        total = total.saturating_add(record.size);
        if total > from.len() {
            return Err(Error::Damaged("its records overlap, or lie outside"));
        }
        records.push(record);
        rest = next;
    }
    Ok(records)
}

/// The record of a name.
pub(crate) fn find<'a>(records: &'a [Record], name: &str) -> Result<&'a Record, Error> {
    let found = records.iter().find(|record| record.name == name);
    found.ok_or_else(|| Error::Missing(name.to_owned()))
}

impl Record {
    /// All of a file that is no archive, which stores no CRC-32.
    pub(crate) fn raw(size: u64) -> Self {
        Self { name: "elements".to_owned(), crc: 0, size, header: 0 }
    }

    /// Where the record's bytes begin; they are known to lie in `from`.
    pub(crate) fn locate(&self, from: &dyn Object) -> Result<u64, Error> {
        const OUTSIDE: Error = Error::Damaged("a record lies outside the archive");
        if self.header.checked_add(30).is_none_or(|end| end > from.len()) {
            return Err(OUTSIDE);
        }
        let mut header = [0; 30];
        from.read_at(self.header, &mut header)?;
        if header[..4] != *b"PK\x03\x04" {
            return Err(Error::Damaged("a record does not begin where the directory says"));
        }
        let (name, extra) = (u16_at(&header, 26), u16_at(&header, 28));
        let at = self.header + 30 + u64::from(name) + u64::from(extra);
        if at.checked_add(self.size).is_none_or(|end| end > from.len()) {
            return Err(OUTSIDE);
        }
        Ok(at)
    }

    /// The record's bytes, checked against its CRC-32.
    pub(crate) fn read(&self, from: &dyn Object, limit: u64) -> Result<Vec<u8>, Error> {
        if self.size > limit {
            return Err(Error::TooLarge { name: self.name.clone(), bytes: self.size, limit });
        }
        let at = self.locate(from)?;
        let mut bytes = vec![0; self.size as usize];
        from.read_at(at, &mut bytes)?;
        self.check(crc32fast::hash(&bytes))?;
        Ok(bytes)
    }

    /// Compares the CRC-32 of the record's bytes with the stored one.
    pub(crate) fn check(&self, found: u32) -> Result<(), Error> {
        if self.crc == 0 || self.crc == found {
            return Ok(());
        }
        Err(Error::Crc { name: self.name.clone(), stored: self.crc, found })
    }
}

struct Directory {
    count: u64,
    size: u64,
    at: u64,
}

impl Directory {
    /// Reads the end record, and the 64-bit one before it where it has to.
    fn read(from: &dyn Object, end: &[u8], end_at: u64) -> Result<Self, Error> {
        let (count, size, at) = (u16_at(end, 10), u32_at(end, 12), u32_at(end, 16));
        if count != u16::MAX && size != u32::MAX && at != u32::MAX {
            return Ok(Self { count: count.into(), size: size.into(), at: at.into() });
        }
        const DAMAGED: Error = Error::Damaged("the 64-bit end record is missing");
        let mut locator = [0; 20];
        from.read_at(end_at.checked_sub(20).ok_or(DAMAGED)?, &mut locator)?;
        let record_at = u64_at(&locator, 8);
        if locator[..4] != *b"PK\x06\x07"
            || record_at.checked_add(56).is_none_or(|record_end| record_end > end_at)
        {
            return Err(DAMAGED);
        }
        let mut record = [0; 56];
        from.read_at(record_at, &mut record)?;
        if record[..4] != *b"PK\x06\x06" {
            return Err(DAMAGED);
        }
        Ok(Self { count: u64_at(&record, 32), size: u64_at(&record, 40), at: u64_at(&record, 48) })
    }
}

/// The last end record whose comment fits behind it.
fn find_end(tail: &[u8]) -> Option<usize> {
    let last = tail.len().checked_sub(22)?;
    (0..=last).rev().find(|&at| {
        tail[at..at + 4] == *b"PK\x05\x06"
            && usize::from(u16_at(tail, at + 20)) <= tail.len() - at - 22
    })
}

/// One directory entry and the bytes after it.
fn entry(bytes: &[u8]) -> Result<(Record, &[u8]), Error> {
    const SHORT: Error = Error::Damaged("the directory is cut short");
    let fixed = bytes.get(..46).ok_or(SHORT)?;
    if fixed[..4] != *b"PK\x01\x02" {
        return Err(Error::Damaged("the directory holds something else than entries"));
    }
    let lengths = [u16_at(fixed, 28), u16_at(fixed, 30), u16_at(fixed, 32)].map(usize::from);
    let name_end = 46 + lengths[0];
    let extra_end = name_end + lengths[1];
    let end = extra_end + lengths[2];
    let rest = bytes.get(end..).ok_or(SHORT)?;
    let name = std::str::from_utf8(&bytes[46..name_end])
        .map_err(|_| Error::Damaged("a record's name is not UTF-8"))?;
    let (_, name) =
        name.split_once('/').ok_or(Error::Damaged("a record is not in the archive's folder"))?;

    let mut wide = Wide(extra_64(&bytes[name_end..extra_end]));
    let size = wide.or_next(u32_at(fixed, 24))?;
    let stored = wide.or_next(u32_at(fixed, 20))?;
    let header = wide.or_next(u32_at(fixed, 42))?;
    let method = u16_at(fixed, 10);
    if method != 0 {
        return Err(Error::Compressed { name: name.to_owned(), method });
    }
    if stored != size {
        return Err(Error::Damaged("a stored record has two sizes"));
    }
    Ok((Record { name: name.to_owned(), crc: u32_at(fixed, 16), size, header }, rest))
}

/// The 64-bit extra field: size, stored size, header position, each only when
/// its 32-bit field is all ones.
struct Wide<'a>(&'a [u8]);

impl Wide<'_> {
    fn or_next(&mut self, narrow: u32) -> Result<u64, Error> {
        if narrow != u32::MAX {
            return Ok(narrow.into());
        }
        const MISSING: Error = Error::Damaged("a 64-bit field is missing");
        let (field, rest) = self.0.split_at_checked(8).ok_or(MISSING)?;
        self.0 = rest;
        Ok(u64_at(field, 0))
    }
}

fn extra_64(mut extra: &[u8]) -> &[u8] {
    while extra.len() >= 4 {
        let (id, length) = (u16_at(extra, 0), usize::from(u16_at(extra, 2)));
        let Some((field, rest)) = extra[4..].split_at_checked(length) else { break };
        if id == 1 {
            return field;
        }
        extra = rest;
    }
    &[]
}

fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes_at(bytes, at))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes_at(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes_at(bytes, at))
}
