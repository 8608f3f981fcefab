//! Which ranks of a mesh are on one machine, and the rings between them.

use std::time::Instant;

use super::{
    Communicator, Error, HostMesh,
    direct::Local,
    frame::Op,
    shm::{Door, HOST, NAME, Neighbour, Rings, Segment, host},
};

/// What a rank says of itself: its host and its door. Zeros where it shares no
/// memory.
const SAID: usize = HOST + NAME;

impl HostMesh {
    /// Finds the ranks of this machine and connects with them through shared
    /// memory. A pair of which one side has no memory to share goes on talking
    /// over its connection.
    pub(super) fn find_neighbours(&mut self, deadline: Instant) -> Result<(), Error> {
        self.operate(Op::Connect, |mesh| mesh.meet_neighbours(deadline))
    }

    fn meet_neighbours(&mut self, deadline: Instant) -> Result<(), Error> {
        let door = self.origin.shares_memory.then(Door::open).and_then(Result::ok);
        let mut said = [0; SAID];
        if let (Some(door), Some(host)) = (&door, host()) {
            said[..HOST].copy_from_slice(&host);
            said[HOST..].copy_from_slice(&door.name());
        }
        let all = self.gather_all(Op::Connect, &said, SAID, deadline)?;
        let shares = |rank: &usize| {
            all[*rank].len() == SAID && all[*rank][..HOST] == said[..HOST] && said != [0; SAID]
        };
        let group: Vec<_> = (0..self.size()).filter(shares).collect();
        let neighbours: Vec<_> = group
            .iter()
            .filter(|rank| **rank != self.rank())
            .map(|&rank| {
                let mut name = [0; NAME];
                name.copy_from_slice(&all[rank][HOST..]);
                Neighbour { rank, name }
            })
            .collect();
        let found = match &door {
            Some(door) if !neighbours.is_empty() => {
                self.share_memory(door, &group, &neighbours, deadline)?
            }
            _ => Found::default(),
        };
        // Both sides of a pair use their rings, or neither does.
        let mut mapped = vec![0; self.size()];
        found.rings.iter().for_each(|(rank, _)| mapped[*rank] = 1);
        let all = self.gather_all(Op::Connect, &mapped, self.size(), deadline)?;
        for (rank, rings) in found.rings {
            if all[rank].get(self.rank()) == Some(&1)
                && let Some((_, link)) = &mut self.wire.peers[rank]
            {
                link.share(rings);
            }
        }
        self.wire.segment = found.segment;
        // Buffers are shared by all ranks or by none.
        let whole = neighbours.len() + 1 == self.size();
        if let Some(door) = door.filter(|_| whole) {
            self.local = Some(Local { door, neighbours, meetings: 0, regions: Vec::new() });
        }
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        self.wire.spins = (1..=processors).contains(&group.len());
        Ok(())
    }

    /// Makes this rank's segment, hands it round, and maps those of the others.
    fn share_memory(
        &mut self,
        door: &Door,
        group: &[usize],
        neighbours: &[Neighbour],
        deadline: Instant,
    ) -> Result<Found, Error> {
        let rank = self.rank();
        let others = neighbours.len();
        let own = Segment::new(self.token(), others).and_then(|segment| {
            let files = segment.files().map_err(|errno| Error::system("dup", errno))?;
            Ok((segment, files))
        });
        // A rank without memory says so at every door, or they would wait.
        let files = own.as_ref().map_or(&[][..], |(_, files)| files);
        let who = (&self.origin.key, rank, 0);
        let theirs = door.meet(&mut self.wire, who, neighbours, files, deadline)?;
        let (segment, _) = match own {
            Ok(own) => own,
            Err(error) => {
                tracing::warn!(%error, "no shared memory, this rank talks over TCP");
                return Ok(Found::default());
            }
        };
        let place = |rank: usize, of: usize| {
            group.iter().filter(|other| **other != of).position(|other| *other == rank)
        };
        let mut rings = Vec::with_capacity(others);
        for (neighbour, files) in neighbours.iter().zip(theirs) {
            let (Some(own), Some(their)) =
                (place(rank, neighbour.rank), place(neighbour.rank, rank))
            else {
                continue;
            };
            match segment.connect(files, others, own, their) {
                Ok(connected) => rings.push((neighbour.rank, connected)),
                Err(error) => {
                    let peer = self.origin.names[neighbour.rank];
                    tracing::warn!(peer, %error, "no shared memory with this rank, over TCP");
                }
            }
        }
        Ok(Found { segment: Some(segment), rings })
    }
}

/// What this rank shares, and with whom.
#[derive(Default)]
struct Found {
    segment: Option<Segment>,
    rings: Vec<(usize, Rings)>,
}
