//! Reads checkpoints: any region of any tensor, from whatever shards hold it.
//!
//! Opening costs the index only. Reading touches the bytes that are needed; a
//! shard that is read whole is checked against its CRC-32 on the way, which is
//! something that PyTorch never does.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::dtype::Dtype;
use crate::durable::At;
use crate::error::{Error, SliceError};
use crate::index::{self, Index, METADATA, Place, TensorEntry};
use crate::payload;
use crate::region::{Region, Runs, strides};
use crate::value::{Segment, Value};
use crate::zip::read::ReadAt;

/// The index of Llama-3-8B over 256 ranks has 32 MB.
const INDEX_LIMIT: u64 = 1 << 30;

/// An open checkpoint. Threads may read from one at the same time.
#[derive(Debug)]
pub struct Checkpoint {
    directory: PathBuf,
    pub(crate) index: Index,
    files: Vec<OnceLock<(File, u64)>>,
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
    /// Opens a directory that we or PyTorch wrote. Reads its index only.
    ///
    /// # Errors
    /// When there is no index, or a damaged one.
    pub fn open(directory: &Path) -> Result<Self, Error> {
        let path = directory.join(METADATA);
        let bytes = match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Error::NoIndex(directory.to_owned()));
            }
            found => found.at("find", &path)?.len(),
        };
        if bytes > INDEX_LIMIT {
            return Err(Error::TooLarge { path, bytes, limit: INDEX_LIMIT });
        }
        let index = index::read::parse(&fs::read(&path).at("read", &path)?, &path)?;
        let files = index.files.iter().map(|_| OnceLock::new()).collect();
        Ok(Self { directory: directory.to_owned(), index, files })
    }

    /// The directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
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

    /// Reads an object.
    ///
    /// # Errors
    /// When there is no such object, or its bytes are damaged.
    pub fn object(&self, fqn: &str) -> Result<Value, Error> {
        let place = self.index.objects.get(fqn).ok_or_else(|| self.no_key("object", fqn))?;
        let slice = self.slice(fqn, *place)?;
        payload::object(&slice).map_err(|source| self.bad_slice(fqn, *place, source))
    }

    /// Reads a region of a tensor into `into`, as elements in C order,
    /// little-endian, in the tensor's own type. The saved shards may be cut in
    /// any way (CKPT-2).
    ///
    /// # Errors
    /// When there is no such tensor, the region does not fit it, `into` does
    /// not have the size of the region, the shards leave a hole in the region
    /// or overlap in it, or bytes are damaged. `into` is then undefined.
    pub fn read(&self, fqn: &str, region: &Region, into: &mut [u8]) -> Result<(), Error> {
        let entry = self.index.tensors.get(fqn).ok_or_else(|| self.no_key("tensor", fqn))?;
        let request = |detail| Error::Request { fqn: fqn.to_owned(), detail };
        if !region.fits(&entry.shape) {
            return Err(request(format!("{region} is not a region of shape {:?}", entry.shape)));
        }
        let (bytes, expected) = (into.len() as u64, region.elements() * entry.dtype.size() as u64);
        if bytes != expected {
            return Err(request(format!("{region} has {expected} bytes, the buffer {bytes}")));
        }
        entry.check_cover(region).map_err(|detail| Error::Cover { fqn: fqn.to_owned(), detail })?;
        for chunk in &entry.chunks {
            let Some(part) = chunk.region.intersect(region) else { continue };
            let slice = self.slice(fqn, chunk.place)?;
            let copy = Copy { part: &part, from: &chunk.region, to: region, dtype: entry.dtype };
            copy.run(&slice, into).map_err(|source| self.bad_slice(fqn, chunk.place, source))?;
        }
        Ok(())
    }

    pub(crate) fn slice(&self, fqn: &str, place: Place) -> Result<Slice<'_>, Error> {
        let (file, length) = self.file(place.file)?;
        if place.offset + place.length > *length {
            return Err(self.bad_slice(fqn, place, SliceError::Short(*length)));
        }
        Ok(Slice { file, offset: place.offset, length: place.length })
    }

    pub(crate) fn bad_slice(&self, fqn: &str, place: Place, source: SliceError) -> Error {
        Error::Slice {
            path: self.file_path(place.file),
            start: place.offset,
            end: place.offset + place.length,
            fqn: fqn.to_owned(),
            source,
        }
    }

    fn file_path(&self, number: u32) -> PathBuf {
        self.directory.join(&self.index.files[number as usize])
    }

    /// An open data file and its length.
    fn file(&self, number: u32) -> Result<&(File, u64), Error> {
        let cell = &self.files[number as usize];
        if let Some(open) = cell.get() {
            return Ok(open);
        }
        let path = self.file_path(number);
        let file = File::open(&path).at("open", &path)?;
        let length = file.metadata().at("find", &path)?.len();
        Ok(cell.get_or_init(|| (file, length)))
    }

    fn no_key(&self, kind: &'static str, fqn: &str) -> Error {
        Error::NoKey { path: self.directory.clone(), kind, fqn: fqn.to_owned() }
    }
}

