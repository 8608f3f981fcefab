//! What a run left in its files: committed events and the steps of its ranks.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde::Deserialize;
use serde_json::Value;

/// The system's clock, which the lines of a record have.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "to be compared with records")]
pub fn wall_clock() -> SystemTime {
    SystemTime::now()
}

/// A committed event, `kind` and all fields.
#[derive(Clone, Debug)]
pub struct Event {
    /// Which fact it is.
    pub kind: String,
    /// The whole line.
    pub line: Value,
}

/// A step of one rank.
#[derive(Clone, Debug, Deserialize)]
pub struct Line {
    /// Node that recorded it.
    pub node: String,
    /// When, in microseconds since the Unix epoch.
    pub seen: u64,
    /// The rank.
    pub rank: u32,
    /// Generation in which it was applied.
    pub generation: u64,
    /// Steps applied after it.
    pub step: u64,
    /// Its loss; the same on every rank, whenever it was computed (TRAJ-1).
    pub loss: f64,
    /// How long it took, in microseconds.
    pub micros: u64,
}

/// Everything that the nodes recorded, as far as their folders are still there.
#[derive(Clone, Debug)]
pub struct History {
    /// Committed events in order, each once.
    pub events: Vec<Event>,
    /// Steps of ranks.
    pub steps: Vec<Line>,
}

impl History {
    /// Reads the records of all nodes below a dump folder.
    #[must_use]
    pub fn read(dump: &Path) -> Self {
        let (mut lines, mut steps) = (Vec::new(), Vec::new());
        for folder in nodes(dump) {
            lines.extend(json_lines(&folder.join("events.jsonl")));
            let metrics = json_lines(&folder.join("metrics.jsonl"));
            steps.extend(metrics.into_iter().filter_map(|line| serde_json::from_value(line).ok()));
        }
        // Stable: the order within one node's file stays.
        lines.sort_by_key(|line| line["seen"].as_u64());
        // Every node records every event, again after a restart.
        let mut known = BTreeSet::new();
        let events = lines
            .into_iter()
            .filter(|line| known.insert(fact(line)))
            .map(|line| Event { kind: line["kind"].as_str().unwrap_or_default().into(), line })
            .collect();
        Self { events, steps }
    }

    /// The events of one kind.
    pub fn of<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a Value> {
        self.events.iter().filter(move |event| event.kind == kind).map(|event| &event.line)
    }

