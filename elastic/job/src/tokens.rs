//! The token file and the dataset folder: pure encoding and decoding, shared by
//! whoever prepares a dataset and whoever trains on it (DATA-1).
//!
//! A dataset folder holds [`TRAIN_FILE`], [`VALIDATION_FILE`] and
//! [`DATASET_FILE`] (a [`Dataset`] as JSON). A token file is a header of
//! [`HEADER_BYTES`] bytes, then the payload, `count` tokens of `width` bytes;
//! every integer is little-endian:
//!
//! | bytes | field |
//! |---|---|
//! | 0..8 | the magic `ELASTOK1` |
//! | 8..12 | version, 1 |
//! | 12..16 | width of a token in bytes: 1, 2 or 4 |
//! | 16..24 | vocabulary size; every token is below it |
//! | 24..32 | number of tokens |
//! | 32..64 | SHA-256 of the payload |
//!
//! The byte tokenizer ([`Tokenizer::Byte`]) has a vocabulary of 256, one token
//! per byte of text. It knows no begin or end of document: documents follow each
//! other in the order given, byte for byte, with nothing in between.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Length of the header, so that the payload starts on a cache line.
pub const HEADER_BYTES: usize = 64;
/// The tokens to train on.
pub const TRAIN_FILE: &str = "train.tok";
/// The tokens to validate on.
pub const VALIDATION_FILE: &str = "validation.tok";
/// What the folder holds and where it came from.
pub const DATASET_FILE: &str = "dataset.json";

const MAGIC: &[u8; 8] = b"ELASTOK1";
const VERSION: u32 = 1;

/// How a token is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Width {
    /// One byte, vocabularies up to 256.
    One,
    /// Two bytes, vocabularies up to 65,536.
    Two,
    /// Four bytes.
    Four,
}

/// The header of a token file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// How a token is stored.
    pub width: Width,
    /// Every token is below it.
    pub vocab_size: u64,
    /// Number of tokens.
    pub count: u64,
    /// SHA-256 of the payload.
    pub payload_sha256: [u8; 32],
}

/// How text became tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tokenizer {
    /// One token per byte, vocabulary 256.
    Byte,
}

/// `dataset.json`: what a dataset folder holds and where it came from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dataset {
    /// [`digest`] of the two token files, in hex.
    pub digest: String,
    /// How the text became tokens.
    pub tokenizer: Tokenizer,
    /// Vocabulary size of both files.
    pub vocab_size: u64,
    /// Tokens in [`TRAIN_FILE`].
    pub train_tokens: u64,
    /// Tokens in [`VALIDATION_FILE`].
    pub validation_tokens: u64,
    /// The texts, in the order in which they were read.
    pub sources: Vec<Source>,
}

/// One text that went into a dataset.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// The file's name, without its folder: the same text prepared elsewhere
    /// gives the same description.
    pub name: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// Its SHA-256, in hex.
    pub sha256: String,
}

/// Why bytes are not the start of a sound token file.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Shorter than a header.
    #[error(
        "{bytes} bytes are too short for a token file (its header alone has {HEADER_BYTES}): \
         the file is truncated or was not written by `elastic data prepare`"
    )]
    Short {
        /// What there is.
        bytes: u64,
    },
    /// The magic is not there.
    #[error("this is not a token file: make one with `elastic data prepare`")]
    Magic,
    /// Another version of the format.
    #[error("token file version {0}, this program reads {VERSION}: prepare the data again")]
    Version(u32),
    /// A width that no token has.
    #[error("token width {0} in the header, expected 1, 2 or 4 bytes: prepare the data again")]
    Width(u32),
    /// A vocabulary that the width cannot hold, or an empty one.
    #[error(
        "vocabulary size {vocab_size} in the header does not go with tokens of {width} bytes: \
         prepare the data again"
    )]
    Vocabulary {
        /// The size in the header.
        vocab_size: u64,
        /// The width in bytes.
        width: usize,
    },
    /// The file is longer or shorter than its header says.
    #[error(
        "the header announces {tokens} tokens, which make {expected} bytes, but the file has \
         {actual}: it was truncated or overwritten, prepare the data again"
    )]
    Length {
        /// Tokens in the header.
        tokens: u64,
        /// Bytes that the file should have.
        expected: u128,
        /// Bytes that it has.
        actual: u64,
    },
}

impl Width {
    /// The narrowest width for a vocabulary; none beyond 2³².
    #[must_use]
    pub fn for_vocabulary(vocab_size: u64) -> Option<Self> {
        [Self::One, Self::Two, Self::Four].into_iter().find(|width| width.holds(vocab_size))
    }

    /// Bytes per token.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::One => 1,
            Self::Two => 2,
            Self::Four => 4,
        }
    }

    fn holds(self, vocab_size: u64) -> bool {
        (1..=1u64 << (8 * self.bytes())).contains(&vocab_size)
    }
}

