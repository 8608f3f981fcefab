//! BLAKE3 of files, in the form that `b3sum --check B3SUMS` checks. SHA-256
//! takes three times as long as writing the bytes does; BLAKE3 less than that.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::storage::Dir;

/// The list of digests beside DCP's own files, which PyTorch does not look at.
pub const SUMS: &str = "B3SUMS";

/// A BLAKE3 digest of 256 bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(pub [u8; 32]);

/// Read at once: large enough to cost little, small enough to stay cached.
const PIECE: u64 = 256 << 10;

/// A file that cannot change unnoticed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileDigest {
    /// The name within the checkpoint's directory.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// The digest of all of its bytes.
    pub blake3: Digest,
}

impl Digest {
    /// The digest of bytes in memory.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(blake3::hash(bytes).into())
    }
}

impl FileDigest {
    /// Reads a whole file.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn of(dir: &Dir, name: &str) -> Result<Self, Error> {
        let object = dir.open(name)?;
        let (mut hash, bytes) = (blake3::Hasher::new(), object.len());
        let mut buffer = vec![0; bytes.min(PIECE) as usize];
        let mut at = 0;
        while at < bytes {
            let piece = &mut buffer[..(bytes - at).min(PIECE) as usize];
            object.read_at(at, piece).map_err(|source| Error::Io {
                action: "read",
                path: dir.path_of(name),
                source,
            })?;
            hash.update(piece);
            at += piece.len() as u64;
        }
        Ok(Self { name: name.to_owned(), bytes, blake3: Digest(hash.finalize().into()) })
    }

    /// Reads the file again and compares.
    ///
    /// # Errors
    /// When the file is missing, shorter, longer or changed.
    pub fn check(&self, dir: &Dir) -> Result<(), Error> {
        self.check_size(dir)?;
        let found = Self::of(dir, &self.name)?;
        if found == *self {
            return Ok(());
        }
        Err(Error::Digest { path: dir.path_of(&self.name), stored: self.blake3 })
    }

    /// Compares the size alone, which costs nothing.
    ///
    /// # Errors
    /// When the file is missing, shorter or longer.
    pub fn check_size(&self, dir: &Dir) -> Result<(), Error> {
        let found = dir.open(&self.name)?.len();
        if found == self.bytes {
            return Ok(());
        }
        Err(Error::FileSize { path: dir.path_of(&self.name), stored: self.bytes, found })
    }
}

/// The text of a `B3SUMS` file.
pub(crate) fn to_sums(files: &[FileDigest]) -> String {
    files.iter().map(|file| format!("{}  {}\n", file.blake3, file.name)).collect()
}

/// The digests and names of a `B3SUMS` file; `None` for a malformed one.
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
#[error("{0:?} is not a digest of 64 hexadecimal digits")]
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
