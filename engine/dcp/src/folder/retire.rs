//! Deletes old checkpoints, never the last good one.

use super::record::live;
use super::{Commit, Error, Folder, Record, step_key};

/// Names of checkpoints on their way out; torchtitan takes none for a step.
pub(super) const RETIRED: &str = ".retired-";

/// How often a retirement tries again when someone else appends.
const ATTEMPTS: usize = 16;

impl Folder {
    /// Deletes all but the newest `keep_latest_k` committed checkpoints; zero
    /// keeps all. Nothing is deleted unless one of those that stay verifies.
    /// The record comes first, then the rename, then the removal: a crash in
    /// between is finished by [`recover`](Self::recover). Returns the deleted
    /// steps.
    ///
    /// # Errors
    /// When the ledger or the folder cannot be read or changed.
    pub fn retire(&self, keep_latest_k: usize) -> Result<Vec<u64>, Error> {
        let mut retired = Vec::new();
        for _ in 0..ATTEMPTS {
            let records = self.records()?;
            // Quarantined ones are gone already and do not count.
            let mut live = live(&records);
            for commit in live.clone().into_values() {
                if !self.root.exists(&self.key_of(commit))? || self.is_marked(commit)? {
                    live.remove(&commit.step);
                }
            }
            let Some(surplus) = live.len().checked_sub(keep_latest_k).filter(|&n| n > 0) else {
                break;
            };
            if keep_latest_k == 0
                || !live
                    .values()
                    .rev()
                    .take(keep_latest_k)
                    .any(|commit| self.verify(commit).is_ok())
            {
                break;
            }
            let surplus = live.values().take(surplus).copied();
            let appended = (records.len() as u64..).zip(surplus).try_for_each(|(seq, commit)| {
                self.append(seq, &Record::Retire { step: commit.step })?;
                retired.push(commit.clone());
                Ok(())
            });
            match appended {
                Err(Error::Taken { .. }) => {}
                appended => {
                    appended?;
                    break;
                }
            }
        }
        for commit in &retired {
            self.delete(commit)?;
        }
        Ok(retired.iter().map(|commit| commit.step).collect())
    }

    fn delete(&self, commit: &Commit) -> Result<(), Error> {
        self.verified().remove(&commit.step);
        if !self.root.storage().renames() {
            return Ok(self.root.remove(&self.key_of(commit))?);
        }
        let name = format!("{RETIRED}{}", commit.step);
        self.root.remove(&name)?;
        if self.rename(&step_key(commit.step), &name, "retire")? {
            self.root.remove(&name)?;
        }
        Ok(())
    }
}
