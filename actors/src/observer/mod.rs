//! What a node records for people and machines: the committed events and the
//! steps of its ranks as JSON lines, each with the node's own clock, and where
//! the process stands, for its log.

mod place;

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    path::Path,
};

use job::{NodeId, Step, command::Event, report::Progress};
use serde::Serialize;

use crate::clock;

pub use place::Place;

/// The node's record files.
#[derive(Debug)]
pub struct Recorder {
    node: NodeId,
    events: File,
    metrics: File,
    newest: Step,
}

#[derive(Serialize)]
struct EventLine<'a> {
    /// Place in the replicated log.
    index: u64,
    /// Microseconds since the Unix epoch when this node applied it.
    seen: u64,
    /// That node. Events have a `node` of their own, the one they are about.
    seen_by: &'a NodeId,
    #[serde(flatten)]
    event: &'a Event,
}

#[derive(Serialize)]
struct StepLine<'a> {
    seen: u64,
    node: &'a NodeId,
    rank: u32,
    #[serde(flatten)]
    progress: &'a Progress,
    tokens_per_s: f64,
}

impl Recorder {
    /// Opens or continues the files `events.jsonl` and `metrics.jsonl`.
    ///
    /// # Errors
    /// Names the file.
    pub fn open(folder: &Path, node: NodeId) -> io::Result<Self> {
        Ok(Self {
            node,
            events: open(folder, "events.jsonl")?,
            newest: newest_step(&folder.join(METRICS)),
            metrics: open(folder, METRICS)?,
        })
    }

    /// The newest step in the records, of whichever process start.
    #[must_use]
    pub fn newest(&self) -> Step {
        self.newest
    }

    /// Records a committed event. A full disk costs the record, not the job.
    pub fn event(&mut self, index: u64, event: &Event) {
        let line = EventLine { index, seen: clock::timestamp().0, seen_by: &self.node, event };
        write(&mut self.events, &line);
    }

    /// Records a step of a rank on this node.
    pub fn step(&mut self, rank: u32, progress: &Progress) {
        self.newest = self.newest.max(progress.step);
        let tokens_per_s = tokens_per_s(progress);
        let seen = clock::timestamp().0;
        write(
            &mut self.metrics,
            &StepLine { seen, node: &self.node, rank, progress, tokens_per_s },
        );
    }
}

/// Of all ranks together, in this step.
#[must_use]
pub fn tokens_per_s(progress: &Progress) -> f64 {
    progress.tokens as f64 / (progress.micros.max(1) as f64 / 1e6)
}

const METRICS: &str = "metrics.jsonl";

/// The last line that is whole holds the newest step.
fn newest_step(metrics: &Path) -> Step {
    let Ok(text) = std::fs::read_to_string(metrics) else { return Step(0) };
    let step = |line: &str| serde_json::from_str::<serde_json::Value>(line).ok()?["step"].as_u64();
    Step(text.lines().rev().take(LAST_LINES).find_map(step).unwrap_or(0))
}

/// A crash may have torn the very last one.
const LAST_LINES: usize = 8;

fn open(folder: &Path, name: &str) -> io::Result<File> {
    let path = folder.join(name);
    OpenOptions::new().create(true).append(true).open(&path).map_err(|error| {
        io::Error::new(error.kind(), format!("cannot open {}: {error}", path.display()))
    })
}

fn write(file: &mut File, line: &impl Serialize) {
    let written = serde_json::to_vec(line).map_err(io::Error::other).and_then(|mut bytes| {
        bytes.push(b'\n');
        file.write_all(&bytes)
    });
    if let Err(error) = written {
        tracing::warn!(%error, "an event could not be recorded");
    }
}

#[cfg(test)]
mod tests {
    use job::{Incarnation, plan::Timestamp};

    use super::*;

    #[test]
    fn a_record_says_who_saw_it_and_whom_it_is_about() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let name = |name| NodeId::new(name).expect("a good name");
        let mut recorder = Recorder::open(folder.path(), name("n1")).expect("a writable folder");
        let (incarnation, at) = (Incarnation(2), Timestamp(3));
        recorder.event(7, &Event::NodeLeaving { node: name("n2"), incarnation, at });
        let line = std::fs::read_to_string(folder.path().join("events.jsonl")).expect("a record");
        assert_eq!(line.matches("\"node\":").count(), 1, "{line}");
        let line: serde_json::Value = serde_json::from_str(&line).expect("JSON");
        assert_eq!((&line["seen_by"], &line["node"]), (&"n1".into(), &"n2".into()));
    }
}
