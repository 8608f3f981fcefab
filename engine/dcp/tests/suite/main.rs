//! Everything that needs no Python: PyTorch's own checkpoints read to the last
//! byte, ours through every mesh, damage, hostile bytes, crashes.

#![allow(clippy::unwrap_used, reason = "tests")]

mod crash;
mod damage;
mod folder;
mod golden;
mod hostile;
mod load;
mod merge;
mod reshard;
mod scale;
mod storage;
mod support;
