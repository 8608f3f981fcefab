//! The one place that turns messages into bytes and back. Decoding is bounded:
//! a length that a peer claims never makes us allocate beyond [`MAX_MESSAGE`].

use bincode::config::{self, Configuration, Fixint, Limit, LittleEndian};
use serde::{Serialize, de::DeserializeOwned};

/// The largest message that decodes, in bytes: a replicated state of thousands
/// of nodes stays far below.
pub const MAX_MESSAGE: usize = 64 << 20;

const CONFIG: Configuration<LittleEndian, Fixint, Limit<MAX_MESSAGE>> =
    config::standard().with_fixed_int_encoding().with_limit::<MAX_MESSAGE>();

/// Bytes that are not the message that they should be.
#[derive(Debug, thiserror::Error)]
#[error("cannot decode {what}: {detail}")]
pub struct DecodeError {
    /// The type that was expected.
    pub what: &'static str,
    detail: String,
}

/// Encodes a message.
///
/// # Panics
/// Never for the message types of this workspace: they hold no maps with
/// failing keys and no unsized sequences.
#[must_use]
pub fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    // PANIC: serialising owned plain data into memory does not fail.
    bincode::serde::encode_to_vec(value, CONFIG).expect("plain data serialises")
}

/// Decodes one message that fills `bytes` exactly.
///
/// # Errors
/// When the bytes are short, long, over the limit or of another type.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, DecodeError> {
    let what = std::any::type_name::<T>();
    match bincode::serde::decode_from_slice(bytes, CONFIG) {
        Ok((value, used)) if used == bytes.len() => Ok(value),
        Ok((_, used)) => Err(DecodeError {
            what,
            detail: format!("{} bytes left over after {used}", bytes.len() - used),
        }),
        Err(error) => Err(DecodeError { what, detail: error.to_string() }),
    }
}
