//! An index of a checkpoint.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dcp::fuzzing::index(bytes));
