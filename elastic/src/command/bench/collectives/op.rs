//! What is measured.

use std::time::Instant;

use transport::collective::{Buffer, Communicator, Error, Reduce, View};

/// An operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Op {
    /// Sums over all ranks, on all ranks.
    AllReduce,
    /// Sums over all ranks, a part on each.
    ReduceScatter,
    /// Every rank's part on all ranks.
    AllGather,
    /// One rank's buffer on all ranks.
    Broadcast,
    /// A part from each rank to each.
    AllToAll,
    /// Every rank to the next one, and from the one before.
    SendReceive,
}

impl Op {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast => "broadcast",
            Self::AllToAll => "all_to_all",
            Self::SendReceive => "send_receive",
        }
    }

    /// Bytes that cross the slowest link for each byte of the buffer.
    pub(super) fn bus_factor(self, ranks: usize) -> f64 {
        let others = (ranks - 1) as f64 / ranks as f64;
        match self {
            Self::AllReduce => 2.0 * others,
            Self::ReduceScatter | Self::AllGather | Self::AllToAll => others,
            Self::Broadcast | Self::SendReceive => 1.0,
        }
    }

    /// Writes what this rank brings: in each place of the buffer its rank plus
    /// one, a value whose sums are exact.
    pub(super) fn prepare(self, rank: usize, buffer: &mut [f32]) {
        buffer.fill((rank + 1) as f32);
    }

    /// Runs it once.
    pub(super) fn run(
        self,
        comm: &mut dyn Communicator,
        buffer: &mut Buffer,
        other: &mut Buffer,
        deadline: Instant,
    ) -> Result<(), Error> {
        let (rank, size) = (comm.rank(), comm.size());
        let splits = comm.even_splits(buffer.view().len());
        match self {
            Self::AllReduce => comm.all_reduce(Reduce::Sum, buffer.view_mut(), deadline),
            Self::ReduceScatter => {
                let out = other.view_mut().slice(splits[rank].clone());
                comm.reduce_scatter(Reduce::Sum, buffer.view(), &splits, out, deadline)
            }
            Self::AllGather => comm.all_gather(buffer.view_mut(), &splits, deadline),
            Self::Broadcast => comm.broadcast(0, buffer.view_mut(), deadline),
            Self::AllToAll => {
                // Every rank's parts have one size, so that the pairs agree.
                let part = buffer.view().len() / size;
                let splits: Vec<_> = (0..size).map(|at| at * part..(at + 1) * part).collect();
                comm.all_to_all(buffer.view(), &splits, other.view_mut(), &splits, deadline)
            }
            Self::SendReceive => {
                comm.send((rank + 1) % size, buffer.view(), deadline)?;
                comm.receive((rank + size - 1) % size, other.view_mut(), deadline)
            }
        }
    }

    /// Elements that are not what one run from [`Self::prepare`] gives.
    pub(super) fn wrong(self, comm: &dyn Communicator, buffer: View, other: View) -> usize {
        let (rank, size) = (comm.rank(), comm.size());
        let (Ok(buffer), Ok(other)) = (buffer.typed::<f32>(), other.typed::<f32>()) else {
            return buffer.len();
        };
        let splits = comm.even_splits(buffer.len());
        let sum = (size * (size + 1) / 2) as f32;
        let differ = |part: &[f32], value: f32| part.iter().filter(|at| **at != value).count();
        match self {
            Self::AllReduce => differ(buffer, sum),
            Self::ReduceScatter => differ(&other[splits[rank].clone()], sum),
            Self::AllGather => {
                let parts = splits.into_iter().enumerate();
                parts.map(|(from, split)| differ(&buffer[split], (from + 1) as f32)).sum()
            }
            Self::Broadcast => differ(buffer, 1.0),
            Self::AllToAll => {
                let part = buffer.len() / size;
                let parts = other.chunks(part.max(1)).take(size).enumerate();
                parts.map(|(from, part)| differ(part, (from + 1) as f32)).sum()
            }
            Self::SendReceive => differ(other, ((rank + size - 1) % size + 1) as f32),
        }
    }
}
