//! Nested state dicts out of keys with paths, as PyTorch's `dcp_to_torch` nests
//! them.

use std::collections::BTreeMap;

use crate::convert::Error;
use crate::value::Segment;

/// A list has no more positions than this: the path of a key may name any.
const LONGEST_LIST: u64 = 1 << 20;

/// A nested state dict with leaves of any kind.
#[derive(Debug)]
pub(super) enum Nest<'a, T> {
    Leaf(T),
    Dict(BTreeMap<&'a str, Nest<'a, T>>),
    /// Positions that no key names are `None` in Python.
    List(BTreeMap<u64, Nest<'a, T>>),
}

impl<'a, T> Nest<'a, T> {
    /// An empty state dict.
    pub(super) fn new() -> Self {
        Self::Dict(BTreeMap::new())
    }

    /// Puts a leaf where its path says.
    pub(super) fn insert(&mut self, fqn: &str, path: &'a [Segment], leaf: T) -> Result<(), Error> {
        let wrong = |detail: &str| Error::Name { fqn: fqn.to_owned(), detail: detail.to_owned() };
        let Some((first, rest)) = path.split_first() else {
            return Err(wrong("its path is empty"));
        };
        // What the rest of the path needs below.
        let below = || match rest.first() {
            Some(Segment::Key(_)) | None => Self::new(),
            Some(Segment::Index(_)) => Self::List(BTreeMap::new()),
        };
        let conflict = "its path leads through another key";
        if rest.is_empty() {
            let before = match (self, first) {
                (Self::Dict(dict), Segment::Key(key)) => dict.insert(key, Self::Leaf(leaf)),
                (Self::List(list), Segment::Index(at)) if *at < LONGEST_LIST => {
                    list.insert(*at, Self::Leaf(leaf))
                }
                _ => return Err(wrong(conflict)),
            };
            return before.map_or(Ok(()), |_| Err(wrong(conflict)));
        }
        match (self, first) {
            (Self::Dict(dict), Segment::Key(key)) => {
                dict.entry(key).or_insert_with(below).insert(fqn, rest, leaf)
            }
            (Self::List(list), Segment::Index(at)) if *at < LONGEST_LIST => {
                list.entry(*at).or_insert_with(below).insert(fqn, rest, leaf)
            }
            _ => Err(wrong(conflict)),
        }
    }
}
