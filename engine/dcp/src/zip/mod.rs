//! The zip archives of `torch.save`: stored records in one folder, 64-bit sizes
//! where needed, payload at a 64-byte boundary.

pub(crate) mod read;
pub(crate) mod stream;
pub(crate) mod write;

/// Bytes that are not an archive of the kind that `torch.save` writes.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The bytes could not be read at all.
    #[error("cannot read: {0}")]
    Io(#[from] std::io::Error),
    /// The end of the archive is not where it must be: it is cut short, or is
    /// something else.
    #[error("no zip archive ends here: cut short, torn or overwritten")]
    NoEnd,
    /// A field that contradicts the rest of the archive.
    #[error("zip archive is damaged: {0}")]
    Damaged(&'static str),
    /// A record that must be there.
    #[error("zip archive has no record {0:?}")]
    Missing(String),
    /// A record under compression, which `torch.save` never writes.
    #[error("zip record {name:?} is compressed (method {method}), only stored ones are read")]
    Compressed {
        /// The record.
        name: String,
        /// The zip number of the method.
        method: u16,
    },
    /// A record larger than anything of its kind.
    #[error("zip record {name:?} has {bytes} bytes, more than the {limit} allowed")]
    TooLarge {
        /// The record.
        name: String,
        /// What it claims.
        bytes: u64,
        /// What is allowed.
        limit: u64,
    },
    /// A record whose bytes are not those that were written.
    #[error("zip record {name:?} has CRC-32 {found:08x}, {stored:08x} was stored: bytes changed")]
    Crc {
        /// The record.
        name: String,
        /// The checksum of the archive.
        stored: u32,
        /// The checksum of the bytes.
        found: u32,
    },
}
