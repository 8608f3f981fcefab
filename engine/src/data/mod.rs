//! Which tokens a step trains on, and the proof of it (DATA-1).
//!
//! The order of samples is a function, not a position: [`permutation`] gives
//! sample *i* of epoch *e* at random access, [`batch`] turns (step, micro-batch)
//! into token ids, [`tokens`] reads them from a token file, and [`ledger`] writes
//! down what was read where it was read. There is no shuffle buffer, no loader
//! state and nothing to restore: the cursor is the step.

pub mod batch;
pub mod ledger;
pub mod permutation;
pub mod tokens;

pub use batch::{Batch, Batches, Validation};
pub use ledger::Ledger;
pub use permutation::Permutation;
pub use tokens::TokenFile;

#[cfg(test)]
mod tests;
