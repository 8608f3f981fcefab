//! The state of one moment, in a buffer that is nobody else's.

use std::ops::Range;
use std::sync::Arc;

use memmap2::MmapMut;

use super::Error;
use super::pool::Pool;
use crate::dtype::Dtype;
use crate::region::Region;
use crate::value::{Segment, Value};
use crate::writer::{Content, Item};

/// Tensors begin at multiples of it, as vector instructions like it.
const ALIGN: usize = 64;

/// What one rank saves. Dropped, it gives its buffer back.
pub struct Snapshot {
    /// There until the drop.
    buffer: Option<MmapMut>,
    pool: Arc<Pool>,
    used: usize,
    items: Vec<Staged>,
}

struct Staged {
    fqn: String,
    path: Vec<Segment>,
    what: What,
}

enum What {
    Tensor { dtype: Dtype, shape: Vec<u64>, region: Region, bytes: Range<usize> },
    Object(Value),
}

impl Snapshot {
    pub(super) fn new(buffer: MmapMut, pool: Arc<Pool>) -> Self {
        Self { buffer: Some(buffer), pool, used: 0, items: Vec::new() }
    }

    /// Copies a box of a tensor.
    ///
    /// # Errors
    /// When the bytes are not those of the region, or the buffer is full.
    pub fn tensor(
        &mut self,
        fqn: &str,
        path: &[Segment],
        dtype: Dtype,
        shape: &[u64],
        region: &Region,
        bytes: &[u8],
    ) -> Result<(), Error> {
        let expected = region.elements().saturating_mul(dtype.size() as u64);
        if expected != bytes.len() as u64 {
            return Err(Error::Bytes { fqn: fqn.to_owned(), expected, given: bytes.len() });
        }
        self.room(fqn, path, dtype, shape, region)?.copy_from_slice(bytes);
        Ok(())
    }

    /// The place of a box of a tensor, to be filled by the caller, for example
    /// from another device.
    ///
    /// # Errors
    /// When the buffer is full.
    pub fn room(
        &mut self,
        fqn: &str,
        path: &[Segment],
        dtype: Dtype,
        shape: &[u64],
        region: &Region,
    ) -> Result<&mut [u8], Error> {
        let bytes = region.elements().saturating_mul(dtype.size() as u64);
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let buffer = self.buffer.as_deref_mut().unwrap_or_default();
        let start = self.used.next_multiple_of(ALIGN).min(buffer.len());
        let (left, end) = (buffer.len() - start, start.saturating_add(bytes));
        let Some(room) = buffer.get_mut(start..end) else {
            return Err(Error::Full { fqn: fqn.to_owned(), bytes, left });
        };
        self.used = end;
        let (shape, region) = (shape.to_vec(), region.clone());
        let what = What::Tensor { dtype, shape, region, bytes: start..end };
        self.items.push(Staged { fqn: fqn.to_owned(), path: path.to_vec(), what });
        Ok(room)
    }

    /// Takes a Python value.
    pub fn object(&mut self, fqn: &str, path: &[Segment], value: Value) {
        let what = What::Object(value);
        self.items.push(Staged { fqn: fqn.to_owned(), path: path.to_vec(), what });
    }

    /// Bytes of all tensors.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let bytes = |item: &Staged| match &item.what {
            What::Tensor { bytes, .. } => bytes.len() as u64,
            What::Object(_) => 0,
        };
        self.items.iter().map(bytes).sum()
    }

    pub(super) fn items(&self) -> Vec<Item<'_>> {
        let buffer = self.buffer.as_deref().unwrap_or_default();
        self.items.iter().map(|item| item.borrowed(buffer)).collect()
    }
}

impl Staged {
    fn borrowed<'a>(&'a self, buffer: &'a [u8]) -> Item<'a> {
        let content = match &self.what {
            What::Object(value) => Content::Object(value),
            What::Tensor { dtype, shape, region, bytes } => Content::Tensor {
                dtype: *dtype,
                shape,
                region: region.clone(),
                bytes: &buffer[bytes.clone()],
            },
        };
        Item { fqn: &self.fqn, path: &self.path, content }
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.pool.put(buffer);
        }
    }
}
