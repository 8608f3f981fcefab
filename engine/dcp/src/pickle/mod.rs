//! The part of Python's pickle that checkpoints use.
//!
//! [`read`] is a machine that builds inert nodes and calls nothing: a global
//! stays a name. Its memory is bounded by a constant times the input. [`write`]
//! emits protocol 2, the only one that PyTorch's safe loader knows.

pub(crate) mod read;
pub(crate) mod value;
pub(crate) mod write;

/// Bytes that are not a pickle of the kind that checkpoints hold.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The pickle ends in the middle.
    #[error("pickle is cut short at byte {0}")]
    Short(usize),
    /// Bytes follow the end.
    #[error("pickle ends at byte {0}, but bytes follow")]
    Trailing(usize),
    /// A newer protocol.
    #[error("pickle protocol {0} is not one of 2 to 5")]
    Protocol(u8),
    /// An instruction that no checkpoint needs.
    #[error("pickle has the unknown opcode {opcode:#04x} at byte {at}")]
    Opcode {
        /// The opcode.
        opcode: u8,
        /// Where it is.
        at: usize,
    },
    /// An instruction whose operands are missing or of the wrong kind.
    #[error("pickle opcode {opcode:#04x} at byte {at} does not fit what precedes it")]
    Operand {
        /// The opcode.
        opcode: u8,
        /// Where it is.
        at: usize,
    },
    /// Text that is not UTF-8.
    #[error("pickle text at byte {0} is not UTF-8")]
    Text(usize),
    /// A value that unfolds to far more than the input, or without end.
    #[error("pickled value unfolds beyond {0}")]
    Unbounded(&'static str),
    /// A well-formed pickle of another shape.
    #[error("pickle holds {found} where {expected} belongs")]
    Unexpected {
        /// What belongs there.
        expected: &'static str,
        /// What is there.
        found: String,
    },
    /// A value that has no place in a checkpoint that we write.
    #[error("a value of class {0} cannot be written")]
    Opaque(String),
}
