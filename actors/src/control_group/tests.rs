//! Several members in one process, linked by channels that can be cut, each on
//! a real store.

mod cluster;
mod failures;
mod growth;
mod store;
mod storm;
mod timing;

pub(super) use cluster::Journal;
