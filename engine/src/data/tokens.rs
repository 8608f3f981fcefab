//! Reads a token file (the format is [`job::tokens`]'s).
//!
//! Tokens are read by position, one system call per sample, not through a memory
//! map: a file that shrinks or a disk that fails under a map kills the process
//! with SIGBUS, here it is an error that names the file. The page cache serves
//! both alike.

use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use job::tokens::{HEADER_BYTES, Header, HeaderError, Width};
use sha2::{Digest, Sha256};

/// Why tokens cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file does not open or read.
    #[error("cannot read the token file {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The file is not a sound token file.
    #[error("{path}: {source}")]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: HeaderError,
    },
    /// A token that the vocabulary does not have.
    #[error(
        "{path}: token {token} at position {position} is not below the vocabulary size \
         {vocab_size}: the file is damaged, prepare the data again"
    )]
    Token {
        /// The file.
        path: PathBuf,
        /// The token.
        token: i64,
        /// Its position in the file, in tokens.
        position: u64,
        /// What it should be below.
        vocab_size: u64,
    },
    /// The payload has another digest than the header says.
    #[error(
        "{path}: the tokens have SHA-256 {actual}, the header says {expected}: the file is \
         damaged, prepare the data again"
    )]
    Digest {
        /// The file.
        path: PathBuf,
        /// In the header, in hex.
        expected: String,
        /// Of the payload, in hex.
        actual: String,
    },
}

/// An open token file whose header and length were checked.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    file: File,
    header: Header,
}

impl TokenFile {
    /// Opens a token file and checks its header against its length.
    ///
    /// # Errors
    /// [`Error::Io`] and [`Error::Header`].
    pub fn open(path: &Path) -> Result<Self, Error> {
        let io = |source| Error::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(io)?;
        let bytes = file.metadata().map_err(io)?.len();
        let mut start = Vec::with_capacity(HEADER_BYTES);
        (&file).take(HEADER_BYTES as u64).read_to_end(&mut start).map_err(io)?;
        let header = Header::decode(&start, bytes)
            .map_err(|source| Error::Header { path: path.to_owned(), source })?;
        Ok(Self { path: path.to_owned(), file, header })
    }

    /// The file's header.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads `count` tokens from position `first` on: appends their ids to
    /// `ids` and their bytes, as they are in the file, to `hash`.
    ///
    /// # Errors
    /// [`Error::Io`] and [`Error::Token`]; `ids` is then as it was.
    ///
    /// # Panics
    /// When the range reaches beyond the file.
    pub fn read(
        &self,
        first: u64,
        count: usize,
        ids: &mut Vec<i64>,
        hash: &mut Sha256,
    ) -> Result<(), Error> {
        let within = first.checked_add(count as u64).is_some_and(|end| end <= self.header.count);
        assert!(within, "tokens {first} + {count} of {}", self.header.count);
        let width = self.header.width.bytes();
        let mut bytes = vec![0; count * width];
        self.file
            .read_exact_at(&mut bytes, HEADER_BYTES as u64 + first * width as u64)
            .map_err(|source| Error::Io { path: self.path.clone(), source })?;
        let before = ids.len();
        decode(self.header.width, &bytes, ids);
        let vocab_size = self.header.vocab_size;
        if let Some(at) = ids[before..].iter().position(|id| *id as u64 >= vocab_size) {
            let (token, position) = (ids[before + at], first + at as u64);
            ids.truncate(before);
            return Err(Error::Token { path: self.path.clone(), token, position, vocab_size });
        }
        hash.update(&bytes);
        Ok(())
    }

    /// Reads the whole payload and compares its digest with the header's.
    ///
    /// # Errors
    /// [`Error::Io`] and [`Error::Digest`].
    pub fn verify(&self) -> Result<(), Error> {
        let io = |source| Error::Io { path: self.path.clone(), source };
        let mut hash = Sha256::new();
        let mut buffer = vec![0; 1 << 20];
        let mut at = HEADER_BYTES as u64;
        loop {
            let read = self.file.read_at(&mut buffer, at).map_err(io)?;
            if read == 0 {
                break;
            }
            hash.update(&buffer[..read]);
            at += read as u64;
        }
        let actual: [u8; 32] = hash.finalize().into();
        if actual == self.header.payload_sha256 {
            return Ok(());
        }
        let expected = hex::encode(self.header.payload_sha256);
        Err(Error::Digest { path: self.path.clone(), expected, actual: hex::encode(actual) })
    }
}

