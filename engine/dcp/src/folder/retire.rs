//! Deletes old checkpoints, never the last good one.

use std::fs;
use std::io;

use crate::durable::{At, sync_directory};

use super::record::live;
use super::{Error, Folder, Record};

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
            live.retain(|&step, _| self.step(step).is_dir());
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
            let steps: Vec<u64> = live.keys().take(surplus).copied().collect();
            let appended = (records.len() as u64..).zip(&steps).try_for_each(|(seq, &step)| {
                self.append(seq, &Record::Retire { step })?;
                retired.push(step);
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
        for &step in &retired {
            self.delete(step)?;
        }
        Ok(retired)
    }

    fn delete(&self, step: u64) -> Result<(), Error> {
        self.verified().remove(&step);
        let name = format!("{RETIRED}{step}");
        self.remove(&name)?;
        let from = self.step(step);
        match fs::rename(&from, self.root.join(&name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            renamed => renamed.at("retire", &from)?,
        }
        sync_directory(&self.root)?;
        self.remove(&name)
    }
}
