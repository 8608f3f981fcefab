//! What [`write_metadata`] refuses: every error names the tensor or the file.

use dcp::{Dtype, Error, Region, ShardIndex, ShardWriter, Value, write_metadata};

use crate::support::path;

/// What a rank writes: a tensor "w", a part of it; or an object.
enum Item {
    Part(Dtype, [u64; 2], [u64; 2], [u64; 2]),
    Object(&'static str),
}
use Item::{Object, Part};

fn write(ranks: &[&[Item]]) -> Result<(), Error> {
    let scratch = tempfile::tempdir().unwrap();
    let mut shards = Vec::new();
    for (rank, items) in (0..).zip(ranks) {
        let mut writer = ShardWriter::create(scratch.path(), rank).unwrap();
        for item in *items {
            match item {
                Part(dtype, shape, offsets, sizes) => {
                    let region = Region { offsets: offsets.to_vec(), sizes: sizes.to_vec() };
                    let bytes = vec![0; region.elements() as usize * dtype.size()];
                    writer.tensor("w", &path("w"), *dtype, shape, &region, &bytes)?;
                }
                Object(fqn) => writer.object(fqn, &path(fqn), &Value::None)?,
            }
        }
        shards.push(writer.finish().unwrap());
    }
    write_metadata(scratch.path(), &shards).map(|_| ())
}

#[track_caller]
fn check(ranks: &[&[Item]], expected: &str) {
    let told = write(ranks).map_or_else(|error| error.to_string(), |()| "fine".to_owned());
    assert_eq!(told, expected);
}

const F32: Dtype = Dtype::F32;

#[test]
fn shards_must_cover_every_tensor_exactly_once() {
    check(&[&[Part(F32, [4, 6], [0, 0], [2, 6])], &[Part(F32, [4, 6], [2, 0], [2, 6])]], "fine");
    check(
        &[&[Part(F32, [4, 6], [0, 0], [2, 6])], &[Part(F32, [4, 6], [3, 0], [1, 6])]],
        "w: no shard holds 6 of the 24 elements of [0..4, 0..6]",
    );
    check(
        &[&[Part(F32, [4, 6], [0, 0], [3, 6])], &[Part(F32, [4, 6], [2, 0], [2, 6])]],
        "w: two shards hold elements of both [0..3, 0..6] and [2..4, 0..6]",
    );
    check(
        &[&[Part(F32, [4, 6], [0, 0], [4, 6])], &[Part(F32, [4, 6], [0, 0], [4, 6])]],
        "w: two ranks wrote the shards [0..4, 0..6] and [0..4, 0..6]",
    );
    check(
        &[&[Part(F32, [4, 6], [3, 0], [2, 6])]],
        "w: the shard [3..5, 0..6] lies outside of the shape [4, 6]",
    );
    check(&[&[Part(F32, [0, 6], [0, 0], [0, 6])], &[Part(F32, [0, 6], [0, 0], [0, 6])]], "fine");
    check(&[&[Part(F32, [1, 6], [0, 0], [1, 6])], &[Part(F32, [1, 6], [0, 0], [0, 6])]], "fine");
    check(&[&[Part(F32, [1, 6], [0, 0], [0, 6])], &[Part(F32, [1, 6], [0, 0], [1, 6])]], "fine");
}

#[test]
fn ranks_must_agree() {
    check(
        &[&[Part(F32, [4, 6], [0, 0], [2, 6])], &[Part(Dtype::F16, [4, 6], [2, 0], [2, 6])]],
        "w: is a float32 of shape [4, 6] on one rank and a float16 of shape [4, 6] on another",
    );
    check(&[&[Object("o")], &[Object("o")]], "o: two ranks wrote this object");
    check(
        &[&[Part(F32, [1, 1], [0, 0], [1, 1])], &[Object("w")]],
        "w: is both a tensor and an object",
    );
}

/// One good shard, spoiled by `spoil`; what the merge says.
#[track_caller]
fn check_spoiled(spoil: impl FnOnce(&mut Vec<ShardIndex>, &std::path::Path), expected: &str) {
    let scratch = tempfile::tempdir().unwrap();
    let stage = scratch.path().join("stage");
    std::fs::create_dir(&stage).unwrap();
    let mut writer = ShardWriter::create(&stage, 0).unwrap();
    writer.object("o", &path("o"), &Value::None).unwrap();
    let mut shards = vec![writer.finish().unwrap()];
    spoil(&mut shards, &stage);
    let told = write_metadata(&stage, &shards).unwrap_err().to_string();
    assert!(told.contains(expected), "{told}");
    assert!(!stage.join(".metadata").exists());
}

#[test]
fn shards_that_are_not_there_in_full_are_named() {
    check_spoiled(
        |_, stage| std::fs::remove_file(stage.join("__0_0.distcp")).unwrap(),
        "__0_0.distcp: No such file",
    );
    check_spoiled(
        |_, stage| std::fs::write(stage.join("__0_0.distcp"), b"half").unwrap(),
        "__0_0.distcp has 4 bytes",
    );
    check_spoiled(|shards, _| shards.push(shards[0].clone()), "two ranks wrote this file");
    check_spoiled(
        |shards, stage| {
            shards[0].file.name = "../escape".into();
            std::fs::rename(stage.join("__0_0.distcp"), stage.join("../escape")).unwrap();
        },
        "it may lead out of the folder",
    );
    check_spoiled(|shards, _| shards[0].entries[0].path = path("p"), "joins to another name");
}

#[test]
fn a_writer_refuses_what_does_not_fit() {
    let scratch = tempfile::tempdir().unwrap();
    let mut writer = ShardWriter::create(scratch.path(), 0).unwrap();
    let whole = Region::whole(&[2]);
    let short = writer.tensor("w", &path("w"), F32, &[2], &whole, &[0; 7]).unwrap_err();
    assert_eq!(short.to_string(), "w: float32 [0..2] has 8 bytes, 7 were given");
    let opaque = Value::Opaque("a.B".into());
    let opaque = writer.object("o", &path("o"), &opaque).unwrap_err();
    assert_eq!(opaque.to_string(), "o: a value of class a.B cannot be written");
    let again = ShardWriter::create(scratch.path(), 0).map(|_| ()).unwrap_err();
    assert!(again.to_string().contains("cannot create"), "{again}");
    // Refusals leave the file good.
    writer.tensor("w", &path("w"), F32, &[2], &whole, &[0; 8]).unwrap();
    write_metadata(scratch.path(), &[writer.finish().unwrap()]).unwrap();
}
