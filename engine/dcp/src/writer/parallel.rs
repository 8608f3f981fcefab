//! Writes a rank's share with several threads, each into a file of its own:
//! nothing is shared between them, and an object store takes several uploads at
//! once as well as a disk does.

use crate::dtype::Dtype;
use crate::error::Error;
use crate::region::Region;
use crate::storage::Dir;
use crate::value::{Segment, Value};

use super::{ShardIndex, ShardWriter, sync};

/// Something to save.
#[derive(Clone, Debug)]
pub struct Item<'a> {
    /// The key.
    pub fqn: &'a str,
    /// Its path in the nested state dict.
    pub path: &'a [Segment],
    /// What it is.
    pub content: Content<'a>,
}

/// What an [`Item`] is.
#[derive(Clone, Debug)]
pub enum Content<'a> {
    /// A box of a tensor.
    Tensor {
        /// Element type.
        dtype: Dtype,
        /// Shape of the whole tensor.
        shape: &'a [u64],
        /// Which part of it.
        region: Region,
        /// The elements of the part in C order, little-endian.
        bytes: &'a [u8],
    },
    /// A Python value.
    Object(&'a Value),
}

/// Smaller pieces are not worth a shard of their own.
const SPLIT: u64 = 1 << 20;

/// Writes the items of a rank into a stage with `threads` threads, the files
/// `__{rank}_0.distcp`, `__{rank}_1.distcp`, …, all of about the same size: a
/// large shard that lies across a cut becomes two. Everything is durable when
/// this returns, the index not yet written ([`write_index`](super::write_index)).
///
/// # Errors
/// As of [`ShardWriter::tensor`].
pub fn save(
    stage: &Dir,
    rank: u32,
    items: &[Item<'_>],
    threads: usize,
) -> Result<Vec<ShardIndex>, Error> {
    save_watched(stage, rank, items, threads, &|_| ())
}

/// [`save`], which tells the bytes of elements that each of its threads wrote.
///
/// # Errors
/// The same.
pub fn save_watched(
    stage: &Dir,
    rank: u32,
    items: &[Item<'_>],
    threads: usize,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Vec<ShardIndex>, Error> {
    let buckets = cut(items, threads.max(1));
    stage.make()?;
    let written = std::thread::scope(|scope| {
        let write =
            |(part, bucket): (usize, Vec<Item<'_>>)| write(stage, rank, part, &bucket, progress);
        let mut buckets = buckets.into_iter().enumerate();
        let first = buckets.next();
        let others: Vec<_> = buckets.map(|bucket| scope.spawn(move || write(bucket))).collect();
        let first = first.map(write);
        let others = others
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        first.into_iter().chain(others).collect::<Result<Vec<_>, _>>()
    })?;
    sync(stage)?;
    Ok(written)
}

fn write(
    stage: &Dir,
    rank: u32,
    part: usize,
    items: &[Item<'_>],
    progress: &(dyn Fn(u64) + Sync),
) -> Result<ShardIndex, Error> {
    let mut writer = ShardWriter::create_in(stage, rank, part as u32)?;
    for Item { fqn, path, content } in items {
        match content {
            Content::Tensor { dtype, shape, region, bytes } => {
                writer.tensor(fqn, path, *dtype, shape, region, bytes)?;
                progress(bytes.len() as u64);
            }
            Content::Object(value) => writer.object(fqn, path, value)?,
        }
    }
    writer.close()
}

/// Cuts the sequence of items into `count` parts of about as many bytes.
fn cut<'a>(items: &[Item<'a>], count: usize) -> Vec<Vec<Item<'a>>> {
    let total: u64 = items.iter().map(size).sum();
    let share = total.div_ceil(count as u64);
    let mut buckets = vec![Vec::new(); count];
    let (mut now, mut room) = (0, share);
    for item in items {
        let mut rest = Some(item.clone());
        while let Some(item) = rest.take() {
            let last = now + 1 == count;
            if last || size(&item) <= room {
                room = room.saturating_sub(size(&item));
                buckets[now].push(item);
            } else if let Some((head, tail)) = split(&item, room) {
                buckets[now].push(head);
                rest = Some(tail);
                (now, room) = (now + 1, share);
            } else if size(&item) - room <= room {
                // More of it fits here than does not.
                buckets[now].push(item);
                (now, room) = (now + 1, share);
            } else {
                rest = Some(item);
                (now, room) = (now + 1, share);
            }
        }
    }
    buckets
}

fn size(item: &Item<'_>) -> u64 {
    match &item.content {
        Content::Tensor { bytes, .. } => bytes.len() as u64,
        Content::Object(_) => 0,
    }
}

/// Two boxes instead of one, the first of about `room` bytes; both contiguous
/// in the bytes of the one.
fn split<'a>(item: &Item<'a>, room: u64) -> Option<(Item<'a>, Item<'a>)> {
    let Content::Tensor { dtype, shape, region, bytes } = &item.content else { return None };
    let along = region.sizes.iter().position(|&size| size > 1)?;
    let size = region.sizes[along];
    let row = bytes.len() as u64 / size;
    let rows = room.checked_div(row)?;
    let at = rows * row;
    if rows == 0 || rows >= size || at < SPLIT || bytes.len() as u64 - at < SPLIT {
        return None;
    }
    let (mut head, mut tail) = (region.clone(), region.clone());
    head.sizes[along] = rows;
    tail.offsets[along] += rows;
    tail.sizes[along] -= rows;
    let (first, second) = bytes.split_at_checked(at as usize)?;
    let part = |region, bytes| Item {
        content: Content::Tensor { dtype: *dtype, shape, region, bytes },
        ..*item
    };
    Some((part(head, first), part(tail, second)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sizes of the parts that tensors of these shapes are cut into.
    #[track_caller]
    fn check(shapes: &[&[u64]], count: usize, expected: &[&[u64]]) {
        let bytes = vec![0; 64 << 20];
        let item = |shape: &&'static [u64]| Item {
            fqn: "w",
            path: &[],
            content: Content::Tensor {
                dtype: Dtype::U8,
                shape,
                region: Region::whole(shape),
                bytes: &bytes[..shape.iter().product::<u64>() as usize],
            },
        };
        let shapes: Vec<&'static [u64]> =
            shapes.iter().map(|shape| &*Vec::leak(shape.to_vec())).collect();
        let items: Vec<_> = shapes.iter().map(item).collect();
        let buckets = cut(&items, count);
        let sizes: Vec<Vec<u64>> =
            buckets.iter().map(|bucket| bucket.iter().map(size).collect()).collect();
        assert_eq!(sizes, expected);
    }

    #[test]
    fn parts_are_even_and_small_tensors_stay_whole() {
        const M: u64 = 1 << 20;
        check(&[&[16 * M], &[4]], 1, &[&[16 * M, 4]]);
        check(&[&[16 * M]], 2, &[&[8 * M], &[8 * M]]);
        check(&[&[1, 1, 16, M]], 2, &[&[8 * M], &[8 * M]]);
        check(&[&[3, 4 * M]], 2, &[&[4 * M], &[8 * M]]);
        check(&[&[30], &[10], &[20]], 2, &[&[30], &[10, 20]]);
        check(&[&[8 * M], &[8 * M], &[8 * M]], 2, &[&[8 * M, 4 * M], &[4 * M, 8 * M]]);
        check(&[&[0], &[]], 3, &[&[0, 1], &[], &[]]);
        check(&[], 2, &[&[], &[]]);
    }
}
