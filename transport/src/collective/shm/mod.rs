//! Shared memory between the ranks of one machine: for each pair of them a ring
//! in each direction, beside the connection that tells of failures.
//!
//! ME-1: the memory is made for one mesh and goes with it. A rank that was
//! stopped and wakes up writes into memory that nobody looks at any more.

mod bell;
mod ffi;
mod meet;
mod region;
mod ring;

use std::sync::Arc;

use job::Token;
use rustix::fd::OwnedFd;

use super::Error;

pub(super) use bell::Bell;
pub(super) use ffi::{Mapping, memory_file};
pub(super) use meet::{Door, HOST, NAME, Neighbour, host};
pub(super) use region::Region;
pub(super) use ring::Broken;

/// Bytes of a ring. With four ranks, twelve rings stay in the caches of two
/// cores, and a rank that gets the processor has enough to do.
const RING: usize = 256 << 10;

/// Bytes published at once, so that a peer begins while we go on.
const CHUNK: usize = 32 << 10;

/// Bytes in front of the rings, and in front of each ring: cursors of two
/// processes are on lines, and pages, of their own.
const HEAD: usize = 4096;

/// Offset of the word that says that the rank sleeps.
const MARK: usize = 0;

/// Offsets of a ring's cursors.
const READER: usize = 0;
const WRITER: usize = 128;

/// What one rank offers its neighbours: memory with the rings that it reads,
/// one for each of them, and its bell.
#[derive(Debug)]
pub(super) struct Segment {
    memory: Arc<Mapping>,
    bell: Arc<Bell>,
    file: OwnedFd,
}

/// The two rings that connect this rank with a neighbour.
#[derive(Debug)]
pub(super) struct Rings {
    writer: ring::Writer<RingMemory>,
    reader: ring::Reader<RingMemory>,
    theirs: Arc<Mapping>,
    bell: Arc<Bell>,
}

#[derive(Debug)]
struct RingMemory {
    memory: Arc<Mapping>,
    at: usize,
}

/// Bytes of a segment for so many neighbours.
fn length(neighbours: usize) -> usize {
    HEAD + neighbours * (HEAD + RING)
}

impl Segment {
    pub(super) fn new(token: Token, neighbours: usize) -> Result<Self, Error> {
        let failed = |errno| {
            let bytes = length(neighbours);
            Error::System {
                call: "memfd_create",
                why: format!("{errno}, for {bytes} bytes of shared memory; raise the limit"),
            }
        };
        let file = memory_file(&format!("elastic-mesh-{token}"), length(neighbours));
        let file = file.map_err(failed)?;
        let memory = Arc::new(Mapping::new(&file, length(neighbours)).map_err(failed)?);
        let bell = Bell::new().map_err(|errno| Error::system("eventfd", errno))?;
        Ok(Self { memory, bell: Arc::new(bell), file })
    }

    /// The memory file, and the file of the bell.
    pub(super) fn files(&self) -> rustix::io::Result<[OwnedFd; 2]> {
        Ok([rustix::io::fcntl_dupfd_cloexec(&self.file, 0)?, self.bell.copy()?])
    }

    /// Connects with a neighbour through its files. `own` and `their` are the
    /// places of the one among the neighbours of the other.
    pub(super) fn connect(
        &self,
        files: Vec<OwnedFd>,
        neighbours: usize,
        own: usize,
        their: usize,
    ) -> rustix::io::Result<Rings> {
        let Ok([file, bell]) = <[OwnedFd; 2]>::try_from(files) else {
            return Err(rustix::io::Errno::PROTO);
        };
        let theirs = Arc::new(Mapping::new(&file, length(neighbours))?);
        let at = |place| HEAD + place * (HEAD + RING);
        let reads = RingMemory { memory: Arc::clone(&self.memory), at: at(their) };
        let writes = RingMemory { memory: Arc::clone(&theirs), at: at(own) };
        Ok(Rings {
            writer: ring::Writer::new(writes),
            reader: ring::Reader::new(reads),
            theirs,
            bell: Arc::new(Bell::from(bell)),
        })
    }

    pub(super) fn bell(&self) -> &Bell {
        &self.bell
    }

    /// About to sleep: look for work once more after this.
    pub(super) fn drowse(&self) {
        bell::drowse(self.memory.word(MARK));
    }

    /// Awake again.
    pub(super) fn rouse(&self) {
        bell::rouse(self.memory.word(MARK));
        self.bell.silence();
    }
}

impl Rings {
    /// Writes the start of these slices, one after the other, as far as it fits
    /// and up to a chunk.
    pub(super) fn write<'a>(
        &mut self,
        slices: impl Iterator<Item = &'a [u8]>,
    ) -> Result<usize, Broken> {
        let mut written = 0;
        for slice in slices {
            let length = slice.len().min(CHUNK - written);
            let took = self.writer.write(&slice[..length])?;
            written += took;
            if took < slice.len() {
                break;
            }
        }
        self.changed(written);
        Ok(written)
    }

    /// Reads what is there and fits, up to a chunk.
    pub(super) fn read(&mut self, into: &mut [u8]) -> Result<usize, Broken> {
        let length = into.len().min(CHUNK);
        let read = self.reader.read(&mut into[..length])?;
        self.changed(read);
        Ok(read)
    }

    /// Whether there is nothing to read.
    pub(super) fn is_empty(&mut self) -> Result<bool, Broken> {
        Ok(self.reader.filled(1)? == 0)
    }

    fn changed(&self, bytes: usize) {
        if bytes > 0 && bell::must_ring(self.theirs.word(MARK)) {
            self.bell.ring();
        }
    }
}

impl ring::Memory for RingMemory {
    fn capacity(&self) -> usize {
        RING
    }

    fn head(&self) -> u64 {
        self.memory.word(self.at + READER).load(std::sync::atomic::Ordering::Acquire)
    }

    fn set_head(&self, head: u64) {
        self.memory.word(self.at + READER).store(head, std::sync::atomic::Ordering::Release);
    }

    fn tail(&self) -> u64 {
        self.memory.word(self.at + WRITER).load(std::sync::atomic::Ordering::Acquire)
    }

    fn set_tail(&self, tail: u64) {
        self.memory.word(self.at + WRITER).store(tail, std::sync::atomic::Ordering::Release);
    }

    fn copy_in(&self, at: usize, bytes: &[u8]) {
        self.memory.write(self.at + HEAD + at, bytes);
    }

    fn copy_out(&self, at: usize, into: &mut [u8]) {
        self.memory.read(self.at + HEAD + at, into);
    }
}
