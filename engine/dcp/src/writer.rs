//! Writes checkpoints: one file per rank, then the index over all of them.
//!
//! Nothing is ever overwritten: a save goes into a fresh directory, so that the
//! previous checkpoint stays loadable whatever happens (CKPT-1).

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::digest::{Digest, FileDigest, SUMS, to_sums};
use crate::dtype::Dtype;
use crate::durable::{At, create_new, replace, sync_directory};
use crate::error::Error;
use crate::index::{
    self, Chunk, Form, Index, METADATA, Place, TensorEntry, check_name, check_shape,
};
use crate::payload::{describe, describe_object};
use crate::pickle;
use crate::region::Region;
use crate::value::{Segment, Value, join};
use crate::zip::write::{Payload, frame};

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

/// Writes the file of one rank, `__{rank}_0.distcp`.
pub struct ShardWriter {
    stage: PathBuf,
    path: PathBuf,
    name: String,
    file: File,
    hash: Sha256,
    at: u64,
    entries: Vec<Entry>,
    failed: bool,
}

impl ShardWriter {
    /// Starts the file of a rank in a stage directory, which is created when it
    /// is not there.
    ///
    /// # Errors
    /// When the file exists: a stage is never used twice (LG-2).
    pub fn create(stage: &Path, rank: u32) -> Result<Self, Error> {
        fs::create_dir_all(stage).at("create directory", stage)?;
        let name = format!("__{rank}_0.distcp");
        let path = stage.join(&name);
        let file = create_new(&path)?;
        Ok(Self {
            stage: stage.to_owned(),
            path,
            name,
            file,
            hash: Sha256::new(),
            at: 0,
            entries: Vec::new(),
            failed: false,
        })
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
        check_region(dtype, global_shape, region).map_err(|detail| request(fqn, detail))?;
        let expected = region.elements() * dtype.size() as u64;
        if bytes.len() as u64 != expected {
            let given = bytes.len();
            let detail = format!("{dtype} {region} has {expected} bytes, {given} were given");
            return Err(request(fqn, detail));
        }
        let description = describe(dtype, &region.sizes).map_err(|e| unpicklable(fqn, e))?;
        let kind = Kind::Tensor { dtype, shape: global_shape.to_vec(), region: region.clone() };
        self.item(fqn, path, kind, &description, Some(bytes))
    }

    /// Appends a Python value.
    ///
    /// # Errors
    /// When the value is opaque, the path does not fit, or the disk refuses.
    pub fn object(&mut self, fqn: &str, path: &[Segment], value: &Value) -> Result<(), Error> {
        check_path(fqn, path)?;
        let description = describe_object(value).map_err(|e| unpicklable(fqn, e))?;
        self.item(fqn, path, Kind::Object, &description, None)
    }

    /// Waits until the file is on the disk, and says what is in it.
    ///
    /// # Errors
    /// When the disk refuses, now or earlier.
    pub fn finish(self) -> Result<ShardIndex, Error> {
        if self.failed {
            return Err(Error::Incomplete(self.path));
        }
        self.file.sync_all().at("sync", &self.path)?;
        // The file's name, and the stage's own.
        sync_directory(&self.stage)?;
        self.stage.parent().map_or(Ok(()), sync_directory)?;
        let sha256 = Digest(self.hash.finalize().into());
        let file = FileDigest { name: self.name, bytes: self.at, sha256 };
        Ok(ShardIndex { file, entries: self.entries })
    }

    fn item(
        &mut self,
        fqn: &str,
        path: &[Segment],
        kind: Kind,
        description: &[u8],
        bytes: Option<&[u8]>,
    ) -> Result<(), Error> {
        if self.failed {
            return Err(Error::Incomplete(self.path.clone()));
        }
        let payload = bytes.map(|bytes| Payload {
            name: "data/0",
            crc: crc32fast::hash(bytes),
            size: bytes.len() as u64,
        });
        let small: [(&str, &[u8]); 3] =
            [("data.pkl", description), ("byteorder", b"little"), ("version", b"3\n")];
        let frame = frame(&small, payload.as_ref(), self.at);
        let offset = self.at;
        for part in [&frame.before, bytes.unwrap_or_default(), &frame.after] {
            self.write(part).inspect_err(|_| self.failed = true).at("write", &self.path)?;
        }
        let length = self.at - offset;
        let (fqn, path) = (fqn.to_owned(), path.to_vec());
        self.entries.push(Entry { fqn, path, offset, length, kind });
        Ok(())
    }

    /// Hashes and writes in pieces that stay in the cache between the two.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        for piece in bytes.chunks(256 << 10) {
            self.hash.update(piece);
            self.file.write_all(piece)?;
            self.at += piece.len() as u64;
        }
        Ok(())
    }
}

