//! The leader's work on the checkpoint folder (LG-2). Blocking; each function
//! can be repeated after a crash at any point.

use std::path::PathBuf;

use dcp::{
    Folder, ShardIndex,
    folder::{Commit, Error as FolderError, Genesis, Record, stage_name},
};
use job::{
    Era, Generation, JobId, Step, codec, command::Command, report::ShardSaved,
    state::CheckpointRecord,
};

use crate::clock;

/// Merges the shards' indexes into the checkpoint's own, durably, and says what
/// to propose: the checkpoint exists once that is committed. A group whose job
/// was founded again elsewhere is told to stop instead (GEN-2).
pub(super) fn assemble(
    folder: &Folder,
    era: Era,
    generation: Generation,
    step: Step,
    shards: &[ShardSaved],
) -> Result<Command, String> {
    let at = clock::timestamp();
    if let Some(newer) = newer_era(folder, era)? {
        return Ok(Command::Fail { why: overtaken(newer), final_: true, at });
    }
    let stage = stage_name(era.0, generation.0, step.0);
    let indexes: Vec<ShardIndex> = shards
        .iter()
        .map(|shard| codec::decode(&shard.index).map_err(|error| error.to_string()))
        .collect::<Result<_, _>>()?;
    let index = dcp::write_metadata(&folder.stage(&stage), &indexes).map_err(|e| e.to_string())?;
    let mut files: Vec<_> = indexes.into_iter().map(|shard| shard.file).collect();
    files.push(index);
    let stall_micros = shards.iter().map(|shard| shard.stall_micros).max().unwrap_or(0);
    let files = codec::encode(&files);
    Ok(Command::CommitCheckpoint { era, generation, step, stage, files, stall_micros, at })
}

/// Writes a committed checkpoint's ledger record and gives it its name.
pub(super) fn publish(
    folder: &Folder,
    step: Step,
    record: &CheckpointRecord,
) -> Result<PathBuf, String> {
    let commit = Commit {
        step: step.0,
        stage: record.stage.clone(),
        era: record.era.0,
        generation: record.generation.0,
        files: codec::decode(&record.files).map_err(|error| error.to_string())?,
    };
    append_once(
        folder,
        &Record::Commit(commit.clone()),
        |known| matches!(known, Record::Commit(known) if known.stage == commit.stage),
    )?;
    let path = folder.publish(&commit).map_err(|error| error.to_string())?;
    // Saves of earlier steps that somebody did not live to complete.
    folder.recover().map_err(|error| error.to_string())?;
    Ok(path)
}

/// Removes what was written of a save that can never be complete.
pub(super) fn discard(
    folder: &Folder,
    era: Era,
    generation: Generation,
    step: Step,
) -> Result<(), String> {
    let stage = folder.stage(&stage_name(era.0, generation.0, step.0));
    match std::fs::remove_dir_all(&stage) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("cannot remove the failed save {}: {error}", stage.display()))
        }
        _ => Ok(()),
    }
}

/// An era above this group's own in the ledger.
fn newer_era(folder: &Folder, own: Era) -> Result<Option<u32>, String> {
    let records = folder.records().map_err(|error| error.to_string())?;
    let eras = records.iter().filter_map(|(_, record)| match record {
        Record::Reform { era, .. } => Some(*era),
        _ => None,
    });
    Ok(eras.max().filter(|era| *era > own.0))
}

fn overtaken(era: u32) -> String {
    format!(
        "era {era} of this job was begun elsewhere from the same checkpoint folder (LG-3): this \
         group stops"
    )
}

/// Publishes what an earlier leader committed and may not have published.
pub(super) fn roll_forward(
    folder: &Folder,
    records: &std::collections::BTreeMap<Step, CheckpointRecord>,
) -> Result<(), String> {
    for (step, record) in records {
        if !folder.step(step.0).exists() {
            publish(folder, *step, record)?;
        }
    }
    folder.recover().map(|_| ()).map_err(|error| error.to_string())
}

