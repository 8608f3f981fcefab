//! What the ledger says (LG-1): JSON, one record a file, for people to read too.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::digest::{Digest, FileDigest};

/// One record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "record", rename_all = "snake_case")]
pub enum Record {
    /// Record 0: whose folder this is. It keeps two founders from founding twice.
    Genesis(Genesis),
    /// A checkpoint exists (CKPT-1, LG-2).
    Commit(Commit),
    /// A checkpoint may be deleted.
    Retire {
        /// Its step.
        step: u64,
    },
    /// A new era begins without a quorum of the old one (LG-3).
    Reform {
        /// The new era.
        era: u32,
        /// Digest of the record before this one: two founders with different
        /// pasts cannot both succeed.
        parent: Digest,
        /// The nodes that begin it.
        founders: Vec<String>,
        /// Where the first of them lets the others in; empty when they are told.
        #[serde(default)]
        address: String,
        /// Digest of the new era's certificate authority; empty without one.
        #[serde(default)]
        ca_pin: String,
    },
    /// The run reached its last step (ST-4).
    Finish {
        /// Steps applied.
        step: u64,
    },
}

/// The identity of the job that owns a folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Genesis {
    /// The job's id.
    pub job: String,
    /// Digest of the configuration that decides the trajectory.
    pub config_digest: String,
    /// The seed of everything random.
    pub seed: u64,
    /// Digest of the certificate authority's certificate; empty without one.
    #[serde(default)]
    pub ca_pin: String,
    /// The configuration behind the digest, so that another one can be told from it
    /// key by key; null where it was not kept.
    #[serde(default)]
    pub config: serde_json::Value,
}

/// A committed checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commit {
    /// Steps applied to the saved state.
    pub step: u64,
    /// The stage's name, as given to [`Folder::stage`](super::Folder::stage).
    pub stage: String,
    /// The era of the save.
    pub era: u32,
    /// The generation that began the save.
    pub generation: u64,
    /// Every file of the checkpoint, the index included.
    pub files: Vec<FileDigest>,
    /// Micro-batches of a global batch, which whoever goes on from here keeps;
    /// absent in older records.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micro_batches: Option<u32>,
}

/// The checkpoints that the ledger holds to exist, by step: committed and not
/// retired since.
#[must_use]
pub fn live(records: &[(u64, Record)]) -> BTreeMap<u64, &Commit> {
    let mut live = BTreeMap::new();
    for (_, record) in records {
        match record {
            Record::Commit(commit) => {
                live.insert(commit.step, commit);
            }
            Record::Retire { step } => {
                live.remove(step);
            }
            Record::Genesis(_) | Record::Reform { .. } | Record::Finish { .. } => {}
        }
    }
    live
}

/// The name of a stage: `<era>-<generation>-<step>`. It never looks like
/// `step-<digits>`, which torchtitan takes for a checkpoint.
#[must_use]
pub fn stage_name(era: u32, generation: u64, step: u64) -> String {
    format!("{era}-{generation}-{step}")
}

/// The step of a stage's name.
pub(crate) fn stage_step(name: &str) -> Option<u64> {
    let mut parts = name.split('-');
    let (era, generation, step) = (parts.next()?, parts.next()?, parts.next()?);
    era.parse::<u32>().ok()?;
    generation.parse::<u64>().ok()?;
    let step = step.parse().ok()?;
    parts.next().is_none().then_some(step)
}
