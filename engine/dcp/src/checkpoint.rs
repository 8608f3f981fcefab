//! Reads checkpoints: any region of any tensor, from whatever shards hold it.
//!
//! Opening costs the index only. Reading touches the bytes that are needed; see
//! [`load`](crate::load).

use std::fmt;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use crate::dtype::Dtype;
use crate::error::{Error, SliceError};
use crate::index::{self, Form, Index, Place, TensorEntry};
use crate::item::{Edges, Item, Slice};
use crate::payload;
use crate::region::Region;
use crate::storage::{Dir, Object};
use crate::value::{Segment, Value};

/// Files that stay open between reads; the others are opened again.
const OPEN_FILES: usize = 256;

/// An open checkpoint. Threads may read from one at the same time.
pub struct Checkpoint {
    dir: Dir,
    pub(crate) index: Index,
    files: Vec<OnceLock<Arc<dyn Object>>>,
}

/// A tensor of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// The key.
    pub fqn: &'a str,
    /// Element type.
    pub dtype: Dtype,
    /// Shape of the whole tensor.
    pub shape: &'a [u64],
}

impl Checkpoint {
    /// Opens a directory, or a URL that [`Dir::at`] takes, that we or PyTorch
    /// wrote: DCP with one index or one per rank, or safetensors. Reads the
    /// index only.
    ///
    /// # Errors
    /// When there is no index, or a damaged one.
    pub fn open(directory: &Path) -> Result<Self, Error> {
        Self::open_in(Dir::at(directory)?)
    }

