//! Why a resize does not change a result: floats summed in an order that only
//! depends on micro-batch numbers (TRAJ-1).
//!
//! ```sh
//! cargo run --release -p examples --bin same_bits
//! ```
//!
//! Ten micro-batches have one made-up gradient each. Meshes of one to five
//! ranks, connected over TCP as workers are, sum them: first each rank its own
//! from left to right and the ranks' sums after one another, as most trainers
//! do, then in the tree of [`transport::collective`].

use std::{
    error::Error,
    thread,
    time::{Duration, Instant},
};

use job::{Era, Generation, JobId, Token, shares::Shares};
use transport::collective::{AbortHandle, Communicator, Listener, MeshSpec, View, ViewMut, tree};

const MICRO_BATCHES: u32 = 10;

fn main() -> Result<(), Box<dyn Error>> {
    println!("ranks  shares             one after another   in tree order");
    for ranks in 1..=5 {
        let shares = Shares::even(MICRO_BATCHES, ranks);
        let counts: Vec<_> = (0..shares.ranks()).map(|rank| shares.of(rank).len()).collect();
        let (naive, tree) = (one_after_another(&shares), over_a_mesh(&shares)?);
        println!(
            "{ranks:>5}  {:<17}  {naive:.7} {:08x}  {tree:.7} {:08x}",
            format!("{counts:?}"),
            naive.to_bits(),
            tree.to_bits(),
        );
    }
    Ok(())
}

/// Stands for a backward pass: depends on the micro-batch alone.
fn gradient(micro_batch: u32) -> f32 {
    (micro_batch as f32 * 1.7).sin() * 10_f32.powi(micro_batch as i32 % 4)
}

fn one_after_another(shares: &Shares) -> f32 {
    (0..shares.ranks()).map(|rank| shares.of(rank).map(gradient).sum::<f32>()).sum()
}

/// One thread a rank. Every rank ends with the same sum; the first one's counts.
fn over_a_mesh(shares: &Shares) -> Result<f32, Box<dyn Error>> {
    let listeners = (0..shares.ranks())
        .map(|_| Listener::bind(([127, 0, 0, 1], 0).into()))
        .collect::<Result<Vec<_>, _>>()?;
    let addresses: Vec<_> = listeners.iter().map(Listener::local_addr).collect();
    let token = Token { job: JobId(Default::default()), era: Era(0), generation: Generation(1) };
    let sums: Vec<_> = thread::scope(|scope| {
        let ranks = listeners.into_iter().enumerate().map(|(rank, listener)| {
            let spec = MeshSpec { token, key: [7; 32], rank, addresses: addresses.clone() };
            scope.spawn(move || sum(&listener, spec, shares))
        });
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join()).collect()
    });
    let first = sums.into_iter().next().ok_or("a mesh has a rank")?;
    Ok(first.map_err(|_| "a rank panicked")??)
}

fn sum(
    listener: &Listener,
    spec: MeshSpec,
    shares: &Shares,
) -> Result<f32, transport::collective::Error> {
    let deadline = Instant::now() + Duration::from_secs(10);
    let rank = spec.rank;
    let mut mesh = listener.connect(spec, deadline, &AbortHandle::new()?)?;
    // What a rank sends: partial sums of the fewest tree nodes that cover its share.
    let pieces: Vec<Vec<f32>> = shares
        .pieces(rank)
        .into_iter()
        .map(|node| vec![subtree(node.range(shares.total()).map(gradient).collect())])
        .collect();
    let pieces: Vec<View> = pieces.iter().map(View::from).collect();
    let mut total = [0.0];
    mesh.all_reduce_tree(shares, &pieces, ViewMut::of(&mut total), deadline)?;
    Ok(total[0])
}

/// Sums neighbours, then neighbours of those; one without a neighbour moves up.
fn subtree(mut level: Vec<f32>) -> f32 {
    while level.len() > 1 {
        let above = level.chunks(2).map(|pair| match pair {
            [left, right] => tree::plus(*left, *right),
            _ => pair[0],
        });
        level = above.collect();
    }
    level[0]
}
