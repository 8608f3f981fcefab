//! The engine as its callers use it: one binary, because linking is slow.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod checkpoint;
mod loopback;
mod matrix;
mod step;
mod support;
mod sync;
mod trajectory;
