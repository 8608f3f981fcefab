//! A rank's place in a generation: which micro-batches it computes with which
//! part of the model, and with whom it exchanges what.

use std::{ops::Range, time::Instant};

use job::{
    Token,
    mesh::{Mesh, Place},
    pipeline::{Schedule, Timeline},
    shares::Shares,
    spec::Sharding,
};
use transport::collective::{self, Communicator, groups};

use crate::placement::Placement;

pub(crate) struct Seat {
    pub(crate) token: Token,
    pub(crate) rank: usize,
    pub(crate) mesh: Mesh,
    pub(crate) place: Place,
    /// Contiguous micro-batches of each data-parallel rank, or of each replica
    /// where a replica's ranks take turns.
    pub(crate) shares: Shares,
    /// Whether the ranks of a replica take turns.
    strided: bool,
    /// Units of each of this rank's chunks.
    pub(crate) chunks: Vec<Range<usize>>,
    pub(crate) timeline: Timeline,
    /// Made by the first collective of the generation.
    groups: Option<Groups>,
}

/// Communicators of fewer ranks than the mesh has; none where they are all.
struct Groups {
    /// The ranks over which the state of a stage is cut, or copied.
    data: Option<Box<dyn Communicator>>,
    /// The ranks that hold the same shard.
    replicas: Option<Box<dyn Communicator>>,
}

impl std::fmt::Debug for Seat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Seat(rank {} of {}, {:?})", self.rank, self.mesh, self.place)
    }
}

impl Seat {
    pub(crate) fn new(
        token: Token,
        rank: usize,
        mesh: Mesh,
        micro_batches: u32,
        sharding: Sharding,
        placement: &Placement,
        schedule: Schedule,
    ) -> Self {
        let place = mesh.place(rank as u32);
        let strided = sharding.cuts_gradients();
        let shares =
            Shares::even(micro_batches, if strided { mesh.replicas } else { mesh.degree() });
        let chunks: Vec<_> = (0..placement.chunks(mesh.stages))
            .map(|chunk| placement.part(mesh.stages, place.stage, chunk))
            .collect();
        // A pipeline of one stage keeps the activations of one micro-batch.
        let schedule = if mesh.stages == 1 { Schedule::OneForwardOneBackward } else { schedule };
        let mut seat = Self {
            token,
            rank,
            mesh,
            place,
            shares,
            strided,
            chunks,
            timeline: schedule.timeline(1, 1, 0),
            groups: None,
        };
        let turns = seat.turns().len() as u32;
        seat.timeline = schedule.timeline(mesh.stages, seat.chunks.len() as u32, turns);
        seat
    }

    /// The micro-batches of this rank's pipeline, in order. A turn without one is
    /// where other ranks of the replica have one.
    pub(crate) fn turns(&self) -> Vec<Option<u32>> {
        let own = self.own();
        if !self.strided {
            return own.map(Some).collect();
        }
        let count = own.len().div_ceil(self.mesh.shards as usize) as u32;
        let index = |turn| {
            let wave = self.wave(turn);
            let at = wave.start + self.place.shard;
            wave.contains(&at).then_some(at)
        };
        (0..count).map(index).collect()
    }

    /// The micro-batches of a turn of all ranks of the replica that take turns.
    pub(crate) fn wave(&self, turn: u32) -> Range<u32> {
        let own = self.own();
        let start = own.start + turn * self.mesh.shards;
        start..own.end.min(start + self.mesh.shards)
    }

    /// The contiguous micro-batches that end up in this rank's partial sums.
    pub(crate) fn own(&self) -> Range<u32> {
        let Place { replica, shard, .. } = self.place;
        let index = if self.strided { replica } else { replica * self.mesh.shards + shard };
        self.shares.of(index as usize)
    }

    /// The rank of this pipeline that holds another stage.
    pub(crate) fn peer(&self, stage: u32) -> usize {
        self.mesh.rank(Place { stage, ..self.place }) as usize
    }

    /// Part of the model of a chunk, and the number of parts.
    pub(crate) fn part(&self, chunk: u32) -> (u32, u32) {
        let Mesh { stages, .. } = self.mesh;
        (chunk * stages + self.place.stage, stages * self.chunks.len() as u32)
    }

    /// Makes the groups, once in a generation: all ranks call it together.
    pub(crate) fn connect(
        &mut self,
        world: &mut dyn Communicator,
        deadline: Instant,
    ) -> Result<(), collective::Error> {
        if self.groups.is_some() {
            return Ok(());
        }
        let Mesh { stages, replicas, shards } = self.mesh;
        let shape = [stages as usize, replicas as usize, shards as usize];
        let (data, copies) =
            if self.strided { (vec![2], replicas > 1) } else { (vec![1, 2], false) };
        let mut partitions = Vec::new();
        let whole = groups(&shape, &data).len() == 1;
        if !whole {
            partitions.push(groups(&shape, &data));
        }
        if copies {
            partitions.push(groups(&shape, &[1]));
        }
        let mut made = match partitions.is_empty() {
            true => Vec::new(),
            false => world.split(&partitions, deadline)?,
        }
        .into_iter();
        let data = if whole { None } else { made.next() };
        self.groups = Some(Groups { data, replicas: made.next() });
        Ok(())
    }

    /// The communicator of the ranks over which the state of a stage is cut or
    /// copied.
    pub(crate) fn data<'a>(
        &'a mut self,
        world: &'a mut dyn Communicator,
    ) -> &'a mut dyn Communicator {
        match self.groups.as_mut().and_then(|groups| groups.data.as_mut()) {
            Some(group) => group.as_mut(),
            None => world,
        }
    }

    /// The communicator of the ranks that hold this rank's shard, if it is not
    /// alone.
    pub(crate) fn replicas(&mut self) -> Option<&mut (dyn Communicator + 'static)> {
        self.groups.as_mut()?.replicas.as_deref_mut()
    }
}
