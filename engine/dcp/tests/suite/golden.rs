//! Checkpoints that PyTorch 2.11 wrote, against what PyTorch read from them.

use std::path::{Path, PathBuf};

use dcp::{Checkpoint, Region, Segment, Value};
use serde_json::Value as Json;

fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(case)
}

fn expected(case: &str) -> Json {
    serde_json::from_slice(&std::fs::read(golden(case).join("expected.json")).unwrap()).unwrap()
}

#[track_caller]
fn check(case: &str) {
    let checkpoint = Checkpoint::open(&golden(case)).unwrap();
    let expected = expected(case);
    let items = expected["items"].as_object().unwrap();
    let (mut tensors, mut objects) = (0, 0);
    for (fqn, item) in items {
        if item["kind"] == "tensor" {
            tensors += 1;
            check_tensor(&checkpoint, fqn, item);
        } else {
            objects += 1;
            check_value(fqn, &item["value"], &checkpoint.object(fqn).unwrap());
        }
        check_path(fqn, &item["path"], checkpoint.path(fqn).unwrap());
    }
    assert_eq!(checkpoint.tensors().count(), tensors, "{case}");
    assert_eq!(checkpoint.objects().count(), objects, "{case}");
    let report = checkpoint.verify().unwrap();
    assert_eq!((report.tensors, report.objects, report.digests), (tensors, objects, false));
}

#[track_caller]
fn check_tensor(checkpoint: &Checkpoint, fqn: &str, item: &Json) {
    let tensor = checkpoint.tensor(fqn).unwrap();
    let shape: Vec<u64> = serde_json::from_value(item["shape"].clone()).unwrap();
    assert_eq!(
        (tensor.shape, tensor.dtype.torch_name()),
        (&*shape, item["dtype"].as_str().unwrap())
    );
    let mut bytes = vec![0; item["nbytes"].as_u64().unwrap() as usize];
    checkpoint.read(fqn, &Region::whole(&shape), &mut bytes).unwrap();
    assert_eq!(crate::support::sha256(&bytes), item["sha256"], "{fqn}");
    // Rows one by one, backwards, from the middle of shards.
    if let Some(&rows) = shape.first().filter(|&&rows| rows > 0) {
        let size = bytes.len() / rows as usize;
        for row in (0..rows).rev() {
            let mut part = vec![0; size];
            checkpoint.read(fqn, &Region::rows(&shape, row, 1), &mut part).unwrap();
            assert_eq!(part, bytes[row as usize * size..][..size], "{fqn} row {row}");
        }
    }
}

#[track_caller]
fn check_value(fqn: &str, expected: &Json, value: &Value) {
    let items = |list: &[Value]| {
        let expected = expected["items"].as_array().unwrap();
        assert_eq!(list.len(), expected.len(), "{fqn}");
        expected.iter().zip(list).for_each(|(e, v)| check_value(fqn, e, v));
    };
    let plain = &expected["value"];
    match (expected["py"].as_str().unwrap(), value) {
        ("NoneType", Value::None) => {}
        ("bool", Value::Bool(value)) => assert_eq!(plain, value, "{fqn}"),
        ("int", Value::Int(value)) => assert_eq!(plain, value, "{fqn}"),
        ("int", Value::BigInt(digits)) => {
            let value = digits.iter().rev().fold(0.0, |sum, &d| sum * 256.0 + f64::from(d));
            assert_eq!(plain.as_f64(), Some(value), "{fqn}");
        }
        ("float", Value::Float(value)) => assert_eq!(plain.as_f64(), Some(*value), "{fqn}"),
        ("str", Value::Str(value)) => assert_eq!(plain, value, "{fqn}"),
        ("bytes", Value::Bytes(value)) => {
            assert_eq!(expected["hex"], hex::encode(value), "{fqn}");
        }
        ("list", Value::List(list)) | ("tuple", Value::Tuple(list)) => items(list),
        (class, Value::Opaque(found)) => assert_eq!(class, found, "{fqn}"),
        (class, found) => panic!("{fqn}: expected {class}, found {found:?}"),
    }
}

