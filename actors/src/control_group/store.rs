//! The node's own disk: the Raft log, hard state and snapshot of one member,
//! in `<dir>/raft.redb`.
//!
//! Every [`Store::write`] is one atomic, synced transaction: after a crash at
//! any byte the store holds all of a write or nothing. The directory is locked
//! for one process, and its [`StoreId`] is the member's identity (ID-1).

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use job::{StoreId, codec};
use raft::eraftpb::{Entry, HardState, Snapshot};
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::Founding;
use super::replica;

const ENTRIES: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("entries");
const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");

const IDENTITY: &str = "identity";
const FOUNDING: &str = "founding";
const HARD_STATE: &str = "hard_state";
const SNAPSHOT: &str = "snapshot";
const TRUNCATED: &str = "truncated";

/// Grows when the layout of the tables changes.
const FORMAT: u32 = 1;

/// A log of some hundred entries needs no more; the default is 1 GiB.
const CACHE_BYTES: usize = 8 << 20;

/// Why a store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process has it.
    #[error("node store {dir} is in use by pid {pid}: stop that process or use another directory")]
    InUse {
        /// The data directory.
        dir: PathBuf,
        /// The other process, as it wrote itself down.
        pid: String,
    },
    /// The file system refused.
    #[error("node store {path}: {source}")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The content is not what was written.
    #[error(
        "node store {path} is damaged ({detail}): move it away and this node joins anew, under a \
         new identity"
    )]
    Damaged {
        /// The database file.
        path: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// Written by another version.
    #[error("node store {path} has format {found}, this version reads {expected}")]
    Format {
        /// The database file.
        path: PathBuf,
        /// Format in the file.
        found: u32,
        /// Format of this version.
        expected: u32,
    },
    /// The database cannot read or write, for example on a full disk.
    #[error("node store {path}: {detail}")]
    Database {
        /// The database file.
        path: PathBuf,
        /// What it said.
        detail: String,
    },
}

/// An opened node store.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    path: PathBuf,
    db: Database,
    id: StoreId,
    founding: Option<Founding>,
    _lock: File,
}

/// Everything that a member starts from.
#[derive(Clone, Debug, Default)]
pub(super) struct Loaded {
    /// Entries after `truncated`, without gaps.
    pub(super) entries: Vec<Entry>,
    /// Index and term of the entry before the first.
    pub(super) truncated: (u64, u64),
    pub(super) hard_state: HardState,
    pub(super) snapshot: Snapshot,
}

/// One change of the log. Fields apply in order.
#[derive(Debug, Default)]
pub(super) struct Write {
    /// A state from the leader, which replaces the whole log.
    pub(super) installed: Option<Snapshot>,
    /// Entries; they replace those at the same indices and all later ones.
    pub(super) entries: Vec<Entry>,
    pub(super) hard_state: Option<HardState>,
    /// An own snapshot, and the (index, term) up to which entries go.
    pub(super) compacted: Option<(Snapshot, (u64, u64))>,
}

impl Loaded {
    /// What every member of a group begins with: its first state, at index 1 and
    /// term 1.
    pub(super) fn first(founding: &Founding) -> Self {
        let data = replica::first(&founding.state).into();
        let mut snapshot = Snapshot { data, ..Snapshot::default() };
        let at = snapshot.mut_metadata();
        (at.index, at.term) = (1, 1);
        at.mut_conf_state().voters = vec![founding.founder];
        let hard_state = HardState { term: 1, commit: 1, ..HardState::default() };
        Self { entries: Vec::new(), truncated: (1, 1), hard_state, snapshot }
    }

