//! Fault injection with real processes and real signals, and the tests of the
//! promises: TRAJ-1, DATA-1, CKPT-1, LIVE-1, LIVE-2.
//!
//! [`harness`] starts `elastic run --standalone N` in a folder of its own, kills
//! what it is told to and reads what the run left. [`fake`] is a trainer with the
//! arithmetic of training but without libtorch, so that hundreds of kills fit
//! into a minute. The tests themselves are in `tests/suite`; `oracles/` holds
//! what an outsider recomputes in Python.

pub mod fake;
pub mod harness;
