//! The referee is PyTorch itself: it loads what we wrote, and we read what it
//! wrote (CKPT-2). Needs a Python with torch 2.11, named by
//! `ELASTIC_TEST_PYTHON`, as `make venv` and `make test` arrange.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::{Path, PathBuf};
use std::process::Command;

use dcp::{Checkpoint, Dtype, Region, Segment, ShardWriter, Value, write_metadata};
use serde_json::{Value as Json, json};

#[path = "pytorch/converted.rs"]
mod converted;
#[path = "suite/support.rs"]
#[allow(dead_code, reason = "shared with the other tests")]
mod support;
use support::{Tensor, cut};

#[test]
fn pytorch_loads_what_we_write() {
    let scratch = tempfile::tempdir().unwrap();
    let directory = scratch.path().join("step-3");
    let expected = save(&directory);
    assert!(Checkpoint::open(&directory).unwrap().verify().unwrap().digests);
    let path = scratch.path().join("expected.json");
    std::fs::write(&path, expected.to_string()).unwrap();
    let said = check("read", &directory, &path);
    for how in ["dcp.load in 1 process", "dcp_to_torch", "rank 0, Shard(0)", "rank 1, Shard(1)"] {
        assert!(said.contains(how), "{said}");
    }
}

#[test]
fn we_read_what_pytorch_saves() {
    let scratch = tempfile::tempdir().unwrap();
    let directory = scratch.path().join("step-17");
    let path = scratch.path().join("expected.json");
    check("save", &directory, &path);
    let expected: Json = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let checkpoint = Checkpoint::open(&directory).unwrap();
    checkpoint.verify().unwrap();
    for (fqn, item) in expected.as_object().unwrap() {
        let tensor = checkpoint.tensor(fqn).unwrap();
        let whole = Region::whole(tensor.shape);
        let mut bytes = vec![0; whole.elements() as usize * tensor.dtype.size()];
        checkpoint.read(fqn, &whole, &mut bytes).unwrap();
        assert_eq!(item["sha256"], support::sha256(&bytes), "{fqn}");
    }
    assert_eq!(checkpoint.object("train_state.step").unwrap(), Value::Int(17));
    let betas = Value::Tuple(vec![Value::Float(0.9), Value::Float(0.95)]);
    assert_eq!(checkpoint.object("train_state.betas").unwrap(), betas);
}

/// Runs the referee; its output.
#[track_caller]
fn check(command: &str, directory: &Path, expected: &Path) -> String {
    let python = std::env::var_os("ELASTIC_TEST_PYTHON").unwrap_or_else(|| {
        panic!(
            "ELASTIC_TEST_PYTHON names no Python with torch 2.11: run `make venv`, then `make test`"
        )
    });
    let script =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../chaos-tests/oracles/dcp_check.py");
    let output = Command::new(python)
        .arg(script)
        .arg(command)
        .args([directory, expected])
        // Ours is the libtorch without Python; the referee brings its own.
        .env_remove("LD_LIBRARY_PATH")
        .env("OMP_NUM_THREADS", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{complained}");
    said
}

/// Three ranks, every dtype, shards along rows, columns and both, empty shards,
/// empty tensors, a scalar, and values of every kind.
fn save(stage: &Path) -> Json {
    const RANKS: u64 = 3;
    let mut tensors: Vec<(Tensor, usize)> = Dtype::all()
        // PyTorch cannot copy this one, so it cannot load it either.
        .filter(|&dtype| dtype != Dtype::F4E2M1FnX2)
        .map(|dtype| (Tensor::new(&format!("type.{dtype}"), dtype, &[5, 3]), 0))
        .collect();
    tensors.extend([
        (Tensor::new("tok_embeddings.weight", Dtype::F32, &[700, 66]), 0),
        (Tensor::new("layers.0.attention.wq.weight", Dtype::BF16, &[66, 70]), 1),
        (Tensor::new("deep", Dtype::I64, &[3, 4, 5]), 2),
        (Tensor::new("few_rows", Dtype::F32, &[2, 3]), 0),
        (Tensor::new("no_rows", Dtype::F32, &[0, 4]), 0),
        (Tensor::new("optimizer.state.tok_embeddings.weight.exp_avg", Dtype::F32, &[700, 66]), 1),
    ]);
    // Any bytes are a bool for us; PyTorch knows two.
    for (tensor, _) in tensors.iter_mut().filter(|(tensor, _)| tensor.dtype == Dtype::Bool) {
        tensor.bytes.iter_mut().for_each(|byte| *byte &= 1);
    }
    let scalar = Tensor::new("optimizer.state.tok_embeddings.weight.step", Dtype::F32, &[]);
    let objects = [
        ("train_state.step", Value::Int(1 << 40), "1099511627776"),
        ("train_state.lr", Value::Float(3e-4), "3e-4"),
        ("train_state.name", Value::Str("hé".into()), "'hé'"),
        ("train_state.blob", Value::Bytes(vec![0, 127, 128, 255]), r"b'\x00\x7f\x80\xff'"),
        ("train_state.none", Value::None, "None"),
        ("train_state.flag", Value::Bool(true), "True"),
        (
            "train_state.big",
            Value::BigInt([&[0; 10][..], &[1]].concat()),
            "1208925819614629174706176",
        ),
        ("train_state.pair", Value::Tuple(vec![Value::Int(-1), Value::Int(65_536)]), "(-1, 65536)"),
        ("train_state.list", Value::List(vec![Value::Int(256), Value::None]), "[256, None]"),
    ];
    let mut expected = serde_json::Map::new();
    let mut shards = Vec::new();
    for rank in 0..RANKS {
        let mut writer = ShardWriter::create(stage, rank as u32).unwrap();
        for (tensor, dim) in &tensors {
            let region = cut(&tensor.shape, *dim, rank, RANKS);
            put(&mut writer, tensor, &region);
            expected.insert(tensor.fqn.clone(), describe(tensor));
        }
        if rank == 1 {
            put(&mut writer, &scalar, &Region::whole(&[]));
            expected.insert(scalar.fqn.clone(), describe(&scalar));
            for (fqn, value, literal) in &objects {
                writer.object(fqn, &path_of(fqn), value).unwrap();
                expected.insert((*fqn).to_owned(), json!({"path": names(fqn), "value": literal}));
            }
        }
        shards.push(writer.finish().unwrap());
    }
    write_metadata(stage, &shards).unwrap();
    Json::Object(expected)
}

fn put(writer: &mut ShardWriter, tensor: &Tensor, region: &Region) {
    let Tensor { fqn, dtype, shape, .. } = tensor;
    writer.tensor(fqn, &path_of(fqn), *dtype, shape, region, &tensor.region(region)).unwrap();
}

fn describe(tensor: &Tensor) -> Json {
    json!({
        "path": names(&tensor.fqn),
        "dtype": tensor.dtype.torch_name(),
        "shape": tensor.shape,
        "sha256": support::sha256(&tensor.bytes),
    })
}

/// As torchtitan nests: model keys at the top, the others one level below.
fn path_of(fqn: &str) -> Vec<Segment> {
    names(fqn).into_iter().map(Segment::from).collect()
}

fn names(fqn: &str) -> Vec<&str> {
    match fqn.split_once('.') {
        Some((top @ ("optimizer" | "train_state"), rest)) => vec![top, rest],
        _ => vec![fqn],
    }
}
