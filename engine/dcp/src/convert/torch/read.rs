//! Reads a file of `torch.save`. Nothing in it is executed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::convert::{Error, Object, Source, Tensor};
use crate::error::SliceError;
use crate::index::check_shape;
use crate::payload::View;
use crate::pickle::read::{Id, Node, Pickle};
use crate::region::{Region, strides};
use crate::storage::{self, Dir};
use crate::value::{Segment, Value, join};
use crate::zip::read::{Record, find, records};

/// Descriptions of models have a few hundred bytes for each tensor.
const DESCRIPTION_LIMIT: u64 = 1 << 30;
/// Nesting that real state dicts stay far below.
const MAX_DEPTH: usize = 100;

/// A state dict in one file. Its keys are flattened as DCP flattens them: dicts
/// always, lists when there is a tensor or a dict in them.
pub struct TorchFile {
    path: PathBuf,
    file: Box<dyn storage::Object>,
    tensors: BTreeMap<String, Entry>,
    objects: BTreeMap<String, (Vec<Segment>, Value)>,
}

struct Entry {
    tensor: Tensor,
    view: View,
    /// Where the storage begins in the file, and its bytes.
    at: u64,
    bytes: u64,
}

impl TorchFile {
    /// Opens a file, and reads its description.
    ///
    /// # Errors
    /// [`Error::Torch`] for a file of another kind, [`Error::Shape`] when it
    /// holds no state dict, and [`Error::Name`] when two of its keys become the
    /// same.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let above = path.parent().filter(|above| !above.as_os_str().is_empty());
        let dir = Dir::at(above.unwrap_or(Path::new(".")))?;
        let shape =
            |detail: &str| Error::Shape { path: path.to_owned(), detail: detail.to_owned() };
        let name = path.file_name().and_then(|name| name.to_str());
        let file = dir.open(name.ok_or_else(|| shape("is no file"))?)?;
        let wrong = |source: SliceError| Error::Torch { path: path.to_owned(), source };
        let read = || -> Result<_, SliceError> {
            let records = records(&*file)?;
            let bytes = find(&records, "data.pkl")?.read(&*file, DESCRIPTION_LIMIT)?;
            Ok((records, bytes))
        };
        let (records, bytes) = read().map_err(wrong)?;
        let pickle = Pickle::parse(&bytes).map_err(|error| wrong(error.into()))?;
        if !matches!(pickle.node(pickle.root), Node::Dict(_)) {
            return Err(shape("holds no dict at the top: save model.state_dict()"));
        }
        let records = records.iter().map(|record| (record.name.as_str(), record)).collect();
        let mut reader = Reader {
            pickle: &pickle,
            file: &*file,
            records,
            tensors: BTreeMap::new(),
            objects: BTreeMap::new(),
            // Sharing makes real state dicts a little larger than their pickle.
            budget: 1024 + 16 * bytes.len(),
        };
        reader.walk(pickle.root, &mut Vec::new()).map_err(|error| match error {
            Walk::Damage(source) => wrong(source),
            Walk::Twice(fqn) => {
                Error::Name { fqn, detail: "two keys of the file become this one".to_owned() }
            }
        })?;
        let Reader { tensors, objects, .. } = reader;
        Ok(Self { path: path.to_owned(), file, tensors, objects })
    }

    fn told<T>(&self, done: std::io::Result<T>) -> Result<T, crate::Error> {
        done.map_err(|source| crate::Error::Io { action: "read", path: self.path.clone(), source })
    }
}

impl Source for TorchFile {
    fn tensors(&self) -> Vec<Tensor> {
        self.tensors.values().map(|entry| entry.tensor.clone()).collect()
    }

