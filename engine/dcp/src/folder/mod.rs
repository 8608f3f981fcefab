//! The checkpoint folder: which checkpoints exist (CKPT-1).
//!
//! ```text
//! <folder>/ledger/00000000.json     what was decided, in order (LG-1)
//! <folder>/.stage-<era>-<generation>-<step>/   a save in progress
//! <folder>/step-<N>/                a published checkpoint
//! <folder>/quarantine-<N>-<nonce>/  a checkpoint that failed its verification
//! ```
//!
//! A checkpoint exists when its [`Commit`] record exists. The order of a save
//! is (LG-2): shards and index into the stage, durably; [`Folder::append`] of
//! the commit; [`Folder::publish`]. A crash before the record leaves an orphan,
//! a crash after it is rolled forward by [`Folder::recover`]. Only names change
//! afterwards, so whatever happens the previous checkpoint stays loadable.

mod error;
mod ledger;
mod publish;
mod record;
mod retire;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use uuid::Uuid;

use crate::checkpoint::Checkpoint;
use crate::digest::Digest;
use crate::durable::{At, sync_directory};

pub use error::Error;
pub use publish::Recovery;
pub use record::{Commit, Genesis, Record, stage_name};

/// A checkpoint folder.
#[derive(Debug)]
pub struct Folder {
    root: PathBuf,
    ledger: PathBuf,
    /// Steps that this process verified in full: a checkpoint is read once.
    verified: Mutex<BTreeSet<u64>>,
}

/// The answer to "which checkpoint do we continue from".
#[derive(Debug, Default)]
pub struct Newest {
    /// Step and directory of the newest committed checkpoint that verified.
    pub checkpoint: Option<(u64, PathBuf)>,
    /// Newer ones that did not.
    pub quarantined: Vec<Quarantined>,
}

/// A committed checkpoint that failed its verification.
#[derive(Debug)]
pub struct Quarantined {
    /// Its step.
    pub step: u64,
    /// Where it lies now; `None` when it was gone.
    pub path: Option<PathBuf>,
    /// The damage, which names the file.
    pub reason: crate::Error,
}

impl Folder {
    /// Opens a folder, and creates it when it is not there.
    ///
    /// # Errors
    /// [`Error::NotWritable`], before anyone trains for an hour.
    pub fn open(root: &Path) -> Result<Self, Error> {
        let ledger = root.join("ledger");
        let probe = ledger.join(format!(".draft-{}", Uuid::new_v4()));
        fs::create_dir_all(&ledger)
            .and_then(|()| fs::write(&probe, b"probe"))
            .and_then(|()| fs::remove_file(&probe))
            .map_err(|source| Error::NotWritable { path: root.to_owned(), source })?;
        sync_directory(root)?;
        Ok(Self { root: root.to_owned(), ledger, verified: Mutex::default() })
    }

    /// Opens a folder that is there to be read, and writes nothing: a mounted backup,
    /// another user's. Only [`records`](Self::records) and names are of use then.
    #[must_use]
    pub fn read_only(root: &Path) -> Self {
        Self { root: root.to_owned(), ledger: root.join("ledger"), verified: Mutex::default() }
    }

    /// The folder's own path.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The directory of a stage of this name ([`stage_name`]).
    #[must_use]
    pub fn stage(&self, name: &str) -> PathBuf {
        self.root.join(format!(".stage-{name}"))
    }

    /// The directory of a published checkpoint.
    #[must_use]
    pub fn step(&self, step: u64) -> PathBuf {
        self.root.join(format!("step-{step}"))
    }

    /// All records in order, with their numbers. The next one to append has the
    /// number `records.len()`.
    ///
    /// # Errors
    /// When a record is missing or damaged.
    pub fn records(&self) -> Result<Vec<(u64, Record)>, Error> {
        ledger::read(&self.ledger)
    }

    /// Appends a record, durably, as number `expected_seq`.
    ///
    /// # Errors
    /// [`Error::Taken`] when someone else appended that number: read again.
    pub fn append(&self, expected_seq: u64, record: &Record) -> Result<(), Error> {
        ledger::append(&self.ledger, expected_seq, record)
    }

    /// SHA-256 of a record's file: the parent of a [`Record::Reform`].
    ///
    /// # Errors
    /// When there is no such record.
    pub fn record_digest(&self, seq: u64) -> Result<Digest, Error> {
        ledger::digest(&self.ledger, seq)
    }

    /// The newest committed checkpoint, verified in full: sizes and SHA-256 of
    /// all files, and the index. A bad one is renamed to
    /// `quarantine-<step>-<nonce>` and named, and the next older one is tried.
    ///
    /// # Errors
    /// When the ledger or the folder cannot be read, or permission is missing:
    /// that says nothing about the checkpoint.
    pub fn newest(&self) -> Result<Newest, Error> {
        let records = self.records()?;
        let mut newest = Newest::default();
        for (&step, commit) in record::live(&records).iter().rev() {
            match self.verify(commit) {
                Ok(path) => {
                    newest.checkpoint = Some((step, path));
                    break;
                }
                Err(reason) if reason.is_damage() => {
                    let path = self.quarantine(step)?;
                    // A checkpoint that was quarantined earlier is old news.
                    if path.is_some() || !self.was_quarantined(step)? {
                        tracing::warn!(step, %reason, "checkpoint quarantined");
                        newest.quarantined.push(Quarantined { step, path, reason });
                    }
                }
                Err(other) => return Err(other.into()),
            }
        }
        Ok(newest)
    }

    /// Checks a published checkpoint against its record.
    fn verify(&self, commit: &Commit) -> Result<PathBuf, crate::Error> {
        let path = self.step(commit.step);
        // Sizes first: a torn file is noticed before the others are read.
        commit.files.iter().try_for_each(|file| file.check_size(&path))?;
        let checkpoint = Checkpoint::open(&path)?;
        if let Some(name) =
            checkpoint.files().find(|name| commit.files.iter().all(|f| f.name != *name))
        {
            let detail = "is in the index, but was not committed".to_owned();
            return Err(crate::Error::Entry { path, fqn: name.to_owned(), detail });
        }
        if !self.verified().contains(&commit.step) {
            commit.files.iter().try_for_each(|file| file.check(&path))?;
            self.verified().insert(commit.step);
        }
        Ok(path)
    }

    /// Moves a bad checkpoint out of the way; `None` when it is not there.
    fn quarantine(&self, step: u64) -> Result<Option<PathBuf>, Error> {
        self.verified().remove(&step);
        let nonce = Uuid::new_v4().simple().to_string();
        let to = self.root.join(format!("quarantine-{step}-{}", &nonce[..8]));
        let from = self.step(step);
        match fs::rename(&from, &to) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            renamed => renamed.at("quarantine", &from)?,
        }
        sync_directory(&self.root)?;
        Ok(Some(to))
    }

    fn was_quarantined(&self, step: u64) -> Result<bool, Error> {
        let prefix = format!("quarantine-{step}-");
        Ok(self.names()?.iter().any(|name| name.starts_with(&prefix)))
    }

    /// The names in the folder, sorted.
    fn names(&self) -> Result<Vec<String>, Error> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.root).at("list", &self.root)? {
            let name = entry.at("list", &self.root)?.file_name();
            names.extend(name.into_string());
        }
        names.sort_unstable();
        Ok(names)
    }

    fn verified(&self) -> std::sync::MutexGuard<'_, BTreeSet<u64>> {
        // The set stays true whatever a panicking thread did.
        self.verified.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
