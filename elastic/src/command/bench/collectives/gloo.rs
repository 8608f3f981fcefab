//! PyTorch's Gloo, measured the same way for comparison.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use super::{Row, op::Op, row, sizes};
use crate::cli::CollectivesArgs;

const SCRIPT: &str = include_str!("gloo.py");

/// Runs the script, which starts the ranks; each line it prints is bytes and a
/// median in microseconds of an all-reduce.
pub(super) fn measure(
    python: &Path,
    args: &CollectivesArgs,
    ranks: usize,
) -> Result<Vec<Row>, String> {
    if !args.ops.contains(&Op::AllReduce) {
        return Ok(Vec::new());
    }
    let name = python.display();
    let sizes: Vec<String> = sizes(args).map(|size| size.to_string()).collect();
    let output = Command::new(python)
        .args(["-c", SCRIPT, &ranks.to_string(), &args.iterations.to_string()])
        .args(sizes)
        .env("OMP_NUM_THREADS", "1")
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("{name}: {error}"))?;
    if !output.status.success() {
        return Err(format!("{name} ended with {}; does it have torch?", output.status));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let parse = |line: &str| {
        let (bytes, median) = line.split_once(' ')?;
        Some(row(Op::AllReduce, "gloo", ranks, bytes.parse().ok()?, median.parse().ok()?, 0))
    };
    text.lines().map(|line| parse(line).ok_or_else(|| format!("{name} printed {line}"))).collect()
}
