//! What the reader does with bytes from a stranger: the entry points of the fuzz
//! targets, which are no part of the crate's interface. Whatever the bytes are,
//! these return, in memory and time bounded by a constant times their number.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use crate::checkpoint::Checkpoint;
use crate::index::{Chunk, Form, Index, Place, TensorEntry};
use crate::payload;
use crate::pickle::read::Pickle;
use crate::region::Region;
use crate::storage::{Dir, Object, Storage, Upload};

/// A pickle as objects hold it.
pub fn pickle(bytes: &[u8]) {
    let _ = Pickle::parse(bytes).and_then(|pickle| pickle.value(pickle.root));
}

/// An archive as tensors and objects are: read as both.
pub fn zip(bytes: &[u8]) {
    let bytes = bytes.to_vec();
    let _ = payload::object(&bytes);
    let _ = payload::check_archive(&bytes);
    let Ok(tensor) = payload::tensor(&bytes) else { return };
    let region = Region::whole(&tensor.sizes);
    let place = Place { file: 0, offset: 0, length: bytes.len() as u64, form: Form::Archive };
    let entry = TensorEntry {
        dtype: tensor.dtype,
        shape: tensor.sizes,
        chunks: vec![Chunk { region, place }],
    };
    let index = Index {
        tensors: BTreeMap::from([("x".to_owned(), entry)]),
        files: vec!["x".to_owned()],
        ..Index::default()
    };
    use_up(&Checkpoint::of(Memory::dir([("x", bytes)]), index));
}

/// An index, `.metadata`, beside a data file of zeros.
pub fn index(bytes: &[u8]) {
    let files = [(".metadata", bytes.to_vec()), ("__0_0.distcp", vec![0; 4096])];
    if let Ok(checkpoint) = Checkpoint::open_in(Memory::dir(files)) {
        use_up(&checkpoint);
    }
}

/// A file of safetensors.
pub fn safetensors(bytes: &[u8]) {
    let files = [("model.safetensors", bytes.to_vec())];
    if let Ok(checkpoint) = Checkpoint::open_in(Memory::dir(files)) {
        use_up(&checkpoint);
    }
}

/// Reads all that can be read.
fn use_up(checkpoint: &Checkpoint) {
    let _ = checkpoint.verify();
    for tensor in checkpoint.tensors() {
        let _ = checkpoint.read_vec(tensor.fqn, &Region::whole(tensor.shape));
    }
    for fqn in checkpoint.objects() {
        let _ = checkpoint.object(fqn);
    }
}

/// Files that can only be read.
#[derive(Debug)]
struct Memory(BTreeMap<String, Arc<Vec<u8>>>);

impl Memory {
    fn dir<const N: usize>(files: [(&str, Vec<u8>); N]) -> Dir {
        let files = files.map(|(name, bytes)| (name.to_owned(), Arc::new(bytes)));
        Dir::new(Arc::new(Self(files.into())), "")
    }
}

impl Storage for Memory {
    fn path(&self, key: &str) -> PathBuf {
        key.into()
    }

    fn parallelism(&self) -> usize {
        1
    }

    fn open(&self, key: &str) -> io::Result<Box<dyn Object>> {
        let file = self.0.get(key).ok_or(io::ErrorKind::NotFound)?;
        Ok(Box::new(Arc::clone(file)))
    }

    fn list(&self, _: &str) -> io::Result<Vec<String>> {
        Ok(self.0.keys().cloned().collect())
    }

    fn exists(&self, key: &str) -> io::Result<bool> {
        Ok(self.0.contains_key(key))
    }

    fn make_folder(&self, _: &str) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn create(&self, _: &str) -> io::Result<Box<dyn Upload>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn claim(&self, _: &str, _: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn replace(&self, _: &str, _: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn sync(&self, _: &str) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn renames(&self) -> bool {
        false
    }

    fn rename(&self, _: &str, _: &str) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn remove(&self, _: &str) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl Object for Arc<Vec<u8>> {
    fn len(&self) -> u64 {
        (**self).len() as u64
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        (**self).read_at(at, into)
    }
}