#[track_caller]
fn check_path(fqn: &str, expected: &Json, path: &[Segment]) {
    let path: Vec<Json> = path
        .iter()
        .map(|segment| match segment {
            Segment::Key(key) => key.clone().into(),
            Segment::Index(index) => (*index).into(),
        })
        .collect();
    assert_eq!(*expected, Json::from(path), "{fqn}");
}

#[test]
fn fsdp_shards_of_uneven_sizes() {
    check("fsdp2");
}

#[test]
fn replicas_plain_tensors_nested_lists_objects() {
    check("replicated_hsdp");
}

#[test]
fn a_whole_torchtitan_checkpoint() {
    check("titan_v022");
}

#[test]
fn a_model_export_in_bf16() {
    check("bf16_export");
}

#[test]
fn empty_shards_scalars_empty_tensors() {
    check("empty_scalar");
}

#[test]
fn an_asynchronous_save() {
    check("async");
}

#[test]
fn every_dtype_transposed_channels_last_conjugate() {
    check("dtypes_strides");
}

#[test]
fn shards_in_safetensors_of_several_ranks() {
    check("hf_sharded");
}

#[test]
fn whole_tensors_in_safetensors_with_an_index() {
    check("hf_whole");
}

#[test]
fn a_file_for_every_item() {
    check("file_per_item");
}

#[test]
fn an_index_of_every_rank() {
    check("rank_indices");
}

#[test]
fn items_compressed_with_zstd() {
    check("zstd");
}

#[test]
fn several_files_per_rank() {
    check("threads3");
}

#[test]
fn a_long_index_of_several_frames() {
    let checkpoint = Checkpoint::open(&golden("bigmeta_only")).unwrap();
    let expected = expected("bigmeta_only");
    let keys = checkpoint.tensors().count() + checkpoint.objects().count();
    assert_eq!(keys as u64, expected["n_keys"].as_u64().unwrap());
    let shards: usize = checkpoint.tensors().map(|t| checkpoint.shards(t.fqn).count()).sum();
    let items = shards + checkpoint.objects().count();
    assert_eq!(items as u64, expected["n_storage"].as_u64().unwrap());
    // Its data files were left out: every item is missed, and the first named.
    let error = checkpoint.verify().unwrap_err();
    assert!(error.is_damage());
    assert!(error.to_string().contains("__0_0.distcp: No such file"), "{error}");
}

#[test]
fn names_of_other_torchtitan_versions() {
    let scratch = tempfile::tempdir().unwrap();
    let mut writer = dcp::ShardWriter::create(scratch.path(), 0).unwrap();
    let names = ["model.norm.weight", "lm_head.weight", "optimizer.state.lm_head.weight.step"];
    for fqn in names {
        let whole = Region::whole(&[1]);
        let path = [fqn.into()];
        writer.tensor(fqn, &path, dcp::Dtype::U8, &[1], &whole, &[7]).unwrap();
    }
    dcp::write_metadata(scratch.path(), &[writer.finish().unwrap()]).unwrap();
    let old = Checkpoint::open(scratch.path()).unwrap().with_torchtitan_names().unwrap();
    let expected = ["norm.weight", "optimizer.state.output.weight.step", "output.weight"];
    assert_eq!(old.tensors().map(|tensor| tensor.fqn).collect::<Vec<_>>(), expected);
    for fqn in expected {
        assert_eq!(old.read_vec(fqn, &Region::whole(&[1])).unwrap(), [7]);
        assert_eq!(old.path(fqn).unwrap(), [Segment::from(fqn)]);
    }
    // What is named as here stays.
    let golden = Checkpoint::open(&golden("titan_v022")).unwrap();
    let before: Vec<String> = golden.tensors().map(|tensor| tensor.fqn.to_owned()).collect();
    let golden = golden.with_torchtitan_names().unwrap();
    assert!(golden.tensors().map(|tensor| tensor.fqn).eq(before.iter().map(String::as_str)));
}
