//! A pickle as objects hold it.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dcp::fuzzing::pickle(bytes));
