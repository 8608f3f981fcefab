//! The figures of a folder, against the targets.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use serde::Serialize;

/// Memory that a save may need beyond the state and the staging buffers.
const MEMORY_LIMIT: u64 = 64 << 20;
/// Seconds that the clock cannot tell apart.
const CLOCK: f64 = 1e-9;
/// Bytes read for a byte that was asked for.
const READ_LIMIT: f64 = 1.1;

/// Seconds of all rounds, by what was done.
#[derive(Default)]
pub(super) struct Figures {
    seconds: BTreeMap<String, Vec<f64>>,
    /// The most bytes read for a byte that was asked for.
    pub(super) read_ratio: f64,
    /// Bytes at the peak of a save.
    pub(super) extra_memory: u64,
}

impl Figures {
    pub(super) fn add(&mut self, name: &str, seconds: f64) {
        self.seconds.entry(name.to_owned()).or_default().push(seconds);
    }

    fn median(&self, name: &str) -> Option<f64> {
        let mut seconds = self.seconds.get(name)?.clone();
        seconds.sort_by(f64::total_cmp);
        seconds.get(seconds.len() / 2).copied()
    }
}

/// What was measured in a folder.
#[derive(Serialize)]
pub(super) struct Place {
    dir: String,
    bytes: u64,
    rows: Vec<Row>,
    read_ratio: f64,
    extra_memory: u64,
    /// Seconds of every round.
    seconds: BTreeMap<String, Vec<f64>>,
}

/// Medians, in seconds.
#[derive(Serialize)]
struct Row {
    name: &'static str,
    elastic: f64,
    torch: Option<f64>,
    raw: Option<f64>,
    target: Option<f64>,
}

impl Place {
    pub(super) fn new(dir: &Path, bytes: u64, figures: Figures) -> Self {
        let best_save = ["torch save, 1 thread", "torch save, 2 threads"]
            .iter()
            .filter_map(|name| figures.median(name))
            .min_by(f64::total_cmp);
        let row = |name, torch: Option<f64>, raw: Option<&str>, times: f64, share: f64| {
            let raw = raw.and_then(|raw| figures.median(raw));
            // The easier of the two is the target, as far as there is one.
            let limits = [torch.map(|torch| torch / times), raw.map(|raw| raw / share)];
            Some(Row {
                name,
                elastic: figures.median(name)?,
                torch,
                raw,
                target: limits.into_iter().flatten().max_by(f64::total_cmp),
            })
        };
        let torch = |name: &str| figures.median(name);
        let rows = [
            row("save", best_save, Some("raw write"), 1.5, 0.9),
            row("load", torch("torch load"), Some("raw read"), 1.5, 0.8),
            row(
                "reshard 4 to 2",
                torch("torch reshard 4 to 2"),
                Some("reshard 4 to 2, raw read"),
                1.5,
                0.8,
            ),
            row(
                "reshard 2 to 3",
                torch("torch reshard 2 to 3"),
                Some("reshard 2 to 3, raw read"),
                1.5,
                0.8,
            ),
            row("async", torch("torch async"), None, 2.0, 1.0),
        ];
        Self {
            dir: dir.display().to_string(),
            bytes,
            rows: rows.into_iter().flatten().collect(),
            read_ratio: figures.read_ratio,
            extra_memory: figures.extra_memory,
            seconds: figures.seconds,
        }
    }
}

/// The table of a folder.
pub(super) fn text(place: &Place, mebibytes: u64, rounds: u32) -> String {
    let mut text = format!("{}: {mebibytes} MiB of fp32, medians of {rounds}\n", place.dir);
    let header = ["", "elastic", "", "PyTorch", "raw", "target", ""];
    let mut line = |cells: [&str; 7]| {
        // Writing into a string does not fail.
        let _ = writeln!(
            text,
            "  {:<16}{:>10}{:>12}{:>10}{:>10}{:>10}  {}",
            cells[0], cells[1], cells[2], cells[3], cells[4], cells[5], cells[6]
        );
    };
    line(header);
    let seconds = |value: f64| format!("{value:.3} s");
    let optional = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), seconds);
    for row in &place.rows {
        let name = if row.name == "async" { "async blocks" } else { row.name };
        let speed = format!("{:.2} GB/s", place.bytes as f64 / 1e9 / row.elastic);
        let met = match row.target {
            Some(target) if row.elastic <= target + CLOCK => "met",
            Some(_) => "missed",
            None => "",
        };
        let elastic = seconds(row.elastic);
        let (torch, raw, target) = (optional(row.torch), optional(row.raw), optional(row.target));
        line([name, &elastic, &speed, &torch, &raw, &target, met]);
    }
    let met = |good: bool| if good { "met" } else { "missed" };
    let _ = writeln!(
        text,
        "  resharding read {:.3} times the bytes needed (at most {READ_LIMIT}: {})\n  \
           a save needed {:.1} MiB more memory at its peak (at most {}: {})",
        place.read_ratio,
        met(place.read_ratio <= READ_LIMIT),
        place.extra_memory as f64 / f64::from(1 << 20),
        MEMORY_LIMIT >> 20,
        met(place.extra_memory <= MEMORY_LIMIT),
    );
    text
}

/// All folders, with the seconds of every round.
pub(super) fn write_json(path: &Path, places: &[Place]) -> Result<(), String> {
    let text = serde_json::to_string_pretty(places).map_err(|error| error.to_string())?;
    std::fs::write(path, text + "\n")
        .map_err(|error| format!("cannot write {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a row meets its target when the other two take so long.
    #[track_caller]
    fn check(save: f64, torch: f64, raw: f64, expected: &str) {
        let mut figures = Figures::default();
        for (name, seconds) in [
            ("save", save),
            ("torch save, 1 thread", 9.0),
            ("torch save, 2 threads", torch),
            ("raw write", raw),
        ] {
            [0.0, seconds, 100.0].iter().for_each(|&seconds| figures.add(name, seconds));
        }
        let text = text(&Place::new(Path::new("/x"), 1 << 30, figures), 1024, 3);
        let line = text.lines().find(|line| line.contains("save  ")).unwrap_or_default();
        assert!(line.ends_with(expected), "{text}");
    }

    #[test]
    fn the_easier_of_two_targets_counts() {
        check(0.4, 0.6, 0.3, "  met");
        check(0.5, 0.6, 0.46, "  met");
        check(0.5, 0.6, 0.3, "  missed");
    }
}
