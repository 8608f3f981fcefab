//! Operations on buffers that all ranks have mapped: nothing is copied on the
//! way.
//!
//! The owner of a range reads it from every rank's buffer and writes the result
//! into every rank's buffer; the exchanges before and after are the only times
//! that ranks wait for each other. Nobody else accesses the range in between.

use std::{ops::Range, sync::Arc, time::Instant};

use super::{
    Buffer, Communicator, Dtype, Error, HostMesh, Reduce,
    frame::Op,
    kernels,
    shm::{Door, Mapping, Neighbour, Region, memory_file},
};

/// Bytes reduced at a time: a cache holds them, and an abort is noticed in time.
const BLOCK: usize = 16 << 10;

/// Allocations of a mesh; further ones are ordinary memory.
const REGIONS: usize = 64;

/// Of a region, in bytes: whole pages.
const PAGE: usize = 4096;

/// Where a rank's operand lies: region + 1 and offset, or zeros.
const PLACE: usize = 16;

/// How the ranks of a mesh that is all on one machine meet once more.
pub(super) struct Local {
    pub(super) door: Door,
    pub(super) neighbours: Vec<Neighbour>,
    pub(super) meetings: u64,
    pub(super) regions: Vec<Arc<Region>>,
}

/// The operands of all ranks.
pub(super) struct Operands {
    places: Vec<(Arc<Region>, usize)>,
}

impl HostMesh {
    /// A buffer in memory that all ranks have mapped, or an ordinary one where
    /// any rank cannot.
    pub(super) fn allocate_shared(
        &mut self,
        dtype: Dtype,
        elements: usize,
        deadline: Instant,
    ) -> Result<Buffer, Error> {
        let rank = self.rank();
        let Some(mut local) = self.local.take() else {
            return Ok(Buffer::ordinary(dtype, elements));
        };
        let made = self.map_region(&mut local, elements * dtype.size(), deadline);
        let region = match made {
            Ok(memory) => memory,
            Err(error @ Error::System { .. }) => {
                tracing::warn!(%error, "no shared buffer, this rank has an ordinary one");
                None
            }
            Err(error) => return Err(error),
        };
        let well = u8::from(region.is_some());
        let all = self.gather_all(Op::Allocate, &[well], 1, deadline)?;
        let region = region.filter(|_| all.iter().all(|well| well == &[1]));
        let buffer = match region {
            Some(memory) => {
                let region = Region::new(rank, memory);
                let buffer = region.buffer(dtype, elements);
                local.regions.push(Arc::new(region));
                buffer
            }
            None => Buffer::ordinary(dtype, elements),
        };
        self.local = Some(local);
        Ok(buffer)
    }

    /// Every rank's memory, by rank; none where there are too many already.
    fn map_region(
        &mut self,
        local: &mut Local,
        bytes: usize,
        deadline: Instant,
    ) -> Result<Option<Vec<Arc<Mapping>>>, Error> {
        let length = bytes.next_multiple_of(PAGE).max(PAGE);
        let told = (length as u64).to_le_bytes();
        let lengths = self.gather_all(Op::Allocate, &told, told.len(), deadline)?;
        if local.regions.len() == REGIONS {
            return Ok(None);
        }
        let failed = |errno| Error::System {
            call: "memfd_create",
            why: format!("{errno}, for a shared buffer of {length} bytes; raise the limit"),
        };
        let file = memory_file("elastic-buffer", length).map_err(failed);
        let files = file.as_ref().map_or(&[][..], std::slice::from_ref);
        local.meetings += 1;
        let who = (&self.origin.key, self.rank(), local.meetings);
        let theirs = local.door.meet(&mut self.wire, who, &local.neighbours, files, deadline)?;
        let own = Mapping::new(file?, length).map_err(failed)?;
        let mut memory: Vec<_> = (0..self.size()).map(|_| None).collect();
        memory[self.rank()] = Some(Arc::new(own));
        for (neighbour, files) in local.neighbours.iter().zip(theirs) {
            let length =
                lengths[neighbour.rank].first_chunk().map(|chunk| u64::from_le_bytes(*chunk));
            if let (Some(length), Some(file)) = (length, files.into_iter().next()) {
                let mapped = Mapping::new(file, length as usize).map_err(failed)?;
                memory[neighbour.rank] = Some(Arc::new(mapped));
            }
        }
        Ok(memory.into_iter().collect())
    }

    /// Tells every rank where this rank's operand lies, and learns where theirs
    /// do. None unless all lie in memory that all have mapped.
    pub(super) fn operands(
        &mut self,
        op: Op,
        bytes: &[u8],
        deadline: Instant,
    ) -> Result<Option<Operands>, Error> {
        let Some(local) = &self.local else { return Ok(None) };
        let find = |(number, region): (usize, &Arc<Region>)| {
            Some((number as u64 + 1, region.offset_of(bytes)? as u64))
        };
        let (region, offset) = local.regions.iter().enumerate().find_map(find).unwrap_or_default();
        let mut told = [0; PLACE];
        told[..8].copy_from_slice(&region.to_le_bytes());
        told[8..].copy_from_slice(&offset.to_le_bytes());
        let all = self.gather_all(op, &told, PLACE, deadline)?;
        let Some(local) = &self.local else { return Ok(None) };
        let place = |(rank, told): (usize, &Vec<u8>)| {
            let word = |at: usize| {
                told.get(at..)?.first_chunk().map(|chunk| u64::from_le_bytes(*chunk) as usize)
            };
            let region = local.regions.get(word(0)?.checked_sub(1)?)?;
            let (offset, end) = (word(8)?, word(8)?.checked_add(bytes.len())?);
            (end <= region.memory(rank).len()).then(|| (Arc::clone(region), offset))
        };
        let places: Option<Vec<_>> = all.iter().enumerate().map(place).collect();
        Ok(places.map(|places| Operands { places }))
    }

    /// Reduces this rank's range of all operands into all of them, and waits
    /// until every rank has done so.
    pub(super) fn reduce_directly(
        &mut self,
        op: Op,
        (how, dtype): (Reduce, Dtype),
        operands: &Operands,
        own: Range<usize>,
        deadline: Instant,
    ) -> Result<(), Error> {
        let mut block = [0_u64; BLOCK / 8];
        let block = bytemuck::cast_slice_mut::<u64, u8>(&mut block);
        for start in own.clone().step_by(BLOCK) {
            self.wire.abort.check()?;
            let length = BLOCK.min(own.end - start);
            let block = &mut block[..length];
            operands.read(start, length, |inputs| kernels::reduce(how, dtype, inputs, None, block));
            for (rank, (region, offset)) in operands.places.iter().enumerate() {
                region.memory(rank).write(offset + start, block);
            }
        }
        self.gather_all(op, &[], 0, deadline).map(drop)
    }
}

impl Operands {
    /// A range of every rank's operand, in rank order.
    fn read(&self, start: usize, length: usize, with: impl FnOnce(&[&[u8]])) {
        let places = self.places.iter().enumerate();
        let mappings = places.map(|(rank, (region, offset))| (region.memory(rank), offset + start));
        Mapping::read_all(mappings, length, with);
    }
}
