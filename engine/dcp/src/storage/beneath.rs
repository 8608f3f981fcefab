//! Opens files below a root without leaving it: a checkpoint from a stranger
//! may name `../../etc/passwd`, or hold a link to it.

use std::fs::File;
use std::io;
use std::path::{Component, Path};

use rustix::fs::{Mode, OFlags, open, openat};
use rustix::io::Errno;

/// Opens `root/key` for reading. Every part of `key` is a plain name and no
/// link, which the walk holds true whatever others rename meanwhile.
pub(super) fn open_beneath(root: &Path, key: &str) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOFOLLOW;
    let mut names = key.split('/').peekable();
    let folder = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut at = open(root, folder, Mode::empty())?;
    while let Some(name) = names.next() {
        check_name(name)?;
        let last = names.peek().is_none();
        let wanted = if last { flags } else { folder | OFlags::NOFOLLOW };
        at = openat(&at, name, wanted, Mode::empty()).map_err(|errno| match errno {
            Errno::LOOP => leaves(format_args!("{name:?} is a link")),
            Errno::NOTDIR => leaves(format_args!("{name:?} is a link or no folder")),
            other => other.into(),
        })?;
    }
    let file = File::from(at);
    // A pipe or a device would block, or never end.
    if file.metadata()?.is_file() { Ok(file) } else { Err(not_a_file()) }
}

/// The components of a key are plain names.
pub(super) fn check_key(key: &str) -> io::Result<()> {
    if key.is_empty() { Ok(()) } else { key.split('/').try_for_each(check_name) }
}

fn check_name(name: &str) -> io::Result<()> {
    let mut parts = Path::new(name).components();
    match (parts.next(), parts.next()) {
        (Some(Component::Normal(_)), None) if !name.contains(['\0', '/']) => Ok(()),
        _ => Err(leaves(format_args!("{name:?} is not a plain name"))),
    }
}

fn leaves(why: std::fmt::Arguments<'_>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("it may lead out of the folder: {why}"))
}

fn not_a_file() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it is not a regular file")
}
