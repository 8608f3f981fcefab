//! Bad checkpoints, out of the way and kept for whoever asks why.

use std::path::PathBuf;

use uuid::Uuid;

use super::{Commit, Error, Folder, step_key};

impl Folder {
    /// Moves a bad checkpoint out of the way; `None` when it is not there.
    pub(super) fn quarantine(&self, commit: &Commit) -> Result<Option<PathBuf>, Error> {
        let step = commit.step;
        self.verified().remove(&step);
        if !self.root.storage().renames() {
            self.root.claim(&mark(commit), b"damaged\n")?;
            return Ok(Some(self.dir_of(commit).path()));
        }
        let nonce = Uuid::new_v4().simple().to_string();
        let to = format!("quarantine-{step}-{}", &nonce[..8]);
        let moved = self.rename(&step_key(step), &to, "quarantine")?;
        Ok(moved.then(|| self.root.path_of(&to)))
    }

    /// Whether a checkpoint is known to be bad where it lies.
    pub(super) fn is_marked(&self, commit: &Commit) -> Result<bool, Error> {
        Ok(!self.root.storage().renames() && self.root.exists(&mark(commit))?)
    }

    pub(super) fn was_quarantined(&self, step: u64) -> Result<bool, Error> {
        let prefix = format!("quarantine-{step}-");
        Ok(self.root.list()?.iter().any(|name| name.starts_with(&prefix)))
    }
}

fn mark(commit: &Commit) -> String {
    format!("quarantine-{}", commit.stage)
}
