//! The unsafe edge of this crate: libtorch's process-wide settings, memory that
//! can be given back, and tensors over memory that Rust owns.

mod pages;
mod replica;
mod runtime;
mod view;

pub(crate) use replica::Replica;
pub(crate) use runtime::prepare_libtorch;
