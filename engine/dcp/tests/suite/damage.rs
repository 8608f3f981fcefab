//! CKPT-1: a truncated, torn, flipped or missing shard is detected and named.

use std::fs;
use std::path::Path;

use dcp::{Checkpoint, Region};

use crate::support::save;

/// Everything: the index, and every byte behind it.
fn verify(directory: &Path) -> Result<(), dcp::Error> {
    Checkpoint::open(directory)?.verify().map(|_| ())
}

#[track_caller]
fn check(damage: impl FnOnce(&Path), expected: &[&str]) {
    let scratch = tempfile::tempdir().unwrap();
    save(scratch.path(), 1);
    verify(scratch.path()).unwrap();
    damage(scratch.path());
    let error = verify(scratch.path()).unwrap_err();
    let told = error.to_string();
    assert!(expected.iter().all(|part| told.contains(part)), "{told}");
    assert!(error.is_damage(), "{told}");
}

fn edit(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

#[test]
fn damage_is_named() {
    let shard = |directory: &Path| directory.join("__1_0.distcp");
    check(|d| fs::remove_file(shard(d)).unwrap(), &["__1_0.distcp: No such file"]);
    check(
        |d| edit(&shard(d), |bytes| bytes.truncate(bytes.len() - 1)),
        &["__1_0.distcp", "norm.weight", "cut short"],
    );
    check(|d| edit(&shard(d), |bytes| bytes[..64].fill(0)), &["__1_0.distcp", "tok_embeddings"]);
    check(|d| edit(&shard(d), Vec::clear), &["__1_0.distcp", "has only 0 bytes"]);
    check(|d| drop(fs::copy(d.join("__0_0.distcp"), shard(d))), &["__1_0.distcp"]);
    check(|d| fs::remove_file(d.join(".metadata")).unwrap(), &["has no .metadata", "interrupted"]);
    check(|d| edit(&d.join(".metadata"), Vec::clear), &[".metadata is damaged", "cut short"]);
    check(|d| edit(&d.join(".metadata"), |b| b.push(0)), &[".metadata is damaged", "bytes follow"]);
    check(|d| edit(&d.join("B3SUMS"), |b| b.truncate(70)), &["B3SUMS"]);
}

#[test]
fn a_flipped_byte_is_found_by_crc_alone() {
    let scratch = tempfile::tempdir().unwrap();
    save(scratch.path(), 1);
    fs::remove_file(scratch.path().join("B3SUMS")).unwrap();
    // The first tensor's payload begins at the first 64-byte boundary that the
    // writer could choose; the middle of the file lies in a payload or near it.
    let path = scratch.path().join("__0_0.distcp");
    let good = fs::read(&path).unwrap();
    let payload = crate::support::Tensor::new("tok_embeddings.weight.1", dcp::Dtype::F32, &[7, 6]);
    let at = good.windows(96).position(|window| window == &payload.bytes[..96]).unwrap();
    edit(&path, |bytes| bytes[at + 17] ^= 0x10);
    let told = verify(scratch.path()).unwrap_err().to_string();
    assert!(told.contains("__0_0.distcp") && told.contains("bytes changed"), "{told}");
    // Reading the whole shard finds it too, without a verification.
    let checkpoint = Checkpoint::open(scratch.path()).unwrap();
    let mut into = vec![0; 7 * 6 * 4];
    let told = checkpoint.read("tok_embeddings.weight.1", &Region::whole(&[7, 6]), &mut into);
    assert!(told.unwrap_err().to_string().contains("bytes changed"));
}

/// Every file cut at every length, and every byte flipped.
#[test]
fn no_single_byte_can_change_unnoticed() {
    let scratch = tempfile::tempdir().unwrap();
    save(scratch.path(), 1);
    for name in [".metadata", "__0_0.distcp", "__1_0.distcp"] {
        let path = scratch.path().join(name);
        let good = fs::read(&path).unwrap();
        for at in 0..good.len() {
            fs::write(&path, &good[..at]).unwrap();
            assert!(verify(scratch.path()).is_err(), "{name} cut at {at}");
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            fs::write(&path, &bad).unwrap();
            assert!(verify(scratch.path()).is_err(), "{name} flipped at {at}");
        }
        fs::write(&path, &good).unwrap();
    }
    verify(scratch.path()).unwrap();
}

#[test]
fn requests_that_do_not_fit_are_refused() {
    let scratch = tempfile::tempdir().unwrap();
    save(scratch.path(), 1);
    let checkpoint = Checkpoint::open(scratch.path()).unwrap();
    let read = |fqn, region: Region, bytes| {
        let error = checkpoint.read(fqn, &region, &mut vec![0; bytes]).unwrap_err();
        assert!(!error.is_damage());
        error.to_string()
    };
    let outside = read("norm.weight", Region::whole(&[6]), 24);
    assert_eq!(outside, "norm.weight: [0..6] is not a region of shape [5]");
    let short = read("norm.weight", Region::whole(&[5]), 19);
    assert_eq!(short, "norm.weight: [0..5] has 20 bytes, the buffer 19");
    assert!(read("nope", Region::whole(&[5]), 20).ends_with("has no tensor \"nope\""));
    assert!(checkpoint.object("norm.weight").unwrap_err().to_string().contains("has no object"));
}