fn decode(width: Width, bytes: &[u8], ids: &mut Vec<i64>) {
    match width {
        Width::One => ids.extend(bytes.iter().map(|byte| i64::from(*byte))),
        Width::Two => {
            ids.extend(bytes.as_chunks().0.iter().map(|b| i64::from(u16::from_le_bytes(*b))))
        }
        Width::Four => {
            ids.extend(bytes.as_chunks().0.iter().map(|b| i64::from(u32::from_le_bytes(*b))))
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Writes a token file of bytes-as-tokens for tests of this folder.
    pub(in crate::data) fn write(path: &Path, width: Width, vocab_size: u64, tokens: &[u32]) {
        let bytes: Vec<u8> =
            tokens.iter().flat_map(|t| t.to_le_bytes()[..width.bytes()].to_vec()).collect();
        let payload_sha256 = Sha256::digest(&bytes).into();
        let header = Header { width, vocab_size, count: tokens.len() as u64, payload_sha256 };
        std::fs::write(path, [&header.encode()[..], &bytes].concat()).expect("a writable folder");
    }

    #[track_caller]
    fn check(width: Width, vocab_size: u64, tokens: &[u32], expected: Result<(), &str>) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("train.tok");
        write(&path, width, vocab_size, tokens);
        let file = TokenFile::open(&path).expect("a sound file");
        file.verify().expect("a sound payload");
        for first in 0..tokens.len() {
            for count in 0..=tokens.len() - first {
                let (mut ids, mut hash) = (vec![-1], Sha256::new());
                match (file.read(first as u64, count, &mut ids, &mut hash), expected) {
                    (Ok(()), _) => {
                        let read = &tokens[first..first + count];
                        assert!(ids[1..].iter().copied().eq(read.iter().map(|t| i64::from(*t))));
                        let bytes = std::fs::read(&path).expect("readable");
                        let at = |t: usize| HEADER_BYTES + t * width.bytes();
                        let own = Sha256::digest(&bytes[at(first)..at(first + count)]);
                        assert_eq!(hash.finalize(), own);
                    }
                    (Err(error), Err(part)) => {
                        assert_eq!(ids, [-1]);
                        assert!(error.to_string().contains(part), "{error}");
                    }
                    (Err(error), Ok(())) => panic!("{error}"),
                }
            }
        }
    }

    #[test]
    fn tokens_of_every_width_are_read_at_any_position() {
        check(Width::One, 256, &[0, 255, 7, 128], Ok(()));
        check(Width::Two, 65_536, &[0, 65_535, 256, 4], Ok(()));
        check(Width::Four, 1 << 32, &[u32::MAX, 0, 70_000], Ok(()));
        check(Width::One, 200, &[3, 201, 4], Err("token 201 at position 1 is not below"));
    }

    #[test]
    fn damage_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("train.tok");
        #[track_caller]
        fn check(result: Result<(), Error>, part: &str) {
            let error = result.expect_err("damage").to_string();
            assert!(error.contains(part) && error.contains("train.tok"), "{error:?}: {part:?}?");
        }
        let open = || TokenFile::open(&path).map(drop);
        check(open(), "No such file");
        write(&path, Width::Two, 300, &[1, 2, 299]);
        let good = std::fs::read(&path).expect("readable");
        for length in 0..good.len() {
            std::fs::write(&path, &good[..length]).expect("writable");
            check(open(), &format!("{length}"));
        }
        let mut flipped = good.clone();
        flipped[HEADER_BYTES] ^= 1;
        std::fs::write(&path, &flipped).expect("writable");
        let file = TokenFile::open(&path).expect("the header is sound");
        check(file.verify(), "the header says");
        // The file shrinks while it is open.
        std::fs::write(&path, &good[..HEADER_BYTES + 1]).expect("writable");
        check(file.read(0, 3, &mut Vec::new(), &mut Sha256::new()), "cannot read");
    }
}
