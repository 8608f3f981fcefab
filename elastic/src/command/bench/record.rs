//! What the nodes of a group wrote so far: every node's `events.jsonl` and
//! `metrics.jsonl`, read as they grow. The earliest node to see a fact counts.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use job::{command::Event, report::ResumeTiming};
use serde::Deserialize;

/// Microseconds since the Unix epoch, on this machine's clock.
pub(super) type Micros = u64;

/// Facts by generation.
#[derive(Debug, Default)]
pub(super) struct Record {
    events: Vec<Tail>,
    metrics: Vec<Tail>,
    pub(super) plans: BTreeMap<u64, Planned>,
    /// When a seal was first seen.
    pub(super) sealed: BTreeMap<u64, Micros>,
    pub(super) resumed: BTreeMap<u64, ResumeTiming>,
    /// When a step of a generation was first seen, by step.
    pub(super) steps: BTreeMap<u64, BTreeMap<u64, Micros>>,
}

/// A plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Planned {
    pub(super) ranks: usize,
    pub(super) failure: bool,
    /// When the leader noticed the cause.
    pub(super) noticed: Micros,
    /// When a node first saw it committed.
    pub(super) seen: Micros,
}

#[derive(Debug)]
struct Tail {
    path: PathBuf,
    offset: u64,
    /// The beginning of a line whose end is not written yet.
    rest: Vec<u8>,
}

#[derive(Deserialize)]
struct StepLine {
    seen: Micros,
    generation: u64,
    step: u64,
}

impl Record {
    /// Of the nodes with these folders.
    pub(super) fn of<'a>(nodes: impl Iterator<Item = &'a Path>) -> Self {
        let tail = |path| Tail { path, offset: 0, rest: Vec::new() };
        let (events, metrics) = nodes
            .map(|node| (tail(node.join("events.jsonl")), tail(node.join("metrics.jsonl"))))
            .unzip();
        Self { events, metrics, ..Self::default() }
    }

    /// Takes in what was written since the last time.
    ///
    /// # Errors
    /// Names the file.
    pub(super) fn update(&mut self) -> Result<(), String> {
        let events = read(&mut self.events)?;
        events.iter().for_each(|line| self.take_event(line));
        let steps = read(&mut self.metrics)?;
        steps.iter().for_each(|line| self.take_step(line));
        Ok(())
    }

    /// The newest plan.
    pub(super) fn newest_plan(&self) -> Option<(u64, Planned)> {
        self.plans.last_key_value().map(|(generation, plan)| (*generation, *plan))
    }

    /// The newest step that was seen to be committed, in whatever generation.
    pub(super) fn newest_step(&self) -> Option<(u64, u64)> {
        let (generation, steps) = self.steps.last_key_value()?;
        steps.last_key_value().map(|(step, _)| (*generation, *step))
    }

    /// Steps seen in a generation.
    pub(super) fn steps_in(&self, generation: u64) -> usize {
        self.steps.get(&generation).map_or(0, BTreeMap::len)
    }

    /// The first generation after this one that committed a step, and when.
    pub(super) fn first_step_after(&self, generation: u64) -> Option<(u64, Micros)> {
        let (generation, steps) = self.steps.range(generation + 1..).next()?;
        steps.first_key_value().map(|(_, seen)| (*generation, *seen))
    }

    fn take_step(&mut self, line: &[u8]) {
        let Ok(step) = serde_json::from_slice::<StepLine>(line) else { return };
        let seen = self.steps.entry(step.generation).or_default().entry(step.step);
        let seen = seen.or_insert(step.seen);
        *seen = (*seen).min(step.seen);
    }

    /// Facts of other kinds are not this benchmark's business.
    fn take_event(&mut self, line: &[u8]) {
        let Ok(value) = serde_json::from_slice::<serde_json::Value>(line) else { return };
        let Some(seen) = value.get("seen").and_then(serde_json::Value::as_u64) else { return };
        match serde_json::from_value(value) {
            Ok(Event::Planned { generation, mesh, failure, noticed, .. }) => {
                let plan = Planned { ranks: mesh.len(), failure, noticed: noticed.0, seen };
                let known = self.plans.entry(generation.0).or_insert(plan);
                known.seen = known.seen.min(seen);
            }
            Ok(Event::Sealed { generation, .. }) => {
                let known = self.sealed.entry(generation.0).or_insert(seen);
                *known = (*known).min(seen);
            }
            Ok(Event::Resumed { generation, timing, .. }) => {
                self.resumed.insert(generation.0, timing);
            }
            _ => {}
        }
    }
}

fn read(tails: &mut [Tail]) -> Result<Vec<Vec<u8>>, String> {
    let mut lines = Vec::new();
    for tail in tails {
        tail.read(&mut lines)
            .map_err(|error| format!("cannot read {}: {error}", tail.path.display()))?;
    }
    Ok(lines)
}

impl Tail {
    /// A file that is not there yet has nothing to say.
    fn read(&mut self, lines: &mut Vec<Vec<u8>>) -> io::Result<()> {
        let mut file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        file.seek(SeekFrom::Start(self.offset))?;
        self.offset += file.read_to_end(&mut self.rest)? as u64;
        while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
            let after = self.rest.split_off(end + 1);
            lines.push(std::mem::replace(&mut self.rest, after));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn lines_count_when_they_are_whole_and_the_first_to_see_wins() {
        let folder = tempfile::tempdir().unwrap();
        let nodes = ["a", "b"].map(|name| folder.path().join(name));
        nodes.iter().for_each(|node| std::fs::create_dir(node).unwrap());
        let mut record = Record::of(nodes.iter().map(PathBuf::as_path));
        let mut write = |node: usize, file: &str, text: &str| {
            let path = nodes[node].join(file);
            let mut file = File::options().create(true).append(true).open(path).unwrap();
            file.write_all(text.as_bytes()).unwrap();
            record.update().unwrap();
            record.newest_step()
        };
        let step = |seen, step| {
            format!(
                "{{\"seen\":{seen},\"node\":\"a\",\"rank\":0,\"generation\":4,\"step\":{step}}}\n"
            )
        };
        assert_eq!(write(0, "metrics.jsonl", "{\"seen\":5,"), None);
        assert_eq!(write(0, "metrics.jsonl", "\"generation\":4,\"step\":9}\n{"), Some((4, 9)));
        assert_eq!(write(1, "metrics.jsonl", &step(3, 9)), Some((4, 9)));
        assert_eq!(write(1, "metrics.jsonl", &step(8, 10)), Some((4, 10)));
        let planned = |seen| {
            format!(
                "{{\"index\":1,\"seen\":{seen},\"seen_by\":\"a\",\"kind\":\"planned\",\"era\":0,\
                 \"generation\":4,\"mesh\":[\"a\",\"b\"],\"shares\":[1,1],\"reason\":\"\",\
                 \"failure\":true,\"noticed\":1,\"at\":1}}\n"
            )
        };
        write(0, "events.jsonl", &planned(4));
        write(1, "events.jsonl", &planned(2));
        write(1, "events.jsonl", "{\"seen\":1,\"seen_by\":\"a\",\"kind\":\"of_the_future\"}\n");
        assert_eq!(record.first_step_after(3), Some((4, 3)));
        assert_eq!(record.first_step_after(4), None);
        assert_eq!(record.steps_in(4), 2);
        let plan = Planned { ranks: 2, failure: true, noticed: 1, seen: 2 };
        assert_eq!(record.newest_plan(), Some((4, plan)));
    }
}
