//! Meshes of threads over loopback.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use job::{Era, Generation, JobId, Token, shares::Shares};

use super::*;

mod arithmetic;
mod exchange;
mod faults;
mod kills;
mod operations;
mod port;
mod process;
mod speed;

pub(super) fn token(generation: u64) -> Token {
    Token { job: JobId(uuid::Uuid::from_u128(7)), era: Era(1), generation: Generation(generation) }
}

pub(super) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

pub(super) fn listener() -> Listener {
    Listener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap()
}

pub(super) fn spec(generation: u64, rank: usize, listeners: &[Listener]) -> MeshSpec {
    let addresses = listeners.iter().map(Listener::local_addr).collect();
    MeshSpec { token: token(generation), key: [generation as u8; 32], rank, addresses }
}

/// Runs a function on every rank of a mesh, each with its own abort handle.
pub(super) fn with_mesh<T: Send>(
    ranks: usize,
    run: impl Fn(HostMesh, AbortHandle) -> T + Sync,
) -> Vec<T> {
    let listeners: Vec<_> = (0..ranks).map(|_| listener()).collect();
    with_listeners(&listeners, 1, run)
}

pub(super) fn with_listeners<T: Send>(
    listeners: &[Listener],
    generation: u64,
    run: impl Fn(HostMesh, AbortHandle) -> T + Sync,
) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..listeners.len())
            .map(|rank| {
                let run = &run;
                scope.spawn(move || {
                    let abort = AbortHandle::new().unwrap();
                    let spec = spec(generation, rank, listeners);
                    let mesh = listeners[rank].connect(spec, soon(), &abort).unwrap();
                    run(mesh, abort)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// An operation during which something happens.
#[derive(Clone, Copy, Debug)]
pub(super) enum During {
    Barrier,
    Votes,
    Sum,
    Broadcast,
}

impl During {
    pub(super) const ALL: [Self; 4] = [Self::Barrier, Self::Votes, Self::Sum, Self::Broadcast];

    /// Repeats the operation until it fails.
    pub(super) fn run(self, mesh: &mut HostMesh) -> Error {
        let size = mesh.size();
        let shares = Shares::even(size as u32, size as u32);
        let piece = vec![1.0_f32; 1 << 20];
        let mut out = piece.clone();
        loop {
            let result = match self {
                Self::Barrier => mesh.barrier(soon()),
                Self::Votes => mesh.all_gather_bytes(&[1; 100], 100, soon()).map(drop),
                Self::Sum => mesh.all_reduce_tree(
                    &shares,
                    &[View::of(&piece)],
                    ViewMut::of(&mut out),
                    soon(),
                ),
                Self::Broadcast => mesh.broadcast(0, ViewMut::of(&mut out), soon()),
            };
            if let Err(error) = result {
                return error;
            }
        }
    }
}
