//! Python values: the objects of a checkpoint, and the paths of its keys.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One step of the path by which a key is reached in the nested state dict
/// (`planner_data`). A key's name is its path joined by dots.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Segment {
    /// A key of a dict. May hold dots.
    Key(String),
    /// A position in a list.
    Index(u64),
}

/// A Python value that is data, never code: reading one executes nothing.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// `None`
    None,
    /// `True`, `False`
    Bool(bool),
    /// An integer of 64 bits.
    Int(i64),
    /// A larger integer: little-endian two's complement.
    BigInt(Vec<u8>),
    /// `float`
    Float(f64),
    /// `str`
    Str(String),
    /// `bytes`
    Bytes(Vec<u8>),
    /// `list`
    List(Vec<Value>),
    /// `tuple`, and `torch.Size`
    Tuple(Vec<Value>),
    /// `dict`, in order
    Dict(Vec<(Value, Value)>),
    /// Anything else, by the dotted name of its class, such as `_io.BytesIO`,
    /// or of the global that it is, such as `torch.float32`. It cannot be
    /// written again.
    Opaque(String),
}

impl Value {
    /// The integer, when it is one.
    #[must_use]
    pub fn as_int(&self) -> Option<i64> {
        if let Self::Int(value) = self { Some(*value) } else { None }
    }

    /// The number, when it is an integer or a float.
    #[must_use]
    pub fn as_float(&self) -> Option<f64> {
        match self {
            Self::Float(value) => Some(*value),
            Self::Int(value) => Some(*value as f64),
            _ => None,
        }
    }

    /// The text, when it is one.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        if let Self::Str(value) = self { Some(value) } else { None }
    }

    /// The bytes, when it is bytes.
    #[must_use]
    pub fn as_bytes(&self) -> Option<&[u8]> {
        if let Self::Bytes(value) = self { Some(value) } else { None }
    }
}

impl From<&str> for Segment {
    fn from(key: &str) -> Self {
        Self::Key(key.to_owned())
    }
}

impl From<u64> for Segment {
    fn from(index: u64) -> Self {
        Self::Index(index)
    }
}

impl fmt::Display for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key(key) => f.write_str(key),
            Self::Index(index) => index.fmt(f),
        }
    }
}

/// The name of a key: its path joined by dots.
#[must_use]
pub fn join(path: &[Segment]) -> String {
    path.iter().map(Segment::to_string).collect::<Vec<_>>().join(".")
}

/// Whether `name` is the path joined by dots; merging asks it of every shard.
pub(crate) fn joins_to(path: &[Segment], name: &str) -> bool {
    let mut rest = Some(name);
    for (n, segment) in path.iter().enumerate() {
        let dot = if n == 0 { "" } else { "." };
        rest = rest.and_then(|rest| rest.strip_prefix(dot)).and_then(|rest| match segment {
            Segment::Key(key) => rest.strip_prefix(key.as_str()),
            Segment::Index(index) => rest.strip_prefix(index.to_string().as_str()),
        });
    }
    rest == Some("")
}