fn info<'a>(fqn: &'a str, entry: &'a TensorEntry) -> TensorInfo<'a> {
    TensorInfo { fqn, dtype: entry.dtype, shape: &entry.shape }
}

/// A slice of a data file.
pub(crate) struct Slice<'a> {
    file: &'a File,
    offset: u64,
    length: u64,
}

impl ReadAt for Slice<'_> {
    fn len(&self) -> u64 {
        self.length
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        if at.checked_add(into.len() as u64).is_none_or(|end| end > self.length) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.file.read_exact_at(into, self.offset + at)
    }
}

/// Reads this much at once, so that the CRC runs over warm bytes.
const PIECE: usize = 256 << 10;

/// The way of one shard's part into the caller's region.
struct Copy<'a> {
    part: &'a Region,
    from: &'a Region,
    to: &'a Region,
    dtype: Dtype,
}

impl Copy<'_> {
    fn run(&self, slice: &dyn ReadAt, into: &mut [u8]) -> Result<(), SliceError> {
        let tensor = check_tensor(slice, self.dtype, &self.from.sizes)?;
        if tensor.scattered.is_some() || tensor.conjugate {
            return self.gather(slice, &tensor, into);
        }
        let item = self.dtype.size() as u64;
        let runs = Runs::new(self.part, self.from, self.to);
        let length = (runs.len * item) as usize;
        // Short runs close to each other come through a buffer; others directly.
        let buffer = if length < PIECE && runs.step() <= 8 * runs.len { PIECE } else { 0 };
        let mut window = Window {
            slice,
            end: tensor.at + tensor.storage.size,
            start: 0,
            bytes: Vec::new(),
            buffer,
        };
        let whole = self.part == self.from;
        let mut crc = crc32fast::Hasher::new();
        for (from, to) in runs {
            let mut at = tensor.at + from * item;
            let to = (to * item) as usize;
            for piece in into[to..to + length].chunks_mut(PIECE) {
                window.read(at, piece)?;
                at += piece.len() as u64;
                if whole {
                    crc.update(piece);
                }
            }
        }
        if whole { Ok(tensor.storage.check(crc.finalize())?) } else { Ok(()) }
    }

    /// Tensors of other layouts, which PyTorch writes for transposed, channels-last
    /// and conjugated ones: the storage is read whole.
    fn gather(
        &self,
        slice: &dyn ReadAt,
        tensor: &payload::Tensor,
        into: &mut [u8],
    ) -> Result<(), SliceError> {
        let storage = tensor.storage.read(slice, slice.len())?;
        let c_order = strides(&self.from.sizes);
        let (first, steps) = match &tensor.scattered {
            Some(scattered) => (scattered.first, scattered.strides.as_slice()),
            None => (0, c_order.as_slice()),
        };
        let position = |mut element: u64| {
            let mut at = first;
            for (stride, step) in c_order.iter().zip(steps) {
                at += element / stride * step;
                element %= stride;
            }
            at
        };
        let item = self.dtype.size();
        let runs = Runs::new(self.part, self.from, self.to);
        let length = runs.len;
        for (from, to) in runs {
            for n in 0..length {
                let (at, to) = (position(from + n) as usize * item, (to + n) as usize * item);
                into[to..to + item].copy_from_slice(&storage[at..at + item]);
                if tensor.conjugate {
                    into[to + item - 1] ^= 0x80;
                }
            }
        }
        Ok(())
    }
}

/// The tensor of a slice, which must be the one that the index promises.
pub(crate) fn check_tensor(
    slice: &dyn ReadAt,
    dtype: Dtype,
    sizes: &[u64],
) -> Result<payload::Tensor, SliceError> {
    let tensor = payload::tensor(slice)?;
    if tensor.dtype == dtype && tensor.sizes == sizes {
        return Ok(tensor);
    }
    let found = format!("a {} tensor of shape {:?}", tensor.dtype, tensor.sizes);
    Err(SliceError::Mismatch { found, expected: format!("{dtype}, {sizes:?}") })
}

/// Ascending reads through a buffer.
struct Window<'a> {
    slice: &'a dyn ReadAt,
    end: u64,
    start: u64,
    bytes: Vec<u8>,
    /// Bytes to read ahead; none at all when zero.
    buffer: usize,
}

impl Window<'_> {
    fn read(&mut self, at: u64, into: &mut [u8]) -> Result<(), SliceError> {
        let io = |error| SliceError::Zip(crate::zip::Error::Io(error));
        if self.buffer == 0 {
            return self.slice.read_at(at, into).map_err(io);
        }
        let held = self.start + self.bytes.len() as u64;
        if at < self.start || at + into.len() as u64 > held {
            let ahead = self.buffer.max(into.len()) as u64;
            self.bytes.resize(ahead.min(self.end - at) as usize, 0);
            self.start = at;
            self.slice.read_at(at, &mut self.bytes).map_err(io)?;
        }
        let skip = (at - self.start) as usize;
        into.copy_from_slice(&self.bytes[skip..skip + into.len()]);
        Ok(())
    }
}
