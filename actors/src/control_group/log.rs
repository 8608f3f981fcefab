//! The log as Raft reads it: all of it in memory, a few hundred entries. The
//! `disk` thread makes the same content durable a little later, and Raft counts
//! an entry only once it is told so.

use std::cell::Cell;
use std::collections::VecDeque;

use raft::eraftpb::{ConfState, Entry, HardState, Snapshot};
use raft::{Error, GetEntriesContext, RaftState, Storage, StorageError};

use super::store::Loaded;

pub(super) struct Log {
    entries: VecDeque<Entry>,
    /// Index and term of the entry before the first.
    truncated: (u64, u64),
    hard_state: HardState,
    snapshot: Snapshot,
    /// A member waits for a snapshot that knows it; see [`Log::take_wanted`].
    wanted: Cell<bool>,
}

impl Log {
    pub(super) fn new(loaded: Loaded) -> Self {
        Self {
            entries: loaded.entries.into(),
            truncated: loaded.truncated,
            hard_state: loaded.hard_state,
            snapshot: loaded.snapshot,
            wanted: Cell::new(false),
        }
    }

    pub(super) fn latest_snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    pub(super) fn hard_state(&self) -> &HardState {
        &self.hard_state
    }

    pub(super) fn set_hard_state(&mut self, hard_state: HardState) {
        self.hard_state = hard_state;
    }

    /// Appends; entries from the first index on are replaced.
    pub(super) fn append(&mut self, entries: &[Entry]) {
        if let Some(first) = entries.first() {
            let keep = first.index.saturating_sub(self.truncated.0 + 1) as usize;
            self.entries.truncate(keep);
            self.entries.extend(entries.iter().cloned());
        }
    }

    /// Replaces everything by a state from the leader.
    pub(super) fn install(&mut self, snapshot: Snapshot) {
        let at = snapshot.get_metadata();
        self.truncated = (at.index, at.term);
        self.entries.clear();
        self.snapshot = snapshot;
    }

    /// Takes an own snapshot and drops all but the last `keep` entries before
    /// it. Returns the index and term up to which entries went.
    pub(super) fn compact(&mut self, snapshot: Snapshot, keep: u64) -> (u64, u64) {
        let to = snapshot.get_metadata().index.saturating_sub(keep);
        self.snapshot = snapshot;
        let gone = self.entries.partition_point(|e| e.index <= to);
        if let Some(entry) = self.entries.drain(..gone).next_back() {
            self.truncated = (entry.index, entry.term);
        }
        self.truncated
    }

    /// Whether a snapshot was asked for that the latest one cannot serve: Raft
    /// refuses a state whose configuration does not know the receiver, and asks
    /// again with the next heartbeat.
    pub(super) fn take_wanted(&self) -> bool {
        self.wanted.take()
    }

    fn last(&self) -> u64 {
        self.entries.back().map_or(self.truncated.0, |e| e.index)
    }

    fn position(&self, index: u64) -> usize {
        (index - self.truncated.0 - 1) as usize
    }
}

fn knows(state: &ConfState, id: u64) -> bool {
    state.voters.contains(&id) || state.learners.contains(&id)
}

impl Storage for Log {
    fn initial_state(&self) -> raft::Result<RaftState> {
        // The configuration as of the snapshot: replaying the log makes it new.
        let conf_state = self.snapshot.get_metadata().get_conf_state().clone();
        Ok(RaftState { hard_state: self.hard_state.clone(), conf_state })
    }

    fn entries(
        &self,
        low: u64,
        high: u64,
        max_size: impl Into<Option<u64>>,
        _context: GetEntriesContext,
    ) -> raft::Result<Vec<Entry>> {
        if low <= self.truncated.0 {
            return Err(Error::Store(StorageError::Compacted));
        }
        if high > self.last() + 1 || low > high {
            return Err(Error::Store(StorageError::Unavailable));
        }
        let range = self.position(low)..self.position(high);
        let mut entries: Vec<Entry> = self.entries.range(range).cloned().collect();
        raft::util::limit_size(&mut entries, max_size.into());
        Ok(entries)
    }

    fn term(&self, index: u64) -> raft::Result<u64> {
        if index == self.truncated.0 {
            return Ok(self.truncated.1);
        }
        if index < self.truncated.0 {
            return Err(Error::Store(StorageError::Compacted));
        }
        let entry = self.entries.get(self.position(index));
        entry.map(|e| e.term).ok_or(Error::Store(StorageError::Unavailable))
    }

    fn first_index(&self) -> raft::Result<u64> {
        Ok(self.truncated.0 + 1)
    }

    fn last_index(&self) -> raft::Result<u64> {
        Ok(self.last())
    }

    fn snapshot(&self, request_index: u64, to: u64) -> raft::Result<Snapshot> {
        let at = self.snapshot.get_metadata();
        if at.index < request_index || !knows(at.get_conf_state(), to) {
            self.wanted.set(true);
            return Err(Error::Store(StorageError::SnapshotTemporarilyUnavailable));
        }
        Ok(self.snapshot.clone())
    }
}
