//! `elastic bench collectives`.

use std::path::PathBuf;

use clap::Args;

use crate::command::{Backend, Op};

/// Arguments of `elastic bench collectives`.
#[derive(Clone, Debug, Args)]
pub struct CollectivesArgs {
    /// Smallest buffer; K, M and G are powers of 1024.
    #[arg(short, long, value_name = "BYTES", default_value = "8", value_parser = size)]
    pub begin: usize,
    /// Largest buffer.
    #[arg(short, long, value_name = "BYTES", default_value = "128M", value_parser = size)]
    pub end: usize,
    /// From one size to the next.
    #[arg(short, long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=1024))]
    pub factor: u32,
    /// Numbers of ranks, each a process.
    #[arg(short = 'n', visible_short_alias = 'g', long, value_name = "N,...", default_value = "2,4",
        value_delimiter = ',', value_parser = ranks)]
    pub ranks: Vec<usize>,
    /// Rounds for each size, of which the median counts; fewer where they take long.
    #[arg(short, long, value_name = "N", default_value_t = 50)]
    pub iterations: usize,
    /// What carries the bytes.
    #[arg(
        long,
        value_name = "NAME,...",
        default_value = "shm,shm-copy,tcp,gloo",
        value_delimiter = ',',
        value_enum
    )]
    pub backends: Vec<Backend>,
    /// Operations.
    #[arg(
        long,
        value_name = "NAME,...",
        default_value = "all_reduce",
        value_delimiter = ',',
        value_enum
    )]
    pub ops: Vec<Op>,
    /// A Python with torch, to measure Gloo in the same run.
    #[arg(long, value_name = "FILE")]
    pub python: Option<PathBuf>,
    /// Write the figures here, one row a measurement.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Which rank this process is; addresses come on its input.
    #[arg(long, hide = true)]
    pub rank: Option<usize>,
}

/// A number of bytes: `8`, `64K`, `128M`.
fn size(text: &str) -> Result<usize, String> {
    let (digits, unit) = match text.strip_suffix(['K', 'M', 'G', 'k', 'm', 'g']) {
        Some(digits) => (digits, text.bytes().last().unwrap_or_default().to_ascii_uppercase()),
        None => (text, b'B'),
    };
    let shift = match unit {
        b'K' => 10,
        b'M' => 20,
        b'G' => 30,
        _ => 0,
    };
    let number: usize = digits.parse().map_err(|_| format!("{text} is no number of bytes"))?;
    match number.checked_mul(1 << shift) {
        Some(bytes @ 4..) if bytes <= 1 << 34 => Ok(bytes),
        _ => Err(format!("{text} is not within 4 .. 16G")),
    }
}

fn ranks(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(ranks @ 1..=64) => Ok(ranks),
        _ => Err(format!("{text} ranks; from 1 to 64")),
    }
}
