//! Targets that appear under their name when they are complete, and not at all
//! when the conversion fails.

use std::io;
use std::path::Path;

use crate::error::Error as Damage;
use crate::storage::{Dir, Upload};

use super::Error;

/// A file or folder in the making, beside the name that it will get. Where
/// names cannot change it is made under its own.
pub(super) struct Fresh {
    above: Dir,
    name: String,
    draft: String,
    kept: bool,
}

impl Fresh {
    /// Something new at a path or URL.
    pub(super) fn at(path: &Path) -> Result<Self, Error> {
        let no_name = || Error::Exists(path.to_owned());
        let name = path.file_name().and_then(|name| name.to_str()).ok_or_else(no_name)?.to_owned();
        let above = path.parent().filter(|above| !above.as_os_str().is_empty());
        let above = Dir::at(above.unwrap_or(Path::new(".")))?;
        if above.exists(&name)? {
            return Err(Error::Exists(path.to_owned()));
        }
        above.make()?;
        let draft = if above.storage().renames() {
            format!(".partial-{}-{name}", uuid::Uuid::new_v4().simple())
        } else {
            name.clone()
        };
        Ok(Self { above, name, draft, kept: false })
    }

    /// The folder to write into.
    pub(super) fn dir(&self) -> Dir {
        self.above.join(&self.draft)
    }

    /// The file to write.
    pub(super) fn file(&self) -> Result<Box<dyn Upload>, Damage> {
        self.above.create(&self.draft)
    }

    /// An error of the file, with its name.
    pub(super) fn told<T>(&self, done: io::Result<T>) -> Result<T, Damage> {
        done.map_err(|source| Damage::Io {
            action: "write",
            path: self.above.path_of(&self.name),
            source,
        })
    }

    /// Gives it its name, durably.
    pub(super) fn keep(mut self) -> Result<(), Error> {
        if self.draft != self.name {
            let renamed = self.above.rename(&self.draft, &self.name);
            self.told(renamed)?;
        }
        self.kept = true;
        Ok(self.above.sync()?)
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        if !self.kept {
            // What cannot be removed has a name that says what it is.
            let _ = self.above.remove(&self.draft);
        }
    }
}
