//! What the reader, the writer and the folder rely on of a storage (CKPT-1,
//! LG-1), and that no key leads out of its root.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::sync::Arc;

use dcp::Dir;
use dcp::storage::{Local, Storage};

/// Every storage keeps these promises.
#[track_caller]
pub(crate) fn check(storage: &dyn Storage) {
    let kind = |done: std::io::Result<()>| done.unwrap_err().kind();
    assert_eq!(storage.list("nothing").unwrap(), [""; 0]);
    assert!(!storage.exists("a/one").unwrap());
    assert_eq!(storage.open("a/one").err().unwrap().kind(), ErrorKind::NotFound);

    storage.make_folder("a/deep").unwrap();
    let mut upload = storage.create("a/deep/large").unwrap();
    let bytes: Vec<u8> = (0..12_000_000u32).map(|n| (n % 251) as u8).collect();
    bytes.chunks(999_999).for_each(|piece| upload.write(piece).unwrap());
    upload.finish().unwrap();
    assert_eq!(storage.create("a/deep/large").err().unwrap().kind(), ErrorKind::AlreadyExists);
    let large = storage.open("a/deep/large").unwrap();
    assert_eq!(large.len(), bytes.len() as u64);
    let mut into = vec![0; 7_000_000];
    large.read_at(4_999_999, &mut into).unwrap();
    assert_eq!(into, bytes[4_999_999..11_999_999]);
    assert_eq!(kind(large.read_at(11_999_999, &mut into[..2])), ErrorKind::UnexpectedEof);
    storage.create("a/deep/empty").unwrap().finish().unwrap();
    assert_eq!(storage.open("a/deep/empty").unwrap().len(), 0);

    storage.claim("a/one", b"first").unwrap();
    assert_eq!(kind(storage.claim("a/one", b"second")), ErrorKind::AlreadyExists);
    storage.replace("a/two", b"old").unwrap();
    storage.replace("a/two", b"newer").unwrap();
    storage.replace("a/deep/.metadata", b"index").unwrap();
    storage.sync("a").unwrap();
    assert_eq!(storage.list("a").unwrap(), ["deep", "one", "two"]);
    assert!(storage.exists("a/deep").unwrap() && storage.exists("a/two").unwrap());
    for (key, expected) in [("a/one", b"first"), ("a/two", b"newer")] {
        let mut into = [0; 5];
        storage.open(key).unwrap().read_at(0, &mut into).unwrap();
        assert_eq!(&into, expected);
    }

    if storage.renames() {
        storage.rename("a/deep", "a/moved").unwrap();
        assert_eq!(storage.list("a/moved").unwrap(), [".metadata", "empty", "large"]);
        assert_eq!(kind(storage.rename("a/deep", "a/other")), ErrorKind::NotFound);
        let taken = kind(storage.rename("a/moved", "a/one"));
        assert!(matches!(taken, ErrorKind::AlreadyExists | ErrorKind::NotADirectory));
        storage.remove("a/moved").unwrap();
    } else {
        assert_eq!(kind(storage.rename("a/deep", "a/moved")), ErrorKind::Unsupported);
    }
    storage.remove("a/deep").unwrap();
    storage.remove("a/deep").unwrap();
    storage.remove("a/one").unwrap();
    assert_eq!(storage.list("a").unwrap(), ["two"]);
    for key in ["../out", "/etc/passwd", "a//two", "a/./two", "a/../a/two", "a/", "."] {
        assert_eq!(storage.open(key).err().unwrap().kind(), ErrorKind::InvalidData, "{key}");
        assert_eq!(kind(storage.claim(key, b"")), ErrorKind::InvalidData, "{key}");
        assert_eq!(kind(storage.remove(key)), ErrorKind::InvalidData, "{key}");
    }
}

#[test]
fn a_local_directory() {
    let scratch = tempfile::tempdir().unwrap();
    check(&Local::new(scratch.path()));
    // No drafts are left.
    assert_eq!(fs::read_dir(scratch.path().join("a")).unwrap().count(), 1);
}

#[test]
fn links_are_not_followed() {
    let scratch = tempfile::tempdir().unwrap();
    let (root, outside) = (scratch.path().join("root"), scratch.path().join("outside"));
    fs::create_dir_all(&root).unwrap();
    fs::create_dir_all(&outside).unwrap();
    fs::write(outside.join("secret"), b"secret").unwrap();
    symlink(outside.join("secret"), root.join("file")).unwrap();
    symlink(&outside, root.join("folder")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, root.join("pipe"), rustix::fs::Mode::RWXU).unwrap();
    let dir = Dir::new(Arc::new(Local::new(&root)), "");
    for (name, expected) in [
        ("file", "\"file\" is a link"),
        ("folder/secret", "\"folder\" is a link"),
        ("pipe", "not a regular file"),
    ] {
        let told = dir.read(name, 10).unwrap_err().to_string();
        assert!(told.contains(expected) && told.contains(name), "{told}");
    }
    // The root itself may be reached by a link: that is the user's choice.
    let link = scratch.path().join("link");
    symlink(&outside, &link).unwrap();
    assert_eq!(Dir::at(&link).unwrap().read("secret", 10).unwrap(), b"secret");
    let told = Dir::at(&link).unwrap().read("secret", 5).unwrap_err().to_string();
    assert!(told.ends_with("secret has 6 bytes, more than any such file (5)"), "{told}");
    // Removing a link leaves what it leads to.
    dir.remove("folder").unwrap();
    assert!(outside.join("secret").exists() && !dir.exists("folder").unwrap());
}

#[test]
fn one_of_many_claims_succeeds() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = Dir::at(scratch.path()).unwrap();
    let won: usize = std::thread::scope(|scope| {
        let claims: Vec<_> = (0..8)
            .map(|n| {
                let dir = &dir;
                scope.spawn(move || dir.claim("it", &[n]).unwrap())
            })
            .collect();
        claims.into_iter().map(|claim| usize::from(claim.join().unwrap())).sum()
    });
    assert_eq!((won, dir.list().unwrap()), (1, vec!["it".to_owned()]));
}
