//! What can be wrong with a checkpoint folder.

use std::io;
use std::path::PathBuf;

/// Says who must act: most are for the user, [`Taken`](Error::Taken) is for the
/// caller.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The folder is of no use as it is.
    #[error(
        "checkpoint folder {path} cannot be written: {source}; \
         choose another one or give this user the right to write there"
    )]
    NotWritable {
        /// The folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Someone appended first: read the records again and decide again.
    #[error("ledger record {seq} exists already: someone else appended it")]
    Taken {
        /// The number that was to be appended.
        seq: u64,
    },
    /// A number was skipped, or a record was deleted by hand.
    #[error("ledger record {path} is missing, though later ones are wanted")]
    Hole {
        /// The missing record.
        path: PathBuf,
    },
    /// A record that cannot be understood.
    #[error("ledger record {path} is damaged or of a newer version: {source}")]
    Record {
        /// The record.
        path: PathBuf,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// A committed checkpoint whose place is taken by something else.
    #[error("{path} is in the way of the checkpoint committed as {stage}: move it elsewhere")]
    Occupied {
        /// The directory in the way.
        path: PathBuf,
        /// The stage that was to be renamed.
        stage: String,
    },
    /// A committed checkpoint that is gone.
    #[error("the checkpoint of step {step} was committed, but neither {path} nor its stage exists")]
    Vanished {
        /// Its step.
        step: u64,
        /// Where it should be.
        path: PathBuf,
    },
    /// A stage that another name would hide.
    #[error("{name:?} is not a stage name: it is <era>-<generation>-<step>")]
    StageName {
        /// The name.
        name: String,
    },
    /// A file operation or a checkpoint failed.
    #[error(transparent)]
    Checkpoint(#[from] crate::Error),
}
