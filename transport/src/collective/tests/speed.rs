//! Times, printed; the bounds are loose, since the machine is shared.

use job::shares::Shares;

use super::*;

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

#[test]
fn a_thousand_small_votes() {
    let medians = with_mesh(4, |mut mesh, _| {
        let votes = (0..1000).map(|_| {
            let start = Instant::now();
            mesh.all_gather_bytes(&[7; 64], 1024, soon()).unwrap();
            start.elapsed()
        });
        median(votes.collect())
    });
    println!("vote of 64 bytes over 4 ranks: median {:?}", medians[0]);
    assert!(medians[0] < Duration::from_millis(10));
}

#[test]
fn a_mesh_of_four_forms_again_and_again() {
    let listeners: Vec<_> = (0..4).map(|_| listener()).collect();
    let start = Instant::now();
    let mut times = Vec::new();
    for generation in 1..=20 {
        let formed = with_listeners(&listeners, generation, |mut mesh, _| {
            mesh.barrier(soon()).unwrap();
            start.elapsed()
        });
        times.extend(formed.into_iter().max());
    }
    let steps = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let median = median(steps);
    println!("forming a mesh of 4, with its first barrier: median {median:?}");
    assert!(median < Duration::from_millis(200));
}

#[test]
fn a_tree_sum_in_memory() {
    const ELEMENTS: usize = 1 << 20;
    let pieces = vec![vec![1.0_f32; ELEMENTS]; 8];
    let nodes = Shares::even(8, 8);
    let nodes = (0..8).flat_map(|rank| nodes.pieces(rank));
    let pieces: Vec<_> = nodes.zip(pieces.iter().map(Vec::as_slice)).collect();
    let mut out = vec![0.0; ELEMENTS];
    let sums = (0..9).map(|_| {
        let start = Instant::now();
        tree::combine(8, &pieces, &mut out).unwrap();
        start.elapsed()
    });
    let median = median(sums.collect());
    let rate = (8 * ELEMENTS * 4) as f64 / median.as_secs_f64() / 1e9;
    println!("tree sum of 8 pieces of 4 MiB: median {median:?}, {rate:.1} GB/s");
    assert!(out.iter().all(|&sum| sum == 8.0));
}

#[test]
fn a_sum_of_four_million_elements() {
    const ELEMENTS: usize = 4 << 20;
    let shares = Shares::even(4, 4);
    let piece = vec![1.0_f32; ELEMENTS];
    let medians = with_mesh(4, |mut mesh, _| {
        let mut out = vec![0.0_f32; ELEMENTS];
        let sums = (0..5).map(|_| {
            let start = Instant::now();
            mesh.all_reduce_tree(&shares, &[View::of(&piece)], ViewMut::of(&mut out), soon())
                .unwrap();
            start.elapsed()
        });
        let median = median(sums.collect());
        assert!(out.iter().all(|&sum| sum == 4.0));
        median
    });
    println!("all-reduce of 16 MiB over 4 ranks: median {:?}", medians[0]);
}

#[test]
fn all_reduces_by_backend() {
    for ranks in [2, 4] {
        for (shm, shared) in [(true, true), (true, false), (false, false)] {
            let listener = || if shm { listener() } else { listener().over_tcp_only() };
            let listeners: Vec<_> = (0..ranks).map(|_| listener()).collect();
            for bytes in [4 << 10, 1 << 20, 16 << 20] {
                let generation = bytes as u64;
                let medians = with_listeners(&listeners, generation, |mut mesh, _| {
                    let mut buffer = match shared {
                        true => mesh.allocate(Dtype::F32, bytes / 4, soon()).unwrap(),
                        false => Buffer::ordinary(Dtype::F32, bytes / 4),
                    };
                    let sums = (0..15).map(|_| {
                        mesh.barrier(soon()).unwrap();
                        let start = Instant::now();
                        mesh.all_reduce(Reduce::Sum, buffer.view_mut(), soon()).unwrap();
                        start.elapsed()
                    });
                    median(sums.collect())
                });
                let slowest = medians.into_iter().max().unwrap();
                let rate = bytes as f64 / slowest.as_secs_f64() / 1e9;
                println!(
                    "all-reduce over {ranks}, shm {shm}, shared buffer {shared}, {bytes} bytes: \
                     {slowest:?}, algbw {rate:.2} GB/s"
                );
            }
        }
    }
}