    fn read(&self, tensor: &Tensor, region: &Region, into: &mut [u8]) -> Result<(), Error> {
        let entry = self.tensors.get(&tensor.fqn);
        let entry = entry.ok_or_else(|| Error::Missing(tensor.fqn.clone()))?;
        let item = tensor.dtype.size();
        if !region.fits(&tensor.shape) || into.len() as u64 != region.elements() * item as u64 {
            let detail = format!("{region} of {} bytes is no part of it", into.len());
            return Err(crate::Error::Request { fqn: tensor.fqn.clone(), detail }.into());
        }
        if region.is_empty() {
            return Ok(());
        }
        // The stretch of the storage from the first element to the last.
        let step = |d: usize| entry.view.strides[d];
        let dims = region.sizes.len();
        let first = entry.view.first + (0..dims).map(|d| region.offsets[d] * step(d)).sum::<u64>();
        let span = (0..dims).map(|d| (region.sizes[d] - 1) * step(d)).sum::<u64>() + 1;
        let at = entry.at + first * item as u64;
        if span == region.elements() && is_c_order(&region.sizes, &entry.view.strides) {
            self.told(self.file.read_at(at, into))?;
            entry.conjugate(into, item);
            return Ok(());
        }
        let mut stretch = vec![0; (span * item as u64).min(entry.bytes) as usize];
        self.told(self.file.read_at(at, &mut stretch))?;
        let c_order = strides(&region.sizes);
        for (n, into) in (0..).zip(into.chunks_exact_mut(item)) {
            let (mut rest, mut from) = (n, 0);
            for (d, stride) in c_order.iter().enumerate() {
                from += rest / stride * step(d);
                rest %= stride;
            }
            into.copy_from_slice(&stretch[from as usize * item..][..item]);
        }
        entry.conjugate(into, item);
        Ok(())
    }

    fn objects(&self) -> Vec<Object> {
        let object = |(fqn, (path, _)): (&String, &(Vec<Segment>, Value))| Object {
            fqn: fqn.clone(),
            path: path.clone(),
        };
        self.objects.iter().map(object).collect()
    }

    fn value(&self, object: &Object) -> Result<Value, Error> {
        let found = self.objects.get(&object.fqn);
        Ok(found.ok_or_else(|| Error::Missing(object.fqn.clone()))?.1.clone())
    }
}

impl Entry {
    /// Flips the sign of imaginary parts that are stored with the other one.
    fn conjugate(&self, elements: &mut [u8], item: usize) {
        if self.view.conjugate {
            elements.chunks_exact_mut(item).for_each(|element| element[item - 1] ^= 0x80);
        }
    }
}

fn is_c_order(sizes: &[u64], steps: &[u64]) -> bool {
    strides(sizes).iter().zip(steps).zip(sizes).all(|((a, b), &size)| size == 1 || a == b)
}

struct Reader<'a> {
    pickle: &'a Pickle<'a>,
    file: &'a dyn storage::Object,
    records: BTreeMap<&'a str, &'a Record>,
    tensors: BTreeMap<String, Entry>,
    objects: BTreeMap<String, (Vec<Segment>, Value)>,
    budget: usize,
}

enum Walk {
    Damage(SliceError),
    Twice(String),
}

impl<E: Into<SliceError>> From<E> for Walk {
    fn from(error: E) -> Self {
        Self::Damage(error.into())
    }
}

