//! `elastic ckpt show`: one checkpoint as a tree, for people and programs.

use std::collections::BTreeMap;

use dcp::digest::SUMS;
use dcp::{Checkpoint, Digest, Region, Segment, Value};
use serde::Serialize;
use serde_json::{Value as Json, json};

use crate::cli::ShowArgs;
use crate::command::print::bytes;
use crate::command::{fail, print};
use crate::exit::Exit;

use super::{Error, newest};

/// A file of digests has a line for each file.
const SUMS_LIMIT: u64 = 64 << 20;
/// Values of objects are cut here.
const LONGEST_VALUE: usize = 80;

/// Shows one checkpoint.
pub(super) fn show(args: &ShowArgs) -> Exit {
    match content(args) {
        Ok(content) => {
            let text = if args.json { json_text(&content) } else { content.text() };
            print(&text);
            Exit::Finished
        }
        Err(error) => fail(Exit::Failed, &error),
    }
}

fn json_text(content: &Content) -> String {
    // Text and numbers have no way to fail.
    serde_json::to_string_pretty(content).map(|text| text + "\n").unwrap_or_default()
}

#[derive(Serialize)]
struct Content {
    path: String,
    bytes: u64,
    tensors: BTreeMap<String, Tensor>,
    objects: BTreeMap<String, Object>,
    files: BTreeMap<String, File>,
}

#[derive(Serialize)]
struct Tensor {
    #[serde(serialize_with = "path_json")]
    path: Vec<Segment>,
    dtype: &'static str,
    shape: Vec<u64>,
    bytes: u64,
    shards: Vec<Region>,
    #[serde(skip_serializing_if = "Option::is_none")]
    blake3: Option<Digest>,
}

#[derive(Serialize)]
struct Object {
    #[serde(serialize_with = "path_json")]
    path: Vec<Segment>,
    value: Json,
}

#[derive(Serialize)]
struct File {
    bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    blake3: Option<Digest>,
}

fn path_json<S: serde::Serializer>(path: &[Segment], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(path.iter().map(|segment| match segment {
        Segment::Key(key) => json!(key),
        Segment::Index(index) => json!(index),
    }))
}

fn content(args: &ShowArgs) -> Result<Content, Error> {
    let checkpoint = Checkpoint::open(&newest(&args.dir)?)?;
    let path_of =
        |fqn: &str| checkpoint.path(fqn).map_or_else(|| vec![fqn.into()], <[Segment]>::to_vec);
    let mut tensors = BTreeMap::new();
    for tensor in checkpoint.tensors() {
        let whole = Region::whole(tensor.shape);
        let blake3 = args.hash.then(|| checkpoint.read_vec(tensor.fqn, &whole)).transpose()?;
        let shown = Tensor {
            path: path_of(tensor.fqn),
            dtype: tensor.dtype.torch_name(),
            shape: tensor.shape.to_vec(),
            bytes: whole.elements() * tensor.dtype.size() as u64,
            shards: checkpoint.shards(tensor.fqn).cloned().collect(),
            blake3: blake3.map(|bytes| Digest::of(&bytes)),
        };
        tensors.insert(tensor.fqn.to_owned(), shown);
    }
    let mut objects = BTreeMap::new();
    for fqn in checkpoint.objects() {
        let value = value_json(&checkpoint.object(fqn)?);
        objects.insert(fqn.to_owned(), Object { path: path_of(fqn), value });
    }
    let dir = checkpoint.dir();
    let sums = if dir.exists(SUMS)? { dir.read(SUMS, SUMS_LIMIT)? } else { Vec::new() };
    let digest = |name: &str| {
        let lines = str::from_utf8(&sums).unwrap_or_default().lines();
        let mut pairs = lines.filter_map(|line| line.split_once("  "));
        let (sum, _) = pairs.find(|pair| pair.1 == name)?;
        Digest::try_from(sum.to_owned()).ok()
    };
    let mut files = BTreeMap::new();
    for name in checkpoint.files() {
        let file = File { bytes: dir.open(name)?.len(), blake3: digest(name) };
        files.insert(name.to_owned(), file);
    }
    let bytes = tensors.values().map(|tensor| tensor.bytes).sum();
    Ok(Content { path: dir.path().display().to_string(), bytes, tensors, objects, files })
}

/// A Python value in JSON: tuples become lists, bytes and what is no data text.
fn value_json(value: &Value) -> Json {
    match value {
        Value::None => Json::Null,
        Value::Bool(value) => json!(value),
        Value::Int(value) => json!(value),
        Value::BigInt(bytes) => json!(format!("an integer of {} bytes", bytes.len())),
        Value::Float(value) if value.is_finite() => json!(value),
        Value::Float(value) => json!(value.to_string()),
        Value::Str(text) => json!(text),
        Value::Bytes(bytes) => json!(format!("{} bytes", bytes.len())),
        Value::List(items) | Value::Tuple(items) => items.iter().map(value_json).collect(),
        Value::Dict(pairs) => {
            let pair = |(key, value): &(Value, Value)| {
                let key = match value_json(key) {
                    Json::String(text) => text,
                    other => other.to_string(),
                };
                (key, value_json(value))
            };
            Json::Object(pairs.iter().map(pair).collect())
        }
        Value::Opaque(class) => json!(format!("a {class}")),
    }
}

impl Content {
    /// The tree: a line for each level of a path, once.
    fn text(&self) -> String {
        let mut lines: Vec<(&[Segment], String)> = Vec::new();
        for tensor in self.tensors.values() {
            let shape: Vec<_> = tensor.shape.iter().map(ToString::to_string).collect();
            let mut line = format!(
                "{} [{}] {}, {} shards",
                tensor.dtype,
                shape.join(", "),
                bytes(tensor.bytes),
                tensor.shards.len()
            );
            if let Some(digest) = &tensor.blake3 {
                line += &format!(", {digest}");
            }
            lines.push((&tensor.path, line));
        }
        for object in self.objects.values() {
            let mut value = object.value.to_string();
            if value.chars().count() > LONGEST_VALUE {
                value = value.chars().take(LONGEST_VALUE).collect::<String>() + "…";
            }
            lines.push((&object.path, value));
        }
        lines.sort_by_key(|(path, _)| path.iter().map(ToString::to_string).collect::<Vec<_>>());
        let mut text = format!("{}: {}\n", self.path, bytes(self.bytes));
        let mut open: &[Segment] = &[];
        for (path, line) in &lines {
            let Some((last, above)) = path.split_last() else { continue };
            let shared = above.iter().zip(open).take_while(|(a, b)| a == b).count();
            for (depth, segment) in above.iter().enumerate().skip(shared) {
                text += &format!("{:1$}{segment}\n", "", 2 * depth + 2);
            }
            text += &format!("{:1$}{last}  {line}\n", "", 2 * above.len() + 2);
            open = above;
        }
        for (name, file) in &self.files {
            let digest = file.blake3.map_or_else(|| "no digest".to_owned(), |d| d.to_string());
            text += &format!("{name}  {}  {digest}\n", bytes(file.bytes));
        }
        text
    }
}
