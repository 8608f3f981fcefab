//! From a stage to a checkpoint, and the repair of what a crash interrupted.

use std::io;
use std::path::PathBuf;

use super::record::{live, stage_step};
use super::retire::RETIRED;
use super::{Commit, Error, Folder, Record, stage_key, step_key};

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
        let dir = self.dir_of(commit);
        let vanished = || Error::Vanished { step: commit.step, path: dir.path() };
        if !self.root.storage().renames() {
            return if self.root.exists(&self.key_of(commit))? {
                Ok(dir.path())
            } else {
                Err(vanished())
            };
        }
        let (stage, step) = (stage_key(&commit.stage), step_key(commit.step));
        match self.root.rename(&stage, &step) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // Published earlier: whoever did may not have lived to sync.
                if !self.root.exists(&step)? {
                    return Err(vanished());
                }
            }
            Err(error) if is_occupied(&error) => {
                return Err(Error::Occupied { path: dir.path(), stage: commit.stage.clone() });
            }
            Err(source) => {
                let path = self.root.path_of(&stage);
                Err(crate::Error::Io { action: "publish", path, source })?;
            }
        }
        self.root.sync()?;
        Ok(dir.path())
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
        let renames = self.root.storage().renames();
        let mut done = Recovery::default();
        for commit in live.values().filter(|_| renames) {
            // Where the checkpoint is already, the stage is another attempt at it.
            if self.root.exists(&stage_key(&commit.stage))? && !self.is_published(commit)? {
                self.publish(commit)?;
                done.published.push(commit.step);
            }
        }
        let names = self.root.list()?;
        // Where names stay, the record alone publishes.
        let published = |commit: &Commit| names.contains(&self.key_of(commit));
        let newest = live
            .values()
            .rev()
            .find(|commit| published(commit) || done.published.contains(&commit.step))
            .map(|commit| commit.step);
        let staged = |name: &str| live.values().any(|commit| stage_key(&commit.stage) == *name);
        for name in &names {
            let stage = name.strip_prefix(".stage-").and_then(stage_step);
            if stage.is_some_and(|step| Some(step) <= newest) && (renames || !staged(name)) {
                self.root.remove(name)?;
                done.orphans.push(name.clone());
            }
            let retired = records.iter().any(|(_, record)| match record {
                Record::Retire { step } => !live.contains_key(step) && *name == step_key(*step),
                _ => false,
            });
            if retired || name.starts_with(RETIRED) {
                self.root.remove(name)?;
                done.retired.push(name.clone());
            }
        }
        Ok(done)
    }

    /// Whether the files of a commit are where they belong.
    fn is_published(&self, commit: &Commit) -> Result<bool, Error> {
        let dir = self.dir_of(commit);
        match commit.files.iter().try_for_each(|file| file.check_size(&dir)) {
            Err(error) if error.is_damage() => Ok(false),
            checked => Ok(checked.map(|()| true)?),
        }
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
