//! A stream of bytes from one process to another: a ring in shared memory with
//! one writer and one reader, without locks.
//!
//! Both cursors only grow; the writer owns `tail`, the reader `head`, and the
//! bytes between them are the reader's. What a peer claims is checked before it
//! is used.

/// The memory of one ring. Loads acquire and stores release.
pub(super) trait Memory {
    fn capacity(&self) -> usize;
    fn head(&self) -> u64;
    fn set_head(&self, head: u64);
    fn tail(&self) -> u64;
    fn set_tail(&self, tail: u64);
    /// Copies to or from an offset, without wrapping around.
    fn copy_in(&self, at: usize, bytes: &[u8]);
    fn copy_out(&self, at: usize, into: &mut [u8]);
}

/// The peer's cursor cannot be right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::collective) struct Broken;

/// The writing end.
#[derive(Debug)]
pub(super) struct Writer<M> {
    memory: M,
    tail: u64,
    // The reader's cursor when last looked at.
    head: u64,
}

/// The reading end.
#[derive(Debug)]
pub(super) struct Reader<M> {
    memory: M,
    head: u64,
    tail: u64,
}

impl<M: Memory> Writer<M> {
    pub(super) fn new(memory: M) -> Self {
        Self { memory, tail: 0, head: 0 }
    }

    /// Writes what fits; how much that was.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<usize, Broken> {
        let length = bytes.len().min(self.free(bytes.len())?);
        let (first, second) = parts(self.tail, length, self.memory.capacity());
        self.memory.copy_in(first.0, &bytes[..first.1]);
        self.memory.copy_in(0, &bytes[first.1..first.1 + second]);
        self.tail += length as u64;
        if length > 0 {
            self.memory.set_tail(self.tail);
        }
        Ok(length)
    }

    /// Bytes that fit, looked up anew where so many did not fit before.
    pub(super) fn free(&mut self, wanted: usize) -> Result<usize, Broken> {
        let capacity = self.memory.capacity() as u64;
        if capacity - (self.tail - self.head) < wanted as u64 {
            let head = self.memory.head();
            // Never back, and never beyond what was written.
            if head < self.head || head > self.tail {
                return Err(Broken);
            }
            self.head = head;
        }
        Ok((capacity - (self.tail - self.head)) as usize)
    }
}

impl<M: Memory> Reader<M> {
    pub(super) fn new(memory: M) -> Self {
        Self { memory, head: 0, tail: 0 }
    }

    /// Reads what is there and fits; how much that was.
    pub(super) fn read(&mut self, into: &mut [u8]) -> Result<usize, Broken> {
        let length = into.len().min(self.filled(into.len())?);
        let (first, second) = parts(self.head, length, self.memory.capacity());
        self.memory.copy_out(first.0, &mut into[..first.1]);
        self.memory.copy_out(0, &mut into[first.1..first.1 + second]);
        self.head += length as u64;
        if length > 0 {
            self.memory.set_head(self.head);
        }
        Ok(length)
    }

    /// Bytes that are there, looked up anew where so many were not before.
    pub(super) fn filled(&mut self, wanted: usize) -> Result<usize, Broken> {
        if ((self.tail - self.head) as usize) < wanted.max(1) {
            let tail = self.memory.tail();
            if tail < self.tail || tail - self.head > self.memory.capacity() as u64 {
                return Err(Broken);
            }
            self.tail = tail;
        }
        Ok((self.tail - self.head) as usize)
    }
}

/// Offset and length up to the end of the memory, and the length from its start.
fn parts(cursor: u64, length: usize, capacity: usize) -> ((usize, usize), usize) {
    let at = (cursor % capacity as u64) as usize;
    let first = length.min(capacity - at);
    ((at, first), length - first)
}

#[cfg(test)]
mod tests {
    use loom::{
        cell::UnsafeCell,
        sync::{
            Arc,
            atomic::{AtomicU64, Ordering},
        },
    };

    use super::*;

    /// A ring whose bytes loom watches: a race would be an error.
    struct Watched {
        head: AtomicU64,
        tail: AtomicU64,
        bytes: Vec<UnsafeCell<u8>>,
    }

    impl Memory for Arc<Watched> {
        fn capacity(&self) -> usize {
            self.bytes.len()
        }

        fn head(&self) -> u64 {
            self.head.load(Ordering::Acquire)
        }

        fn set_head(&self, head: u64) {
            self.head.store(head, Ordering::Release);
        }

        fn tail(&self) -> u64 {
            self.tail.load(Ordering::Acquire)
        }

        fn set_tail(&self, tail: u64) {
            self.tail.store(tail, Ordering::Release);
        }

        fn copy_in(&self, at: usize, bytes: &[u8]) {
            for (cell, byte) in self.bytes[at..].iter().zip(bytes) {
                // SAFETY: loom fails the test if another thread accesses it now.
                cell.with_mut(|cell| unsafe { *cell = *byte });
            }
        }

        fn copy_out(&self, at: usize, into: &mut [u8]) {
            for (cell, byte) in self.bytes[at..].iter().zip(into) {
                // SAFETY: as above.
                *byte = cell.with(|cell| unsafe { *cell });
            }
        }
    }

    fn watched(capacity: usize) -> Arc<Watched> {
        let bytes = (0..capacity).map(|_| UnsafeCell::new(0)).collect();
        Arc::new(Watched { head: AtomicU64::new(0), tail: AtomicU64::new(0), bytes })
    }

    #[test]
    fn every_interleaving_delivers_every_byte_once_and_in_order() {
        loom::model(|| {
            let memory = watched(2);
            let mut writer = Writer::new(Arc::clone(&memory));
            let mut reader = Reader::new(memory);
            let sent = loom::thread::spawn(move || {
                let mut sent = 0;
                for _ in 0..2 {
                    let rest: Vec<u8> = (sent..3).collect();
                    sent += writer.write(&rest).unwrap() as u8;
                    loom::thread::yield_now();
                }
                sent
            });
            let mut got: Vec<u8> = Vec::new();
            for _ in 0..2 {
                let mut bytes = [0; 3];
                let length = reader.read(&mut bytes).unwrap();
                got.extend(&bytes[..length]);
                loom::thread::yield_now();
            }
            let sent = sent.join().unwrap();
            let mut bytes = [0; 3];
            let length = reader.read(&mut bytes).unwrap();
            got.extend(&bytes[..length]);
            assert_eq!(got, (0..sent).collect::<Vec<u8>>());
        });
    }

    #[test]
    fn a_cursor_that_cannot_be_right_is_noticed() {
        loom::model(|| {
            let memory = watched(4);
            let mut writer = Writer::new(Arc::clone(&memory));
            let mut reader = Reader::new(Arc::clone(&memory));
            assert_eq!(writer.write(&[1, 2, 3, 4, 5]), Ok(4));
            assert_eq!(reader.read(&mut [0; 3]), Ok(3));
            memory.set_head(9);
            assert_eq!(writer.write(&[1]), Err(Broken));
            memory.set_tail(8);
            assert_eq!(reader.read(&mut [0; 2]), Err(Broken));
            memory.set_tail(2);
            assert_eq!(reader.read(&mut [0; 2]), Err(Broken));
        });
    }
}
