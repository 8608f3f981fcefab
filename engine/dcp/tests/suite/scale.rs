//! Merging what many ranks wrote does not hold a save up.

use std::time::{Duration, Instant};

use dcp::writer::{Entry, Kind};
use dcp::{Checkpoint, Dir, Dtype, FileDigest, Region, ShardIndex, write_index};

use crate::support::path;

/// As many shards as Llama-3-8B over 64 ranks and more: 1,600 tensors in 64
/// row shards each.
const TENSORS: u64 = 1600;
const RANKS: u64 = 64;

#[test]
fn the_indexes_of_many_ranks_are_merged_in_less_than_a_second() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = Dir::at(scratch.path()).unwrap();
    let shards: Vec<ShardIndex> = (0..RANKS).map(|rank| shard(&dir, rank)).collect();
    let entries: usize = shards.iter().map(|shard| shard.entries.len()).sum();
    assert!(entries >= 100_000);
    let (started, before) = (Instant::now(), cpu());
    write_index(&dir, &shards).unwrap();
    let (wall, cpu) = (started.elapsed(), cpu() - before);
    println!("{entries} entries of {RANKS} ranks merged and written in {wall:?}, {cpu:?} of CPU");
    // Other tests share the machine: the time of this thread is what counts.
    assert!(cpu < Duration::from_secs(1), "{cpu:?}");
    let checkpoint = Checkpoint::open(scratch.path()).unwrap();
    assert_eq!(checkpoint.tensors().count() as u64, TENSORS);
}

/// CPU time of this thread.
fn cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap()
}

/// What a rank would have written, but for the bytes.
fn shard(dir: &Dir, rank: u64) -> ShardIndex {
    let name = format!("__{rank}_0.distcp");
    dir.create(&name).unwrap().finish().unwrap();
    let entry = |n: u64| {
        let fqn =
            format!("optimizer.state.layers.{}.feed_forward.w{}.weight.exp_avg", n / 3, n % 3);
        let shape = vec![4096, 1024];
        let region = Region::rows(&shape, rank * 64, 64);
        let kind = Kind::Tensor { dtype: Dtype::F32, shape, region };
        Entry { path: path(&fqn), fqn, offset: n << 18, length: 1 << 18, kind }
    };
    let file = FileDigest::of(dir, &name).unwrap();
    ShardIndex { file, entries: (0..TENSORS).map(entry).collect() }
}
