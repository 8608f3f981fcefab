//! SHA-256 of files, in the form that `sha256sum -c SHA256SUMS` checks.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::durable::At;
use crate::error::Error;

/// The list of digests beside DCP's own files, which PyTorch does not look at.
pub const SUMS: &str = "SHA256SUMS";

/// A SHA-256.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(pub [u8; 32]);

/// A file that cannot change unnoticed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileDigest {
    /// The name within the checkpoint's directory.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// The digest of all of its bytes.
    pub sha256: Digest,
}

impl Digest {
    /// The digest of bytes in memory.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }
}

impl FileDigest {
    /// Reads a whole file.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn of(directory: &Path, name: &str) -> Result<Self, Error> {
        let path = directory.join(name);
        let mut file = File::open(&path).at("open", &path)?;
        let (mut hash, mut bytes) = (Sha256::new(), 0);
        let mut buffer = vec![0; 1 << 20];
        loop {
            let n = file.read(&mut buffer).at("read", &path)?;
            if n == 0 {
                break;
            }
            hash.update(&buffer[..n]);
            bytes += n as u64;
        }
        Ok(Self { name: name.to_owned(), bytes, sha256: Digest(hash.finalize().into()) })
    }

    /// Reads the file again and compares.
    ///
    /// # Errors
    /// When the file is missing, shorter, longer or changed.
    pub fn check(&self, directory: &Path) -> Result<(), Error> {
        self.check_size(directory)?;
        let found = Self::of(directory, &self.name)?;
        if found == *self {
            return Ok(());
        }
        Err(Error::Digest { path: directory.join(&self.name), stored: self.sha256 })
    }

    /// Compares the size alone, which costs nothing.
    ///
    /// # Errors
    /// When the file is missing, shorter or longer.
    pub fn check_size(&self, directory: &Path) -> Result<(), Error> {
        let path = directory.join(&self.name);
        let found = std::fs::metadata(&path).at("find", &path)?.len();
        if found == self.bytes {
            return Ok(());
        }
        Err(Error::FileSize { path, stored: self.bytes, found })
    }
}

/// The text of a `SHA256SUMS` file.
pub(crate) fn to_sums(files: &[FileDigest]) -> String {
    files.iter().map(|file| format!("{}  {}\n", file.sha256, file.name)).collect()
}

/// The digests and names of a `SHA256SUMS` file; `None` for a malformed one.
pub(crate) fn from_sums(text: &str) -> Option<Vec<(Digest, &str)>> {
    let parse = |line| {
        let (sum, name) = str::split_once(line, "  ")?;
        Some((Digest::try_from(sum.to_owned()).ok()?, name))
    };
    text.lines().map(parse).collect()
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

/// Text that is not 64 hexadecimal digits.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not a SHA-256 of 64 hexadecimal digits")]
pub struct InvalidDigest(String);

impl TryFrom<String> for Digest {
    type Error = InvalidDigest;

    fn try_from(text: String) -> Result<Self, InvalidDigest> {
        let mut digest = [0; 32];
        match hex::decode_to_slice(&text, &mut digest) {
            Ok(()) => Ok(Self(digest)),
            Err(_) => Err(InvalidDigest(text)),
        }
    }
}
