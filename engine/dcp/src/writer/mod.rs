//! Writes checkpoints: the files of the ranks, then the index over all of them.
//!
//! Nothing is ever overwritten: a save goes into a fresh directory, so that the
//! previous checkpoint stays loadable whatever happens (CKPT-1). Bytes go from
//! the caller's memory to the file, checksummed and digested in pieces on the
//! way: there is no second copy of the state.
//!
//! [`ShardWriter`] writes one file, [`save`] those of a rank with several
//! threads, [`assign`] decides which of many ranks writes what all of them
//! have, and [`write_metadata`] merges what they wrote into the index.

mod assign;
mod merge;
mod parallel;

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::digest::{Digest, FileDigest};
use crate::dtype::Dtype;
use crate::error::Error;
use crate::index::check_shape;
use crate::payload::{describe, describe_object};
use crate::pickle;
use crate::region::Region;
use crate::storage::{Dir, Upload};
use crate::value::{Segment, Value, joins_to};
use crate::zip::write::Frame;

pub use assign::{Offer, assign};
pub use merge::{write_index, write_metadata};
pub use parallel::{Content, Item, save, save_watched};

/// Checksummed, digested and written at once, so that the bytes stay in the
/// cache between the three.
const PIECE: usize = 256 << 10;

/// What one rank wrote: travels to whoever writes the index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardIndex {
    /// The data file.
    pub file: FileDigest,
    /// Its items, in file order.
    pub entries: Vec<Entry>,
}

/// One item of a data file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The key.
    pub fqn: String,
    /// The key's path in the nested state dict.
    pub path: Vec<Segment>,
    /// First byte of the item in the file.
    pub offset: u64,
    /// Bytes of the item.
    pub length: u64,
    /// What the item is.
    pub kind: Kind,
}

/// What an item is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// A shard of a tensor.
    Tensor {
        /// Element type.
        dtype: Dtype,
        /// Shape of the whole tensor.
        shape: Vec<u64>,
        /// The part of it that this shard is.
        region: Region,
    },
    /// A Python value.
    Object,
}

/// Writes a file of one rank, `__{rank}_{part}.distcp`.
pub struct ShardWriter {
    dir: Dir,
    name: String,
    upload: Box<dyn Upload>,
    hash: blake3::Hasher,
    at: u64,
    entries: Vec<Entry>,
    /// An item is incomplete, for good or until its stream is finished.
    torn: bool,
}

impl ShardWriter {
    /// Starts the only file of a rank in a stage directory, a path or a URL,
    /// which is created when it is not there.
    ///
    /// # Errors
    /// When the file exists: a stage is never used twice (LG-2).
    pub fn create(stage: &Path, rank: u32) -> Result<Self, Error> {
        Self::create_in(&beside(stage)?, rank, 0)
    }

    /// Starts file `part` of a rank in a stage directory.
    ///
    /// # Errors
    /// When the file exists.
    pub fn create_in(stage: &Dir, rank: u32, part: u32) -> Result<Self, Error> {
        stage.make()?;
        let name = format!("__{rank}_{part}.distcp");
        let upload = stage.create(&name)?;
        let (hash, entries) = (blake3::Hasher::new(), Vec::new());
        Ok(Self { dir: stage.clone(), name, upload, hash, at: 0, entries, torn: false })
    }

    /// Appends a shard: `bytes` are the elements of `region` in C order,
    /// little-endian. An empty region of no bytes is fine.
    ///
    /// # Errors
    /// When the path, the region or the bytes do not fit the tensor, or the
    /// disk refuses.
    pub fn tensor(
        &mut self,
        fqn: &str,
        path: &[Segment],
        dtype: Dtype,
        global_shape: &[u64],
        region: &Region,
        bytes: &[u8],
    ) -> Result<(), Error> {
        check_path(fqn, path)?;
        let expected = bytes_of(fqn, dtype, global_shape, region)?;
        if bytes.len() as u64 != expected {
            let given = bytes.len();
            let detail = format!("{dtype} {region} has {expected} bytes, {given} were given");
            return Err(request(fqn, detail));
        }
        let mut stream = self.stream(fqn, path, dtype, global_shape, region)?;
        stream.write(bytes)?;
        stream.finish()
    }

