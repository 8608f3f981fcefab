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
//!
//! An object store has no names to change: a checkpoint there stays where it
//! was staged, which its record tells, and a bad one is marked by a file
//! `quarantine-<stage>` beside it.

mod error;
mod ledger;
mod publish;
mod quarantine;
mod record;
mod retire;

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use uuid::Uuid;

use crate::checkpoint::Checkpoint;
use crate::digest::Digest;
use crate::storage::Dir;
use crate::writer::beside;

pub use error::Error;
pub use publish::Recovery;
pub use record::{Commit, Genesis, Record, live, stage_name};

/// A checkpoint folder.
#[derive(Debug)]
pub struct Folder {
    root: Dir,
    ledger: Dir,
    path: PathBuf,
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
        Self::found(beside(root)?)
    }

    /// Opens a folder anywhere, and creates it when it is not there.
    ///
    /// # Errors
    /// [`Error::NotWritable`]
    pub fn found(root: Dir) -> Result<Self, Error> {
        let folder = Self::look(root);
        let probe = format!(".draft-{}", Uuid::new_v4());
        let probed = folder.ledger.make().and_then(|()| {
            folder.ledger.claim(&probe, b"probe")?;
            folder.ledger.remove(&probe)
        });
        probed.map_err(|error| match error {
            crate::Error::Io { source, .. } => {
                Error::NotWritable { path: folder.path.clone(), source }
            }
            other => other.into(),
        })?;
        // The ledger's name, and the folder's own.
        folder.root.sync()?;
        match folder.root.parent().map_or(Ok(()), |above| above.sync()) {
            // A folder above that this user may not open was made by someone else.
            Err(crate::Error::Io { source, .. })
                if source.kind() == io::ErrorKind::PermissionDenied => {}
            synced => synced?,
        }
        Ok(folder)
    }

    /// A folder to read from: nothing is created, and nothing checked.
    #[must_use]
    pub fn look(root: Dir) -> Self {
        let (ledger, path) = (root.join("ledger"), root.path());
        Self { root, ledger, path, verified: Mutex::default() }
    }

    /// The folder's own path.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.path
    }

    /// The directory of a stage of this name ([`stage_name`]).
    #[must_use]
    pub fn stage(&self, name: &str) -> PathBuf {
        self.root.path_of(&stage_key(name))
    }

    /// The same, to write into.
    #[must_use]
    pub fn stage_dir(&self, name: &str) -> Dir {
        self.root.join(&stage_key(name))
    }

    /// The directory of a published checkpoint, where names can change.
    #[must_use]
    pub fn step(&self, step: u64) -> PathBuf {
        self.root.path_of(&step_key(step))
    }

    /// Where a committed checkpoint lies, or will once it is published.
    #[must_use]
    pub fn dir_of(&self, commit: &Commit) -> Dir {
        self.root.join(&self.key_of(commit))
    }

    /// All records in order, with their numbers. The next one to append has the
    /// number `records.len()`.
    ///
    /// # Errors
    /// When a record is missing or damaged.
    pub fn records(&self) -> Result<Vec<(u64, Record)>, Error> {
        ledger::read(&self.ledger)
    }

    /// The records from number `seq` on. Cheap while there is none: to be asked
    /// often.
    ///
    /// # Errors
    /// When a record is damaged.
    pub fn records_since(&self, seq: u64) -> Result<Vec<(u64, Record)>, Error> {
        ledger::read_from(&self.ledger, seq)
    }

    /// Appends a record, durably, as number `expected_seq`.
    ///
    /// # Errors
    /// [`Error::Taken`] when someone else appended that number: read again.
    /// [`Error::Occupied`] for a commit that could never be published.
    pub fn append(&self, expected_seq: u64, record: &Record) -> Result<(), Error> {
        if let Record::Commit(Commit { step, stage, .. }) = record
            && self.root.storage().renames()
            && self.root.exists(&step_key(*step))?
        {
            return Err(Error::Occupied { path: self.step(*step), stage: stage.clone() });
        }
        ledger::append(&self.ledger, expected_seq, record)
    }

    /// Digest of a record's file: the parent of a [`Record::Reform`].
    ///
    /// # Errors
    /// When there is no such record.
    pub fn record_digest(&self, seq: u64) -> Result<Digest, Error> {
        ledger::digest(&self.ledger, seq)
    }

    /// The newest committed checkpoint, verified in full: sizes and digests of
    /// all files, and the index. A bad one is renamed to
    /// `quarantine-<step>-<nonce>` and named, and the next older one is tried.
    ///
    /// # Errors
    /// When the ledger or the folder cannot be read, or permission is missing:
    /// that says nothing about the checkpoint.
    pub fn newest(&self) -> Result<Newest, Error> {
        let records = self.records()?;
        let mut newest = Newest::default();
        for (&step, commit) in live(&records).iter().rev() {
            if self.is_marked(commit)? {
                continue;
            }
            match self.verify(commit) {
                Ok(dir) => {
                    newest.checkpoint = Some((step, dir.path()));
                    break;
                }
                Err(reason) if reason.is_damage() => {
                    let path = self.quarantine(commit)?;
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
    fn verify(&self, commit: &Commit) -> Result<Dir, crate::Error> {
        let dir = self.dir_of(commit);
        // Sizes first: a torn file is noticed before the others are read.
        commit.files.iter().try_for_each(|file| file.check_size(&dir))?;
        let checkpoint = Checkpoint::open_in(dir.clone())?;
        if let Some(name) =
            checkpoint.files().find(|name| commit.files.iter().all(|f| f.name != *name))
        {
            let detail = "is in the index, but was not committed".to_owned();
            return Err(crate::Error::Entry { path: dir.path(), fqn: name.to_owned(), detail });
        }
        if !self.verified().contains(&commit.step) {
            commit.files.iter().try_for_each(|file| file.check(&dir))?;
            self.verified().insert(commit.step);
        }
        Ok(dir)
    }

    fn key_of(&self, commit: &Commit) -> String {
        if self.root.storage().renames() { step_key(commit.step) } else { stage_key(&commit.stage) }
    }

    /// Renames within the folder; false when there is nothing of that name.
    fn rename(&self, from: &str, to: &str, action: &'static str) -> Result<bool, Error> {
        match self.root.rename(from, to) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            renamed => renamed.map_err(|source| crate::Error::Io {
                action,
                path: self.root.path_of(from),
                source,
            })?,
        }
        self.root.sync()?;
        Ok(true)
    }

    fn verified(&self) -> std::sync::MutexGuard<'_, BTreeSet<u64>> {
        // The set stays true whatever a panicking thread did.
        self.verified.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn stage_key(name: &str) -> String {
    format!(".stage-{name}")
}

fn step_key(step: u64) -> String {
    format!("step-{step}")
}
