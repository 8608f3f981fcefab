//! One item of a data file: a slice of it, or what it decodes to.

use std::io;
use std::sync::Arc;

use crate::error::SliceError;
use crate::storage::Object;
use crate::zip;

/// Bytes of an item's beginning and end that are read ahead: they hold all of
/// an archive but its large record.
const EDGE: u64 = 4096;

/// Bytes to read at once: few enough to stay in the cache for the CRC, and so
/// many that a slow store's requests are worth it.
pub(crate) fn piece_of(object: &dyn Object) -> usize {
    (256 << 10).max(4 * object.request_cost() as usize)
}

/// The bytes of an item.
pub(crate) enum Item {
    /// As they are in the file.
    Slice(Slice),
    /// Decoded, from so many stored bytes.
    Memory { bytes: Vec<u8>, stored: usize },
}

/// A slice of a data file; known to lie in it.
pub(crate) struct Slice {
    pub(crate) file: Arc<dyn Object>,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

impl Slice {
    /// All of it.
    pub(crate) fn read(&self) -> Result<Vec<u8>, SliceError> {
        let mut bytes = vec![0; self.length as usize];
        self.read_at(0, &mut bytes).map_err(zip::Error::Io)?;
        Ok(bytes)
    }
}

impl Object for Item {
    fn len(&self) -> u64 {
        match self {
            Self::Slice(slice) => slice.length,
            Self::Memory { bytes, .. } => bytes.len() as u64,
        }
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        match self {
            Self::Slice(slice) => slice.read_at(at, into),
            Self::Memory { bytes, .. } => bytes.read_at(at, into),
        }
    }

    fn request_cost(&self) -> u64 {
        match self {
            Self::Slice(slice) => slice.request_cost(),
            Self::Memory { .. } => 0,
        }
    }
}

impl Object for Slice {
    fn len(&self) -> u64 {
        self.length
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        if at.checked_add(into.len() as u64).is_none_or(|end| end > self.length) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.file.read_at(self.offset + at, into)
    }

    fn request_cost(&self) -> u64 {
        self.file.request_cost()
    }
}

impl Object for Vec<u8> {
    fn len(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let from = usize::try_from(at).ok().and_then(|at| self.get(at..)?.get(..into.len()));
        into.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// An item whose edges were read: what an archive needs besides its large
/// record then costs two requests, and small archives one.
pub(crate) struct Edges<'a> {
    item: &'a dyn Object,
    head: Vec<u8>,
    tail: Vec<u8>,
}

impl<'a> Edges<'a> {
    /// Reads the edges.
    pub(crate) fn of(item: &'a dyn Object) -> Result<Self, SliceError> {
        let edge = |at: u64, length: u64| {
            let mut bytes = vec![0; length as usize];
            item.read_at(at, &mut bytes).map_err(zip::Error::Io)?;
            Ok::<_, SliceError>(bytes)
        };
        let len = item.len();
        if len <= 2 * EDGE {
            return Ok(Self { item, head: edge(0, len)?, tail: Vec::new() });
        }
        Ok(Self { item, head: edge(0, EDGE)?, tail: edge(len - EDGE, EDGE)? })
    }

    /// Bytes that were read.
    pub(crate) fn read(&self) -> usize {
        self.head.len() + self.tail.len()
    }
}

impl Object for Edges<'_> {
    fn len(&self) -> u64 {
        self.item.len()
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let tail = self.len() - self.tail.len() as u64;
        let held = self.head.read_at(at, into).or_else(|_| {
            let at = at.checked_sub(tail).ok_or(io::ErrorKind::UnexpectedEof)?;
            self.tail.read_at(at, into)
        });
        held.or_else(|_| self.item.read_at(at, into))
    }
}
