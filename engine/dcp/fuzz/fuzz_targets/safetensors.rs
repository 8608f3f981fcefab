//! A file of safetensors.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dcp::fuzzing::safetensors(bytes));
