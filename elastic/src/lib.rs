//! The `elastic` command as a library: configuration, command line, and tools
//! that work without libtorch, so that it starts everywhere at once.
//!
//! Start with [`config`] for what a job is, and [`command`] for what can be done
//! with it.

pub mod config;
