//! Into DCP, as any number of ranks would have written it.

use std::path::Path;

use crate::region::Region;
use crate::writer::{ShardWriter, write_index};

use super::fresh::Fresh;
use super::pieces::Pieces;
use super::{Error, Progress, Report, Source, Tensor};

/// Writes a source as `ranks` ranks would, each its rows of every tensor as
/// `torch.chunk` cuts them. Objects are copied byte for byte where the source
/// has PyTorch's own bytes; others that are no plain data are skipped.
///
/// # Errors
/// When the target exists, the source is damaged, or the disk refuses.
pub fn to_dcp(
    source: &dyn Source,
    to: &Path,
    ranks: u32,
    progress: Progress<'_>,
) -> Result<Report, Error> {
    let fresh = Fresh::at(to)?;
    let dir = fresh.dir();
    let tensors = source.tensors();
    let mut report = Report { tensors: tensors.len(), ..Report::default() };
    report.bytes = tensors.iter().map(Tensor::bytes).sum();
    let mut pieces = Pieces::new(source, &tensors, progress);
    let mut shards = Vec::new();
    for rank in 0..ranks.max(1) {
        let mut writer = ShardWriter::create_in(&dir, rank, 0)?;
        for tensor in &tensors {
            let Some(region) = part(&tensor.shape, rank.into(), ranks.max(1).into()) else {
                continue;
            };
            let Tensor { fqn, path, dtype, shape } = tensor;
            let mut stream = writer.stream(fqn, path, *dtype, shape, &region)?;
            pieces.stream(tensor, &region, |bytes| stream.write(bytes))?;
            stream.finish()?;
        }
        if rank == 0 {
            objects(source, &mut writer, &mut report)?;
        }
        shards.push(writer.finish()?);
    }
    write_index(&dir, &shards)?;
    fresh.keep()?;
    Ok(report)
}

fn objects(
    source: &dyn Source,
    writer: &mut ShardWriter,
    report: &mut Report,
) -> Result<(), Error> {
    for object in source.objects() {
        if let Some(archive) = source.archive(&object)? {
            writer.archive(&object.fqn, &object.path, &archive)?;
        } else {
            let value = source.value(&object)?;
            match writer.object(&object.fqn, &object.path, &value) {
                Err(crate::Error::Value { .. }) => {
                    report.skipped.push(object.fqn);
                    continue;
                }
                written => written?,
            }
        }
        report.objects += 1;
    }
    Ok(())
}

/// The rows of a rank; rank 0 has what cannot be cut.
fn part(shape: &[u64], rank: u64, ranks: u64) -> Option<Region> {
    let whole = Region::whole(shape);
    let (Some(&rows), false) = (shape.first(), whole.is_empty()) else {
        return (rank == 0).then_some(whole);
    };
    let step = rows.div_ceil(ranks);
    let (start, end) = ((rank * step).min(rows), ((rank + 1) * step).min(rows));
    (start < end).then(|| Region::rows(shape, start, end - start))
}
