//! One rank's buffer to all.

use std::time::Instant;

use super::{
    Communicator, Error, HostMesh,
    frame::Op,
    outgoing::Outgoing,
    sink::Slots,
    splits::{cut, evenly},
};

/// Broadcasts from this many bytes on are spread over all ranks' connections.
const SPREAD: usize = 256 << 10;

impl HostMesh {
    pub(super) fn broadcast_from(
        &mut self,
        root: usize,
        buffer: &mut [u8],
        deadline: Instant,
    ) -> Result<(), Error> {
        if buffer.len() < SPREAD || self.size() < 3 {
            self.broadcast_directly(root, buffer, deadline)
        } else {
            self.broadcast_spread(root, buffer, deadline)
        }
    }

    fn broadcast_directly(
        &mut self,
        root: usize,
        buffer: &mut [u8],
        deadline: Instant,
    ) -> Result<(), Error> {
        let mut slots = Slots::none(self.size());
        if root == self.rank() {
            let outgoing = self.to_all(|_| vec![&*buffer]);
            return self.exchange(Op::Broadcast, outgoing, &mut slots, deadline);
        }
        slots.set(root, buffer);
        self.exchange(Op::Broadcast, self.nothing(), &mut slots, deadline)
    }

    /// The root hands each other rank a part, and these pass them on: the root
    /// sends the buffer once instead of once for each rank.
    fn broadcast_spread(
        &mut self,
        root: usize,
        buffer: &mut [u8],
        deadline: Instant,
    ) -> Result<(), Error> {
        let splits = evenly(buffer.len(), self.size(), Some(root));
        let own = splits[self.rank()].clone();
        let mut slots = Slots::none(self.size());
        if root == self.rank() {
            let outgoing = self.to_all(|rank| vec![&buffer[splits[rank].clone()]]);
            return self.exchange(Op::Broadcast, outgoing, &mut slots, deadline);
        }
        slots.set(root, &mut buffer[own]);
        self.exchange(Op::Broadcast, self.nothing(), &mut slots, deadline)?;
        let (mut outgoing, mut own) = (self.nothing(), &[][..]);
        let mut slots = Slots::none(self.size());
        for (rank, split) in cut(buffer, &splits).into_iter().enumerate() {
            match rank {
                _ if rank == self.rank() => own = split,
                _ if rank == root => {}
                _ => slots.set(rank, split),
            }
        }
        for (rank, out) in outgoing.iter_mut().enumerate() {
            if rank != root && rank != self.rank() {
                *out = Outgoing::frame(vec![own]);
            }
        }
        self.exchange(Op::Broadcast, outgoing, &mut slots, deadline)
    }
}
