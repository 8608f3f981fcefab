//! Memory of every rank of a mesh that all of them have mapped, from which
//! operations copy nothing.

use std::sync::Arc;

use super::{Mapping, ffi::Exclusive};
use crate::collective::{Buffer, Dtype};

/// One allocation of all ranks together.
#[derive(Debug)]
pub(in crate::collective) struct Region {
    own: usize,
    // By rank.
    memory: Vec<Arc<Mapping>>,
}

impl Region {
    pub(in crate::collective) fn new(own: usize, memory: Vec<Arc<Mapping>>) -> Self {
        Self { own, memory }
    }

    /// This rank's part of it, as a buffer: the only one.
    pub(in crate::collective) fn buffer(&self, dtype: Dtype, elements: usize) -> Buffer {
        let memory = Arc::clone(&self.memory[self.own]);
        Buffer::new(dtype, Exclusive::new(memory, elements * dtype.size()))
    }

    /// Where some memory lies in this rank's part, if it does.
    pub(in crate::collective) fn offset_of(&self, bytes: &[u8]) -> Option<usize> {
        self.memory[self.own].offset_of(bytes)
    }

    /// A rank's part.
    pub(in crate::collective) fn memory(&self, rank: usize) -> &Mapping {
        &self.memory[rank]
    }
}
