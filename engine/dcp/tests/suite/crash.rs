//! CKPT-1 with real processes: SIGKILL at any moment, and a disk that is full.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use dcp::folder::{Genesis, Record};
use dcp::{Checkpoint, Folder, ShardWriter};

use crate::support::{Tensor, path};

/// Set for the child: the folder to save into.
const CHILD: &str = "DCP_TEST_CHILD";

/// This test binary again, running one test as the child.
fn child(test: &str, root: &Path) -> String {
    let binary = std::env::current_exe().unwrap();
    format!("exec env {CHILD}={} {} --exact {test} --nocapture", root.display(), binary.display())
}

fn root() -> Option<std::path::PathBuf> {
    std::env::var_os(CHILD).map(Into::into)
}

#[test]
fn killed_at_any_moment_a_saver_leaves_a_loadable_checkpoint() {
    if let Some(root) = root() {
        return save_forever(&Folder::open(&root).unwrap());
    }
    let scratch = tempfile::tempdir().unwrap();
    let folder = Folder::open(scratch.path()).unwrap();
    let (job, config_digest) = ("job".to_owned(), String::new());
    let (ca_pin, config) = (String::new(), serde_json::Value::Null);
    let genesis = Genesis { job, config_digest, seed: 1, ca_pin, config };
    folder.append(0, &Record::Genesis(genesis)).unwrap();
    let mut survived = 0;
    for round in 0..12u64 {
        let script = child(
            "crash::killed_at_any_moment_a_saver_leaves_a_loadable_checkpoint",
            scratch.path(),
        );
        let mut saver =
            Command::new("sh").args(["-c", &script]).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(saver.stdout.take().unwrap()).lines();
        // Let it save one, then kill it a little later: each round elsewhere.
        let mut told = lines
            .map_while(Result::ok)
            .filter_map(|line| line.strip_prefix("saved ")?.parse().ok());
        let first: u64 = told.next().unwrap();
        std::thread::sleep(Duration::from_micros(round * 2_700));
        saver.kill().unwrap();
        saver.wait().unwrap();
        let last = told.last().unwrap_or(first);

        let folder = Folder::open(scratch.path()).unwrap();
        folder.recover().unwrap();
        let found = folder.newest().unwrap();
        assert!(found.quarantined.is_empty(), "{:?}", found.quarantined);
        let (step, path) = found.checkpoint.unwrap();
        assert!(step >= last, "step {last} was told to be saved, {step} survived");
        assert!(Checkpoint::open(&path).unwrap().verify().unwrap().digests);
        survived = survived.max(step);
    }
    assert!(survived >= 12);
}

/// The child: saves, publishes and retires until it is killed.
fn save_forever(folder: &Folder) {
    let newest = folder.newest().unwrap().checkpoint.map_or(0, |(step, _)| step);
    for step in newest + 1.. {
        // A stage is never used twice: the process is the generation.
        let stage = dcp::folder::stage_name(0, std::process::id().into(), step);
        let (_, files) = crate::support::save(&folder.stage(&stage), step as i64);
        let commit =
            dcp::folder::Commit { step, stage, era: 0, generation: 1, files, micro_batches: None };
        crate::folder::append(folder, Record::Commit(commit.clone()));
        folder.publish(&commit).unwrap();
        println!("saved {step}");
        folder.retire(2).unwrap();
    }
}

#[test]
fn a_full_disk_is_named_and_the_previous_checkpoint_stays() {
    if let Some(root) = root() {
        return save_too_much(&root);
    }
    let scratch = tempfile::tempdir().unwrap();
    let previous = scratch.path().join("previous");
    crate::support::save(&previous, 1);
    // A limit on the size of files stands in for the disk: a short write, then
    // an error, without the rights that a file system of fixed size needs.
    let script =
        child("crash::a_full_disk_is_named_and_the_previous_checkpoint_stays", scratch.path());
    let script = format!("trap '' XFSZ; ulimit -f 64; {script}");
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("refused as it should"), "{said}");
    assert!(Checkpoint::open(&previous).unwrap().verify().unwrap().digests);
}

/// The child: a tensor larger than any file may be.
fn save_too_much(root: &Path) {
    let tensor = Tensor::new("large", dcp::Dtype::F32, &[64 << 10]);
    let stage = root.join(".stage-0-1-2");
    let mut writer = ShardWriter::create(&stage, 0).unwrap();
    let whole = dcp::Region::whole(&tensor.shape);
    let mut put = || {
        writer.tensor("large", &path("large"), tensor.dtype, &tensor.shape, &whole, &tensor.bytes)
    };
    let told = put().unwrap_err().to_string();
    assert!(told.contains("cannot write") && told.contains(".stage-0-1-2/__0_0.distcp"), "{told}");
    let again = put().unwrap_err().to_string();
    assert!(again.contains("incomplete after an earlier error"), "{again}");
    assert!(writer.finish().is_err());
    println!("refused as it should");
}
