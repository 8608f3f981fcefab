//! SEC-1 in spirit: whatever lies in a checkpoint's files, reading them ends in
//! data or in an error, never in a panic, and in bounded memory.

use std::fs;
use std::path::Path;

use dcp::{Checkpoint, Region};
use proptest::prelude::*;
use proptest::sample::Index;

/// Opens, verifies and reads all that can be read.
fn use_up(directory: &Path) {
    let Ok(checkpoint) = Checkpoint::open(directory) else { return };
    let _ = checkpoint.verify();
    for tensor in checkpoint.tensors() {
        let whole = Region::whole(tensor.shape);
        if whole.elements() < 1 << 20 {
            let mut into = vec![0; whole.elements() as usize * tensor.dtype.size()];
            let _ = checkpoint.read(tensor.fqn, &whole, &mut into);
        }
    }
    for fqn in checkpoint.objects() {
        let _ = checkpoint.object(fqn);
    }
}

fn copy(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// Overwrites, inserts or removes a few bytes.
fn mutate(bytes: &mut Vec<u8>, at: Index, patch: &[u8], kind: u8) {
    let at = at.index(bytes.len() + 1);
    let end = (at + patch.len()).min(bytes.len());
    match kind % 3 {
        0 => drop(bytes.splice(at..end, patch.iter().copied())),
        1 => drop(bytes.splice(at..at, patch.iter().copied())),
        _ => drop(bytes.drain(at..end)),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn changed_files_never_panic(
        case in prop::sample::select(vec!["fsdp2", "dtypes_strides", "empty_scalar"]),
        file in prop::sample::select(vec![".metadata", "__0_0.distcp"]),
        edits in prop::collection::vec((any::<Index>(), prop::collection::vec(any::<u8>(), 1..9), any::<u8>()), 1..6),
    ) {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(case);
        let scratch = tempfile::tempdir().unwrap();
        copy(&golden, scratch.path());
        let path = scratch.path().join(file);
        let mut bytes = fs::read(&path).unwrap();
        for (at, patch, kind) in edits {
            mutate(&mut bytes, at, &patch, kind);
        }
        fs::write(&path, bytes).unwrap();
        use_up(scratch.path());
    }

    #[test]
    fn arbitrary_indices_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let scratch = tempfile::tempdir().unwrap();
        fs::write(scratch.path().join(".metadata"), bytes).unwrap();
        use_up(scratch.path());
    }
}

/// One line that names the file, the place in it, the key, and what belongs there.
#[track_caller]
fn check_told(file: &str, from: &[u8], to: &[u8], expected: &[&str]) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/fsdp2");
    let scratch = tempfile::tempdir().unwrap();
    copy(&golden, scratch.path());
    let path = scratch.path().join(file);
    let mut bytes = fs::read(&path).unwrap();
    let at = bytes.windows(from.len()).position(|window| window == from).unwrap();
    bytes[at..at + to.len()].copy_from_slice(to);
    fs::write(&path, bytes).unwrap();
    let told = Checkpoint::open(scratch.path()).and_then(|c| c.verify()).unwrap_err().to_string();
    assert!(!told.contains('\n'), "{told}");
    assert!(told.contains(&path.display().to_string()), "{told}");
    assert!(expected.iter().all(|part| told.contains(part)), "{told}");
}

#[test]
fn bad_input_is_told_in_one_line() {
    let index = ".metadata";
    check_told(
        index,
        b"float32",
        b"float31",
        &["torch.float31 at byte", "a known torch dtype", "model."],
    );
    check_told(
        index,
        b"offsets",
        b"offsetz",
        &["is damaged at model.", "at byte", "where offsets belongs"],
    );
    check_told(
        index,
        b"__0_0.distcp",
        b"/etc/passwd0",
        &["model.", "\"/etc/passwd0\" leaves the checkpoint"],
    );
    check_told(index, b"\x8c\x06chunks", b"\xee\x06chunks", &["unknown opcode 0xee at byte"]);
    let data = "__0_0.distcp";
    check_told(data, b"FloatStorage", b"GloatStorage", &["bytes 0..", "model.", "CRC-32"]);
    check_told(
        data,
        b"PK\x05\x06",
        b"PK\x05\x07",
        &["bytes ", "model.", "no zip archive ends here"],
    );
}