impl Reader<'_> {
    fn walk(&mut self, id: Id, path: &mut Vec<Segment>) -> Result<(), Walk> {
        self.spend(path.len())?;
        match self.pickle.node(id) {
            Node::Dict(pairs) => {
                for &(key, value) in pairs {
                    path.push(Segment::Key(self.key(key)?));
                    self.walk(value, path)?;
                    path.pop();
                }
                Ok(())
            }
            Node::List(items) if self.is_nested(id, MAX_DEPTH)? => {
                for (n, &item) in (0..).zip(items) {
                    path.push(Segment::Index(n));
                    self.walk(item, path)?;
                    path.pop();
                }
                Ok(())
            }
            _ => match self.tensor(id) {
                Some(tensor) => self.add_tensor(tensor, path),
                None => self.add_object(id, path),
            },
        }
    }

    /// Bounds the walk: a few bytes can refer to themselves without end.
    fn spend(&mut self, depth: usize) -> Result<(), Walk> {
        use crate::pickle::Error::Unbounded;
        if depth > MAX_DEPTH {
            return Err(Unbounded("100 levels").into());
        }
        self.budget = self.budget.checked_sub(1).ok_or(Unbounded("16 times its size"))?;
        Ok(())
    }

    /// As `str(key)` for the keys that state dicts have.
    fn key(&self, id: Id) -> Result<String, Walk> {
        Ok(match self.pickle.node(id) {
            Node::Str(text) => (*text).to_owned(),
            Node::Int(value) => value.to_string(),
            Node::Bool(true) => "True".to_owned(),
            Node::Bool(false) => "False".to_owned(),
            Node::None => "None".to_owned(),
            _ => return Err(self.pickle.unexpected("a key that is text or a number", id).into()),
        })
    }

    /// Whether there is a tensor or a dict in a list.
    fn is_nested(&mut self, id: Id, depth: usize) -> Result<bool, Walk> {
        self.spend(MAX_DEPTH - depth)?;
        let pickle = self.pickle;
        let Node::List(items) = pickle.node(id) else {
            return Ok(matches!(pickle.node(id), Node::Dict(_)) || self.tensor(id).is_some());
        };
        let depth = depth.checked_sub(1).ok_or(crate::pickle::Error::Unbounded("100 levels"))?;
        for &item in items {
            if self.is_nested(item, depth)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The call that makes a tensor, without the parameter around it.
    fn tensor(&self, id: Id) -> Option<Id> {
        let Node::Object { callable, args, .. } = self.pickle.node(id) else { return None };
        match self.pickle.node(*callable) {
            Node::Global { module: "torch._utils", name: "_rebuild_parameter" } => {
                match self.pickle.node(*args) {
                    Node::Tuple(args) => self.tensor(*args.first()?),
                    _ => None,
                }
            }
            Node::Global { module: "torch._utils", name } => {
                matches!(*name, "_rebuild_tensor_v2" | "_rebuild_tensor_v3").then_some(id)
            }
            _ => None,
        }
    }

    fn add_tensor(&mut self, id: Id, path: &[Segment]) -> Result<(), Walk> {
        let view = View::of(self.pickle, id)?;
        let record = self.records.get(format!("data/{}", view.key).as_str()).copied();
        let record =
            record.ok_or_else(|| crate::zip::Error::Missing(format!("data/{}", view.key)))?;
        let at = record.locate(self.file)?;
        let item = view.dtype.size() as u64;
        let fits = check_shape(view.dtype, &view.sizes).is_ok()
            && view.storage_bytes == Some(record.size)
            && view.inside(record.size / item);
        if !fits {
            let detail = format!("{} reaches out of its storage", join(path));
            return Err(SliceError::Unsupported(detail).into());
        }
        let fqn = join(path);
        let tensor = Tensor {
            fqn: fqn.clone(),
            path: path.to_vec(),
            dtype: view.dtype,
            shape: view.sizes.clone(),
        };
        let entry = Entry { tensor, view, at, bytes: record.size };
        let twice = self.objects.contains_key(&fqn) || self.tensors.contains_key(&fqn);
        if twice {
            return Err(Walk::Twice(fqn));
        }
        self.tensors.insert(fqn, entry);
        Ok(())
    }

    fn add_object(&mut self, id: Id, path: &[Segment]) -> Result<(), Walk> {
        let fqn = join(path);
        if self.objects.contains_key(&fqn) || self.tensors.contains_key(&fqn) {
            return Err(Walk::Twice(fqn));
        }
        let value = self.pickle.value(id)?;
        self.objects.insert(fqn, (path.to_vec(), value));
        Ok(())
    }
}
