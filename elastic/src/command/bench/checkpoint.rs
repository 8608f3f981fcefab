//! `elastic bench checkpoint`: saving, loading and resharding a state beside
//! PyTorch and beside what the folder itself can do, in one run. Within a round
//! they take turns, so that what changes on the machine changes for all; the
//! figures are medians over the rounds. Digests and checksums are included, and
//! so is waiting until the bytes are on the disk.

mod memory;
mod ours;
mod python;
mod raw;
mod table;

use std::path::{Path, PathBuf};

use crate::cli::CheckpointArgs;
use crate::command::{fail, print};
use crate::exit::Exit;
use ours::State;
use python::Python;
use table::{Figures, Place};

/// Runs the benchmark.
pub(in crate::command) fn checkpoint(args: &CheckpointArgs) -> Exit {
    match measure(args) {
        Ok(()) => Exit::Finished,
        Err(why) => fail(Exit::Failed, &why),
    }
}

fn measure(args: &CheckpointArgs) -> Result<(), String> {
    let state = State::new(args.size)?;
    let mut places = Vec::new();
    for dir in &args.dir {
        let figures = rounds(args, &state, dir)?;
        print(&table::text(&figures, args.size, args.rounds));
        places.push(figures);
    }
    if let Some(path) = &args.json {
        table::write_json(path, &places)?;
    }
    Ok(())
}

/// All rounds in one folder.
fn rounds(args: &CheckpointArgs, state: &State, dir: &Path) -> Result<Place, String> {
    let folder = Folder::create(dir)?;
    let at = |name: &str| folder.path.join(name);
    let start = |world: u32| {
        let python = args.python.as_deref();
        python.map(|python| Python::start(python, &folder.path, world, state)).transpose()
    };
    let mut single = start(1)?;
    let background = ours::Background::start(state)?;
    let mut figures = Figures::default();
    let progress = |round: u32, what: &str| {
        eprintln!("elastic: {}: round {} of {}, {what}", dir.display(), round + 1, args.rounds);
    };
    for round in 0..args.rounds {
        progress(round, "save and load");
        figures.add("raw write", raw::write(&at("raw"), &state.bytes)?);
        figures.add("save", ours::save(state, &at("ours"))?);
        figures.add("raw read", raw::read(&at("ours"))?);
        figures.add("load", ours::load(state, &at("ours"))?);
        figures.add("async", background.save(state, &at("async"))?);
        remove(&at("async"))?;
        if let Some(python) = &mut single {
            for (threads, name) in [(1, "torch save, 1 thread"), (2, "torch save, 2 threads")] {
                remove(&at("theirs"))?;
                figures.add(name, python.save(&at("theirs"), threads)?);
            }
            figures.add("torch load", python.load(&at("theirs"))?);
            figures.add("torch async", python.save_async(&at("async"))?);
        }
        ["raw", "ours", "theirs", "async"].iter().try_for_each(|name| remove(&at(name)))?;
    }
    drop((single, background));
    for (saved, wanted, name) in [(4, 2, "reshard 4 to 2"), (2, 3, "reshard 2 to 3")] {
        ours::save_ranks(state, &at("sharded"), saved)?;
        let mut group = start(wanted)?;
        for round in 0..args.rounds {
            progress(round, name);
            let (seconds, ratio) = ours::reshard(state, &at("sharded"), wanted)?;
            figures.add(name, seconds);
            figures.read_ratio = figures.read_ratio.max(ratio);
            figures.add(&format!("{name}, raw read"), raw::read(&at("sharded"))?);
            if let Some(group) = &mut group {
                figures.add(&format!("torch {name}"), group.load(&at("sharded"))?);
            }
        }
        remove(&at("sharded"))?;
    }
    figures.extra_memory = memory::extra(|| ours::save(state, &at("ours")).map(|_| ()))?;
    Ok(Place::new(dir, state.bytes.len() as u64, figures))
}

fn remove(path: &Path) -> Result<(), String> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("cannot remove {}: {error}", path.display()))
        }
        _ => Ok(()),
    }
}

/// A folder that goes when the benchmark ends.
struct Folder {
    path: PathBuf,
}

impl Folder {
    fn create(dir: &Path) -> Result<Self, String> {
        let name = format!("elastic-bench-{}", uuid::Uuid::new_v4().simple());
        let path = dir.join(name);
        std::fs::create_dir(&path)
            .map_err(|error| format!("cannot create {}: {error}", path.display()))?;
        let path = path
            .canonicalize()
            .map_err(|error| format!("cannot find {}: {error}", path.display()))?;
        Ok(Self { path })
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What stays has a name that says what it is.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}