    /// The newest generation that was planned.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.of("planned").filter_map(|line| line["generation"].as_u64()).max().unwrap_or(0)
    }

    /// Steps of committed checkpoints, in order of commitment.
    #[must_use]
    pub fn checkpoints(&self) -> Vec<u64> {
        self.of("checkpoint_committed").filter_map(|line| line["step"].as_u64()).collect()
    }

    /// Tiers of the seals, in order.
    #[must_use]
    pub fn tiers(&self) -> Vec<&str> {
        self.of("sealed").filter_map(|line| line["tier"].as_str()).collect()
    }

    /// Steps that some of these nodes applied after a moment of the system's clock.
    pub fn steps_of<'a>(
        &'a self,
        nodes: &'a [String],
        since: SystemTime,
    ) -> impl Iterator<Item = &'a Line> {
        let since = since.duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
        let of = move |line: &&Line| nodes.contains(&line.node) && u128::from(line.seen) > since;
        self.steps.iter().filter(of)
    }

    /// How often each tier was used.
    #[must_use]
    pub fn tiers_counted(&self) -> BTreeMap<&str, usize> {
        let mut counts = BTreeMap::new();
        for tier in self.tiers() {
            *counts.entry(tier).or_default() += 1;
        }
        counts
    }

    /// The median time of a step.
    #[must_use]
    pub fn pace(&self) -> Duration {
        let mut micros: Vec<u64> = self.steps.iter().map(|line| line.micros).collect();
        micros.sort_unstable();
        Duration::from_micros(micros.get(micros.len() / 2).copied().unwrap_or_default())
    }

    /// Steps that were computed in more than one generation.
    #[must_use]
    pub fn redone(&self) -> usize {
        let mut generations: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
        for line in &self.steps {
            generations.entry(line.step).or_default().insert(line.generation);
        }
        generations.values().filter(|generations| generations.len() > 1).count()
    }

    /// Checks what must hold over any history.
    ///
    /// # Panics
    /// When a step has two losses (TRAJ-1), a plan does not cover the global
    /// batch once (DATA-2), or a generation was planned or sealed twice (GEN-1).
    #[track_caller]
    pub fn check(&self, micro_batches: u32, steps: u64) {
        let mut losses: BTreeMap<u64, u64> = BTreeMap::new();
        for line in &self.steps {
            let first = losses.entry(line.step).or_insert(line.loss.to_bits());
            assert_eq!(
                f64::from_bits(*first),
                line.loss,
                "TRAJ-1: step {} has two losses, the second in {line:?}",
                line.step
            );
            assert!(line.step <= steps, "a step after the last: {line:?}");
        }
        for plan in self.of("planned") {
            let shares: Vec<u64> = numbers(&plan["shares"]);
            let ranks = plan["mesh"].as_array().map_or(0, Vec::len);
            let pipelines = shares.len();
            assert!(
                pipelines <= ranks && ranks.is_multiple_of(pipelines.max(1)),
                "one share for each pipeline of as many ranks: {plan}"
            );
            if ranks > 0 {
                assert_eq!(
                    shares.iter().sum::<u64>(),
                    u64::from(micro_batches),
                    "DATA-2: the shares are not the global batch: {plan}"
                );
            }
        }
        for kind in ["planned", "sealed"] {
            let mut seen = BTreeSet::new();
            for line in self.of(kind) {
                let token = (line["era"].as_u64(), line["generation"].as_u64());
                assert!(seen.insert(token), "GEN-1: {token:?} was {kind} twice: {line}");
            }
        }
    }

    /// The shares of every plan with so many ranks.
    #[must_use]
    pub fn shares_seen(&self, ranks: usize) -> BTreeSet<Vec<u64>> {
        let shares = self.of("planned").map(|plan| numbers(&plan["shares"]));
        shares.filter(|shares| shares.len() == ranks).collect()
    }

    /// Checks that every step was computed by at least two ranks with work.
    ///
    /// # Panics
    /// When one rank alone computed one.
    #[track_caller]
    pub fn check_shared(&self) {
        let workers: BTreeMap<u64, usize> = self
            .of("planned")
            .map(|plan| {
                let busy = numbers(&plan["shares"]).into_iter().filter(|share| *share > 0).count();
                (plan["generation"].as_u64().unwrap_or_default(), busy)
            })
            .collect();
        for line in &self.steps {
            let busy = workers.get(&line.generation).copied().unwrap_or_default();
            assert!(busy >= 2, "{busy} rank(s) at work in {line:?}");
        }
    }
}

/// The newest step in the records of any node. Reads only the files' ends: it is
/// asked many times a second.
pub(super) fn newest_step(dump: &Path) -> u64 {
    let newest = nodes(dump).into_iter().filter_map(|folder| {
        let text = tail(&folder.join("metrics.jsonl"))?;
        let steps = text.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok());
        steps.map(|line| line.step).max()
    });
    newest.max().unwrap_or(0)
}

const TAIL: u64 = 2048;

fn tail(path: &Path) -> Option<String> {
    let mut file = fs::File::open(path).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL))).ok()?;
    let mut bytes = Vec::new();
    file.take(2 * TAIL).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

fn nodes(dump: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dump.join("nodes")).into_iter().flatten().flatten();
    let mut folders: Vec<_> = entries.map(|entry| entry.path()).collect();
    folders.sort();
    folders
}

/// An event without who saw it when.
fn fact(line: &Value) -> String {
    let mut fact = line.clone();
    if let Some(fields) = fact.as_object_mut() {
        fields.remove("seen");
        fields.remove("seen_by");
    }
    fact.to_string()
}

/// The JSON lines of a file; the last one of a killed process may be torn.
fn json_lines(path: &Path) -> Vec<Value> {
    let text = fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

fn numbers(list: &Value) -> Vec<u64> {
    list.as_array().into_iter().flatten().filter_map(Value::as_u64).collect()
}
