//! Into a file that `torch.load(weights_only=True)` reads.

use std::path::Path;

use crate::convert::fresh::Fresh;
use crate::convert::pieces::Pieces;
use crate::convert::{Error, Progress, Report, Source, Tensor};
use crate::payload::tensor_call;
use crate::pickle::{self, write::Writer};
use crate::region::Region;
use crate::value::Value;
use crate::zip::stream::Archive;

use super::nest::Nest;

/// Writes a state dict, nested by its paths. Objects that are no plain data are
/// skipped.
///
/// # Errors
/// When the target exists, paths contradict each other, the source is damaged,
/// or the disk refuses.
pub fn to_torch(source: &dyn Source, to: &Path, progress: Progress<'_>) -> Result<Report, Error> {
    let tensors = source.tensors();
    let mut report = Report { tensors: tensors.len(), ..Report::default() };
    report.bytes = tensors.iter().map(Tensor::bytes).sum();
    let objects = source.objects();
    let mut values = Vec::new();
    for object in &objects {
        let value = source.value(object)?;
        if is_plain(&value) {
            values.push((object, value));
            report.objects += 1;
        } else {
            report.skipped.push(object.fqn.clone());
        }
    }
    let mut nest = Nest::new();
    for (n, tensor) in tensors.iter().enumerate() {
        nest.insert(&tensor.fqn, &tensor.path, Leaf::Tensor(n, tensor))?;
    }
    for (object, value) in &values {
        nest.insert(&object.fqn, &object.path, Leaf::Value(value))?;
    }
    let description = describe(&nest)
        .map_err(|source| crate::Error::Value { fqn: "data.pkl".to_owned(), source })?;
    let fresh = Fresh::at(to)?;
    let mut file = fresh.file()?;
    let mut out = |bytes: &[u8]| fresh.told(file.write(bytes));
    let mut archive = Archive::default();
    out(&archive.small("data.pkl", &description))?;
    out(&archive.small("byteorder", b"little"))?;
    let mut pieces = Pieces::new(source, &tensors, progress);
    for (n, tensor) in tensors.iter().enumerate() {
        out(&archive.begin(&format!("data/{n}"), tensor.bytes()))?;
        let mut crc = crc32fast::Hasher::new();
        pieces.stream(tensor, &Region::whole(&tensor.shape), |bytes| {
            crc.update(bytes);
            out(bytes)
        })?;
        out(&archive.end(crc.finalize()))?;
    }
    out(&archive.small("version", b"3\n"))?;
    out(&archive.finish())?;
    let finished = file.finish();
    fresh.told(finished)?;
    fresh.keep()?;
    Ok(report)
}

enum Leaf<'a> {
    /// And the number of its storage.
    Tensor(usize, &'a Tensor),
    Value(&'a Value),
}

fn describe(nest: &Nest<'_, Leaf<'_>>) -> Result<Vec<u8>, pickle::Error> {
    let mut p = Writer::new();
    write(&mut p, nest)?;
    Ok(p.finish())
}

fn write(p: &mut Writer, nest: &Nest<'_, Leaf<'_>>) -> Result<(), pickle::Error> {
    match nest {
        Nest::Leaf(Leaf::Tensor(n, tensor)) => {
            tensor_call(p, tensor.dtype, &tensor.shape, &n.to_string())
        }
        Nest::Leaf(Leaf::Value(value)) => p.value(value),
        Nest::Dict(dict) => p.dict(|p| {
            dict.iter().try_for_each(|(key, value)| {
                p.name(key)?;
                write(p, value)
            })
        }),
        Nest::List(list) => p.list(|p| {
            let last = list.keys().last().copied().unwrap_or_default();
            (0..=last).try_for_each(|at| match list.get(&at) {
                Some(value) => write(p, value),
                None => {
                    p.none();
                    Ok(())
                }
            })
        }),
    }
}

/// Whether all of a value can be written.
fn is_plain(value: &Value) -> bool {
    match value {
        Value::Opaque(_) => false,
        Value::List(items) | Value::Tuple(items) => items.iter().all(is_plain),
        Value::Dict(pairs) => pairs.iter().all(|(key, value)| is_plain(key) && is_plain(value)),
        _ => true,
    }
}
