//! From the pickle of a `Metadata` object to an [`Index`].

use std::collections::HashMap;
use std::path::Path;

use crate::error::Error;
use crate::payload::{dtype_of, uint, uints};
use crate::pickle;
use crate::pickle::read::{Id, Node, Pickle};
use crate::region::Region;
use crate::value::Segment;

use super::{Chunk, Form, Index, Place, TYPES, TensorEntry, check_name, check_shape};

/// Fields of an object; PyTorch's have at most five.
const MOST_FIELDS: usize = 100;

/// Parses an index; `path` names it in errors.
pub(crate) fn parse(bytes: &[u8], path: &Path) -> Result<Index, Error> {
    let damaged = |source| Error::Index { path: path.to_owned(), fqn: None, source };
    let pickle = Pickle::parse(bytes).map_err(damaged)?;
    let reader = Reader { pickle: &pickle, path };
    let mut files = Files::default();
    let places = reader.places(&mut files)?;
    let mut index = Index { files: files.names, ..Index::default() };
    index.paths = reader.paths()?;
    for &(fqn, entry) in reader
        .field(pickle.root, "state_dict_metadata")
        .and_then(|d| dict(&pickle, d))
        .map_err(damaged)?
    {
        let fqn = text(&pickle, fqn).map_err(damaged)?;
        match reader.class(entry) {
            Some("TensorStorageMetadata") => {
                let tensor = reader.tensor(fqn, entry, &places)?;
                index.tensors.insert(fqn.to_owned(), tensor);
            }
            Some("BytesStorageMetadata") => {
                let place = places.get(&(fqn, None));
                let place = place.ok_or_else(|| reader.entry(fqn, "has no bytes in any file"))?;
                index.objects.insert(fqn.to_owned(), *place);
            }
            _ => return Err(damaged(pickle.unexpected("a tensor's or object's metadata", entry))),
        }
    }
    Ok(index)
}

/// Where each item is, by name and, for tensors, offset.
type Places<'a> = HashMap<(&'a str, Option<Vec<u64>>), Place>;

#[derive(Default)]
struct Files {
    names: Vec<String>,
    known: HashMap<String, u32>,
}

struct Reader<'a> {
    pickle: &'a Pickle<'a>,
    path: &'a Path,
}

impl<'a> Reader<'a> {
    fn tensor(&self, fqn: &str, id: Id, places: &Places<'a>) -> Result<TensorEntry, Error> {
        let wrong = |source| self.damaged(Some(fqn), source);
        let properties = self.field(id, "properties").map_err(wrong)?;
        let dtype = self.dtype(properties).map_err(wrong)?;
        let shape = self.field(id, "size").and_then(|s| uints(self.pickle, s)).map_err(wrong)?;
        check_shape(dtype, &shape).map_err(|detail| self.entry(fqn, detail))?;
        let mut chunks = Vec::new();
        let list = self.field(id, "chunks").map_err(wrong)?;
        let Node::List(list) = self.pickle.node(list) else {
            return Err(wrong(self.pickle.unexpected("a list of chunks", list)));
        };
        for &chunk in list {
            let part = |name| self.field(chunk, name).and_then(|id| uints(self.pickle, id));
            let region = Region {
                offsets: part("offsets").map_err(wrong)?,
                sizes: part("sizes").map_err(wrong)?,
            };
            if !region.fits(&shape) {
                let detail = format!("the shard {region} lies outside of the shape {shape:?}");
                return Err(self.entry(fqn, detail));
            }
            // PyTorch reads nothing for empty shards either.
            if region.is_empty() {
                continue;
            }
            let key = (fqn, Some(region.offsets.clone()));
            let place = *places
                .get(&key)
                .ok_or_else(|| self.entry(fqn, format!("the shard {region} is in no file")))?;
            chunks.push(Chunk { region, place });
        }
        Ok(TensorEntry { dtype, shape, chunks })
    }

    /// The dtype of a `TensorProperties`, whose state is a tuple.
    fn dtype(&self, id: Id) -> Result<crate::Dtype, pickle::Error> {
        const EXPECTED: &str = "tensor properties";
        let &Node::Object { state: Some(state), .. } = self.pickle.node(id) else {
            return Err(self.pickle.unexpected(EXPECTED, id));
        };
        match self.pickle.node(state) {
            Node::Tuple(fields) if !fields.is_empty() => dtype_of(self.pickle, fields[0]),
            _ => Err(self.pickle.unexpected(EXPECTED, state)),
        }
    }