    /// Opens a folder of a storage.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_in(dir: Dir) -> Result<Self, Error> {
        let index = index::find(&dir)?;
        Ok(Self::of(dir, index))
    }

    pub(crate) fn of(dir: Dir, index: Index) -> Self {
        let kept = index.files.len().min(OPEN_FILES);
        let files = std::iter::repeat_with(OnceLock::new).take(kept).collect();
        Self { dir, index, files }
    }

    /// The folder.
    #[must_use]
    pub fn dir(&self) -> &Dir {
        &self.dir
    }

    /// The names of the data files, within the directory.
    pub fn files(&self) -> impl Iterator<Item = &str> {
        self.index.files.iter().map(String::as_str)
    }

    /// All tensors, in order of their keys.
    pub fn tensors(&self) -> impl Iterator<Item = TensorInfo<'_>> {
        self.index.tensors.iter().map(|(fqn, entry)| info(fqn, entry))
    }

    /// The tensor of a key.
    #[must_use]
    pub fn tensor(&self, fqn: &str) -> Option<TensorInfo<'_>> {
        self.index.tensors.get_key_value(fqn).map(|(fqn, entry)| info(fqn, entry))
    }

    /// The shards of a tensor that have elements, in no particular order; none
    /// for an unknown key.
    pub fn shards(&self, fqn: &str) -> impl Iterator<Item = &Region> {
        let chunks = self.index.tensors.get(fqn).map(|entry| entry.chunks.as_slice());
        chunks.unwrap_or_default().iter().map(|chunk| &chunk.region)
    }

    /// The keys of all objects, in order.
    pub fn objects(&self) -> impl Iterator<Item = &str> {
        self.index.objects.keys().map(String::as_str)
    }

    /// Where a key belongs in the nested state dict. `None` for an unknown key,
    /// or when the checkpoint does not say.
    #[must_use]
    pub fn path(&self, fqn: &str) -> Option<&[Segment]> {
        self.index.paths.get(fqn).map(Vec::as_slice)
    }

    /// Reads an object. What is no plain data comes as [`Value::Opaque`]:
    /// nothing is executed.
    ///
    /// # Errors
    /// When there is no such object, or its bytes are damaged.
    pub fn object(&self, fqn: &str) -> Result<Value, Error> {
        let place = self.object_place(fqn)?;
        let item = self.item(fqn, place, payload::OBJECT_LIMIT)?;
        Edges::of(&item)
            .and_then(|item| payload::object(&item))
            .map_err(|source| self.bad_slice(fqn, place, source))
    }

    /// The archive of an object as PyTorch wrote it, for a copy byte for byte,
    /// whatever the object is.
    ///
    /// # Errors
    /// When there is no such object, or its bytes are damaged.
    pub fn object_archive(&self, fqn: &str) -> Result<Vec<u8>, Error> {
        let place = self.object_place(fqn)?;
        let bad = |source| self.bad_slice(fqn, place, source);
        let bytes = match self.item(fqn, place, payload::OBJECT_LIMIT)? {
            Item::Memory { bytes, .. } => bytes,
            Item::Slice(slice) if slice.length <= payload::OBJECT_LIMIT => {
                slice.read().map_err(bad)?
            }
            Item::Slice(slice) => {
                let (bytes, limit) = (slice.length, payload::OBJECT_LIMIT);
                let detail = format!("the object has {bytes} bytes, more than {limit}");
                return Err(bad(SliceError::Unsupported(detail)));
            }
        };
        payload::check_archive(&bytes).map_err(bad)?;
        Ok(bytes)
    }

    pub(crate) fn entry(&self, fqn: &str) -> Result<&TensorEntry, Error> {
        self.index.tensors.get(fqn).ok_or_else(|| self.no_key("tensor", fqn))
    }

    fn object_place(&self, fqn: &str) -> Result<Place, Error> {
        self.index.objects.get(fqn).copied().ok_or_else(|| self.no_key("object", fqn))
    }

    /// The bytes of an item, decoded when they are encoded; `expected` bounds
    /// the bytes of its large record.
    pub(crate) fn item(&self, fqn: &str, place: Place, expected: u64) -> Result<Item, Error> {
        let slice = self.slice(fqn, place)?;
        if place.form != Form::Zstd {
            return Ok(Item::Slice(slice));
        }
        let decoded = slice.read().and_then(|bytes| payload::unzstd(&bytes, expected));
        let bytes = decoded.map_err(|source| self.bad_slice(fqn, place, source))?;
        Ok(Item::Memory { bytes, stored: slice.length as usize })
    }

    /// A slice that lies in its file.
    pub(crate) fn slice(&self, fqn: &str, place: Place) -> Result<Slice, Error> {
        let file = self.file(place.file)?;
        if place.offset + place.length > file.len() {
            return Err(self.bad_slice(fqn, place, SliceError::Short(file.len())));
        }
        Ok(Slice { file, offset: place.offset, length: place.length })
    }

    pub(crate) fn bad_slice(&self, fqn: &str, place: Place, source: SliceError) -> Error {
        Error::Slice {
            path: self.dir.path_of(&self.index.files[place.file as usize]),
            start: place.offset,
            end: place.offset + place.length,
            fqn: fqn.to_owned(),
            source,
        }
    }

    pub(crate) fn bad_cover(&self, fqn: &str, detail: String) -> Error {
        Error::Cover { path: self.dir.path(), fqn: fqn.to_owned(), detail }
    }

    /// Requests that are worth making at the same time.
    pub(crate) fn threads(&self) -> usize {
        self.dir.storage().parallelism()
    }

    /// An open data file.
    fn file(&self, number: u32) -> Result<Arc<dyn Object>, Error> {
        let open = || self.dir.open(&self.index.files[number as usize]).map(Arc::from);
        let Some(cell) = self.files.get(number as usize) else { return open() };
        if let Some(file) = cell.get() {
            return Ok(Arc::clone(file));
        }
        let file = open()?;
        Ok(Arc::clone(cell.get_or_init(|| file)))
    }

    fn no_key(&self, kind: &'static str, fqn: &str) -> Error {
        Error::NoKey { path: self.dir.path(), kind, fqn: fqn.to_owned() }
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint").field("dir", &self.dir).finish_non_exhaustive()
    }
}

fn info<'a>(fqn: &'a str, entry: &'a TensorEntry) -> TensorInfo<'a> {
    TensorInfo { fqn, dtype: entry.dtype, shape: &entry.shape }
}
