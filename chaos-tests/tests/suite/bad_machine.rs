//! Bad machines: a disk that is full, a libtorch that is wrong or missing. One
//! clear line, the right exit code, nothing lost (CKPT-1, TRAJ-1).

use std::{fs, path::Path, process::Command};

use chaos_tests::harness::{Run, dataset, elastic, release};

use crate::{bad_input, quiet_real, real};

/// `unshare` with what a mount of one's own needs: root, or a user namespace.
fn own_mounts() -> Option<Vec<&'static str>> {
    let choices = [vec!["--mount"], vec!["--user", "--map-root-user", "--mount"]];
    choices.into_iter().find(|choice| {
        let mounts = "mount -t tmpfs -o size=1m tmpfs /mnt";
        let tried = Command::new("unshare").args(choice).args(["sh", "-c", mounts]).output();
        tried.is_ok_and(|output| output.status.success())
    })
}

/// The disk holds one checkpoint of 12.6 MB, and not two.
#[test]
fn ckpt_1_a_full_disk_loses_no_checkpoint_on_a_real_disk() {
    let Some(own_mounts) = own_mounts() else {
        eprintln!("full-tmpfs: this machine lets nobody mount; the file size limit stands in");
        return;
    };
    let expected = quiet_real();
    // What the run holds beside its checkpoints is on the usual disk.
    let run = Run::prepare(real("full-tmpfs", 1));
    let further = ["--standalone=1", "--min-nodes=1"];
    let summary = run.folder().join("summary.json");
    let mut arguments = bad_input::command(&run.setup, run.folder(), dataset(), &further);
    arguments.extend(["--summary".into(), summary.display().to_string()]);
    let script = format!(
        r#"disk={disk}; mkdir -p $disk
        mount -t tmpfs -o size=20m tmpfs $disk || exit 99
        "$@"; echo "first ended with $?"
        {elastic} ckpt verify $disk; echo "verify ended with $?"
        ls $disk
        mount -o remount,size=80m $disk
        "$@"; echo "second ended with $?""#,
        disk = run.folder().join("checkpoint").display(),
        elastic = elastic().display(),
    );
    let mut command = Command::new("unshare");
    command.args(own_mounts).args(["sh", "-c", &script, "sh"]).arg(elastic()).args(arguments);
    let output = bad_input::output(&mut command);
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    eprintln!("full-tmpfs:\n{out}{err}");
    assert!(out.contains("first ended with 1\n"), "a full disk fails the run");
    let said = err.lines().find(|line| line.contains("No space left on device"));
    let said = said.expect("a line about the full disk");
    assert!(said.starts_with("elastic: ") && said.contains("checkpoint"), "{said}");
    assert!(out.contains("verify ended with 0\n") && out.contains("step-10\n"), "{out}");
    assert!(out.contains("second ended with 0\n"), "with room it goes on");
    let digests = run.finished();
    assert_eq!(&digests, expected);
}

/// A copy of the programs whose worker looks for libtorch in another folder.
fn programs_with_libtorch_at(folder: &Path, libtorch: &str) {
    fs::create_dir_all(folder).expect("a folder for the programs");
    fs::copy(elastic(), folder.join("elastic")).expect("a copy");
    let worker = release().join("elastic-worker");
    let mut bytes = fs::read(&worker).expect("the worker");
    let said = Command::new("readelf").arg("-d").arg(&worker).output().expect("readelf starts");
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    let path = said.lines().find_map(|line| line.split_once("runpath: [")?.1.strip_suffix(']'));
    let own = path.unwrap_or_else(|| panic!("{} has no run path", worker.display())).as_bytes();
    let other = format!("{libtorch:/<width$}", width = own.len());
    assert_eq!(other.len(), own.len(), "{libtorch} is longer than the run path");
    let at = bytes.windows(own.len()).position(|found| found == own).expect("the run path");
    bytes[at..at + own.len()].copy_from_slice(other.as_bytes());
    let copy = folder.join("elastic-worker");
    fs::write(&copy, bytes).expect("the changed worker");
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(&copy, executable).expect("it can be run");
}

#[track_caller]
fn check_libtorch(name: &'static str, broken: impl FnOnce(&Path), words: &[&str]) {
    let folder = bad_input::folder(name);
    let libtorch = folder.join("t");
    fs::create_dir_all(&libtorch).expect("a folder");
    broken(&libtorch);
    programs_with_libtorch_at(&folder.join("bin"), "$ORIGIN/../t");
    let arguments =
        bad_input::command(&real(name, 1), &folder.join("run"), dataset(), &["--standalone=1"]);
    let mut command = Command::new(folder.join("bin/elastic"));
    command.args(arguments).env_remove("LD_LIBRARY_PATH");
    let output = bad_input::output(&mut command);
    let said = String::from_utf8_lossy(&output.stderr);
    eprintln!("{name}: exit {:?}: {}", output.status.code(), said.trim_end());
    assert_eq!(output.status.code(), Some(bad_input::DO_NOT_REQUEUE), "{name}");
    let line = said.lines().last().unwrap_or_default();
    assert!(line.starts_with("elastic: "), "{name}: {said}");
    for word in words {
        assert!(line.contains(word), "{name}: no {word:?} in {line}");
    }
}

#[test]
fn a_missing_or_wrong_libtorch_is_named() {
    check_libtorch("no-libtorch", |_| (), &["libtorch", "LIBTORCH"]);
    check_libtorch(
        "wrong-libtorch",
        |folder| fs::write(folder.join("libtorch_cpu.so"), "not a library").expect("a file"),
        &["libtorch_cpu.so", "LIBTORCH"],
    );
}

#[test]
fn a_libtorch_folder_without_libtorch_stops_the_setup() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/setup.sh");
    let folder = bad_input::folder("setup");
    let output = Command::new("bash")
        .arg(script)
        .env("LIBTORCH", "/no/such/libtorch")
        .env("TEXT", "none")
        .env("DEPS", folder.join("deps"))
        .output()
        .expect("bash starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        said,
        "setup: LIBTORCH=/no/such/libtorch has no lib/libtorch_cpu.so: correct it or leave it unset\n"
    );
    assert_eq!(output.status.code(), Some(1));
    assert!(!folder.join("deps").exists(), "nothing is fetched");
}
