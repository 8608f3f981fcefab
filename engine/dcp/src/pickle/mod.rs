//! The part of Python's pickle that checkpoints use.
//!
//! `read` is a machine that builds inert nodes and calls nothing: a global
//! stays a name. Its memory is bounded by a constant times the input. `write`
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
    #[error("pickle holds {found} at byte {at}, where {expected} belongs")]
    Unexpected {
        /// Where it is.
        at: usize,
        /// What belongs there.
        expected: &'static str,
        /// What is there.
        found: String,
    },
    /// A value that has no place in a checkpoint that we write.
    #[error("a value of class {0} cannot be written")]
    Opaque(String),
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Error;
    use super::read::Pickle;
    use super::write::Writer;
    use crate::value::Value;

    fn load(bytes: &[u8]) -> Result<Value, Error> {
        let pickle = Pickle::parse(bytes)?;
        assert!(pickle.nodes() <= bytes.len());
        pickle.value(pickle.root)
    }

    #[track_caller]
    fn check(bytes: &[u8], expected: &str) {
        let told = load(bytes).map_or_else(|e| e.to_string(), |value| format!("{value:?}"));
        assert_eq!(told, expected);
    }

    #[test]
    fn bad_pickles_are_named() {
        check(b"", "pickle is cut short at byte 0");
        check(b"\x80\x02N", "pickle is cut short at byte 3");
        check(b"\x80\x07N.", "pickle protocol 7 is not one of 2 to 5");
        check(b"N.N", "pickle ends at byte 2, but bytes follow");
        check(b"N\xff.", "pickle has the unknown opcode 0xff at byte 1");
        check(b"Ni.", "pickle has the unknown opcode 0x69 at byte 1");
        check(b".", "pickle opcode 0x2e at byte 0 does not fit what precedes it");
        check(b"N(s.", "pickle opcode 0x73 at byte 2 does not fit what precedes it");
        check(b"h\x05.", "pickle opcode 0x68 at byte 0 does not fit what precedes it");
        check(b"X\xff\xff\xff\x7fab.", "pickle is cut short at byte 5");
        check(b"X\x01\0\0\0\xff.", "pickle text at byte 1 is not UTF-8");
        check(b"cos\nsystem\n(X\x02\0\0\0lstR.", "Opaque(\"os.system\")");
    }

    /// Forty doublings of a tuple fit in 130 bytes; unfolded they fill any memory.
    #[test]
    fn values_that_unfold_without_bound_are_refused() {
        let mut bomb = b"N\x94".to_vec();
        for n in 0..40 {
            bomb.extend([b'h', n, 0x86, 0x94]);
        }
        bomb.push(b'.');
        check(&bomb, "pickled value unfolds beyond 16 times its size");
        // A list that holds itself.
        check(b"]q\0h\0a.", "pickled value unfolds beyond 100 levels");
    }

    fn values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::None),
            any::<bool>().prop_map(Value::Bool),
            any::<i64>().prop_map(Value::Int),
            (-70_000..70_000i64).prop_map(Value::Int),
            (-1e300..1e300).prop_map(Value::Float),
            ".{0,20}".prop_map(Value::Str),
            prop::collection::vec(any::<u8>(), 0..40).prop_map(Value::Bytes),
            Just(Value::BigInt([&[7; 20][..], &[1]].concat())),
        ];
        leaf.prop_recursive(4, 40, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::List),
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::Tuple),
                prop::collection::vec((inner.clone(), inner), 0..6).prop_map(Value::Dict),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn values_survive(value in values()) {
            let mut writer = Writer::new();
            writer.value(&value).map_err(|e| TestCaseError::fail(e.to_string()))?;
            let read = load(&writer.finish()).map_err(|e| TestCaseError::fail(e.to_string()))?;
            prop_assert_eq!(read, value);
        }

        /// Programs of real opcodes get far; arbitrary bytes get nowhere.
        #[test]
        fn hostile_programs_never_panic(program in prop::collection::vec(prop_oneof![
            4 => prop::sample::select(b"N()]}tesuabRQ0KhqX\x81\x85\x86\x87\x88\x89\x8a\x8c\x93\x94".to_vec()),
            1 => 0..4u8,
            1 => any::<u8>(),
        ], 0..200)) {
            let mut program = program;
            program.push(b'.');
            let _ = load(&program);
        }
    }
}
