//! An archive as tensors and objects are.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dcp::fuzzing::zip(bytes));
