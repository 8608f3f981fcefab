//! `elastic ckpt`: what is in a checkpoint folder, whether it can be trusted
//! (CKPT-1), and the same in other formats. What is read stays as it is, also
//! what is damaged.

mod convert;
mod show;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use dcp::folder::{Commit, live};
use dcp::{Checkpoint, Dir, Folder};

use super::print::{bytes, grouped};
use super::{fail, print};
use crate::cli::CkptCommand;
use crate::exit::Exit;

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot read {}: {error}", .path.display())]
    Io { path: PathBuf, error: io::Error },
    #[error("{} holds no checkpoint: no .metadata, no step-N", .0.display())]
    Nothing(PathBuf),
    #[error(transparent)]
    Folder(#[from] dcp::folder::Error),
    #[error(transparent)]
    Checkpoint(#[from] dcp::Error),
    #[error(transparent)]
    Convert(#[from] dcp::convert::Error),
    #[error(
        "which Llama is this? Give --heads N (its num_attention_heads), --hf-assets-path DIR \
         with its config.json, or --model-flavor NAME"
    )]
    Heads,
    #[error("{}: {detail}", .path.display())]
    Config { path: PathBuf, detail: String },
}

/// Runs one of the commands.
pub(super) fn run(command: CkptCommand) -> Exit {
    match command {
        CkptCommand::Ls { dir } => list(&dir),
        CkptCommand::Verify { dir } => verify(&dir),
        CkptCommand::Show(args) => show::show(&args),
        other => convert::run(other),
    }
}

/// Lists the checkpoints of a folder, or the content of one.
fn list(dir: &Path) -> Exit {
    let text = if is_checkpoint(dir) { tensors(dir) } else { steps(dir) };
    match text {
        Ok(text) => {
            print(&text);
            Exit::Finished
        }
        Err(error) => fail(Exit::Failed, &error),
    }
}

/// Verifies one checkpoint, or all of a folder.
fn verify(dir: &Path) -> Exit {
    let all = match found(dir) {
        Ok(all) => all,
        Err(error) => return fail(Exit::Failed, &error),
    };
    let mut exit = Exit::Finished;
    for Found { path, commit, .. } in &all {
        match check(path, commit.as_ref()) {
            Ok(line) => print(&format!("{}: {line}\n", path.display())),
            Err(error) => exit = fail(Exit::Failed, &error),
        }
    }
    exit
}

/// A checkpoint, or the newest of a folder of them.
fn newest(dir: &Path) -> Result<PathBuf, Error> {
    // Anything else is told by whoever opens it.
    let has_steps = names(dir).is_ok_and(|names| names.iter().any(|name| step_of(name).is_some()));
    if is_checkpoint(dir) || !has_steps {
        return Ok(dir.to_owned());
    }
    let all = found(dir)?;
    let there = all.into_iter().rev().find(|found| found.path.is_dir());
    Ok(there.ok_or_else(|| Error::Nothing(dir.to_owned()))?.path)
}

/// A checkpoint, with its record where there is a ledger.
struct Found {
    step: Option<u64>,
    path: PathBuf,
    commit: Option<Commit>,
}

/// Whether a folder has an index of its own: one for all ranks, one for each, or
/// that of safetensors, which is in the files.
fn is_checkpoint(dir: &Path) -> bool {
    let is_index = |name: &str| name.ends_with(".metadata") || name.ends_with(".safetensors");
    names(dir).is_ok_and(|names| names.iter().any(|name| is_index(name)))
}

/// The names in a folder, those that are no text aside.
fn names(dir: &Path) -> io::Result<Vec<String>> {
    let names = fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name().into_string().ok()));
    Ok(names.collect::<io::Result<Vec<_>>>()?.into_iter().flatten().collect())
}

/// The checkpoint `dir`, or those in it and those that its ledger says exist.
fn found(dir: &Path) -> Result<Vec<Found>, Error> {
    let at = |error| Error::Io { path: dir.to_owned(), error };
    if is_checkpoint(dir) {
        let whole = fs::canonicalize(dir).map_err(at)?;
        let step = whole.file_name().and_then(|name| step_of(name.to_str()?));
        let mut commits = whole.parent().map(commits).transpose()?.unwrap_or_default();
        let commit = step.and_then(|step| commits.remove(&step));
        return Ok(vec![Found { step, path: dir.to_owned(), commit }]);
    }
    let mut commits = commits(dir)?;
    let names = names(dir).map_err(at)?;
    let mut steps: BTreeMap<_, _> =
        names.iter().filter_map(|name| Some((step_of(name)?, dir.join(name)))).collect();
    // A record without a folder is a loss, and has to be told.
    for step in commits.keys() {
        steps.entry(*step).or_insert_with(|| dir.join(format!("step-{step}")));
    }
    if steps.is_empty() {
        return Err(Error::Nothing(dir.to_owned()));
    }
    let found = steps.into_iter().map(|(step, path)| Found {
        step: Some(step),
        path,
        commit: commits.remove(&step),
    });
    Ok(found.collect())
}

fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-")?.parse().ok()
}

/// The checkpoints that the ledger of a folder says exist; none without one.
fn commits(root: &Path) -> Result<BTreeMap<u64, Commit>, Error> {
    if !root.join("ledger").is_dir() {
        return Ok(BTreeMap::new());
    }
    let records = Folder::look(Dir::at(root)?).records()?;
    Ok(live(&records).into_iter().map(|(step, commit)| (step, commit.clone())).collect())
}

fn check(path: &Path, commit: Option<&Commit>) -> Result<String, Error> {
    let report = Checkpoint::open(path)?.verify()?;
    let dir = Dir::at(path)?;
    for recorded in commit.iter().flat_map(|commit| &commit.files) {
        recorded.check(&dir)?;
    }
    let vouched = match (commit, report.digests) {
        (Some(_), _) => "BLAKE3 of the ledger",
        (None, true) => "BLAKE3 beside it, no ledger record",
        (None, false) => "CRC-32 where the format has it, no digests",
    };
    Ok(format!(
        "good: {} files, {} tensors in {} shards, {} objects, {}; checked by {vouched}",
        report.files,
        report.tensors,
        report.shards,
        report.objects,
        bytes(report.bytes),
    ))
}

fn steps(dir: &Path) -> Result<String, Error> {
    let mut text = format!("{:>12}  {:<28}  {:>10}  folder\n", "step", "state", "size");
    for Found { step, path, commit } in found(dir)? {
        let (state, size) = match (&commit, size(&path)) {
            (Some(commit), Some(size)) => {
                let state = format!("committed, generation {}.{}", commit.era, commit.generation);
                (state, bytes(size))
            }
            (Some(_), None) => ("committed, but missing".to_owned(), "-".to_owned()),
            (None, size) => ("no record".to_owned(), size.map_or_else(|| "-".to_owned(), bytes)),
        };
        let step = step.map_or_else(String::new, grouped);
        text += &format!("{step:>12}  {state:<28}  {size:>10}  {}\n", path.display());
    }
    Ok(text)
}

/// Bytes of all files; `None` when there is no such folder.
fn size(path: &Path) -> Option<u64> {
    let files = fs::read_dir(path).ok()?;
    Some(files.filter_map(|file| Some(file.ok()?.metadata().ok()?.len())).sum())
}

fn tensors(dir: &Path) -> Result<String, Error> {
    let checkpoint = Checkpoint::open(dir)?;
    let mut text = String::new();
    let mut elements = 0;
    for tensor in checkpoint.tensors() {
        let shape: Vec<_> = tensor.shape.iter().map(ToString::to_string).collect();
        let shards = checkpoint.shards(tensor.fqn).count();
        elements += tensor.shape.iter().product::<u64>();
        text += &format!(
            "{:<9} {:<16} {shards:>4} shards  {}\n",
            tensor.dtype.torch_name().trim_start_matches("torch."),
            format!("[{}]", shape.join(", ")),
            tensor.fqn
        );
    }
    for object in checkpoint.objects() {
        text += &format!("{:<9} {:<16} {:>11}  {object}\n", "object", "", "");
    }
    text += &format!("{} elements in tensors\n", grouped(elements));
    Ok(text)
}

#[cfg(test)]
mod tests {
    use dcp::folder::{Record, stage_name};
    use dcp::{Dtype, FileDigest, Region, Segment, ShardWriter, write_metadata};

    use super::*;

