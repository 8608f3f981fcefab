//! The last operations of a mesh, for incident reports.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Operations remembered: a few steps of training.
const CAPACITY: usize = 64;

/// A flight recorder: a bounded ring that any thread may read, also while an
/// operation hangs.
#[derive(Clone, Debug, Default)]
pub struct Recorder(Arc<Mutex<VecDeque<Running>>>);

/// One operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its number within the mesh, from 0; equal on all ranks of one program.
    pub number: u64,
    /// Its name.
    pub operation: &'static str,
    /// Payload bytes to send and to receive, as far as they were known.
    pub bytes: u64,
    /// How long it took, or has been running for.
    pub elapsed: Duration,
    /// How it ended.
    pub state: State,
}

/// How an operation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// It has not.
    Running,
    /// Well.
    Done,
    /// With this error.
    Failed(String),
}

#[derive(Debug)]
struct Running {
    started: Instant,
    record: Record,
}

impl Recorder {
    /// The last operations, oldest first.
    #[must_use]
    pub fn records(&self) -> Vec<Record> {
        let ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ring.iter()
            .map(|running| match running.record.state {
                State::Running => {
                    Record { elapsed: running.started.elapsed(), ..running.record.clone() }
                }
                _ => running.record.clone(),
            })
            .collect()
    }

    pub(super) fn begin(&self, operation: &'static str) {
        let mut ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let number = ring.back().map_or(0, |last| last.record.number + 1);
        if ring.len() == CAPACITY {
            ring.pop_front();
        }
        let record =
            Record { number, operation, bytes: 0, elapsed: Duration::ZERO, state: State::Running };
        ring.push_back(Running { started: Instant::now(), record });
    }

    pub(super) fn count(&self, bytes: u64) {
        let mut ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = ring.back_mut() {
            last.record.bytes += bytes;
        }
    }

    pub(super) fn end(&self, state: State) {
        let mut ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = ring.back_mut() {
            last.record.elapsed = last.started.elapsed();
            last.record.state = state;
        }
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, operation, bytes, elapsed, state } = self;
        write!(f, "#{number} {operation} {bytes} B {:.1} ms ", elapsed.as_secs_f64() * 1e3)?;
        match state {
            State::Running => f.write_str("running"),
            State::Done => f.write_str("done"),
            State::Failed(why) => write!(f, "failed: {why}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_is_bounded_and_keeps_the_latest() {
        let recorder = Recorder::default();
        for _ in 0..CAPACITY as u64 + 10 {
            recorder.begin("barrier");
            recorder.count(5);
            recorder.end(State::Done);
        }
        recorder.begin("broadcast");
        let records = recorder.records();
        assert_eq!(records.len(), CAPACITY);
        assert_eq!(records[0].number, 11);
        let last = records.last().map(ToString::to_string).unwrap_or_default();
        assert!(last.starts_with("#74 broadcast 0 B ") && last.ends_with("running"), "{last}");
        assert_eq!((records[3].bytes, &records[3].state), (5, &State::Done));
    }
}
