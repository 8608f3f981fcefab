//! Writes down which samples a rank read, at the place where it read them
//! (DATA-1): one JSON line per micro-batch, with the digest of its token bytes.
//!
//! A line is handed to the system before the micro-batch is computed on, so it
//! is there even if the process is killed right after. Lines of attempts that
//! were never committed are part of the evidence: an audit joins all ledgers of
//! a run with the chain of seals (GN-5), as the oracle `replay.py` does.
//!
//! One file belongs to one process. It grows by about 150 bytes and a dozen per
//! sample for each micro-batch.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

use job::{Step, Token};
use serde::{Deserialize, Serialize};

/// What one line says: a rank of a generation read these samples for a
/// micro-batch of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Era of the generation.
    pub era: u32,
    /// The generation.
    pub generation: u64,
    /// The step, 0 for the first.
    pub step: u64,
    /// The rank in the mesh of the generation.
    pub rank: usize,
    /// Number of the micro-batch within the step.
    pub micro_batch: u32,
    /// The samples, in the order of the micro-batch.
    pub samples: Vec<u64>,
    /// SHA-256 of the samples' token bytes as they are in the file, one sample
    /// after the other, in hex.
    pub sha256: String,
}

/// A ledger that cannot be written: a full disk, as a rule.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the data ledger {path}: {source}")]
pub struct Error {
    /// The file.
    pub path: PathBuf,
    /// What the system says.
    pub source: io::Error,
}

/// The ledger of one process.
#[derive(Debug)]
pub struct Ledger {
    path: PathBuf,
    file: File,
    seat: Option<(Token, usize)>,
}

impl Ledger {
    /// Creates the file, which must not exist yet, and its folder, which may.
    ///
    /// # Errors
    /// [`Error`].
    pub fn create(path: &Path) -> Result<Self, Error> {
        let error = |source| Error { path: path.to_owned(), source };
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(error)?;
        }
        let file = OpenOptions::new().append(true).create_new(true).open(path).map_err(error)?;
        Ok(Self { path: path.to_owned(), file, seat: None })
    }

    /// The seat that the lines from now on are written for.
    pub fn enter(&mut self, token: Token, rank: usize) {
        self.seat = Some((token, rank));
    }

    /// Writes a line down.
    ///
    /// # Errors
    /// [`Error`].
    ///
    /// # Panics
    /// Before the first [`Self::enter`].
    pub fn record(
        &mut self,
        step: Step,
        micro_batch: u32,
        samples: &[u64],
        sha256: &[u8; 32],
    ) -> Result<(), Error> {
        let Some((token, rank)) = self.seat else { panic!("a ledger entry needs a seat") };
        let entry = Entry {
            era: token.era.0,
            generation: token.generation.0,
            step: step.0,
            rank,
            micro_batch,
            samples: samples.to_vec(),
            sha256: hex::encode(sha256),
        };
        let error = |source| Error { path: self.path.clone(), source };
        let mut line = serde_json::to_vec(&entry).map_err(|e| error(e.into()))?;
        line.push(b'\n');
        // One write: a line is whole unless the disk is full.
        self.file.write_all(&line).map_err(error)
    }
}

#[cfg(test)]
mod tests {
    use job::{Era, Generation, JobId};

    use super::*;

    fn token(era: u32, generation: u64) -> Token {
        let job = JobId(
            serde_json::from_str("\"00000000-0000-0000-0000-000000000001\"").expect("a uuid"),
        );
        Token { job, era: Era(era), generation: Generation(generation) }
    }

    #[test]
    fn lines_say_who_read_what() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("data/ledger-1.jsonl");
        let mut ledger = Ledger::create(&path).expect("created");
        ledger.enter(token(0, 1), 2);
        ledger.record(Step(5), 3, &[9, 8], &[0xab; 32]).expect("written");
        ledger.enter(token(0, 2), 0);
        ledger.record(Step(5), 0, &[], &[1; 32]).expect("written");
        let text = std::fs::read_to_string(&path).expect("readable");
        let lines: Vec<Entry> =
            text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        let entry = |generation, rank, micro_batch, samples, byte| Entry {
            era: 0,
            generation,
            step: 5,
            rank,
            micro_batch,
            samples,
            sha256: hex::encode([byte; 32]),
        };
        assert_eq!(lines, [entry(1, 2, 3, vec![9, 8], 0xab), entry(2, 0, 0, vec![], 1)]);
        let again = Ledger::create(&path).expect_err("another process's ledger");
        assert!(again.to_string().contains("ledger-1.jsonl"), "{again}");
    }

    #[test]
    fn a_full_disk_is_a_clear_line() {
        let file = OpenOptions::new().append(true).open("/dev/full").expect("/dev/full");
        let mut ledger = Ledger { path: "/dev/full".into(), file, seat: None };
        ledger.enter(token(0, 1), 0);
        let error = ledger.record(Step(0), 0, &[1], &[0; 32]).expect_err("full");
        assert!(error.to_string().starts_with("cannot write the data ledger /dev/full: No space"));
    }
}
