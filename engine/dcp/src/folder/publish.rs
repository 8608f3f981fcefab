//! From a stage to a checkpoint, and the repair of what a crash interrupted.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::durable::{At, sync_directory};

use super::record::{live, stage_step};
use super::retire::RETIRED;
use super::{Commit, Error, Folder};

/// What [`Folder::recover`] repaired.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Steps that were committed and are published now.
    pub published: Vec<u64>,
    /// Stages of saves that can never be committed, removed.
    pub orphans: Vec<String>,
    /// Retired checkpoints whose removal was interrupted, removed.
    pub retired: Vec<String>,
}

impl Folder {
    /// Gives a committed stage its name `step-N`. Doing it twice is fine.
    ///
    /// # Errors
    /// [`Error::Occupied`] when something else has that name, and
    /// [`Error::Vanished`] when neither the stage nor the checkpoint is there.
    pub fn publish(&self, commit: &Commit) -> Result<PathBuf, Error> {
        if stage_step(&commit.stage) != Some(commit.step) {
            return Err(Error::StageName { name: commit.stage.clone() });
        }
        let (stage, step) = (self.stage(&commit.stage), self.step(commit.step));
        match rename_new(&stage, &step) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // Published earlier: whoever did may not have lived to sync.
                if !step.try_exists().at("find", &step)? {
                    return Err(Error::Vanished { step: commit.step, path: step });
                }
            }
            Err(error) if is_occupied(&error) => {
                return Err(Error::Occupied { path: step, stage: commit.stage.clone() });
            }
            Err(error) => Err(error).at("publish", &stage)?,
        }
        sync_directory(&self.root)?;
        Ok(step)
    }

    /// Repairs what a crash interrupted (LG-2): publishes what was committed,
    /// removes what was retired, and removes stages of steps that a published
    /// checkpoint made useless. Stages of newer steps may still be written.
    ///
    /// # Errors
    /// When the folder or its ledger cannot be read or changed.
    pub fn recover(&self) -> Result<Recovery, Error> {
        let records = self.records()?;
        let live = live(&records);
        let mut done = Recovery::default();
        for commit in live.values() {
            if self.stage(&commit.stage).try_exists().at("find", &self.root)? {
                self.publish(commit)?;
                done.published.push(commit.step);
            }
        }
        let names = self.names()?;
        let published = |step: u64| names.contains(&format!("step-{step}"));
        let newest =
            live.keys().rev().copied().find(|&s| published(s) || done.published.contains(&s));
        for name in &names {
            let stage = name.strip_prefix(".stage-").and_then(stage_step);
            if stage.is_some_and(|step| Some(step) <= newest) {
                self.remove(name)?;
                done.orphans.push(name.clone());
            }
            let retired = records.iter().any(|(_, record)| match record {
                super::Record::Retire { step } => {
                    !live.contains_key(step) && *name == format!("step-{step}")
                }
                _ => false,
            });
            if retired || name.starts_with(RETIRED) {
                self.remove(name)?;
                done.retired.push(name.clone());
            }
        }
        Ok(done)
    }

    /// Removes a directory of the folder; fine when it is gone already.
    pub(super) fn remove(&self, name: &str) -> Result<(), Error> {
        let path = self.root.join(name);
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => Ok(removed.at("remove", &path)?),
        }
    }
}

/// Renames a directory to a name that must be free.
fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // Some network file systems know only the plain rename, which refuses
        // any directory that is not empty: no checkpoint is ever replaced.
        Err(Errno::INVAL | Errno::NOSYS) => fs::rename(from, to),
        renamed => Ok(renamed?),
    }
}

fn is_occupied(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::AlreadyExists
            | io::ErrorKind::DirectoryNotEmpty
            | io::ErrorKind::NotADirectory
    )
}
