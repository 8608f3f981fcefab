//! Memory for flat buffers, aligned so that every parameter in them is.

use std::ops::{Deref, DerefMut};

/// f32 elements in 64 bytes.
pub(crate) const LINE: usize = 16;

/// f32 values that start at a 64-byte boundary, zero at first.
///
/// The memory never moves while the buffer lives, not even when the buffer
/// itself is moved, so that tensors may view it.
#[derive(Debug)]
pub struct AlignedBuffer {
    // Longer by up to a line than the buffer, which starts at `start`: alignment
    // without an allocator of our own.
    memory: Vec<f32>,
    start: usize,
    length: usize,
}

impl AlignedBuffer {
    /// `length` zeros.
    #[must_use]
    pub fn zeroed(length: usize) -> Self {
        let memory = vec![0f32; length + LINE];
        let start = memory.as_ptr().align_offset(LINE * size_of::<f32>());
        assert!(start <= LINE, "an f32 reaches a 64-byte boundary within a line");
        Self { memory, start, length }
    }
}

impl Deref for AlignedBuffer {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &self.memory[self.start..self.start + self.length]
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.memory[self.start..self.start + self.length]
    }
}

impl Clone for AlignedBuffer {
    fn clone(&self) -> Self {
        let mut copy = Self::zeroed(self.length);
        copy.copy_from_slice(self);
        copy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_wherever_they_land() {
        for length in 0..70 {
            let mut buffer = AlignedBuffer::zeroed(length);
            assert_eq!((buffer.len(), buffer.as_ptr() as usize % 64), (length, 0));
            buffer.fill(1.5);
            let copy = buffer.clone();
            assert_eq!((&*copy, copy.as_ptr() as usize % 64), (&*buffer, 0));
        }
    }
}
