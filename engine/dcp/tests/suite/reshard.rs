//! CKPT-2: gather(reshard(x)) equals x byte for byte, for every pair of meshes.

use std::path::Path;

use dcp::{Checkpoint, Dtype, Region, ShardWriter, write_metadata};
use proptest::prelude::*;
use proptest::sample::Index;

use crate::support::{Tensor, path};

/// A tensor, two ways to cut it up, and an arbitrary region of it.
#[derive(Debug)]
struct Case {
    tensor: Tensor,
    saved: Vec<Region>,
    loaded: Vec<Region>,
    region: Region,
    ranks: u32,
}

/// Cuts every dimension at up to three places; the boxes between the cuts.
fn grid(shape: &[u64], cuts: &[[Index; 3]]) -> Vec<Region> {
    let mut boxes = vec![Region { offsets: vec![], sizes: vec![] }];
    for (&size, cuts) in shape.iter().zip(cuts) {
        let mut bounds: Vec<u64> =
            cuts.iter().map(|cut| cut.index(size as usize + 1) as u64).collect();
        bounds.extend([0, size]);
        bounds.sort_unstable();
        let longer = |region: &Region, pair: &[u64]| {
            let mut region = region.clone();
            region.offsets.push(pair[0]);
            region.sizes.push(pair[1] - pair[0]);
            region
        };
        boxes =
            boxes.iter().flat_map(|b| bounds.windows(2).map(move |pair| longer(b, pair))).collect();
    }
    boxes
}

fn cases() -> impl Strategy<Value = Case> {
    let dtypes: Vec<Dtype> = Dtype::all().collect();
    let shape = prop::collection::vec(prop_oneof![9 => 1..8u64, 1 => Just(0)], 0..5);
    let cuts = || prop::collection::vec(any::<[Index; 3]>(), 4);
    let parts = (prop::sample::select(dtypes), shape, cuts(), cuts(), cuts(), 1..5u32);
    parts.prop_map(|(dtype, shape, saved, loaded, region, ranks)| {
        let (saved, loaded) = (grid(&shape, &saved), grid(&shape, &loaded));
        let regions = grid(&shape, &region);
        let region = regions[regions.len() / 2].clone();
        Case { tensor: Tensor::new("x", dtype, &shape), saved, loaded, region, ranks }
    })
}

fn save(stage: &Path, tensor: &Tensor, ranks: u32, boxes: &[(Region, Vec<u8>)]) {
    let mut writers: Vec<ShardWriter> =
        (0..ranks).map(|rank| ShardWriter::create(stage, rank).unwrap()).collect();
    for (n, (region, bytes)) in boxes.iter().enumerate() {
        let writer = &mut writers[n % ranks as usize];
        let Tensor { dtype, shape, .. } = tensor;
        writer.tensor("x", &path("x"), *dtype, shape, region, bytes).unwrap();
    }
    let shards: Vec<_> = writers.into_iter().map(|writer| writer.finish().unwrap()).collect();
    write_metadata(stage, &shards).unwrap();
}

fn load(checkpoint: &Checkpoint, region: &Region) -> Vec<u8> {
    let size = checkpoint.tensor("x").unwrap().dtype.size();
    let mut bytes = vec![0xa5; region.elements() as usize * size];
    checkpoint.read("x", region, &mut bytes).unwrap();
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    fn resharding_is_a_bijection(case in cases()) {
        let Case { tensor, saved, loaded, region, ranks } = case;
        let scratch = tempfile::tempdir().unwrap();
        let (first, second) = (scratch.path().join("a"), scratch.path().join("b"));
        let boxes: Vec<_> = saved.into_iter().map(|b| { let bytes = tensor.region(&b); (b, bytes) }).collect();
        save(&first, &tensor, ranks, &boxes);
        let checkpoint = Checkpoint::open(&first).unwrap();
        prop_assert_eq!(load(&checkpoint, &region), tensor.region(&region));
        // Onto the second mesh, and from there back to the whole.
        let boxes: Vec<_> = loaded.into_iter().map(|b| { let bytes = load(&checkpoint, &b); (b, bytes) }).collect();
        for (region, bytes) in &boxes {
            prop_assert_eq!(bytes, &tensor.region(region));
        }
        save(&second, &tensor, 5 - ranks, &boxes);
        let checkpoint = Checkpoint::open(&second).unwrap();
        prop_assert_eq!(load(&checkpoint, &Region::whole(&tensor.shape)), tensor.bytes);
        prop_assert!(checkpoint.verify().unwrap().digests);
    }
}

#[test]
fn large_shards_are_read_in_pieces_and_columns_through_a_buffer() {
    let scratch = tempfile::tempdir().unwrap();
    let tensor = Tensor::new("x", Dtype::F32, &[700, 513]);
    let whole = Region::whole(&tensor.shape);
    save(scratch.path(), &tensor, 1, &[(whole.clone(), tensor.bytes.clone())]);
    let checkpoint = Checkpoint::open(scratch.path()).unwrap();
    assert_eq!(load(&checkpoint, &whole), tensor.bytes);
    for (offset, size) in [(0, 1), (512, 1), (100, 300), (0, 512)] {
        let columns = Region { offsets: vec![3, offset], sizes: vec![690, size] };
        assert_eq!(load(&checkpoint, &columns), tensor.region(&columns), "{columns}");
    }
}

#[test]
fn equal_states_give_equal_checkpoints() {
    let scratch = tempfile::tempdir().unwrap();
    let (one, two) = (scratch.path().join("one"), scratch.path().join("two"));
    crate::support::save(&one, 4);
    crate::support::save(&two, 4);
    for name in [".metadata", "__0_0.distcp", "__1_0.distcp", "B3SUMS"] {
        let [one, two] = [&one, &two].map(|stage| std::fs::read(stage.join(name)).unwrap());
        assert_eq!(one, two, "{name}");
    }
}

#[test]
fn payloads_are_aligned_in_the_file() {
    let scratch = tempfile::tempdir().unwrap();
    crate::support::save(scratch.path(), 1);
    let file = std::fs::read(scratch.path().join("__1_0.distcp")).unwrap();
    let tensor = Tensor::new("norm.weight", Dtype::F32, &[5]);
    let payload = &tensor.bytes[3 * 4..];
    let at = file.windows(payload.len()).position(|window| window == payload).unwrap();
    assert_eq!(at % 64, 0);
}
