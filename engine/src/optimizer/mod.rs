//! The optimizer: element-wise over flat f32 slices (TRAJ-1, rule 9 of the
//! arithmetic), so that any shard of any cut gets the bits of the whole.
//!
//! [`schedule`] gives the learning rate of a step, [`clip`] the global gradient
//! norm and the clipping coefficient, [`adamw`] the update itself. None of them
//! knows ranks, collectives or tensors.

pub mod adamw;
pub mod clip;
pub mod schedule;

pub use adamw::AdamW;
pub use schedule::Schedule;