    /// Takes a write in: what [`Store::write`] does to the tables.
    pub(super) fn apply(&mut self, write: Write) {
        if let Some(snapshot) = write.installed {
            let at = snapshot.get_metadata();
            self.entries.clear();
            self.truncated = (at.index, at.term);
            self.snapshot = snapshot;
        }
        if let Some(first) = write.entries.first() {
            let first = first.index;
            self.entries.retain(|entry| entry.index < first);
        }
        self.entries.extend(write.entries);
        if let Some(hard_state) = write.hard_state {
            self.hard_state = hard_state;
        }
        if let Some((snapshot, truncated)) = write.compacted {
            self.entries.retain(|entry| entry.index > truncated.0);
            self.snapshot = snapshot;
            self.truncated = truncated;
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Identity {
    format: u32,
    store: Uuid,
}

impl Store {
    /// Opens the store in `dir`, or makes a new one with a new identity.
    ///
    /// # Errors
    /// When another process uses it, it is damaged, or the disk refuses.
    pub fn open(dir: impl Into<PathBuf>) -> Result<Self, StoreError> {
        let dir = dir.into();
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| StoreError::Io { path, source }
        };
        std::fs::create_dir_all(&dir).map_err(io(&dir))?;
        let lock = lock(&dir)?;
        let path = dir.join("raft.redb");
        // The state holds the key of the job's CA: for the owner's eyes only.
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(io(&path))?;
        let db = open_database(&path, file)?;
        File::open(&dir).and_then(|d| d.sync_all()).map_err(io(&dir))?;
        let mut store =
            Self { dir, path, db, id: StoreId(Uuid::nil()), founding: None, _lock: lock };
        store.identify()?;
        Ok(store)
    }

    /// The identity of the data directory; its Raft id is the member's.
    #[must_use]
    pub fn id(&self) -> StoreId {
        self.id
    }

    /// What the member started from; none in a store that is still empty.
    #[must_use]
    pub fn founding(&self) -> Option<&Founding> {
        self.founding.as_ref()
    }

    /// The data directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Makes an empty store a member of a group, at index 1 and term 1.
    pub(crate) fn found(&mut self, founding: Founding) -> Result<(), StoreError> {
        let Loaded { snapshot, hard_state, .. } = Loaded::first(&founding);
        let tx = self.begin()?;
        {
            let mut meta = tx.open_table(META).map_err(|e| self.failed(e))?;
            put(&mut meta, FOUNDING, &codec::encode(&founding)).map_err(|e| self.failed(e))?;
            put(&mut meta, HARD_STATE, &proto(&hard_state)).map_err(|e| self.failed(e))?;
            put(&mut meta, SNAPSHOT, &proto(&snapshot)).map_err(|e| self.failed(e))?;
            put(&mut meta, TRUNCATED, &codec::encode(&(1u64, 1u64))).map_err(|e| self.failed(e))?;
        }
        tx.commit().map_err(|e| self.failed(e))?;
        self.founding = Some(founding);
        Ok(())
    }

    /// Reads a founded store. A log with a gap, or one that ends before what was
    /// committed, is damaged: Raft would stop the process over it.
    pub(super) fn load(&self) -> Result<Loaded, StoreError> {
        let tx = self.db.begin_read().map_err(|e| self.failed(e))?;
        let meta = tx.open_table(META).map_err(|e| self.failed(e))?;
        let bytes = |key: &str| -> Result<Vec<u8>, StoreError> {
            let value = meta.get(key).map_err(|e| self.failed(e))?;
            value.map(|v| v.value().to_vec()).ok_or_else(|| self.damaged(format!("no {key}")))
        };
        let mut loaded = Loaded {
            entries: Vec::new(),
            truncated: codec::decode(&bytes(TRUNCATED)?).map_err(|e| self.damaged(e))?,
            hard_state: self.parse(&bytes(HARD_STATE)?)?,
            snapshot: self.parse(&bytes(SNAPSHOT)?)?,
        };
        let table = tx.open_table(ENTRIES).map_err(|e| self.failed(e))?;
        let mut next = loaded.truncated.0 + 1;
        for row in table.range(next..).map_err(|e| self.failed(e))? {
            let (index, value) = row.map_err(|e| self.failed(e))?;
            let entry: Entry = self.parse(value.value())?;
            if index.value() != next || entry.index != next {
                return Err(self.damaged(format!("entry {next} is missing")));
            }
            loaded.entries.push(entry);
            next += 1;
        }
        let (snapshot, commit) = (loaded.snapshot.get_metadata().index, loaded.hard_state.commit);
        if snapshot > commit || commit >= next || snapshot < loaded.truncated.0 {
            let last = next - 1;
            return Err(self.damaged(format!(
                "log ends at {last}, snapshot is of {snapshot}, {commit} were committed"
            )));
        }
        Ok(loaded)
    }

    /// Makes the writes durable, all or none.
    pub(super) fn write(&self, writes: &[Write]) -> Result<(), StoreError> {
        let tx = self.begin()?;
        {
            let mut meta = tx.open_table(META).map_err(|e| self.failed(e))?;
            let mut entries = tx.open_table(ENTRIES).map_err(|e| self.failed(e))?;
            for write in writes {
                apply(write, &mut meta, &mut entries).map_err(|e| self.failed(e))?;
            }
        }
        tx.commit().map_err(|e| self.failed(e))
    }

    /// Reads the identity, or gives a new store one.
    fn identify(&mut self) -> Result<(), StoreError> {
        let tx = self.begin()?;
        let identity: Identity;
        {
            // A table that exists only after the first write must not make the
            // first read fail.
            tx.open_table(ENTRIES).map_err(|e| self.failed(e))?;
            let mut meta = tx.open_table(META).map_err(|e| self.failed(e))?;
            let stored = meta.get(IDENTITY).map_err(|e| self.failed(e))?;
            let stored = stored.map(|v| v.value().to_vec());
            identity = match stored {
                Some(bytes) => codec::decode(&bytes).map_err(|e| self.damaged(e))?,
                None => {
                    let new = Identity { format: FORMAT, store: Uuid::new_v4() };
                    put(&mut meta, IDENTITY, &codec::encode(&new)).map_err(|e| self.failed(e))?;
                    new
                }
            };
            let founding = meta.get(FOUNDING).map_err(|e| self.failed(e))?;
            self.founding = founding
                .map(|v| codec::decode(v.value()))
                .transpose()
                .map_err(|e| self.damaged(e))?;
        }
        if identity.format != FORMAT {
            let path = self.path.clone();
            return Err(StoreError::Format { path, found: identity.format, expected: FORMAT });
        }
        tx.commit().map_err(|e| self.failed(e))?;
        self.id = StoreId(identity.store);
        Ok(())
    }

    fn begin(&self) -> Result<redb::WriteTransaction, StoreError> {
        self.db.begin_write().map_err(|e| self.failed(e))
    }

    fn parse<M: protobuf::Message>(&self, bytes: &[u8]) -> Result<M, StoreError> {
        M::parse_from_bytes(bytes).map_err(|e| self.damaged(e))
    }

    fn failed(&self, error: impl Into<redb::Error>) -> StoreError {
        failed(&self.path, error)
    }

    fn damaged(&self, detail: impl ToString) -> StoreError {
        StoreError::Damaged { path: self.path.clone(), detail: detail.to_string() }
    }
}

type Meta<'a> = redb::Table<'a, &'static str, &'static [u8]>;
type Entries<'a> = redb::Table<'a, u64, &'static [u8]>;

fn apply(
    write: &Write,
    meta: &mut Meta<'_>,
    entries: &mut Entries<'_>,
) -> Result<(), redb::StorageError> {
    if let Some(snapshot) = &write.installed {
        let at = snapshot.get_metadata();
        entries.retain(|_, _| false)?;
        put(meta, SNAPSHOT, &proto(snapshot))?;
        put(meta, TRUNCATED, &codec::encode(&(at.index, at.term)))?;
    }
    if let Some(first) = write.entries.first() {
        entries.retain_in(first.index.., |_, _| false)?;
    }
    for entry in &write.entries {
        entries.insert(entry.index, proto(entry).as_slice())?;
    }
    if let Some(hard_state) = &write.hard_state {
        put(meta, HARD_STATE, &proto(hard_state))?;
    }
    if let Some((snapshot, truncated)) = &write.compacted {
        entries.retain_in(..=truncated.0, |_, _| false)?;
        put(meta, SNAPSHOT, &proto(snapshot))?;
        put(meta, TRUNCATED, &codec::encode(truncated))?;
    }
    Ok(())
}

fn put(meta: &mut Meta<'_>, key: &'static str, value: &[u8]) -> Result<(), redb::StorageError> {
    meta.insert(key, value).map(|_| ())
}

fn proto(message: &impl protobuf::Message) -> Vec<u8> {
    // PANIC: writing a message without required fields into memory does not fail.
    message.write_to_bytes().expect("protobuf writes into memory")
}

fn failed(path: &Path, error: impl Into<redb::Error>) -> StoreError {
    let path = path.to_owned();
    match error.into() {
        redb::Error::Corrupted(detail) => StoreError::Damaged { path, detail },
        error => StoreError::Database { path, detail: error.to_string() },
    }
}

fn open_database(path: &Path, file: File) -> Result<Database, StoreError> {
    // The log is small: every open verifies all checksums, for a plain open of
    // an altered file may panic later.
    redb::backends::FileBackend::new(file)
        .and_then(|backend| {
            redb::Builder::new()
                .set_cache_size(CACHE_BYTES)
                .set_check_integrity_on_open(true)
                .create_with_backend(backend)
        })
        .map_err(|e| match redb::Error::from(e) {
            redb::Error::Io(e) if e.kind() == std::io::ErrorKind::InvalidData => {
                StoreError::Damaged { path: path.to_owned(), detail: e.to_string() }
            }
            e => failed(path, e),
        })
}

/// Takes the directory for this process; the file says who has it.
fn lock(dir: &Path) -> Result<File, StoreError> {
    let path = dir.join("raft.lock");
    let io = |source| StoreError::Io { path: path.clone(), source };
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(io)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(std::fs::TryLockError::WouldBlock) => {
            let mut pid = String::new();
            file.take(20).read_to_string(&mut pid).map_err(io)?;
            let pid = pid.trim().to_owned();
            return Err(StoreError::InUse { dir: dir.to_owned(), pid });
        }
        Err(std::fs::TryLockError::Error(e)) => return Err(io(e)),
    }
    file.set_len(0).map_err(io)?;
    file.rewind().map_err(io)?;
    writeln!(file, "{}", std::process::id()).map_err(io)?;
    Ok(file)
}
