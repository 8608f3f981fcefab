//! `elastic bench collectives`: how fast tensors are summed and moved, in the
//! columns of nccl-tests, beside what the machine could do at best.
//!
//! Every rank is a process. Bandwidths are decimal GB/s: *algbw* is bytes over
//! time, and *busbw* is that times what an ideal algorithm would move for each
//! byte, so that it can be compared with the hardware's limit at any number of
//! ranks (<https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md>).

mod gloo;
mod limits;
mod op;
mod rank;

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, Command, Stdio},
};

use serde::{Deserialize, Serialize};

use super::{fail, print};
use crate::{cli::CollectivesArgs, exit::Exit};
pub(crate) use op::Op;

/// One measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Row {
    op: String,
    backend: String,
    ranks: usize,
    bytes: usize,
    median_us: f64,
    algbw_gbps: f64,
    busbw_gbps: f64,
    /// Elements that were not the expected ones.
    wrong: usize,
}

/// Where the elements lie and how they travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Backend {
    /// Shared memory, buffers in it.
    Shm,
    /// Shared memory, buffers in ordinary memory.
    ShmCopy,
    /// TCP, over loopback.
    Tcp,
    /// PyTorch's Gloo, with --python.
    Gloo,
}

impl Backend {
    fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::ShmCopy => "shm-copy",
            Self::Tcp => "tcp",
            Self::Gloo => "gloo",
        }
    }
}

/// Runs the benchmark, or one rank of it.
pub(in crate::command) fn collectives(args: &CollectivesArgs) -> Exit {
    let ran = match args.rank {
        Some(rank) => rank::run(args, rank),
        None => measure(args),
    };
    match ran {
        Ok(()) => Exit::Finished,
        Err(why) => fail(Exit::Failed, &why),
    }
}

fn measure(args: &CollectivesArgs) -> Result<(), String> {
    let limits = limits::measure();
    print(&limits.text());
    let mut rows = Vec::new();
    for &ranks in &args.ranks {
        for &backend in &args.backends {
            let measured = match backend {
                Backend::Gloo => match &args.python {
                    Some(python) => gloo::measure(python, args, ranks)?,
                    None => continue,
                },
                _ => group(args, backend, ranks)?,
            };
            print(&table(backend, ranks, &measured));
            rows.extend(measured);
        }
    }
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&rows).map_err(|error| error.to_string())?;
        std::fs::write(path, text + "\n")
            .map_err(|error| format!("{}: {error}", path.display()))?;
    }
    match rows.iter().map(|row| row.wrong).sum::<usize>() {
        0 => Ok(()),
        wrong => Err(format!("{wrong} elements were wrong")),
    }
}

/// Sizes from the first to the last, in bytes.
fn sizes(args: &CollectivesArgs) -> impl Iterator<Item = usize> {
    let factor = args.factor as usize;
    let next = move |size: &usize| size.checked_mul(factor);
    let end = args.end;
    std::iter::successors(Some(args.begin), next).take_while(move |size| *size <= end)
}

/// Runs all ranks of one backend; rank 0 says what it measured.
fn group(args: &CollectivesArgs, backend: Backend, ranks: usize) -> Result<Vec<Row>, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let spawn = |rank: usize| {
        let mut command = Command::new(&program);
        command.args(["bench", "collectives", "--rank", &rank.to_string()]);
        command.args(["--ranks", &ranks.to_string(), "--backends", backend.name()]);
        command.args(["--begin", &args.begin.to_string(), "--end", &args.end.to_string()]);
        command.args(["--factor", &args.factor.to_string()]);
        command.args(["--iterations", &args.iterations.to_string()]);
        for op in &args.ops {
            command.args(["--ops", op.name()]);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command.spawn().map_err(|error| format!("{}: {error}", program.display()))
    };
    let mut children = Children((0..ranks).map(spawn).collect::<Result<_, _>>()?);
    let mut lines = Vec::new();
    let mut addresses = String::new();
    for child in &mut children.0 {
        let out = child.stdout.take().ok_or("a rank without output")?;
        let mut out = BufReader::new(out);
        let mut line = String::new();
        out.read_line(&mut line).map_err(|error| error.to_string())?;
        addresses += &line;
        lines.push(out);
    }
    for child in &mut children.0 {
        let mut input = child.stdin.take().ok_or("a rank without input")?;
        input.write_all(addresses.as_bytes()).map_err(|error| format!("a rank ended: {error}"))?;
    }
    let mut rows = Vec::new();
    for line in lines.swap_remove(0).lines() {
        let line = line.map_err(|error| error.to_string())?;
        rows.push(serde_json::from_str(&line).map_err(|error| format!("{line}: {error}"))?);
    }
    for child in &mut children.0 {
        let status = child.wait().map_err(|error| error.to_string())?;
        if !status.success() {
            return Err(format!("a rank of {} ended with {status}", backend.name()));
        }
    }
    Ok(rows)
}

/// Killed unless they ended.
struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Both fail for a process that has been waited for.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn row(op: Op, backend: &str, ranks: usize, bytes: usize, median_us: f64, wrong: usize) -> Row {
    let algbw_gbps = bytes as f64 / median_us / 1e3;
    let busbw_gbps = algbw_gbps * op.bus_factor(ranks);
    let (op, backend) = (op.name().to_owned(), backend.to_owned());
    Row { op, backend, ranks, bytes, median_us, algbw_gbps, busbw_gbps, wrong }
}

fn table(backend: Backend, ranks: usize, rows: &[Row]) -> String {
    let mut text = format!("# {} over {ranks} ranks\n", backend.name());
    text +=
        "#       size         count    type            op      time     algbw     busbw  #wrong\n";
    text += "#        (B)    (elements)                           (us)    (GB/s)    (GB/s)\n";
    for Row { op, bytes, median_us, algbw_gbps, busbw_gbps, wrong, .. } in rows {
        let count = bytes / 4;
        text += &format!(
            "{bytes:>12}  {count:>12}     f32  {op:>14}  {median_us:>8.1}  {algbw_gbps:>8.3}  \
             {busbw_gbps:>8.3}  {wrong:>6}\n"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bandwidths_are_those_of_nccl_tests() {
        let row = row(Op::AllReduce, "tcp", 4, 1 << 20, 1000.0, 0);
        assert!((row.algbw_gbps - 1.048_576).abs() < 1e-9, "{row:?}");
        assert!((row.busbw_gbps - 1.572_864).abs() < 1e-9, "{row:?}");
        assert!(
            table(Backend::Tcp, 4, &[row]).contains("all_reduce    1000.0     1.049     1.573")
        );
    }
}
