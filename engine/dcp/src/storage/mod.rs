//! Where checkpoints lie: a directory, or a prefix of an object store.
//!
//! [`Storage`] is what the reader, the writer and the checkpoint folder need of
//! it, no more; [`Local`] has it from the operating system, and `Remote`
//! (feature `object-store`) from S3, GCS or Azure. A [`Dir`] is a folder in a storage,
//! and adds to every error what was tried on which file.
//!
//! Durability is explicit, so that a storage that drops what was not synced
//! finds the writer that forgot to (CKPT-1): bytes are durable when
//! [`Upload::finish`], [`Storage::claim`] or [`Storage::replace`] returns, and
//! *names* when [`Storage::sync`] of their folder does. An object store has no
//! names without bytes: there `sync` has nothing to do.
//!
//! Object stores cannot rename either. A checkpoint then stays under the name
//! of its stage: the ledger's commit record names the stage (LG-2), so that the
//! record alone makes the checkpoint exist, without a copy and without a moment
//! in between. [`Storage::renames`] tells the two kinds apart.

mod beneath;
mod local;
#[cfg(feature = "object-store")]
mod remote;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::Error;

pub use local::Local;
#[cfg(feature = "object-store")]
pub use remote::Remote;

/// A tree of files. Keys are relative, with `/` between their parts and
/// without `.` and `..`; the empty key is the root. All methods block.
pub trait Storage: fmt::Debug + Send + Sync {
    /// The path or URL of a key, for messages.
    fn path(&self, key: &str) -> PathBuf;

    /// Opens a file for reading at any position.
    ///
    /// # Errors
    /// `NotFound`; `InvalidData` when the key leads out of the root by a link.
    fn open(&self, key: &str) -> io::Result<Box<dyn Object>>;

    /// Requests that are worth making at the same time.
    fn parallelism(&self) -> usize {
        std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(16)
    }

    /// The names of the files and folders directly in a folder, sorted; none
    /// for a folder that does not exist.
    ///
    /// # Errors
    /// When the storage refuses.
    fn list(&self, folder: &str) -> io::Result<Vec<String>>;

    /// Whether a file or a folder that is not empty has this key.
    ///
    /// # Errors
    /// When the storage refuses.
    fn exists(&self, key: &str) -> io::Result<bool>;

    /// Creates a folder and those above it; fine when it exists.
    ///
    /// # Errors
    /// When the storage refuses.
    fn make_folder(&self, folder: &str) -> io::Result<()>;

    /// Starts a new file, of which others may see parts, or nothing, until it
    /// is finished.
    ///
    /// # Errors
    /// `AlreadyExists` when there is a file of this key.
    fn create(&self, key: &str) -> io::Result<Box<dyn Upload>>;

    /// Creates a file of these bytes, whole or not at all; of many that try,
    /// one succeeds (LG-1). After another error than `AlreadyExists`, the file
    /// may exist or not.
    ///
    /// # Errors
    /// `AlreadyExists` when there is a file of this key.
    fn claim(&self, key: &str, bytes: &[u8]) -> io::Result<()>;

    /// Creates or replaces a file of these bytes: at any moment it is the old
    /// one or the new one.
    ///
    /// # Errors
    /// When the storage refuses.
    fn replace(&self, key: &str, bytes: &[u8]) -> io::Result<()>;

    /// Makes the names in a folder durable.
    ///
    /// # Errors
    /// When the storage refuses.
    fn sync(&self, folder: &str) -> io::Result<()>;

    /// Whether [`rename`](Self::rename) is possible.
    fn renames(&self) -> bool;

    /// Renames a folder to a name that must be free, in one step.
    ///
    /// # Errors
    /// `NotFound`; `AlreadyExists`, `DirectoryNotEmpty` or `NotADirectory` when
    /// the name is taken; `Unsupported` where names cannot change.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file, or a folder with all that is in it; fine when it is gone
    /// already. A folder's `.metadata` goes first: what is left of a folder
    /// when this is interrupted is no checkpoint.
    ///
    /// # Errors
    /// When the storage refuses.
    fn remove(&self, key: &str) -> io::Result<()>;
}

/// A file open for reading; threads may share it.
#[allow(clippy::len_without_is_empty, reason = "a file, not a collection")]
pub trait Object: Send + Sync {
    /// Its length when it was opened.
    fn len(&self) -> u64;

    /// Fills `into` from position `at`.
    ///
    /// # Errors
    /// `UnexpectedEof` when that reaches beyond the end.
    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()>;

    /// Bytes that are read in the time that one more request takes: shorter
    /// gaps are read, and much longer pieces at once.
    fn request_cost(&self) -> u64 {
        512
    }
}

/// A file that is being written, front to back. Dropped unfinished, it may
/// leave an incomplete file behind, never one that [`Storage::claim`] made.
pub trait Upload: Send {
    /// Appends bytes. They need not be durable yet.
    ///
    /// # Errors
    /// When the storage refuses; the file is then incomplete.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Returns when all bytes are durable.
    ///
    /// # Errors
    /// When the storage refuses; the file may then be incomplete.
    fn finish(self: Box<Self>) -> io::Result<()>;
}

/// A folder in a storage.
#[derive(Clone, Debug)]
pub struct Dir {
    storage: Arc<dyn Storage>,
    key: String,
}

