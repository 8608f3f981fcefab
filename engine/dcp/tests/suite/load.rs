//! Loads into the caller's memory (CKPT-2): any strides, another type, no more
//! bytes read than needed; holes and overlaps are errors.

use std::fs;
use std::path::Path;

use dcp::load::convert;
use dcp::{Checkpoint, Dtype, Region, ShardWriter, Target, write_metadata};

use crate::support::{Tensor, cut, path};

/// Saves a tensor from `ranks` ranks that share it along `dim`.
fn save(stage: &Path, tensor: &Tensor, dim: usize, ranks: u64) -> Checkpoint {
    let shards: Vec<_> = (0..ranks)
        .map(|rank| {
            let mut writer = ShardWriter::create(stage, rank as u32).unwrap();
            let region = cut(&tensor.shape, dim, rank, ranks);
            let Tensor { fqn, dtype, shape, .. } = tensor;
            let bytes = tensor.region(&region);
            writer.tensor(fqn, &path(fqn), *dtype, shape, &region, &bytes).unwrap();
            writer.finish().unwrap()
        })
        .collect();
    write_metadata(stage, &shards).unwrap();
    Checkpoint::open(stage).unwrap()
}

/// What `Target::with_strides` must make of packed bytes.
fn spread(region: &Region, packed: &[u8], item: usize, strides: &[u64], into: &mut [u8]) {
    for (n, element) in packed.chunks_exact(item).enumerate() {
        let (mut rest, mut at) = (n as u64, 0);
        for (size, stride) in region.sizes.iter().zip(strides).rev() {
            at += rest % size * stride;
            rest /= size;
        }
        into[at as usize * item..][..item].copy_from_slice(element);
    }
}

#[track_caller]
fn check_strides(dim: usize, region: &Region, strides: &[u64], elements: usize) {
    let scratch = tempfile::tempdir().unwrap();
    let tensor = Tensor::new("x", Dtype::BF16, &[6, 5, 4]);
    let checkpoint = save(scratch.path(), &tensor, dim, 3);
    let (mut into, mut expected) = (vec![0xa5; elements * 2], vec![0xa5; elements * 2]);
    spread(region, &tensor.region(region), 2, strides, &mut expected);
    let target = Target::new("x", region.clone(), &mut into).with_strides(strides.to_vec());
    checkpoint.load(vec![target]).unwrap();
    assert_eq!(into, expected, "{region} with {strides:?}");
}

#[test]
fn memory_of_any_strides_is_filled_and_no_more() {
    let whole = Region::whole(&[6, 5, 4]);
    let part = Region { offsets: vec![1, 2, 1], sizes: vec![4, 2, 3] };
    for dim in 0..3 {
        check_strides(dim, &whole, &[20, 4, 1], 120);
        check_strides(dim, &whole, &[1, 6, 30], 120);
        check_strides(dim, &whole, &[32, 6, 1], 190);
        check_strides(dim, &whole, &[4, 24, 1], 120);
        check_strides(dim, &part, &[2, 10, 25], 70);
        check_strides(dim, &part, &[100, 7, 2], 400);
    }
}

#[test]
fn targets_that_do_not_fit_are_named() {
    let scratch = tempfile::tempdir().unwrap();
    let checkpoint = save(scratch.path(), &Tensor::new("x", Dtype::C64, &[4, 3]), 0, 2);
    let told = |strides: Option<&[u64]>, dtype: Option<Dtype>, bytes: usize| {
        let mut into = vec![0; bytes];
        let mut target = Target::new("x", Region::whole(&[4, 3]), &mut into);
        if let Some(strides) = strides {
            target = target.with_strides(strides.to_vec());
        }
        if let Some(dtype) = dtype {
            target = target.convert_to(dtype);
        }
        checkpoint.load(vec![target]).unwrap_err().to_string()
    };
    let shared = told(Some(&[2, 1]), None, 96);
    assert_eq!(shared, "x: with the strides [2, 1], elements of [0..4, 0..3] share memory");
    let short = told(Some(&[3, 1]), None, 95);
    assert_eq!(short, "x: [0..4, 0..3] with the strides [3, 1] needs 96 bytes, the buffer has 95");
    assert_eq!(told(Some(&[3]), None, 96), "x: 1 strides were given for 2 dimensions");
    assert_eq!(told(None, Some(Dtype::F32), 48), "x: complex64 cannot be converted to float32");
    assert!(told(Some(&[u64::MAX, 1]), None, 96).contains("needs"));
}

#[test]
fn elements_are_converted_on_request() {
    let scratch = tempfile::tempdir().unwrap();
    let mut tensor = Tensor::new("x", Dtype::BF16, &[700, 513]);
    // No NaN, whose other bits may change.
    tensor.bytes.iter_mut().skip(1).step_by(2).for_each(|byte| *byte &= 0xbf);
    let checkpoint = save(scratch.path(), &tensor, 1, 2);
    for to in [Dtype::F32, Dtype::F64, Dtype::I8, Dtype::BF16] {
        let region = Region { offsets: vec![3, 100], sizes: vec![690, 300] };
        let count = region.elements() as usize;
        let (mut into, mut expected) = (vec![0; count * to.size()], vec![0; count * to.size()]);
        convert::convert(Dtype::BF16, &tensor.region(&region), to, &mut expected);
        let target = Target::new("x", region, &mut into).convert_to(to);
        checkpoint.load(vec![target]).unwrap();
        assert!(into == expected, "{to}");
    }
}

