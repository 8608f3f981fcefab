//! What differs between two state dicts, and by how much.

use std::collections::BTreeMap;

use crate::dtype::Dtype;
use crate::load::convert::{convert, is_possible};
use crate::region::Region;

use super::pieces::split;
use super::{Error, Progress, Source, Tensor};

/// Bytes of each side that are compared at once.
const PIECE: u64 = 4 << 20;

/// A key that is not the same in both.
#[derive(Clone, Debug, PartialEq)]
pub enum Difference {
    /// Only the first has it.
    OnlyFirst(String),
    /// Only the second has it.
    OnlySecond(String),
    /// Tensors of another type or shape, as text, or a tensor and an object.
    Kind {
        /// The key.
        fqn: String,
        /// What the first has.
        first: String,
        /// What the second has.
        second: String,
    },
    /// Tensors whose elements differ.
    Elements {
        /// The key.
        fqn: String,
        /// How many elements have other bits.
        differing: u64,
        /// Of so many.
        elements: u64,
        /// The largest distance of two numbers; infinite when one is not a
        /// number, and `None` for types without an order.
        largest: Option<f64>,
    },
    /// Objects of different values.
    Value(String),
}

/// Compares two state dicts bit for bit. Returns the differences, in order of
/// their keys.
///
/// # Errors
/// When one of them is damaged.
pub fn diff(
    first: &dyn Source,
    second: &dyn Source,
    progress: Progress<'_>,
) -> Result<Vec<Difference>, Error> {
    let (a, b) = (first.tensors(), second.tensors());
    let total = a.iter().map(Tensor::bytes).sum();
    let b: BTreeMap<&str, &Tensor> = b.iter().map(|tensor| (tensor.fqn.as_str(), tensor)).collect();
    let mut found: BTreeMap<String, Difference> = BTreeMap::new();
    let mut done = 0;
    for tensor in &a {
        let fqn = &tensor.fqn;
        let difference = match b.get(fqn.as_str()) {
            None => Some(Difference::OnlyFirst(fqn.clone())),
            Some(other) if (other.dtype, &other.shape) != (tensor.dtype, &tensor.shape) => {
                let text = |tensor: &Tensor| format!("{} {:?}", tensor.dtype, tensor.shape);
                let (first, second) = (text(tensor), text(other));
                Some(Difference::Kind { fqn: fqn.clone(), first, second })
            }
            Some(other) => elements(first, tensor, second, other)?,
        };
        found.extend(difference.map(|difference| (fqn.clone(), difference)));
        done += tensor.bytes();
        progress(done, total);
    }
    let names: BTreeMap<&str, ()> = a.iter().map(|tensor| (tensor.fqn.as_str(), ())).collect();
    for fqn in b.keys().filter(|fqn| !names.contains_key(*fqn)) {
        found.insert((*fqn).to_owned(), Difference::OnlySecond((*fqn).to_owned()));
    }
    objects(first, second, &mut found)?;
    Ok(found.into_values().collect())
}

fn objects(
    first: &dyn Source,
    second: &dyn Source,
    found: &mut BTreeMap<String, Difference>,
) -> Result<(), Error> {
    let (a, b) = (first.objects(), second.objects());
    let mut b: BTreeMap<String, _> = b.into_iter().map(|o| (o.fqn.clone(), o)).collect();
    for object in a {
        let fqn = object.fqn.clone();
        let Some(other) = b.remove(&fqn) else {
            found.entry(fqn.clone()).or_insert(Difference::OnlyFirst(fqn));
            continue;
        };
        // Of opaque objects only the bytes can be compared.
        let same = match (first.archive(&object)?, second.archive(&other)?) {
            (Some(one), Some(other)) if one == other => true,
            _ => first.value(&object)? == second.value(&other)?,
        };
        if !same {
            found.insert(fqn.clone(), Difference::Value(fqn));
        }
    }
    for fqn in b.into_keys() {
        found.entry(fqn.clone()).or_insert(Difference::OnlySecond(fqn));
    }
    Ok(())
}

fn elements(
    first: &dyn Source,
    a: &Tensor,
    second: &dyn Source,
    b: &Tensor,
) -> Result<Option<Difference>, Error> {
    let item = a.dtype.size();
    let (mut one, mut other) = (Vec::new(), Vec::new());
    let (mut differing, mut elements, mut largest) = (0, 0, 0f64);
    for piece in split(&Region::whole(&a.shape), item as u64, PIECE) {
        let bytes = piece.elements() as usize * item;
        one.resize(bytes, 0);
        other.resize(bytes, 0);
        first.read(a, &piece, &mut one)?;
        second.read(b, &piece, &mut other)?;
        elements += piece.elements();
        if one == other {
            continue;
        }
        let pairs = one.chunks_exact(item).zip(other.chunks_exact(item));
        for (x, y) in pairs.filter(|(x, y)| x != y) {
            differing += 1;
            largest = largest.max(distance(a.dtype, x, y));
        }
    }
    let fqn = a.fqn.clone();
    let largest = is_possible(a.dtype, Dtype::F64).then_some(largest);
    Ok((differing > 0).then_some(Difference::Elements { fqn, differing, elements, largest }))
}

fn distance(dtype: Dtype, x: &[u8], y: &[u8]) -> f64 {
    let number = |bytes: &[u8]| {
        let mut wide = [0; 8];
        if is_possible(dtype, Dtype::F64) {
            convert(dtype, bytes, Dtype::F64, &mut wide);
        }
        f64::from_le_bytes(wide)
    };
    let distance = (number(x) - number(y)).abs();
    if distance.is_nan() { f64::INFINITY } else { distance }
}
