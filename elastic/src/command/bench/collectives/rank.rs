//! One rank of the benchmark: its address out, all addresses in, then every
//! operation and size.

use std::{
    io::Write,
    time::{Duration, Instant},
};

use job::{Era, Generation, JobId, Token};
use transport::collective::{AbortHandle, Buffer, Communicator, Dtype, Error, Listener, MeshSpec};
use uuid::Uuid;

use super::{Backend, Row, op::Op, row, sizes};
use crate::cli::CollectivesArgs;

/// Longer than any measurement.
const LIMIT: Duration = Duration::from_secs(120);

/// A size is measured for this long, or so many times as asked for.
const ENOUGH: Duration = Duration::from_secs(4);

pub(super) fn run(args: &CollectivesArgs, rank: usize) -> Result<(), String> {
    let backend = *args.backends.first().ok_or("a rank without a backend")?;
    let mut comm = connect(backend, rank).map_err(|error| error.to_string())?;
    for &op in &args.ops {
        for bytes in sizes(args) {
            let row = measure(&mut *comm, backend, op, bytes, args.iterations)
                .map_err(|error| format!("{} of {bytes} bytes: {error}", op.name()))?;
            if rank == 0 {
                let line = serde_json::to_string(&row).map_err(|error| error.to_string())?;
                println!("{line}");
            }
        }
    }
    Ok(())
}

fn connect(backend: Backend, rank: usize) -> Result<Box<dyn Communicator>, Error> {
    let mut listener = Listener::bind(([127, 0, 0, 1], 0).into())?;
    if backend == Backend::Tcp {
        listener = listener.over_tcp_only();
    }
    println!("{}", listener.local_addr());
    let _ = std::io::stdout().flush();
    let addresses = std::io::stdin().lines().map_while(Result::ok);
    let addresses: Vec<_> = addresses.filter_map(|line| line.parse().ok()).collect();
    let token = Token { job: JobId(Uuid::nil()), era: Era(0), generation: Generation(1) };
    // Everybody on this machine could join: it is a benchmark.
    let spec = MeshSpec { token, key: [7; 32], rank, addresses };
    let mesh = listener.connect(spec, Instant::now() + LIMIT, &AbortHandle::new()?)?;
    Ok(Box::new(mesh))
}

/// The median over rounds of the slowest rank's time, and the wrong elements of
/// all ranks after one round.
fn measure(
    comm: &mut dyn Communicator,
    backend: Backend,
    op: Op,
    bytes: usize,
    iterations: usize,
) -> Result<Row, Error> {
    let deadline = || Instant::now() + LIMIT;
    let elements = bytes / 4;
    let mut buffers = [(); 2].map(|()| Buffer::ordinary(Dtype::F32, elements));
    if backend == Backend::Shm {
        for buffer in &mut buffers {
            *buffer = comm.allocate(Dtype::F32, elements, deadline())?;
        }
    }
    let [mut buffer, mut other] = buffers;
    op.prepare(comm.rank(), buffer.typed_mut()?);
    op.run(comm, &mut buffer, &mut other, deadline())?;
    let wrong = op.wrong(comm, buffer.view(), other.view()) as u64;
    let began = Instant::now();
    let mut times = Vec::new();
    loop {
        // Sums of sums would overflow, and that is slow on some processors.
        op.prepare(comm.rank(), buffer.typed_mut()?);
        comm.barrier(deadline())?;
        let start = Instant::now();
        op.run(comm, &mut buffer, &mut other, deadline())?;
        let took = start.elapsed().as_nanos() as u64;
        // Rank 0 says when it is enough, for everybody.
        let last = times.len() + 1 >= iterations || (began.elapsed() > ENOUGH && times.len() > 3);
        let said = [took.to_le_bytes(), u64::from(last).to_le_bytes(), wrong.to_le_bytes()];
        let all = comm.all_gather_bytes(said.as_flattened(), 24, deadline())?;
        let number = |rank: usize, at: usize| {
            let word = all[rank].as_chunks::<8>().0.get(at).copied().unwrap_or_default();
            u64::from_le_bytes(word)
        };
        times.push((0..all.len()).map(|rank| number(rank, 0)).max().unwrap_or(took));
        if number(0, 1) == 1 {
            times.sort_unstable();
            let median_us = times[times.len() / 2] as f64 / 1e3;
            let wrong = (0..all.len()).map(|rank| number(rank, 2)).sum::<u64>() as usize;
            return Ok(row(op, backend.name(), comm.size(), bytes, median_us, wrong));
        }
    }
}
