//! The figures as a table for people and as JSON rows for machines.

use std::{collections::BTreeMap, fmt::Write as _, path::Path};

use serde::Serialize;

use super::{figures::Figures, record::Micros};

/// The table.
pub(super) fn text(nodes: u32, quiet: &BTreeMap<usize, Micros>, figures: &[Figures]) -> String {
    let mut text = format!(
        "From kill to the next committed step, less a quiet step; {nodes} nodes on this machine.\n"
    );
    let steps: Vec<String> = quiet
        .iter()
        .filter(|(ranks, _)| **ranks > 0)
        .map(|(ranks, step)| format!("{} ms on {ranks}", millis(*step)))
        .collect();
    let _ = writeln!(text, "A quiet step by number of ranks: {}.\n", steps.join(", "));
    let _ = writeln!(
        text,
        "{:<8}{:>7}{:>10}{:>9}{:>9}{:>9}   target median",
        "killed", "rounds", "median ms", "p99", "min", "max"
    );
    for row in figures {
        let _ = writeln!(
            text,
            "{:<8}{:>7}{:>10}{:>9}{:>9}{:>9}   {:>4} ms {}",
            row.kind,
            row.net.len(),
            millis(row.percentile(50)),
            millis(row.percentile(99)),
            millis(row.percentile(0)),
            millis(row.percentile(100)),
            row.kind.target().as_millis(),
            if row.met() { "met" } else { "missed" },
        );
    }
    let Some(first) = figures.first() else { return text };
    let _ = write!(text, "\n{:<8}", "median");
    first.phases.iter().for_each(|(name, _)| {
        let _ = write!(text, "{name:>10}");
    });
    for row in figures {
        let _ = write!(text, "\n{:<8}", row.kind);
        row.phases.iter().for_each(|(_, spent)| {
            let _ = write!(text, "{:>10}", millis(*spent));
        });
    }
    text.push('\n');
    text
}

#[derive(Serialize)]
struct Row {
    kind: String,
    rounds: usize,
    median_ms: f64,
    p99_ms: f64,
    min_ms: f64,
    max_ms: f64,
    target_median_ms: f64,
    met: bool,
    phases_median_ms: BTreeMap<&'static str, f64>,
    samples_ms: Vec<f64>,
}

/// Writes one row a kind.
pub(super) fn write_json(path: &Path, figures: &[Figures]) -> Result<(), String> {
    let ms = |micros: Micros| micros as f64 / 1e3;
    let row = |row: &Figures| Row {
        kind: row.kind.to_string(),
        rounds: row.net.len(),
        median_ms: ms(row.percentile(50)),
        p99_ms: ms(row.percentile(99)),
        min_ms: ms(row.percentile(0)),
        max_ms: ms(row.percentile(100)),
        target_median_ms: row.kind.target().as_secs_f64() * 1e3,
        met: row.met(),
        phases_median_ms: row.phases.iter().map(|(name, spent)| (*name, ms(*spent))).collect(),
        samples_ms: row.net.iter().copied().map(ms).collect(),
    };
    let rows: Vec<Row> = figures.iter().map(row).collect();
    let json = serde_json::to_vec_pretty(&rows).map_err(|error| error.to_string())?;
    std::fs::write(path, json).map_err(|error| format!("cannot write {}: {error}", path.display()))
}

fn millis(micros: Micros) -> String {
    format!("{:.1}", micros as f64 / 1e3)
}
