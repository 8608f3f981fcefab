//! `elastic bench recovery`: how long training stands still when something is
//! killed. A group of nodes on this machine trains; in turns a worker, a whole
//! node and the node that leads are killed, and everything is timed from
//! outside, on the one clock of this machine: from `kill(2)` to the first step
//! that the survivors commit, less what a step takes anyway on as many ranks.
//! Steps on the smaller mesh share the machine with the start of what was
//! killed, the first of them like the others.
//!
//! `elastic bench collectives` is in its own module, and `elastic bench step` is
//! the worker's: it needs the model.

mod collectives;
mod figures;
mod group;
mod record;
mod round;
mod table;

use std::path::{Path, PathBuf};

use super::{fail, print};
use crate::{
    cli::RecoveryArgs,
    config::{Config, Resolved},
    exit::Exit,
};
pub(super) use collectives::collectives;
pub(crate) use collectives::{Backend, Op};
use figures::{Figures, quiet_steps};
use group::Group;
use round::{Kind, Sample};

/// Small steps, no checkpoint within a run: only recovery shows.
const CONFIG: &str = include_str!("recovery.toml");

/// Runs the benchmark.
pub(super) fn recovery(args: &RecoveryArgs) -> Exit {
    match measure(args) {
        Ok(()) => Exit::Finished,
        Err((exit, why)) => fail(exit, &why),
    }
}

type Failure = (Exit, String);

fn failed(why: String) -> Failure {
    (Exit::Failed, why)
}

fn measure(args: &RecoveryArgs) -> Result<(), Failure> {
    let folder = Folder::create().map_err(failed)?;
    let config = configuration(args, &folder.path)?;
    let file = folder.write("bench.toml", &config.print()).map_err(failed)?;
    let mut group =
        Group::start(&folder.path, &file, args.nodes).map_err(|why| folder.keep(failed(why)))?;
    let measured = rounds(args, &mut group);
    group.end();
    let samples = match measured {
        Ok(samples) => samples,
        Err(why) => return Err(folder.keep(failed(why))),
    };
    let quiet = quiet_steps(group.record());
    let figures: Vec<Figures> =
        Kind::ALL.iter().filter_map(|kind| Figures::of(*kind, &samples, &quiet)).collect();
    print(&table::text(args.nodes, &quiet, &figures));
    if let Some(path) = &args.json {
        table::write_json(path, &figures).map_err(failed)?;
    }
    Ok(())
}

/// Every kind in turn, so that what changes during the run changes for all.
fn rounds(args: &RecoveryArgs, group: &mut Group) -> Result<Vec<Sample>, String> {
    let mut samples = Vec::new();
    group.settle().map_err(|why| format!("the group did not start to train: {why}"))?;
    for number in 0..args.rounds {
        for kind in Kind::ALL {
            let name = format!("round {}/{}, {kind}", number + 1, args.rounds);
            let sample = round::run(group, kind, number, args.rounds)
                .map_err(|why| format!("{name}: {why}"))?;
            eprintln!(
                "elastic: {name} of {}: a step after {} ms",
                sample.victim,
                sample.gross() / 1000
            );
            samples.push(sample);
        }
    }
    Ok(samples)
}

/// The built-in or given configuration, in a folder of its own and without end.
fn configuration(args: &RecoveryArgs, folder: &Path) -> Result<Resolved, Failure> {
    let usage = |why: String| (Exit::Usage, why);
    let file = match &args.config {
        Some(file) => file.clone(),
        None => {
            let file = folder.join("default.toml");
            std::fs::write(&file, CONFIG)
                .map_err(|error| failed(format!("cannot write {}: {error}", file.display())))?;
            file
        }
    };
    let mut resolved =
        Resolved::load(Some(&file), &args.overrides).map_err(|error| usage(error.to_string()))?;
    let config: &mut Config = &mut resolved.config;
    if let Some(dataset) = &args.dataset {
        config.training.dataset_path = dataset.display().to_string();
    }
    let dataset = std::path::absolute(&config.training.dataset_path)
        .map_err(|error| usage(format!("{}: {error}", config.training.dataset_path)))?;
    if !dataset.join("dataset.json").is_file() {
        return Err(usage(format!(
            "no dataset in {}: make one with `elastic data prepare TEXT --out DIR`, and name it with --dataset DIR",
            dataset.display()
        )));
    }
    config.training.dataset_path = dataset.display().to_string();
    config.job.dump_folder = folder.join("run").display().to_string();
    config.checkpoint.folder = "checkpoint".into();
    config.training.steps = ENDLESS;
    config.elastic.min_nodes = 1;
    config.elastic.max_nodes = args.nodes;
    Ok(resolved)
}

/// More steps than any run gets to.
const ENDLESS: u64 = 1_000_000_000;

/// A folder that goes when the benchmark ends, unless it failed.
struct Folder {
    path: PathBuf,
    keep: std::cell::Cell<bool>,
}

impl Folder {
    fn create() -> Result<Self, String> {
        let name = format!("elastic-bench-{}", uuid::Uuid::new_v4().simple());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path)
            .map_err(|error| format!("cannot create {}: {error}", path.display()))?;
        Ok(Self { path, keep: false.into() })
    }

    fn write(&self, name: &str, text: &str) -> Result<PathBuf, String> {
        let path = self.path.join(name);
        std::fs::write(&path, text)
            .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        Ok(path)
    }

    /// The folder explains the failure.
    fn keep(&self, (exit, why): Failure) -> Failure {
        self.keep.set(true);
        (exit, format!("{why}\nits logs are in {}", self.path.display()))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !self.keep.get() {
            // What stays is in the folder for temporary files.
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}
