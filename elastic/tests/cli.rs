//! The command as a user meets it: its own process, its output, its exit code.

use std::path::Path;
use std::process::{Command, Output};

/// Runs `elastic` in an empty folder.
fn elastic(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_elastic"))
        .args(arguments)
        .current_dir(folder)
        .env_clear()
        .output()
        .expect("the command starts")
}

/// Runs and compares exit code and a part of the output; errors go to standard
/// error, results to standard output.
#[track_caller]
fn check(arguments: &[&str], code: i32, part: &str) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(folder.path().join("good.toml"), "[training]\nsteps = 7\n").expect("a file");
    std::fs::write(folder.path().join("bad.toml"), "[training]\nstepz = 7\n").expect("a file");
    std::fs::write(folder.path().join("a.txt"), "to be or not").expect("a file");
    let output = elastic(folder.path(), arguments);
    let text = if code == 0 { &output.stdout } else { &output.stderr };
    let text = String::from_utf8_lossy(text);
    assert!(text.contains(part), "{text}\n-- does not contain {part:?}");
    assert_eq!(output.status.code(), Some(code), "{text}");
}

#[test]
fn help_teaches() {
    check(&["--help"], 0, "Exit codes:");
    check(&["-h"], 0, "elastic run --standalone 4 examples/shakespeare.toml");
    check(&["--version"], 0, "elastic 0.");
    check(&["run", "--help"], 0, "[lr_scheduler]");
    check(&["run", "--help"], 0, "ELASTIC_JOIN");
    check(&["run", "-h"], 0, "--training.steps 100");
    check(&["data", "prepare", "--help"], 0, "elastic data prepare books/*.txt --out data");
}

#[test]
fn a_wrong_command_line_starts_nothing() {
    check(&[], 2, "Usage: elastic");
    check(&["fly"], 2, "unrecognized subcommand 'fly'");
    check(&["run", "--nodes", "two"], 2, "\"two\" is no number");
    check(&["run", "--standalone", "0"], 2, "0 is not in 1..=256");
    check(&["run", "--standalone", "2", "--join", "a:1"], 2, "cannot be used with");
    check(&["run", "--node-id", "a b"], 2, "must be 1 to 63 characters");
    check(&["data", "prepare", "a.txt"], 2, "--out");
    check(
        &["data", "prepare", "a.txt", "--out", "d", "--validation-fraction", "1"],
        2,
        "must be a number from 0 to below 1",
    );
}

#[test]
fn a_benchmark_says_what_it_needs() {
    check(&["bench", "recovery", "--help"], 0, "elastic bench recovery --dataset data");
    check(&["bench", "recovery"], 2, "/data: make one with `elastic data prepare");
    check(&["bench", "recovery", "--dataset", "d"], 2, "/d: make one with `elastic data prepare");
    check(&["bench", "recovery", "--nodes", "2"], 2, "2 is not in 3..=64");
    check(&["bench", "recovery", "bad.toml"], 2, "did you mean training.steps?");
    check(&["bench", "recovery", "--training.seq_len", "0"], 2, "training.seq_len");
}

#[test]
fn a_refused_configuration_starts_nothing() {
    check(
        &["run", "bad.toml"],
        2,
        "elastic: bad.toml:2: there is no key training.stepz: did you mean training.steps?\n",
    );
    check(&["run", "absent.toml"], 2, "cannot read the configuration absent.toml: No such file");
    check(
        &["run", "--nodes", "3:2"],
        2,
        "elastic.min_nodes = 3 is more than elastic.max_nodes = 2",
    );
    check(&["run", "--training.steps"], 2, "--training.steps: needs a value");
    check(
        &["run", "--print-config", "--min-nodes", "2", "--elastic.min_nodes", "3"],
        2,
        "elastic.min_nodes is already set by command line (--elastic.min_nodes=2)",
    );
}

#[test]
fn the_configuration_is_printed_with_its_origins() {
    let print = ["run", "good.toml", "--print-config"];
    check(&print, 0, "steps = 7                           # ≥ 1; default 10000; good.toml:2\n");
    let arguments = [&print[..], &["--nodes=2:4", "--optimizer.lr", "0.1"]].concat();
    check(&arguments, 0, "min_nodes = 2 ");
    check(&arguments, 0, "max_nodes = 4 ");
    check(&arguments, 0, "default 0.0008; command line (--optimizer.lr)\n");
    check(&arguments, 0, "# lease               700 ms");
}

#[test]
fn data_and_checkpoints() {
    let prepare = ["data", "prepare", "a.txt", "--out", "d", "--validation-fraction", "0.25"];
    check(&prepare, 0, "d: 9 tokens to train on, 3 to validate on, from 1 text; digest ");
    check(&["data", "prepare", "b.txt", "--out", "d"], 2, "elastic: cannot read the text b.txt: ");
    check(&["ckpt", "ls", "nowhere"], 1, "elastic: cannot read nowhere: No such file");
    check(&["ckpt", "verify", "."], 1, ". holds no checkpoint: no .metadata, no step-N");
}

#[test]
fn an_early_end_of_the_reader_is_no_failure() {
    let command = format!("{} run --print-config | true", env!("CARGO_BIN_EXE_elastic"));
    let output = Command::new("bash")
        .args(["-c", &format!("set -o pipefail; {command}")])
        .output()
        .expect("bash starts");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}
