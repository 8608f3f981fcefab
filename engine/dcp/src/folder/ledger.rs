//! The ledger: numbered records, each created exclusively (LG-1).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use uuid::Uuid;

use crate::digest::Digest;
use crate::durable::{At, sync_directory, write_new};

use super::{Error, Record};

/// All records of a ledger in order, with their numbers.
pub(crate) fn read(ledger: &Path) -> Result<Vec<(u64, Record)>, Error> {
    let mut numbers = Vec::new();
    for entry in fs::read_dir(ledger).at("list", ledger)? {
        let name = entry.at("list", ledger)?.file_name();
        numbers.extend(name.to_str().and_then(number));
    }
    numbers.sort_unstable();
    numbers.dedup();
    let mut records = Vec::with_capacity(numbers.len());
    for (expected, seq) in (0..).zip(numbers) {
        if seq != expected {
            return Err(Error::Hole { path: path_of(ledger, expected) });
        }
        let path = path_of(ledger, seq);
        let bytes = fs::read(&path).at("read", &path)?;
        let record =
            serde_json::from_slice(&bytes).map_err(|source| Error::Record { path, source })?;
        records.push((seq, record));
    }
    Ok(records)
}

/// Creates record `seq`, durably, unless it exists.
pub(crate) fn append(ledger: &Path, seq: u64, record: &Record) -> Result<(), Error> {
    if let Some(before) = seq.checked_sub(1).map(|seq| path_of(ledger, seq))
        && !before.try_exists().at("find", &before)?
    {
        return Err(Error::Hole { path: before });
    }
    let path = path_of(ledger, seq);
    let mut bytes = serde_json::to_vec_pretty(record)
        .map_err(|source| Error::Record { path: path.clone(), source })?;
    bytes.push(b'\n');
    // A hard link, unlike a rename, never replaces: the loser of a race knows.
    let draft = ledger.join(format!(".draft-{}", Uuid::new_v4()));
    let linked =
        write_new(&draft, &bytes).map_err(Error::from).and_then(|()| {
            match fs::hard_link(&draft, &path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    Err(Error::Taken { seq })
                }
                linked => Ok(linked.at("create", &path)?),
            }
        });
    // A draft left behind has no meaning; its removal may fail.
    let _ = fs::remove_file(&draft);
    linked?;
    Ok(sync_directory(ledger)?)
}

/// The digest of a record's file.
pub(crate) fn digest(ledger: &Path, seq: u64) -> Result<Digest, Error> {
    let path = path_of(ledger, seq);
    Ok(Digest::of(&fs::read(&path).at("read", &path)?))
}

fn path_of(ledger: &Path, seq: u64) -> PathBuf {
    ledger.join(format!("{seq:08}.json"))
}

fn number(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(".json")?;
    if digits.len() < 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    digits.parse().ok()
}
