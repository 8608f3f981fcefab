//! Borrowed typed memory: what operations read and write.

use std::{marker::PhantomData, ops::Range};

use super::{Dtype, Element, Error};

/// Elements to read, wherever they lie.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    dtype: Dtype,
    memory: Memory<'a>,
}

/// Elements to write, wherever they lie.
#[derive(Debug)]
pub struct ViewMut<'a> {
    dtype: Dtype,
    memory: MemoryMut<'a>,
}

/// Memory of a GPU. It is an address and no more: only a backend that speaks
/// with the device does anything with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cuda<'a> {
    /// Address on the device.
    pub address: u64,
    /// Bytes.
    pub bytes: usize,
    /// Ordinal of the device.
    pub device: u32,
    borrowed: PhantomData<&'a [u8]>,
}

#[derive(Clone, Copy, Debug)]
enum Memory<'a> {
    Host(&'a [u8]),
    Cuda(Cuda<'a>),
}

#[derive(Debug)]
enum MemoryMut<'a> {
    Host(&'a mut [u8]),
    Cuda(Cuda<'a>),
}

impl<'a> View<'a> {
    /// The elements of a slice.
    pub fn of<T: Element>(elements: &'a [T]) -> Self {
        Self { dtype: T::DTYPE, memory: Memory::Host(bytemuck::cast_slice(elements)) }
    }

    /// Bytes that are elements of this type, in the machine's order.
    ///
    /// # Errors
    /// [`Error::Refused`] when they are no whole number of elements, or not
    /// aligned for them.
    pub fn from_bytes(dtype: Dtype, bytes: &'a [u8]) -> Result<Self, Error> {
        check(dtype, bytes)?;
        Ok(Self { dtype, memory: Memory::Host(bytes) })
    }

    /// Elements in the memory of a GPU.
    ///
    /// # Safety
    /// The memory is allocated on that device, aligned, and for `'a` nobody
    /// writes to it except in stream order.
    #[must_use]
    pub unsafe fn from_cuda(dtype: Dtype, address: u64, elements: usize, device: u32) -> Self {
        let bytes = elements * dtype.size();
        Self { dtype, memory: Memory::Cuda(Cuda { address, bytes, device, borrowed: PhantomData }) }
    }

    /// The type of the elements.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.size() / self.dtype.size()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.size() == 0
    }

    /// Number of bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        match self.memory {
            Memory::Host(bytes) => bytes.len(),
            Memory::Cuda(Cuda { bytes, .. }) => bytes,
        }
    }

    /// The bytes in host memory.
    ///
    /// # Errors
    /// [`Error::Refused`] when they are on a device.
    pub fn host(self) -> Result<&'a [u8], Error> {
        match self.memory {
            Memory::Host(bytes) => Ok(bytes),
            Memory::Cuda(cuda) => Err(on_device(cuda)),
        }
    }

    /// The elements in host memory.
    ///
    /// # Errors
    /// [`Error::Refused`] when they are on a device or of another type.
    pub fn typed<T: Element>(self) -> Result<&'a [T], Error> {
        check_type::<T>(self.dtype)?;
        bytemuck::try_cast_slice(self.host()?).map_err(|_| misaligned(self.dtype))
    }

    /// The memory on a device, if that is where it is.
    #[must_use]
    pub fn cuda(self) -> Option<Cuda<'a>> {
        match self.memory {
            Memory::Host(_) => None,
            Memory::Cuda(cuda) => Some(cuda),
        }
    }

    /// A part, in elements.
    ///
    /// # Panics
    /// When the range leaves the view.
    #[must_use]
    pub fn slice(self, range: Range<usize>) -> Self {
        let range = in_bytes(self.dtype, &range);
        let memory = match self.memory {
            Memory::Host(bytes) => Memory::Host(&bytes[range]),
            Memory::Cuda(cuda) => Memory::Cuda(cuda.slice(range)),
        };
        Self { dtype: self.dtype, memory }
    }
}

impl<'a> ViewMut<'a> {
    /// The elements of a slice.
    pub fn of<T: Element>(elements: &'a mut [T]) -> Self {
        Self { dtype: T::DTYPE, memory: MemoryMut::Host(bytemuck::cast_slice_mut(elements)) }
    }

    /// Bytes that are elements of this type, in the machine's order.
    ///
    /// # Errors
    /// [`Error::Refused`] when they are no whole number of elements, or not
    /// aligned for them.
    pub fn from_bytes(dtype: Dtype, bytes: &'a mut [u8]) -> Result<Self, Error> {
        check(dtype, bytes)?;
        Ok(Self { dtype, memory: MemoryMut::Host(bytes) })
    }

    /// Elements in the memory of a GPU.
    ///
    /// # Safety
    /// The memory is allocated on that device, aligned, and for `'a` nobody
    /// reads or writes it except in stream order.
    #[must_use]
    pub unsafe fn from_cuda(dtype: Dtype, address: u64, elements: usize, device: u32) -> Self {
        let bytes = elements * dtype.size();
        let cuda = Cuda { address, bytes, device, borrowed: PhantomData };
        Self { dtype, memory: MemoryMut::Cuda(cuda) }
    }