impl Dir {
    /// The folder of a path, or of a URL such as `s3://bucket/prefix` when the
    /// crate has the feature `object-store`. It need not exist.
    ///
    /// # Errors
    /// For a URL that is not one of a known store, or whose store is not
    /// configured in the environment.
    pub fn at(path: &Path) -> Result<Self, Error> {
        match path.to_str().filter(|text| text.contains("://")) {
            None => Ok(Self::new(Arc::new(Local::new(path)), "")),
            Some(url) => {
                let storage = of_url(url).map_err(|source| Error::Io {
                    action: "open",
                    path: path.to_owned(),
                    source,
                })?;
                Ok(Self::new(storage, ""))
            }
        }
    }

    /// The folder of a key.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>, key: &str) -> Self {
        Self { storage, key: key.to_owned() }
    }

    /// The storage.
    #[must_use]
    pub fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// The path or URL of the folder, which [`Dir::at`] takes again.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.storage.path(&self.key)
    }

    /// The path or URL of a name in the folder.
    #[must_use]
    pub fn path_of(&self, name: &str) -> PathBuf {
        self.storage.path(&self.key_of(name))
    }

    /// A folder in this one.
    #[must_use]
    pub fn join(&self, name: &str) -> Self {
        Self { storage: Arc::clone(&self.storage), key: self.key_of(name) }
    }

    /// The folder that this one lies in; `None` for the root of the storage.
    #[must_use]
    pub fn parent(&self) -> Option<Self> {
        let (above, _) = self.key.rsplit_once('/').unwrap_or(("", &self.key));
        (!self.key.is_empty()).then(|| Self::new(Arc::clone(&self.storage), above))
    }

    /// See [`Storage::open`].
    ///
    /// # Errors
    /// [`Error::Io`], as of all methods below.
    pub fn open(&self, name: &str) -> Result<Box<dyn Object>, Error> {
        self.told("open", name, self.storage.open(&self.key_of(name)))
    }

    /// Reads a whole file of at most `limit` bytes.
    ///
    /// # Errors
    /// [`Error::TooLarge`] for a larger file.
    pub fn read(&self, name: &str, limit: u64) -> Result<Vec<u8>, Error> {
        let object = self.open(name)?;
        let bytes = object.len();
        if bytes > limit {
            return Err(Error::TooLarge { path: self.path_of(name), bytes, limit });
        }
        let mut into = vec![0; bytes as usize];
        self.told("read", name, object.read_at(0, &mut into))?;
        Ok(into)
    }

    /// See [`Storage::list`].
    ///
    /// # Errors
    /// [`Error::Io`]
    pub fn list(&self) -> Result<Vec<String>, Error> {
        self.told("list", "", self.storage.list(&self.key))
    }

    /// See [`Storage::exists`].
    ///
    /// # Errors
    /// [`Error::Io`]
    pub fn exists(&self, name: &str) -> Result<bool, Error> {
        self.told("find", name, self.storage.exists(&self.key_of(name)))
    }

    /// See [`Storage::make_folder`].
    ///
    /// # Errors
    /// [`Error::Io`]
    pub fn make(&self) -> Result<(), Error> {
        self.told("create directory", "", self.storage.make_folder(&self.key))
    }

    /// See [`Storage::create`].
    ///
    /// # Errors
    /// [`Error::Io`]
    pub fn create(&self, name: &str) -> Result<Box<dyn Upload>, Error> {
        self.told("create", name, self.storage.create(&self.key_of(name)))
    }

    /// See [`Storage::claim`]; false when someone else has.
    ///
    /// # Errors
    /// [`Error::Io`]
    pub fn claim(&self, name: &str, bytes: &[u8]) -> Result<bool, Error> {
        match self.storage.claim(&self.key_of(name), bytes) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            claimed => self.told("create", name, claimed).map(|()| true),
        }
    }

    /// See [`Storage::replace`].
    ///
    /// # Errors
    /// [`Error::Io`]
    pub fn replace(&self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        self.told("write", name, self.storage.replace(&self.key_of(name), bytes))
    }

    /// See [`Storage::sync`].
    ///
    /// # Errors
    /// [`Error::Io`]
    pub fn sync(&self) -> Result<(), Error> {
        self.told("sync directory", "", self.storage.sync(&self.key))
    }

    /// See [`Storage::rename`]: of two names in this folder. The caller tells
    /// the kinds of refusal apart.
    ///
    /// # Errors
    /// As the storage's.
    pub fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.storage.rename(&self.key_of(from), &self.key_of(to))
    }

    /// See [`Storage::remove`].
    ///
    /// # Errors
    /// [`Error::Io`]
    pub fn remove(&self, name: &str) -> Result<(), Error> {
        self.told("remove", name, self.storage.remove(&self.key_of(name)))
    }

    fn key_of(&self, name: &str) -> String {
        match (self.key.as_str(), name) {
            ("", name) => name.to_owned(),
            (key, "") => key.to_owned(),
            (key, name) => format!("{key}/{name}"),
        }
    }

    /// Adds what was tried, and on what, to an I/O error.
    fn told<T>(&self, action: &'static str, name: &str, done: io::Result<T>) -> Result<T, Error> {
        done.map_err(|source| Error::Io { action, path: self.path_of(name), source })
    }
}

#[cfg(feature = "object-store")]
fn of_url(url: &str) -> io::Result<Arc<dyn Storage>> {
    Ok(Arc::new(Remote::open(url, std::env::vars())?))
}

#[cfg(not(feature = "object-store"))]
fn of_url(_: &str) -> io::Result<Arc<dyn Storage>> {
    let why = "it is a URL, which a build with the feature object-store opens";
    Err(io::Error::new(io::ErrorKind::Unsupported, why))
}
