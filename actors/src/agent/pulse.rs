//! The leader's sign of life in the checkpoint folder (LG-3). Blocking.
//!
//! A minority that still sees the folder must not take the job from the majority:
//! while the pulse moves, nobody begins an era.

use std::{fs, io, path::PathBuf};

use dcp::Folder;
use job::{codec, reforming::Pulse};

fn path(folder: &Folder) -> PathBuf {
    folder.root().join("ledger").join(".pulse")
}

/// Replaces the pulse. Not durable on purpose: after a power cut there is nobody
/// whose life it would show.
pub(super) fn write(folder: &Folder, pulse: Pulse) -> io::Result<()> {
    let path = path(folder);
    // One draft a process: two leaders must not write into one file.
    let draft = path.with_file_name(format!(".pulse-{:016x}", pulse.boot));
    fs::write(&draft, codec::encode(&pulse))?;
    fs::rename(&draft, &path)
}

/// The newest pulse; none when there is none that can be read.
pub(super) fn read(folder: &Folder) -> Option<Pulse> {
    codec::decode(&fs::read(path(folder)).ok()?).ok()
}
