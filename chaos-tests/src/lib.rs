//! Fault injection with real processes and real signals, and the tests of the
//! promises: TRAJ-1, DATA-1, CKPT-1, LIVE-1, LIVE-2.
//!
//! [`harness`] starts groups of `elastic run` in a folder of their own, kills what
//! it is told to and reads what a run left. [`fake`] is a trainer with the
//! arithmetic of training but without libtorch, so that hundreds of kills fit
//! into a minute. [`proxy`] is a network between nodes that loses, delays and cuts.
//! [`hostile`] knocks at nodes' doors, and a [`clock`] jumps. The tests themselves are in
//! `tests/suite`; `oracles/` holds what an outsider recomputes in Python.

pub mod clock;
pub mod fake;
pub mod harness;
pub mod hostile;
pub mod proxy;
