//! Random checkpoints that PyTorch saved read back to the same bytes (CKPT-2):
//! shapes, element types, meshes, placements, layouts and writers of all kinds.
//! Needs `ELASTIC_TEST_PYTHON`, as `make test` arranges.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::process::Command;

use dcp::{Checkpoint, Region};
use serde_json::Value as Json;
use sha2::{Digest, Sha256};

/// Cases of 1, 2, 3 and 4 processes each.
const CASES: usize = 60;

#[test]
fn random_checkpoints_of_pytorch_read_back() {
    let scratch = tempfile::tempdir().unwrap();
    let seed = std::env::var("ELASTIC_TEST_SEED").unwrap_or_else(|_| "1".into());
    save(scratch.path(), &seed);
    let mut cases = 0;
    for entry in std::fs::read_dir(scratch.path()).unwrap() {
        check(&entry.unwrap().path(), &seed);
        cases += 1;
    }
    assert_eq!(cases, 4 * CASES);
}

#[track_caller]
fn check(case: &Path, seed: &str) {
    let story = format!("{}, seed {seed}", case.display());
    let expected = std::fs::read(case.join("expected.json")).unwrap();
    let expected: Json = serde_json::from_slice(&expected).unwrap();
    let expected = expected.as_object().unwrap();
    let checkpoint = Checkpoint::open(case).unwrap_or_else(|e| panic!("{story}: {e}"));
    assert_eq!(checkpoint.tensors().count(), expected.len(), "{story}");
    checkpoint.verify().unwrap_or_else(|e| panic!("{story}: {e}"));
    for (fqn, item) in expected {
        let tensor = checkpoint.tensor(fqn).unwrap();
        let shape: Vec<u64> = serde_json::from_value(item["shape"].clone()).unwrap();
        assert_eq!(
            (tensor.shape, tensor.dtype.torch_name()),
            (&*shape, item["dtype"].as_str().unwrap())
        );
        let bytes = checkpoint
            .read_vec(fqn, &Region::whole(&shape))
            .unwrap_or_else(|e| panic!("{story}: {e}"));
        assert_eq!(hex::encode(Sha256::digest(&bytes)), item["sha256"], "{story}: {fqn}");
        // Every row by itself is a part of the whole.
        let rows = shape.first().copied().unwrap_or(0);
        for row in 0..rows {
            let size = bytes.len() / rows as usize;
            let part = checkpoint.read_vec(fqn, &Region::rows(&shape, row, 1)).unwrap();
            assert_eq!(part, bytes[row as usize * size..][..size], "{story}: {fqn} row {row}");
        }
    }
}

fn save(root: &Path, seed: &str) {
    let python = std::env::var_os("ELASTIC_TEST_PYTHON").unwrap_or_else(|| {
        panic!(
            "ELASTIC_TEST_PYTHON names no Python with torch 2.11: run `make venv`, then `make test`"
        )
    });
    let script =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../chaos-tests/oracles/dcp_cases.py");
    let output = Command::new(python)
        .arg(script)
        .arg(root)
        .args([&CASES.to_string(), seed])
        // Ours is the libtorch without Python; the referee brings its own.
        .env_remove("LD_LIBRARY_PATH")
        .env("OMP_NUM_THREADS", "1")
        .output()
        .unwrap();
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{complained}");
}