/// Merges what the ranks wrote into `.metadata`, durably: afterwards PyTorch
/// takes `stage` for a checkpoint. `SHA256SUMS` lists the digests of all files.
/// Returns the digest of the index itself.
///
/// # Errors
/// When shards overlap, leave holes, contradict each other, or their files are
/// not in `stage` in full; or the disk refuses.
pub fn write_metadata(stage: &Path, shards: &[ShardIndex]) -> Result<FileDigest, Error> {
    for shard in shards {
        shard.file.check_size(stage)?;
    }
    let index = merge(shards)?;
    let bytes = index::write::pickle(&index, &save_id(shards))?;
    let metadata = FileDigest {
        name: METADATA.to_owned(),
        bytes: bytes.len() as u64,
        sha256: Digest::of(&bytes),
    };
    let mut files: Vec<FileDigest> = shards.iter().map(|shard| shard.file.clone()).collect();
    files.push(metadata.clone());
    let sums = to_sums(&files);
    replace(&stage.join(".sums.tmp"), &stage.join(SUMS), sums.as_bytes())?;
    replace(&stage.join(".metadata.tmp"), &stage.join(METADATA), &bytes)?;
    Ok(metadata)
}

/// A UUID that depends on nothing but the contents: equal states give equal
/// checkpoints, byte for byte.
fn save_id(shards: &[ShardIndex]) -> String {
    let mut hash = Sha256::new();
    shards.iter().for_each(|shard| hash.update(shard.file.sha256.0));
    let digest: [u8; 32] = hash.finalize().into();
    let mut half = [0; 16];
    half.copy_from_slice(&digest[..16]);
    uuid::Builder::from_random_bytes(half).into_uuid().to_string()
}

fn merge(shards: &[ShardIndex]) -> Result<Index, Error> {
    let mut index = Index::default();
    // Chunks by key and offset: PyTorch looks them up by these two.
    let mut chunks: BTreeMap<&str, BTreeMap<&[u64], Chunk>> = BTreeMap::new();
    for shard in shards {
        let name = &shard.file.name;
        check_name(name).map_err(|detail| conflict(name, detail))?;
        if index.files.contains(name) {
            return Err(conflict(name, "two ranks wrote this file"));
        }
        let file = index.files.len() as u32;
        index.files.push(name.clone());
        for entry in &shard.entries {
            let (offset, length) = (entry.offset, entry.length);
            let place = Place { file, offset, length, form: Form::Archive };
            merge_path(&mut index, entry)?;
            match &entry.kind {
                Kind::Object => {
                    if index.objects.insert(entry.fqn.clone(), place).is_some() {
                        return Err(conflict(&entry.fqn, "two ranks wrote this object"));
                    }
                }
                Kind::Tensor { dtype, shape, region } => {
                    merge_tensor(&mut index, &entry.fqn, *dtype, shape, region)?;
                    let chunk = Chunk { region: region.clone(), place };
                    let at = chunks.entry(&entry.fqn).or_default();
                    merge_chunk(at, &region.offsets, chunk)
                        .map_err(|detail| conflict(&entry.fqn, detail))?;
                }
            }
        }
    }
    for (fqn, chunks) in chunks {
        if let Some(tensor) = index.tensors.get_mut(fqn) {
            tensor.chunks = chunks.into_values().collect();
            tensor
                .check_cover(&Region::whole(&tensor.shape))
                .map_err(|detail| conflict(fqn, detail))?;
        }
    }
    if let Some(both) = index.objects.keys().find(|fqn| index.tensors.contains_key(*fqn)) {
        return Err(conflict(both, "is both a tensor and an object"));
    }
    Ok(index)
}

fn merge_path(index: &mut Index, entry: &Entry) -> Result<(), Error> {
    check_path(&entry.fqn, &entry.path)?;
    match index.paths.get(&entry.fqn) {
        None => {
            index.paths.insert(entry.fqn.clone(), entry.path.clone());
            Ok(())
        }
        Some(path) if *path == entry.path => Ok(()),
        Some(_) => Err(conflict(&entry.fqn, "two ranks give it different paths")),
    }
}

fn merge_tensor(
    index: &mut Index,
    fqn: &str,
    dtype: Dtype,
    shape: &[u64],
    region: &Region,
) -> Result<(), Error> {
    check_region(dtype, shape, region).map_err(|detail| conflict(fqn, detail))?;
    let tensor = index.tensors.entry(fqn.to_owned()).or_insert_with(|| TensorEntry {
        dtype,
        shape: shape.to_vec(),
        chunks: Vec::new(),
    });
    if tensor.dtype == dtype && tensor.shape == shape {
        return Ok(());
    }
    let detail = format!(
        "is a {} of shape {:?} on one rank and a {dtype} of shape {shape:?} on another",
        tensor.dtype, tensor.shape
    );
    Err(conflict(fqn, detail))
}

/// Empty shards of several ranks may share an offset, with each other or with
/// the shard that begins there; one entry stays.
fn merge_chunk<'a>(
    chunks: &mut BTreeMap<&'a [u64], Chunk>,
    offsets: &'a [u64],
    chunk: Chunk,
) -> Result<(), String> {
    match chunks.get(offsets) {
        Some(other) if !chunk.region.is_empty() && !other.region.is_empty() => {
            return Err(format!(
                "two ranks wrote the shards {} and {}",
                other.region, chunk.region
            ));
        }
        Some(_) if chunk.region.is_empty() => {}
        _ => {
            chunks.insert(offsets, chunk);
        }
    }
    Ok(())
}

fn check_region(dtype: Dtype, shape: &[u64], region: &Region) -> Result<(), String> {
    check_shape(dtype, shape)?;
    if region.fits(shape) {
        return Ok(());
    }
    Err(format!("the shard {region} lies outside of the shape {shape:?}"))
}

fn check_path(fqn: &str, path: &[Segment]) -> Result<(), Error> {
    if join(path) == fqn {
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