    /// A folder with one committed checkpoint of one tensor.
    fn folder() -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().expect("a temporary folder");
        let folder = Folder::open(root.path()).expect("writable");
        let stage = folder.stage(&stage_name(1, 2, 50));
        fs::create_dir(&stage).expect("a stage");
        let mut shard = ShardWriter::create(&stage, 0).expect("a shard");
        let key = [Segment::Key("weight".into())];
        let whole = Region { offsets: vec![0, 0], sizes: vec![2, 3] };
        shard.tensor("weight", &key, Dtype::F32, &[2, 3], &whole, &[7; 24]).expect("a tensor");
        let index = shard.finish().expect("a durable shard");
        write_metadata(&stage, &[index]).expect("an index");
        let names = [".metadata", "__0_0.distcp"];
        let commit = Commit {
            step: 50,
            stage: stage_name(1, 2, 50),
            era: 1,
            generation: 2,
            files: names
                .map(|name| {
                    FileDigest::of(&folder.stage_dir(&stage_name(1, 2, 50)), name).expect("a file")
                })
                .to_vec(),
            micro_batches: None,
        };
        folder.append(0, &Record::Commit(commit.clone())).expect("a record");
        let path = folder.publish(&commit).expect("published");
        (root, path)
    }

    #[test]
    fn a_folder_and_a_checkpoint_are_listed() {
        let (root, path) = folder();
        let text = steps(root.path()).expect("a folder");
        assert!(text.contains("          50  committed, generation 1.2"), "{text}");
        let text = tensors(&path).expect("a checkpoint");
        assert!(text.contains("float32   [2, 3]              1 shards  weight\n"), "{text}");
        assert!(text.contains("6 elements"), "{text}");
    }

    /// Also where nothing can be written: a mounted backup, another user's folder.
    #[test]
    fn looking_writes_nothing() {
        let (root, path) = folder();
        let ledger = root.path().join("ledger");
        let touched = || fs::metadata(&ledger).and_then(|facts| facts.modified()).expect("a time");
        let before = touched();
        assert_eq!(list(root.path()), Exit::Finished);
        assert_eq!(verify(root.path()), Exit::Finished);
        assert_eq!(verify(&path), Exit::Finished);
        assert_eq!(touched(), before, "a file was made in the ledger");
    }

    #[test]
    fn a_good_checkpoint_is_vouched_for_by_the_ledger() {
        let (root, path) = folder();
        for dir in [root.path(), &path] {
            let all = found(dir).expect("a checkpoint");
            assert_eq!(all.len(), 1);
            let line = check(&all[0].path, all[0].commit.as_ref()).expect("good");
            assert!(line.ends_with("checked by BLAKE3 of the ledger"), "{line}");
            assert_eq!(verify(dir), Exit::Finished);
        }
    }

    /// Damages the checkpoint and expects `part` in the message.
    #[track_caller]
    fn refuse(damage: impl FnOnce(&Path), part: &str) {
        let (root, path) = folder();
        damage(&path);
        assert_eq!(verify(root.path()), Exit::Failed);
        let all = found(root.path()).expect("a record");
        let error = check(&all[0].path, all[0].commit.as_ref()).expect_err("damage").to_string();
        assert!(error.contains(part), "{error:?} does not name {part:?}");
    }

    #[test]
    fn damage_is_named() {
        let shard = "__0_0.distcp";
        refuse(|path| fs::remove_dir_all(path).expect("removed"), "step-50");
        refuse(|path| fs::remove_file(path.join(shard)).expect("removed"), shard);
        refuse(|path| fs::write(path.join(shard), b"torn").expect("written"), shard);
        refuse(
            |path| {
                let mut bytes = fs::read(path.join(shard)).expect("read");
                let at = bytes.windows(24).position(|w| w == [7; 24]).expect("the payload");
                bytes[at] ^= 1;
                fs::write(path.join(shard), bytes).expect("written");
            },
            shard,
        );
    }

    /// As PyTorch and Hugging Face write them.
    #[test]
    fn checkpoints_with_other_indices_are_listed() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/dcp/tests/golden");
        for name in ["hf_whole", "hf_sharded", "rank_indices"] {
            assert_eq!(list(&golden.join(name)), Exit::Finished, "{name}");
            assert_eq!(verify(&golden.join(name)), Exit::Finished, "{name}");
        }
    }

    #[test]
    fn a_folder_without_checkpoints_says_so() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let error = steps(root.path()).expect_err("empty").to_string();
        assert!(error.ends_with("holds no checkpoint: no .metadata, no step-N"), "{error}");
        assert!(!root.path().join("ledger").exists(), "looking founds nothing");
        let error = steps(&root.path().join("absent")).expect_err("absent").to_string();
        assert!(error.ends_with("absent: No such file or directory (os error 2)"), "{error}");
    }
}
