//! Files that survive a power loss: data before names, names before success.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use crate::error::Error;

/// Adds what was tried, and on what, to an I/O error.
pub(crate) trait At<T> {
    /// `action` completes "cannot … PATH".
    fn at(self, action: &'static str, path: &Path) -> Result<T, Error>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, action: &'static str, path: &Path) -> Result<T, Error> {
        self.map_err(|source| Error::Io { action, path: path.to_owned(), source })
    }
}

/// Creates a file that must not exist yet.
pub(crate) fn create_new(path: &Path) -> Result<File, Error> {
    OpenOptions::new().write(true).create_new(true).open(path).at("create", path)
}

/// Writes a new file and waits until its bytes are on the disk. Its name is
/// only durable after [`sync_directory`].
pub(crate) fn write_new(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let mut file = create_new(path)?;
    file.write_all(bytes).at("write", path)?;
    file.sync_all().at("sync", path)
}

/// Waits until the names in a directory are on the disk.
pub(crate) fn sync_directory(path: &Path) -> Result<(), Error> {
    File::open(path).and_then(|directory| directory.sync_all()).at("sync directory", path)
}

/// Replaces `to` by a new file of these bytes, by way of the temporary name
/// `by`; at any moment `to` is the old file or the new one.
pub(crate) fn replace(by: &Path, to: &Path, bytes: &[u8]) -> Result<(), Error> {
    match fs::remove_file(by) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).at("remove", by)?,
        _ => {}
    }
    write_new(by, bytes)?;
    fs::rename(by, to).at("rename into place", to)?;
    to.parent().map_or(Ok(()), sync_directory)
}