impl Header {
    /// The header's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.width.bytes() as u32).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.vocab_size.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.count.to_le_bytes());
        bytes[32..64].copy_from_slice(&self.payload_sha256);
        bytes
    }

    /// Reads and checks the header of a file that has `file_bytes` bytes and
    /// starts with `start` (its first [`HEADER_BYTES`] bytes, or all if fewer).
    ///
    /// # Errors
    /// [`HeaderError`] names what is wrong, with the expected and actual value.
    pub fn decode(start: &[u8], file_bytes: u64) -> Result<Self, HeaderError> {
        let Some(start) = start.first_chunk::<HEADER_BYTES>() else {
            return Err(HeaderError::Short { bytes: file_bytes });
        };
        if &array::<8>(start, 0) != MAGIC {
            return Err(HeaderError::Magic);
        }
        let version = u32::from_le_bytes(array(start, 8));
        if version != VERSION {
            return Err(HeaderError::Version(version));
        }
        let width = match u32::from_le_bytes(array(start, 12)) {
            1 => Width::One,
            2 => Width::Two,
            4 => Width::Four,
            other => return Err(HeaderError::Width(other)),
        };
        let vocab_size = u64::from_le_bytes(array(start, 16));
        if !width.holds(vocab_size) {
            return Err(HeaderError::Vocabulary { vocab_size, width: width.bytes() });
        }
        let count = u64::from_le_bytes(array(start, 24));
        let header = Self { width, vocab_size, count, payload_sha256: array(start, 32) };
        let expected = header.file_bytes();
        if expected == u128::from(file_bytes) {
            Ok(header)
        } else {
            Err(HeaderError::Length { tokens: count, expected, actual: file_bytes })
        }
    }

    /// Bytes of a whole file with this header. A hostile count does not overflow.
    #[must_use]
    pub fn file_bytes(&self) -> u128 {
        HEADER_BYTES as u128 + u128::from(self.count) * self.width.bytes() as u128
    }
}

/// The identity of a dataset: SHA-256 over the two headers, which hold the
/// digests of the payloads. Nodes compare it before they train together.
#[must_use]
pub fn digest(train: &Header, validation: &Header) -> [u8; 32] {
    Sha256::new().chain_update(train.encode()).chain_update(validation.encode()).finalize().into()
}

fn array<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes[at + i])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(width: Width, vocab_size: u64, count: u64) -> Header {
        Header { width, vocab_size, count, payload_sha256: [7; 32] }
    }

    #[track_caller]
    fn check(change: impl FnOnce(&mut Vec<u8>), file_bytes: u64, expected: Result<(), &str>) {
        let good = header(Width::Two, 1000, 5);
        let mut bytes = good.encode().to_vec();
        change(&mut bytes);
        match (Header::decode(&bytes, file_bytes), expected) {
            (Ok(read), Ok(())) => assert_eq!(read, good),
            (Err(error), Err(part)) => {
                let text = error.to_string();
                assert!(text.contains(part), "{text:?} does not say {part:?}");
            }
            (got, expected) => panic!("got {got:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn a_header_is_read_back_or_refused_with_the_reason() {
        check(|_| (), 74, Ok(()));
        check(|_| (), 73, Err("make 74 bytes, but the file has 73"));
        check(|_| (), 75, Err("make 74 bytes, but the file has 75"));
        check(|b| b.truncate(63), 63, Err("63 bytes are too short"));
        check(|b| b.clear(), 0, Err("0 bytes are too short"));
        check(|b| b[0] = b'X', 74, Err("not a token file"));
        check(|b| b[8] = 9, 74, Err("version 9"));
        check(|b| b[12] = 3, 74, Err("token width 3"));
        check(|b| b[16..24].fill(0), 74, Err("vocabulary size 0"));
        check(|b| b[19] = 1, 74, Err("vocabulary size 16778216"));
        check(|b| b[24..32].fill(0xff), 74, Err("18446744073709551615 tokens"));
    }

    #[test]
    fn the_narrowest_width_is_chosen() {
        let widths = [1, 256, 257, 65_536, 65_537, 1 << 32].map(Width::for_vocabulary);
        let bytes = widths.map(|w| w.map(Width::bytes));
        assert_eq!(bytes, [Some(1), Some(1), Some(2), Some(2), Some(4), Some(4)]);
        assert_eq!(Width::for_vocabulary(0), None);
        assert_eq!(Width::for_vocabulary((1 << 32) + 1), None);
    }

    #[test]
    fn the_dataset_digest_depends_on_both_files() {
        let (a, b) = (header(Width::One, 256, 9), header(Width::One, 256, 8));
        assert_ne!(digest(&a, &b), digest(&b, &a));
        assert_eq!(digest(&a, &b), digest(&a, &b));
    }
}
