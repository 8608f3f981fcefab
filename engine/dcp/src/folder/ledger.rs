//! The ledger: numbered records, each created exclusively (LG-1).

use crate::digest::Digest;
use crate::storage::Dir;

use super::{Error, Record};

/// A record has a few hundred bytes for each file of its checkpoint.
const RECORD_LIMIT: u64 = 64 << 20;

/// All records of a ledger in order, with their numbers.
pub(crate) fn read(ledger: &Dir) -> Result<Vec<(u64, Record)>, Error> {
    let mut numbers: Vec<u64> = ledger.list()?.iter().filter_map(|name| number(name)).collect();
    numbers.sort_unstable();
    numbers.dedup();
    let mut records = Vec::with_capacity(numbers.len());
    for (expected, seq) in (0..).zip(numbers) {
        if seq != expected {
            return Err(Error::Hole { path: ledger.path_of(&name_of(expected)) });
        }
        records.push((seq, read_one(ledger, seq)?));
    }
    Ok(records)
}

/// The records from `first` on, up to the first number that is not there.
pub(crate) fn read_from(ledger: &Dir, first: u64) -> Result<Vec<(u64, Record)>, Error> {
    let mut records = Vec::new();
    for seq in first.. {
        if !ledger.exists(&name_of(seq))? {
            break;
        }
        records.push((seq, read_one(ledger, seq)?));
    }
    Ok(records)
}

fn read_one(ledger: &Dir, seq: u64) -> Result<Record, Error> {
    let name = name_of(seq);
    let bytes = ledger.read(&name, RECORD_LIMIT)?;
    serde_json::from_slice(&bytes)
        .map_err(|source| Error::Record { path: ledger.path_of(&name), source })
}

/// Creates record `seq`, durably, unless it exists.
pub(crate) fn append(ledger: &Dir, seq: u64, record: &Record) -> Result<(), Error> {
    if let Some(before) = seq.checked_sub(1).map(name_of)
        && !ledger.exists(&before)?
    {
        return Err(Error::Hole { path: ledger.path_of(&before) });
    }
    let name = name_of(seq);
    let mut bytes = serde_json::to_vec_pretty(record)
        .map_err(|source| Error::Record { path: ledger.path_of(&name), source })?;
    bytes.push(b'\n');
    if !ledger.claim(&name, &bytes)? {
        return Err(Error::Taken { seq });
    }
    Ok(ledger.sync()?)
}

/// The digest of a record's file.
pub(crate) fn digest(ledger: &Dir, seq: u64) -> Result<Digest, Error> {
    Ok(Digest::of(&ledger.read(&name_of(seq), RECORD_LIMIT)?))
}

fn name_of(seq: u64) -> String {
    format!("{seq:08}.json")
}

fn number(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(".json")?;
    if digits.len() < 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    digits.parse().ok()
}
