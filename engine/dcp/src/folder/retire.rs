//! Deletes old checkpoints, never the last good one.

use super::record::live;
use super::{Commit, Error, Folder, Record, step_key};

/// Names of checkpoints on their way out; torchtitan takes none for a step.
pub(super) const RETIRED: &str = ".retired-";

/// How often a retirement tries again when someone else appends.
const ATTEMPTS: usize = 16;

impl Folder {
    /// Deletes all but the newest `keep_latest_k` committed checkpoints; zero
    /// keeps all. Nothing is deleted unless one of those that stay verifies:
    /// each that does not is told as a warning. The record comes first, then the
    /// rename, then the removal: a crash in between is finished by
    /// [`recover`](Self::recover). Returns the deleted steps.
    ///
    /// # Errors
    /// When the ledger or the folder cannot be read or changed, and
    /// [`Error::Taken`] when others append all the time.
    pub fn retire(&self, keep_latest_k: usize) -> Result<Vec<u64>, Error> {
        if keep_latest_k == 0 {
            return Ok(Vec::new());
        }
        let mut retired = Vec::new();
        let mut recorded = Ok(());
        for _ in 0..ATTEMPTS {
            recorded = self.record_retired(keep_latest_k, &mut retired);
            if !matches!(recorded, Err(Error::Taken { .. })) {
                break;
            }
        }
        // What has its record goes, whatever became of the others.
        for commit in &retired {
            self.delete(commit)?;
        }
        recorded.map(|()| retired.iter().map(|commit| commit.step).collect())
    }

    /// Appends a record for each surplus checkpoint.
    fn record_retired(&self, keep: usize, retired: &mut Vec<Commit>) -> Result<(), Error> {
        let records = self.records()?;
        // Quarantined ones are gone already and do not count.
        let mut live = live(&records);
        for commit in live.clone().into_values() {
            if !self.root.exists(&self.key_of(commit))? || self.is_marked(commit)? {
                live.remove(&commit.step);
            }
        }
        let surplus = live.len().saturating_sub(keep);
        if surplus == 0 || !self.any_verifies(live.values().rev().take(keep))? {
            return Ok(());
        }
        let surplus = live.values().take(surplus).copied();
        (records.len() as u64..).zip(surplus).try_for_each(|(seq, commit)| {
            self.append(seq, &Record::Retire { step: commit.step })?;
            retired.push(commit.clone());
            Ok(())
        })
    }

    /// Whether one is good. That one cannot be read says nothing about it.
    fn any_verifies<'a>(
        &self,
        commits: impl Iterator<Item = &'a &'a Commit>,
    ) -> Result<bool, Error> {
        for commit in commits {
            match self.verify(commit) {
                Ok(_) => return Ok(true),
                Err(reason) if reason.is_damage() => {
                    tracing::warn!(step = commit.step, %reason, "nothing is retired for it");
                }
                Err(other) => return Err(other.into()),
            }
        }
        Ok(false)
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