    /// The type of the elements.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.as_view().len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.as_view().is_empty()
    }

    /// To read.
    #[must_use]
    pub fn as_view(&self) -> View<'_> {
        let memory = match &self.memory {
            MemoryMut::Host(bytes) => Memory::Host(bytes),
            MemoryMut::Cuda(cuda) => Memory::Cuda(*cuda),
        };
        View { dtype: self.dtype, memory }
    }

    /// The same elements for a shorter time.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        let memory = match &mut self.memory {
            MemoryMut::Host(bytes) => MemoryMut::Host(bytes),
            MemoryMut::Cuda(cuda) => MemoryMut::Cuda(*cuda),
        };
        ViewMut { dtype: self.dtype, memory }
    }

    /// The bytes in host memory.
    ///
    /// # Errors
    /// [`Error::Refused`] when they are on a device.
    pub fn host(self) -> Result<&'a mut [u8], Error> {
        match self.memory {
            MemoryMut::Host(bytes) => Ok(bytes),
            MemoryMut::Cuda(cuda) => Err(on_device(cuda)),
        }
    }

    /// The elements in host memory.
    ///
    /// # Errors
    /// [`Error::Refused`] when they are on a device or of another type.
    pub fn typed<T: Element>(self) -> Result<&'a mut [T], Error> {
        check_type::<T>(self.dtype)?;
        let dtype = self.dtype;
        bytemuck::try_cast_slice_mut(self.host()?).map_err(|_| misaligned(dtype))
    }

    /// The memory on a device, if that is where it is.
    #[must_use]
    pub fn cuda(&self) -> Option<Cuda<'_>> {
        self.as_view().cuda()
    }

    /// A part, in elements.
    ///
    /// # Panics
    /// When the range leaves the view.
    #[must_use]
    pub fn slice(self, range: Range<usize>) -> Self {
        let range = in_bytes(self.dtype, &range);
        let memory = match self.memory {
            MemoryMut::Host(bytes) => MemoryMut::Host(&mut bytes[range]),
            MemoryMut::Cuda(cuda) => MemoryMut::Cuda(cuda.slice(range)),
        };
        Self { dtype: self.dtype, memory }
    }
}

impl Cuda<'_> {
    fn slice(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.bytes, "{range:?} of {self:?}");
        Self { address: self.address + range.start as u64, bytes: range.len(), ..self }
    }
}

impl<'a, T: Element> From<&'a [T]> for View<'a> {
    fn from(elements: &'a [T]) -> Self {
        Self::of(elements)
    }
}

impl<'a, T: Element> From<&'a Vec<T>> for View<'a> {
    fn from(elements: &'a Vec<T>) -> Self {
        Self::of(elements)
    }
}

impl<'a, T: Element> From<&'a mut [T]> for ViewMut<'a> {
    fn from(elements: &'a mut [T]) -> Self {
        Self::of(elements)
    }
}

impl<'a, T: Element> From<&'a mut Vec<T>> for ViewMut<'a> {
    fn from(elements: &'a mut Vec<T>) -> Self {
        Self::of(elements)
    }
}

fn in_bytes(dtype: Dtype, range: &Range<usize>) -> Range<usize> {
    range.start * dtype.size()..range.end * dtype.size()
}

fn check(dtype: Dtype, bytes: &[u8]) -> Result<(), Error> {
    let size = dtype.size();
    if !bytes.len().is_multiple_of(size) {
        let length = bytes.len();
        return Err(Error::refused(format!("{length} bytes are no whole number of {dtype}")));
    }
    if !bytes.as_ptr().addr().is_multiple_of(size) {
        return Err(misaligned(dtype));
    }
    Ok(())
}

fn check_type<T: Element>(dtype: Dtype) -> Result<(), Error> {
    if dtype == T::DTYPE {
        return Ok(());
    }
    Err(Error::refused(format!("elements of type {dtype} where {} is meant", T::DTYPE)))
}

fn misaligned(dtype: Dtype) -> Error {
    Error::refused(format!("a buffer of {dtype} that is not aligned to {} bytes", dtype.size()))
}

fn on_device(cuda: Cuda) -> Error {
    let device = cuda.device;
    Error::refused(format!("the buffer is on CUDA device {device}, this backend reads host memory"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_know_their_type_and_refuse_others() {
        let mut values = [1.0_f32, 2.0, 3.0];
        let view = View::of(&values);
        assert_eq!((view.dtype(), view.len(), view.size()), (Dtype::F32, 3, 12));
        assert_eq!(view.slice(1..2).typed::<f32>().unwrap(), [2.0]);
        assert!(view.typed::<i32>().unwrap_err().to_string().contains("f32 where i32"));
        let bytes = view.host().unwrap();
        assert!(View::from_bytes(Dtype::F32, &bytes[..5]).is_err());
        assert!(View::from_bytes(Dtype::F32, &bytes[1..5]).is_err());
        let mut view = ViewMut::of(&mut values);
        view.reborrow().slice(0..1).typed::<f32>().unwrap()[0] = 7.0;
        assert_eq!(view.as_view().typed::<f32>().unwrap(), [7.0, 2.0, 3.0]);
    }

    #[test]
    fn memory_of_a_device_is_no_host_memory() {
        // SAFETY: nothing reads this address.
        let view = unsafe { View::from_cuda(Dtype::Bf16, 4096, 8, 1) };
        assert_eq!((view.len(), view.size()), (8, 16));
        let part = view.slice(2..3).cuda().unwrap();
        assert_eq!((part.address, part.bytes, part.device), (4100, 2, 1));
        assert!(view.host().unwrap_err().to_string().contains("on CUDA device 1"));
    }
}
