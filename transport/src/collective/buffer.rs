//! Memory that a communicator hands out.

use std::fmt;

use super::{Dtype, Element, Error, View, ViewMut};

/// Cache lines and vector registers, and what libtorch's kernels like.
const ALIGNMENT: usize = 64;

/// Elements in memory from which the operations of the communicator that made
/// it copy nothing, where its backend has such memory. Zeros at first, aligned
/// to 64 bytes at least. It belongs to its generation (ME-1): after an error its
/// content is undefined, and the next generation allocates anew.
pub struct Buffer {
    dtype: Dtype,
    memory: Box<dyn Memory>,
}

/// Where a [`Buffer`]'s bytes are.
pub(super) trait Memory: Send {
    fn bytes(&self) -> &[u8];
    fn bytes_mut(&mut self) -> &mut [u8];
}

impl Buffer {
    /// Ordinary memory of this process.
    #[must_use]
    pub fn ordinary(dtype: Dtype, elements: usize) -> Self {
        let bytes = elements * dtype.size();
        let words = vec![0_u64; (bytes + ALIGNMENT).div_ceil(size_of::<u64>())];
        let start = words.as_ptr().addr().next_multiple_of(ALIGNMENT) - words.as_ptr().addr();
        Self::new(dtype, Ordinary { words, start, bytes })
    }

    pub(super) fn new(dtype: Dtype, memory: impl Memory + 'static) -> Self {
        Self { dtype, memory: Box::new(memory) }
    }

    /// The elements, to read.
    #[must_use]
    pub fn view(&self) -> View<'_> {
        // Every kind of memory is aligned and a whole number of elements.
        match self.dtype {
            Dtype::F32 => View::of::<f32>(bytemuck::cast_slice(self.memory.bytes())),
            Dtype::Bf16 => View::of::<half::bf16>(bytemuck::cast_slice(self.memory.bytes())),
            Dtype::F16 => View::of::<half::f16>(bytemuck::cast_slice(self.memory.bytes())),
            Dtype::F64 => View::of::<f64>(bytemuck::cast_slice(self.memory.bytes())),
            Dtype::I64 => View::of::<i64>(bytemuck::cast_slice(self.memory.bytes())),
            Dtype::I32 => View::of::<i32>(bytemuck::cast_slice(self.memory.bytes())),
            Dtype::U8 => View::of(self.memory.bytes()),
        }
    }

    /// The elements, to write.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        let bytes = self.memory.bytes_mut();
        match self.dtype {
            Dtype::F32 => ViewMut::of::<f32>(bytemuck::cast_slice_mut(bytes)),
            Dtype::Bf16 => ViewMut::of::<half::bf16>(bytemuck::cast_slice_mut(bytes)),
            Dtype::F16 => ViewMut::of::<half::f16>(bytemuck::cast_slice_mut(bytes)),
            Dtype::F64 => ViewMut::of::<f64>(bytemuck::cast_slice_mut(bytes)),
            Dtype::I64 => ViewMut::of::<i64>(bytemuck::cast_slice_mut(bytes)),
            Dtype::I32 => ViewMut::of::<i32>(bytemuck::cast_slice_mut(bytes)),
            Dtype::U8 => ViewMut::of(bytes),
        }
    }

    /// The elements as a slice.
    ///
    /// # Errors
    /// [`Error::Refused`] when they are of another type.
    pub fn typed<T: Element>(&self) -> Result<&[T], Error> {
        self.view().typed()
    }

    /// The elements as a slice.
    ///
    /// # Errors
    /// [`Error::Refused`] when they are of another type.
    pub fn typed_mut<T: Element>(&mut self) -> Result<&mut [T], Error> {
        self.view_mut().typed()
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} {})", self.view().len(), self.dtype)
    }
}

/// Words from a multiple of the alignment on: a vector's memory does not move.
struct Ordinary {
    words: Vec<u64>,
    start: usize,
    bytes: usize,
}

impl Memory for Ordinary {
    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[self.start..][..self.bytes]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[self.start..][..self.bytes]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_typed_and_zero() {
        for dtype in Dtype::ALL {
            for elements in [0, 1, 63, 1000] {
                let mut buffer = Buffer::ordinary(dtype, elements);
                let view = buffer.view_mut();
                assert_eq!((view.dtype(), view.len()), (dtype, elements));
                let bytes = view.host().unwrap();
                assert!(bytes.as_ptr().addr().is_multiple_of(ALIGNMENT));
                assert!(bytes.iter().all(|byte| *byte == 0));
            }
        }
        assert!(Buffer::ordinary(Dtype::F32, 1).typed::<f64>().is_err());
    }
}
