//! From nodes to [`Value`]s, within bounds: a few hundred bytes of pickle can
//! refer to themselves so often that the unfolded value fills any memory.

use crate::value::Value;

use super::Error;
use super::read::{Id, Node, Pickle};

/// Nesting that real state dicts stay far below.
const MAX_DEPTH: usize = 100;

impl<'a> Pickle<'a> {
    /// The value of a node, whatever it is.
    pub(crate) fn value(&self, id: Id) -> Result<Value, Error> {
        self.unfold(id, MAX_DEPTH, &mut self.budget())
    }

    /// Nodes and bytes that a walk may visit: sharing makes real values a little
    /// larger than their pickle.
    pub(crate) fn budget(&self) -> usize {
        self.input.saturating_mul(16).saturating_add(1024)
    }

    /// Bytes of a text; zero for anything else.
    pub(crate) fn text_len(&self, id: Id) -> usize {
        if let Node::Str(text) = self.node(id) { text.len() } else { 0 }
    }

    fn unfold(&self, id: Id, depth: usize, budget: &mut usize) -> Result<Value, Error> {
        let depth = depth.checked_sub(1).ok_or(Error::Unbounded("100 levels"))?;
        let node = self.node(id);
        let own = match node {
            Node::Str(text) => text.len(),
            Node::Bytes(bytes) | Node::Big(bytes) => bytes.len(),
            _ => 0,
        };
        *budget = budget.checked_sub(1 + own).ok_or(Error::Unbounded("16 times its size"))?;
        let mut items = |ids: &[Id]| -> Result<Vec<Value>, Error> {
            ids.iter().map(|&id| self.unfold(id, depth, budget)).collect()
        };
        Ok(match node {
            Node::None => Value::None,
            Node::Bool(value) => Value::Bool(*value),
            Node::Int(value) => Value::Int(*value),
            Node::Big(bytes) => Value::BigInt(bytes.to_vec()),
            Node::Float(value) => Value::Float(*value),
            Node::Str(text) => Value::Str((*text).to_owned()),
            Node::Bytes(bytes) => Value::Bytes(bytes.to_vec()),
            Node::List(ids) => Value::List(items(ids)?),
            Node::Tuple(ids) => Value::Tuple(items(ids)?),
            Node::Dict(pairs) => {
                let mut dict = Vec::new();
                for &(key, value) in pairs {
                    let key = self.unfold(key, depth, budget)?;
                    dict.push((key, self.unfold(value, depth, budget)?));
                }
                Value::Dict(dict)
            }
            Node::Global { module, name } => Value::Opaque(format!("{module}.{name}")),
            Node::Persistent(_) => Value::Opaque("storage".to_owned()),
            Node::Object { callable, args, .. } => match self.known_call(*callable, *args)? {
                Known::Latin1(text) => {
                    let wrong = || self.unexpected("latin1 text", id);
                    Value::Bytes(latin1(text).ok_or_else(wrong)?)
                }
                Known::Size(size) => return self.unfold(size, depth, budget),
                Known::Other(class) => Value::Opaque(class),
            },
        })
    }

    /// The two calls that are data: `_codecs.encode` (protocol 2 has no bytes)
    /// and `torch.Size`.
    fn known_call(&self, callable: Id, args: Id) -> Result<Known<'a>, Error> {
        let Node::Global { module, name } = self.node(callable) else {
            return Ok(Known::Other("object".to_owned()));
        };
        let Node::Tuple(args) = self.node(args) else {
            return Err(self.unexpected("a tuple of arguments", args));
        };
        Ok(match (*module, *name, args.as_slice()) {
            ("_codecs", "encode", &[text, encoding]) => {
                match (self.node(text), self.node(encoding)) {
                    (Node::Str(text), Node::Str("latin1" | "latin-1")) => Known::Latin1(text),
                    _ => return Err(self.unexpected("latin1 text", text)),
                }
            }
            ("torch", "Size", &[size]) => Known::Size(size),
            _ => Known::Other(format!("{module}.{name}")),
        })
    }

    /// The error of a node that is something else than what belongs there.
    pub(crate) fn unexpected(&self, expected: &'static str, id: Id) -> Error {
        let found = match self.node(id) {
            Node::None => "None".to_owned(),
            Node::Bool(value) => value.to_string(),
            Node::Int(value) => value.to_string(),
            Node::Big(_) => "a big integer".to_owned(),
            Node::Float(value) => value.to_string(),
            Node::Str(text) => format!("{:?}", text.chars().take(80).collect::<String>()),
            Node::Bytes(_) => "bytes".to_owned(),
            Node::List(items) => format!("a list of {}", items.len()),
            Node::Tuple(items) => format!("a tuple of {}", items.len()),
            Node::Dict(items) => format!("a dict of {}", items.len()),
            Node::Global { module, name } => format!("{module}.{name}"),
            Node::Object { callable, .. } => match self.node(*callable) {
                Node::Global { module, name } => format!("a {module}.{name}"),
                _ => "an object".to_owned(),
            },
            Node::Persistent(_) => "a storage".to_owned(),
        };
        Error::Unexpected { at: self.position(id), expected, found }
    }
}

enum Known<'a> {
    Latin1(&'a str),
    Size(Id),
    Other(String),
}

fn latin1(text: &str) -> Option<Vec<u8>> {
    text.chars().map(|c| u8::try_from(c).ok()).collect()
}
