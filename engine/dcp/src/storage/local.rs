//! A directory of the local machine, or of a shared file system.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use uuid::Uuid;

use super::beneath::{check_key, open_beneath};
use super::{Object, Storage, Upload};
use crate::index::METADATA;

/// The files below a directory, which need not exist yet.
#[derive(Clone, Debug)]
pub struct Local {
    root: PathBuf,
}

impl Local {
    /// The files below `root`.
    #[must_use]
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    fn checked(&self, key: &str) -> io::Result<PathBuf> {
        check_key(key)?;
        Ok(self.path(key))
    }
}

impl Storage for Local {
    fn path(&self, key: &str) -> PathBuf {
        if key.is_empty() { self.root.clone() } else { self.root.join(key) }
    }

    fn open(&self, key: &str) -> io::Result<Box<dyn Object>> {
        let file = open_beneath(&self.root, key)?;
        let len = file.metadata()?.len();
        Ok(Box::new(Opened { file, len }))
    }

    fn list(&self, folder: &str) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(self.checked(folder)?) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut names = Vec::new();
        for entry in entries {
            // Names that are not text are none of ours.
            names.extend(entry?.file_name().into_string());
        }
        names.sort_unstable();
        Ok(names)
    }

    fn exists(&self, key: &str) -> io::Result<bool> {
        self.checked(key)?.try_exists()
    }

    fn make_folder(&self, folder: &str) -> io::Result<()> {
        fs::create_dir_all(self.checked(folder)?)
    }

    fn create(&self, key: &str) -> io::Result<Box<dyn Upload>> {
        Ok(Box::new(create_new(&self.checked(key)?)?))
    }

    fn claim(&self, key: &str, bytes: &[u8]) -> io::Result<()> {
        let path = self.checked(key)?;
        // A hard link, unlike a rename, never replaces: the loser of a race knows.
        let draft = path.with_file_name(format!(".draft-{}", Uuid::new_v4()));
        let claimed = write_new(&draft, bytes).and_then(|()| fs::hard_link(&draft, &path));
        // A draft left behind has no meaning; its removal may fail.
        let _ = fs::remove_file(&draft);
        claimed
    }

    fn replace(&self, key: &str, bytes: &[u8]) -> io::Result<()> {
        let path = self.checked(key)?;
        let by = self.path(&format!("{key}.tmp"));
        match fs::remove_file(&by) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        write_new(&by, bytes)?;
        fs::rename(&by, path)
    }

    fn sync(&self, folder: &str) -> io::Result<()> {
        File::open(self.checked(folder)?)?.sync_all()
    }

    fn renames(&self) -> bool {
        true
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let (from, to) = (self.checked(from)?, self.checked(to)?);
        match renameat_with(CWD, &from, CWD, &to, RenameFlags::NOREPLACE) {
            // Some network file systems know only the plain rename, which
            // refuses any directory that is not empty: nothing is replaced.
            Err(Errno::INVAL | Errno::NOSYS) => fs::rename(from, to),
            renamed => Ok(renamed?),
        }
    }

    fn remove(&self, key: &str) -> io::Result<()> {
        let path = self.checked(key)?;
        let gone = |done: io::Result<()>| match done {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        };
        match fs::symlink_metadata(&path) {
            Err(error) => gone(Err(error)),
            Ok(found) if found.is_dir() => {
                gone(fs::remove_file(path.join(METADATA)))?;
                gone(fs::remove_dir_all(&path))
            }
            Ok(_) => gone(fs::remove_file(&path)),
        }
    }
}

/// Creates a file that must not exist yet.
fn create_new(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).open(path)
}

/// Writes a new file and waits until its bytes are on the disk.
fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = create_new(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

struct Opened {
    file: File,
    len: u64,
}

impl Object for Opened {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(into, at)
    }
}

impl Upload for File {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes)
    }

    fn finish(self: Box<Self>) -> io::Result<()> {
        self.sync_all()
    }
}
