//! The `elastic` command as a library: configuration, command line, and tools
//! that work without libtorch, so that it starts everywhere at once.
//!
//! Start with [`config`] for what a job is, [`cli`] for what can be asked, and
//! [`command`] for how it is done.

pub mod cli;
pub mod command;
pub mod config;
pub mod exit;
mod launch;
pub mod log;