    fn places(&self, files: &mut Files) -> Result<Places<'a>, Error> {
        let wrong = |source| self.damaged(None, source);
        let storage = self.field(self.pickle.root, "storage_data").map_err(wrong)?;
        let storage = dict(self.pickle, storage).map_err(wrong)?;
        let mut places = Places::with_capacity(storage.len());
        for &(key, info) in storage {
            let fqn = self.field(key, "fqn").and_then(|id| text(self.pickle, id)).map_err(wrong)?;
            let wrong = |source| self.damaged(Some(fqn), source);
            let offset = self.optional(key, "offset").map_err(wrong)?;
            let offset = offset.map(|id| uints(self.pickle, id)).transpose().map_err(wrong)?;
            let form = self.form(fqn, info)?;
            let number = |name| self.field(info, name).and_then(|id| uint(self.pickle, id));
            let name = self.field(info, "relative_path").map_err(wrong)?;
            let name = text(self.pickle, name).map_err(wrong)?;
            let place = Place {
                file: files.number(name).map_err(|detail| self.entry(fqn, detail))?,
                offset: number("offset").map_err(wrong)?,
                length: number("length").map_err(wrong)?,
                form,
            };
            if place.offset.checked_add(place.length).is_none_or(|end| end > i64::MAX as u64) {
                return Err(self.entry(fqn, "lies beyond the end of any file"));
            }
            if places.insert((fqn, offset), place).is_some() {
                return Err(self.entry(fqn, "has two places for one shard"));
            }
        }
        Ok(places)
    }

    /// Which transforms the bytes went through.
    fn form(&self, fqn: &str, info: Id) -> Result<Form, Error> {
        let wrong = |source| self.damaged(Some(fqn), source);
        let Some(id) = self.optional(info, "transform_descriptors").map_err(wrong)? else {
            return Ok(Form::Archive);
        };
        let (Node::List(names) | Node::Tuple(names)) = self.pickle.node(id) else {
            return Err(wrong(self.pickle.unexpected("a list of transforms", id)));
        };
        match names.as_slice() {
            [] => Ok(Form::Archive),
            &[one] => match text(self.pickle, one).map_err(wrong)? {
                "stream.zstd/1" | "stream.zstd" => Ok(Form::Zstd),
                other => Err(self.entry(
                    fqn,
                    format!("is stored through {other:?}; only \"stream.zstd/1\" is known"),
                )),
            },
            // PyTorch itself cannot read these: it stores them in the wrong order.
            _ => Err(self.entry(fqn, "is stored through several transforms")),
        }
    }

    /// `planner_data`, which may be absent or of another planner.
    fn paths(&self) -> Result<std::collections::BTreeMap<String, Vec<Segment>>, Error> {
        let mut paths = std::collections::BTreeMap::new();
        let planner =
            self.optional(self.pickle.root, "planner_data").map_err(|e| self.damaged(None, e))?;
        let Some(Node::Dict(pairs)) = planner.map(|id| self.pickle.node(id)) else {
            return Ok(paths);
        };
        let mut budget = self.pickle.budget();
        for &(fqn, path) in pairs {
            let (&Node::Str(fqn), Node::Tuple(path)) =
                (self.pickle.node(fqn), self.pickle.node(path))
            else {
                continue;
            };
            let segment = |&id: &Id| match *self.pickle.node(id) {
                Node::Str(key) => Some(Segment::Key(key.to_owned())),
                Node::Int(index) => u64::try_from(index).ok().map(Segment::Index),
                _ => None,
            };
            // Long keys that are told once and used often would fill any memory.
            let spent: usize = path.iter().map(|&id| self.pickle.text_len(id) + 1).sum();
            budget = budget.checked_sub(spent).ok_or_else(|| {
                self.damaged(Some(fqn), pickle::Error::Unbounded("16 times its size"))
            })?;
            if let Some(path) = path.iter().map(segment).collect() {
                paths.insert(fqn.to_owned(), path);
            }
        }
        Ok(paths)
    }

    /// The class of an object of DCP's own types.
    fn class(&self, id: Id) -> Option<&'a str> {
        let &Node::Object { callable, .. } = self.pickle.node(id) else { return None };
        match self.pickle.node(callable) {
            &Node::Global { module: TYPES, name } => Some(name),
            _ => None,
        }
    }

    /// A field of an object whose state is a dict.
    fn field(&self, id: Id, name: &'static str) -> Result<Id, pickle::Error> {
        self.optional(id, name)?.ok_or_else(|| self.pickle.unexpected(name, id))
    }

    /// The same, `None` when the field is absent or None: older versions lack some.
    fn optional(&self, id: Id, name: &'static str) -> Result<Option<Id>, pickle::Error> {
        let &Node::Object { state: Some(state), .. } = self.pickle.node(id) else {
            return Err(self.pickle.unexpected("an object with fields", id));
        };
        let fields = dict(self.pickle, state)?;
        // Many objects may share one state.
        if fields.len() > MOST_FIELDS {
            return Err(self.pickle.unexpected("at most 100 fields", state));
        }
        let found = fields
            .iter()
            .find(|&&(key, _)| matches!(self.pickle.node(key), Node::Str(key) if *key == name));
        Ok(found.map(|&(_, value)| value).filter(|&v| !matches!(self.pickle.node(v), Node::None)))
    }

    fn damaged(&self, fqn: Option<&str>, source: pickle::Error) -> Error {
        Error::Index { path: self.path.to_owned(), fqn: fqn.map(str::to_owned), source }
    }

    fn entry(&self, fqn: &str, detail: impl Into<String>) -> Error {
        Error::Entry { path: self.path.to_owned(), fqn: fqn.to_owned(), detail: detail.into() }
    }
}

impl Files {
    fn number(&mut self, name: &str) -> Result<u32, String> {
        if let Some(&number) = self.known.get(name) {
            return Ok(number);
        }
        check_name(name)?;
        let number = self.names.len() as u32;
        self.names.push(name.to_owned());
        self.known.insert(name.to_owned(), number);
        Ok(number)
    }
}

fn dict<'p>(pickle: &'p Pickle<'_>, id: Id) -> Result<&'p [(Id, Id)], pickle::Error> {
    match pickle.node(id) {
        Node::Dict(pairs) => Ok(pairs),
        _ => Err(pickle.unexpected("a dict", id)),
    }
}

fn text<'a>(pickle: &Pickle<'a>, id: Id) -> Result<&'a str, pickle::Error> {
    match pickle.node(id) {
        &Node::Str(text) => Ok(text),
        _ => Err(pickle.unexpected("text", id)),
    }
}
