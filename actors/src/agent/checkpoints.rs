//! The leader's work on the checkpoint folder (LG-2). Blocking; each function
//! can be repeated after a crash at any point.

use std::path::PathBuf;

use dcp::{
    Folder, ShardIndex,
    folder::{Commit, Record, stage_name},
};
use job::{
    Era, Generation, Step, codec, command::Command, report::ShardSaved, state::CheckpointRecord,
};

use super::ledger::{append_once, newer_era, overtaken};
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
        micro_batches: record.micro_batches,
    };
    append_once(
        folder,
        record.era,
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
pub(super) fn retire(folder: &Folder, era: Era, keep_latest_k: u32) -> Result<(), String> {
    if let Some(newer) = newer_era(folder, era)? {
        return Err(overtaken(newer));
    }
    folder.retire(keep_latest_k as usize).map(|_| ()).map_err(|error| error.to_string())
}

/// Records that the job is finished.
pub(super) fn finish(folder: &Folder, era: Era, step: Step) -> Result<(), String> {
    append_once(folder, era, &Record::Finish { step: step.0 }, |known| {
        matches!(known, Record::Finish { .. })
    })
}
