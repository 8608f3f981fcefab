//! Everything that needs no Python: PyTorch's own checkpoints read to the last
//! byte, ours through every mesh, damage, hostile bytes, crashes.

#![allow(clippy::unwrap_used, reason = "tests")]

mod crash;
mod damage;
mod faulty;
mod folder;
mod golden;
mod hostile;
mod load;
mod merge;
mod power;
mod reshard;
mod scale;
mod staging;
mod storage;
mod support;