#[test]
fn any_real_type_is_read_as_f32() {
    let scratch = tempfile::tempdir().unwrap();
    let tensor = Tensor { bytes: vec![0, 0xff, 2, 3], ..Tensor::new("x", Dtype::I8, &[2, 2]) };
    let checkpoint = save(scratch.path(), &tensor, 0, 2);
    let rows = checkpoint.read_f32("x", &Region::rows(&[2, 2], 0, 2)).unwrap();
    assert_eq!(rows, [0.0, -1.0, 2.0, 3.0]);
}

#[track_caller]
fn check_read(saved: (usize, u64), loaded: (usize, u64)) {
    let scratch = tempfile::tempdir().unwrap();
    let tensor = Tensor::new("x", Dtype::F32, &[1024, 1024]);
    let checkpoint = save(scratch.path(), &tensor, saved.0, saved.1);
    for rank in 0..loaded.1 {
        let region = cut(&tensor.shape, loaded.0, rank, loaded.1);
        let mut into = vec![0; region.elements() as usize * 4];
        let report = checkpoint.load(vec![Target::new("x", region.clone(), &mut into)]).unwrap();
        assert!(into == tensor.region(&region));
        assert_eq!(report.needed, into.len() as u64);
        let most = report.needed + report.needed / 10;
        assert!(report.read <= most, "{saved:?} to {loaded:?}, {region}: {report:?}");
    }
}

#[test]
fn no_more_is_read_than_needed() {
    for dims in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        check_read((dims.0, 4), (dims.1, 2));
        check_read((dims.0, 2), (dims.1, 3));
    }
}

#[test]
fn several_targets_at_once_and_nothing_for_empty_ones() {
    let scratch = tempfile::tempdir().unwrap();
    let tensor = Tensor::new("x", Dtype::F32, &[1200, 300]);
    let checkpoint = save(scratch.path(), &tensor, 0, 3);
    let mut memory = tensor.bytes.iter().map(|byte| !byte).collect::<Vec<_>>();
    let mut rest = memory.as_mut_slice();
    let mut targets = Vec::new();
    for rank in 0..7 {
        let region = cut(&tensor.shape, 0, rank, 7);
        let (mine, others) = rest.split_at_mut(region.elements() as usize * 4);
        targets.push(Target::new("x", region, mine));
        rest = others;
    }
    targets.push(Target::new("x", Region::rows(&tensor.shape, 1200, 0), &mut []));
    checkpoint.load(targets).unwrap();
    assert!(memory == tensor.bytes);
    assert_eq!(checkpoint.load(Vec::new()).unwrap(), dcp::LoadReport::default());
}

/// A file of PyTorch's sharded safetensors: rows of a [n, 2] tensor of bytes.
fn shard(folder: &Path, name: &str, first: u64, rows: u64) {
    let saved = format!(r#"{{\"x\": {{\"saved_offsets\": [{first}, 0]}}}}"#);
    let bytes = rows * 2;
    let header = format!(
        r#"{{"__metadata__":{{"DCP_SHARDING_INFO":"{saved}"}},"x":{{"dtype":"U8","shape":[{rows},2],"data_offsets":[0,{bytes}]}}}}"#
    );
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend((0..bytes).map(|n| (first * 2 + n) as u8));
    fs::write(folder.join(name), file).unwrap();
}

#[test]
fn holes_and_overlaps_are_errors_where_they_are_read() {
    let scratch = tempfile::tempdir().unwrap();
    shard(scratch.path(), "a.safetensors", 0, 3);
    shard(scratch.path(), "b.safetensors", 4, 3);
    let checkpoint = Checkpoint::open(scratch.path()).unwrap();
    let read = |first, rows| {
        checkpoint.read_vec("x", &Region::rows(&[7, 2], first, rows)).map_err(|e| e.to_string())
    };
    assert_eq!(read(0, 3).unwrap(), [0, 1, 2, 3, 4, 5]);
    assert_eq!(read(5, 2).unwrap(), [10, 11, 12, 13]);
    let hole = read(2, 3).unwrap_err();
    assert!(hole.ends_with("x: no shard holds 2 of the 6 elements of [2..5, 0..2]"), "{hole}");
    assert!(hole.contains(&scratch.path().display().to_string()), "{hole}");
    let all = checkpoint.verify().unwrap_err().to_string();
    assert!(all.contains("no shard holds 2 of the 14 elements"), "{all}");

    shard(scratch.path(), "c.safetensors", 2, 2);
    let checkpoint = Checkpoint::open(scratch.path()).unwrap();
    let told = checkpoint.read_vec("x", &Region::whole(&[7, 2])).unwrap_err().to_string();
    assert!(
        told.contains("two shards hold elements of both [0..3, 0..2] and [2..4, 0..2]"),
        "{told}"
    );
}