/// Reads a committed checkpoint through; a damaged one is moved out of the way.
pub(super) fn verify(folder: &Folder, step: Step, record: &CheckpointRecord) -> Result<(), String> {
    if !folder.step(step.0).exists() {
        publish(folder, step, record)?;
    }
    // A folder of its own remembers nothing: what was sound once may be damaged by now.
    let folder = Folder::open(folder.root()).map_err(|error| error.to_string())?;
    let newest = folder.newest().map_err(|error| error.to_string())?;
    if newest.checkpoint.as_ref().is_some_and(|(found, _)| *found == step.0) {
        return Ok(());
    }
    let bad = newest.quarantined.into_iter().find(|bad| bad.step == step.0);
    Err(match bad {
        Some(bad) => match bad.path {
            Some(path) => format!("{} (moved to {})", bad.reason, path.display()),
            None => bad.reason.to_string(),
        },
        None => "it is not among the committed checkpoints of the folder".into(),
    })
}

/// Deletes all but the newest checkpoints.
pub(super) fn retire(folder: &Folder, keep_latest_k: u32) -> Result<(), String> {
    folder.retire(keep_latest_k as usize).map(|_| ()).map_err(|error| error.to_string())
}

/// Records that the job is finished.
pub(super) fn finish(folder: &Folder, step: Step) -> Result<(), String> {
    append_once(folder, &Record::Finish { step: step.0 }, |known| {
        matches!(known, Record::Finish { .. })
    })
}

/// What a founder finds or makes in the folder (LG-1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Claim {
    /// The folder was empty: this job is its owner now.
    New,
    /// The folder belongs to a job of the same configuration whose control
    /// group is gone: it goes on in a new era.
    Resumes {
        /// That job.
        job: JobId,
        /// The new era.
        era: Era,
        /// Its checkpoints.
        checkpoints: Vec<Commit>,
    },
    /// The folder belongs to another configuration.
    Foreign(Genesis),
    /// The folder belongs to a job of the same configuration that may be running.
    Owned(Genesis),
}

/// Claims the folder for a job: record 0 keeps two founders from founding twice,
/// a `Reform` record keeps two from resuming twice.
pub(super) fn claim(
    folder: &Folder,
    genesis: &Genesis,
    founder: &str,
    reforms: bool,
) -> Result<Claim, String> {
    let text = |error: FolderError| error.to_string();
    loop {
        let records = folder.records().map_err(text)?;
        let Some((last, _)) = records.last() else {
            match folder.append(0, &Record::Genesis(genesis.clone())) {
                Ok(()) => return Ok(Claim::New),
                Err(FolderError::Taken { .. }) => continue,
                Err(error) => return Err(text(error)),
            }
        };
        let Some((_, Record::Genesis(owner))) = records.first() else {
            return Err(format!(
                "ledger of {} does not begin with a genesis",
                folder.root().display()
            ));
        };
        if owner.config_digest != genesis.config_digest {
            return Ok(Claim::Foreign(owner.clone()));
        }
        if !reforms {
            return Ok(Claim::Owned(owner.clone()));
        }
        let job = owner
            .job
            .parse()
            .map(JobId)
            .map_err(|_| format!("ledger of {} names no valid job", folder.root().display()))?;
        let era = records.iter().filter_map(|(_, record)| match record {
            Record::Reform { era, .. } => Some(*era),
            Record::Commit(commit) => Some(commit.era),
            _ => None,
        });
        let era = era.max().unwrap_or(0) + 1;
        let parent = folder.record_digest(*last).map_err(text)?;
        let founders = vec![founder.to_owned()];
        match folder.append(last + 1, &Record::Reform { era, parent, founders }) {
            Ok(()) => {
                folder.recover().map_err(text)?;
                let checkpoints = committed(&records);
                return Ok(Claim::Resumes { job, era: Era(era), checkpoints });
            }
            Err(FolderError::Taken { .. }) => {}
            Err(error) => return Err(text(error)),
        }
    }
}

fn committed(records: &[(u64, Record)]) -> Vec<Commit> {
    let mut commits: Vec<Commit> = Vec::new();
    for (_, record) in records {
        match record {
            Record::Commit(commit) => commits.push(commit.clone()),
            Record::Retire { step } => commits.retain(|commit| commit.step != *step),
            _ => {}
        }
    }
    commits
}

fn append_once(
    folder: &Folder,
    record: &Record,
    same: impl Fn(&Record) -> bool,
) -> Result<(), String> {
    loop {
        let records = folder.records().map_err(|error| error.to_string())?;
        if records.iter().any(|(_, known)| same(known)) {
            return Ok(());
        }
        match folder.append(records.len() as u64, record) {
            Ok(()) => return Ok(()),
            Err(FolderError::Taken { .. }) => {}
            Err(error) => return Err(error.to_string()),
        }
    }
}