    /// Appends a shard whose elements come in pieces.
    ///
    /// # Errors
    /// When the path or the region does not fit the tensor, or the disk refuses.
    pub fn stream(
        &mut self,
        fqn: &str,
        path: &[Segment],
        dtype: Dtype,
        global_shape: &[u64],
        region: &Region,
    ) -> Result<Stream<'_>, Error> {
        check_path(fqn, path)?;
        let left = bytes_of(fqn, dtype, global_shape, region)?;
        let description = describe(dtype, &region.sizes).map_err(|e| unpicklable(fqn, e))?;
        let kind = Kind::Tensor { dtype, shape: global_shape.to_vec(), region: region.clone() };
        let (fqn, path) = (fqn.to_owned(), path.to_vec());
        let entry = Entry { fqn, path, offset: self.at, length: 0, kind };
        let frame = Frame::new(&small(&description), Some(left), self.at);
        self.begin()?;
        self.write(&frame.before)?;
        Ok(Stream { writer: self, entry, frame, left, crc: crc32fast::Hasher::new() })
    }

    /// Appends a Python value.
    ///
    /// # Errors
    /// When the value is opaque, the path does not fit, or the disk refuses.
    pub fn object(&mut self, fqn: &str, path: &[Segment], value: &Value) -> Result<(), Error> {
        let description = describe_object(value).map_err(|e| unpicklable(fqn, e))?;
        let frame = Frame::new(&small(&description), None, self.at);
        let mut archive = frame.before.clone();
        archive.extend(frame.finish(0));
        self.archive(fqn, path, &archive)
    }

    /// Appends an object as the archive that another checkpoint has of it,
    /// byte for byte: also one that cannot be understood.
    ///
    /// # Errors
    /// When the path does not fit, or the disk refuses.
    pub fn archive(&mut self, fqn: &str, path: &[Segment], archive: &[u8]) -> Result<(), Error> {
        check_path(fqn, path)?;
        self.begin()?;
        let (fqn, path) = (fqn.to_owned(), path.to_vec());
        let entry = Entry { fqn, path, offset: self.at, length: 0, kind: Kind::Object };
        self.write(archive)?;
        self.end(entry);
        Ok(())
    }

    /// Waits until the file is on the disk, and says what is in it.
    ///
    /// # Errors
    /// When the disk refuses, now or earlier.
    pub fn finish(self) -> Result<ShardIndex, Error> {
        let dir = self.dir.clone();
        let index = self.close()?;
        sync(&dir)?;
        Ok(index)
    }

    /// Makes the bytes durable, not yet the name.
    fn close(self) -> Result<ShardIndex, Error> {
        let path = self.dir.path_of(&self.name);
        if self.torn {
            return Err(Error::Incomplete(path));
        }
        self.upload.finish().map_err(|source| Error::Io { action: "sync", path, source })?;
        let blake3 = Digest(self.hash.finalize().into());
        let file = FileDigest { name: self.name, bytes: self.at, blake3 };
        Ok(ShardIndex { file, entries: self.entries })
    }

    fn begin(&mut self) -> Result<(), Error> {
        if std::mem::replace(&mut self.torn, true) {
            return Err(Error::Incomplete(self.dir.path_of(&self.name)));
        }
        Ok(())
    }

    fn end(&mut self, mut entry: Entry) {
        entry.length = self.at - entry.offset;
        self.entries.push(entry);
        self.torn = false;
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.hash.update(bytes);
        self.at += bytes.len() as u64;
        self.upload.write(bytes).map_err(|source| Error::Io {
            action: "write",
            path: self.dir.path_of(&self.name),
            source,
        })
    }
}

/// A shard in the making. Dropped unfinished, it leaves a file that
/// [`ShardWriter::finish`] refuses.
pub struct Stream<'a> {
    writer: &'a mut ShardWriter,
    entry: Entry,
    frame: Frame,
    left: u64,
    crc: crc32fast::Hasher,
}

impl Stream<'_> {
    /// Appends the next elements, in C order.
    ///
    /// # Errors
    /// When there are more bytes than the region has, or the disk refuses.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let Some(left) = self.left.checked_sub(bytes.len() as u64) else {
            let detail =
                format!("{} bytes more than its region has", bytes.len() as u64 - self.left);
            return Err(request(&self.entry.fqn, detail));
        };
        for piece in bytes.chunks(PIECE) {
            self.crc.update(piece);
            self.writer.write(piece)?;
        }
        self.left = left;
        Ok(())
    }

    /// Ends the shard.
    ///
    /// # Errors
    /// When bytes are missing, or the disk refuses.
    pub fn finish(self) -> Result<(), Error> {
        if self.left > 0 {
            let detail = format!("{} bytes of its region were not given", self.left);
            return Err(request(&self.entry.fqn, detail));
        }
        self.writer.write(&self.frame.finish(self.crc.finalize()))?;
        self.writer.end(self.entry);
        Ok(())
    }
}

/// The directory of a path or URL, known together with the one above it, whose
/// names include its own.
pub(crate) fn beside(path: &Path) -> Result<Dir, Error> {
    let remote = path.to_string_lossy().contains("://");
    match (path.parent(), path.file_name().and_then(|name| name.to_str())) {
        (Some(parent), Some(name)) if !remote => {
            let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
            Ok(Dir::at(parent)?.join(name))
        }
        _ => Dir::at(path),
    }
}

/// The names in a stage, and its own.
fn sync(stage: &Dir) -> Result<(), Error> {
    stage.sync()?;
    stage.parent().map_or(Ok(()), |parent| parent.sync())
}

fn small(description: &[u8]) -> [(&str, &[u8]); 3] {
    [("data.pkl", description), ("byteorder", b"little"), ("version", b"3\n")]
}

fn bytes_of(fqn: &str, dtype: Dtype, shape: &[u64], region: &Region) -> Result<u64, Error> {
    check_region(dtype, shape, region).map_err(|detail| request(fqn, detail))?;
    Ok(region.elements() * dtype.size() as u64)
}

fn check_region(dtype: Dtype, shape: &[u64], region: &Region) -> Result<(), String> {
    check_shape(dtype, shape)?;
    if region.fits(shape) {
        return Ok(());
    }
    Err(format!("the shard {region} lies outside of the shape {shape:?}"))
}

fn check_path(fqn: &str, path: &[Segment]) -> Result<(), Error> {
    if joins_to(path, fqn) {
        return Ok(());
    }
    Err(request(fqn, format!("its path {path:?} joins to another name")))
}

fn request(fqn: &str, detail: impl Into<String>) -> Error {
    Error::Request { fqn: fqn.to_owned(), detail: detail.into() }
}

fn conflict(fqn: &str, detail: impl Into<String>) -> Error {
    Error::Merge { fqn: fqn.to_owned(), detail: detail.into() }
}

fn unpicklable(fqn: &str, source: pickle::Error) -> Error {
    Error::Value { fqn: fqn.to_owned(), source }
}
