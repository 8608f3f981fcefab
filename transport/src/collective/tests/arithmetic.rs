//! TRAJ-1 over sockets: any number of micro-batches, any number of ranks, the
//! bits of one sequential sum. And every collective, even and uneven.

use std::ops::Range;

use job::shares::{Shares, TreeNode, cover};
use proptest::prelude::*;

use super::*;

/// Elements of a segment.
const SEGMENT: usize = reduce::SEGMENT / size_of::<f32>();

/// The sum of leaves `range`, one addition after the other, from the definition.
fn reference(node: TreeNode, leaves: &[Vec<f32>], element: usize) -> f32 {
    if node.level == 0 {
        return leaves[node.index as usize][element];
    }
    let child = |index| TreeNode { level: node.level - 1, index };
    let left = reference(child(node.index * 2), leaves, element);
    if child(node.index * 2 + 1).range(leaves.len() as u32).is_empty() {
        return left;
    }
    tree::plus(left, reference(child(node.index * 2 + 1), leaves, element))
}

fn value(random: &mut u64) -> f32 {
    *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
    let bits = (*random >> 32) as u32;
    match bits % 32 {
        0 => -0.0,
        1 => f32::from_bits(bits >> 9),
        2 => f32::from_bits(0x7fc0_0000 | bits >> 12),
        3 => f32::NEG_INFINITY,
        _ => (bits as f32 / 2e9 - 1.0) * 10_f32.powi(bits as i32 % 9),
    }
}

#[track_caller]
fn check(total: u32, ranks: usize, elements: usize, seed: u64) {
    let mut random = seed;
    let leaves: Vec<Vec<f32>> =
        (0..total).map(|_| (0..elements).map(|_| value(&mut random)).collect()).collect();
    let root = TreeNode { level: 6, index: 0 };
    let expected: Vec<u32> =
        (0..elements).map(|at| reference(root, &leaves, at).to_bits()).collect();
    let mut bounds: Vec<_> =
        (1..ranks).map(|_| (value(&mut random).to_bits() as usize) % (elements + 1)).collect();
    bounds.extend([0, elements]);
    bounds.sort_unstable();
    let splits: Vec<Range<usize>> = bounds.windows(2).map(|pair| pair[0]..pair[1]).collect();

    let shares = Shares::even(total, ranks as u32);
    let results = with_mesh(ranks, |mut mesh, _| {
        let nodes = cover(shares.of(mesh.rank()), total);
        let pieces: Vec<Vec<f32>> = nodes
            .iter()
            .map(|&node| (0..elements).map(|at| reference(node, &leaves, at)).collect())
            .collect();
        let pieces: Vec<View> = pieces.iter().map(View::from).collect();
        let mut sum = vec![1.0; elements];
        mesh.all_reduce_tree(&shares, &pieces, ViewMut::of(&mut sum), soon()).unwrap();
        let own = splits[mesh.rank()].clone();
        let mut gathered = vec![2.0; elements];
        let out = ViewMut::of(&mut gathered[own]);
        mesh.reduce_scatter_tree(&shares, &pieces, &splits, out, soon()).unwrap();
        mesh.all_gather(ViewMut::of(&mut gathered), &splits, soon()).unwrap();
        (sum, gathered)
    });
    for (sum, gathered) in results {
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(sum), expected, "all_reduce_tree, {total} over {ranks}");
        assert_eq!(bits(gathered), expected, "reduce_scatter_tree, {total} over {ranks}");
    }
}

#[test]
fn sums_have_the_bits_of_the_sequential_tree() {
    for total in 1..=40 {
        for ranks in 1..=6 {
            check(total, ranks, 67, u64::from(total) * 8 + ranks as u64);
        }
    }
}

#[test]
fn sums_of_several_segments_do_too() {
    // Two exchanges, several segments, and a short last one.
    check(5, 3, 3 * SEGMENT + 1234, 1);
    check(4, 2, 4 * SEGMENT, 2);
    check(2, 4, 4 * SEGMENT + 17, 3);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..Default::default() })]
    #[test]
    fn sums_of_any_shape_do_too(
        total in 1..=40_u32, ranks in 1..=6_usize, elements in 0..9000_usize, seed: u64
    ) {
        check(total, ranks, elements, seed);
    }
}

#[test]
fn every_rank_gathers_every_rank_s_bytes() {
    #[track_caller]
    fn check(sizes: &[usize]) {
        let results = with_mesh(sizes.len(), |mut mesh, _| {
            let own = vec![mesh.rank() as u8; sizes[mesh.rank()]];
            let first = mesh.all_gather_bytes(&own, 1 << 20, soon()).unwrap();
            mesh.barrier(soon()).unwrap();
            assert_eq!(mesh.all_gather_bytes(&own, 1 << 20, soon()).unwrap(), first);
            first
        });
        let expected: Vec<_> =
            sizes.iter().enumerate().map(|(rank, &size)| vec![rank as u8; size]).collect();
        assert!(results.iter().all(|result| *result == expected), "{sizes:?}");
    }
    check(&[3]);
    check(&[0, 0]);
    check(&[10, 0, 100_000]);
    check(&[1 << 20, 1, 8160, 8161, 8192]);
}

#[test]
fn uneven_splits_with_gaps_are_gathered() {
    let splits = [2..5, 5..5, 7..300_000, 300_001..300_002];
    let results = with_mesh(4, |mut mesh, _| {
        let mut buffer = vec![-1.0_f32; 300_003];
        buffer[splits[mesh.rank()].clone()].fill(mesh.rank() as f32);
        mesh.all_gather(ViewMut::of(&mut buffer), &splits, soon()).unwrap();
        buffer
    });
    let mut expected = vec![-1.0; 300_003];
    for (rank, split) in splits.into_iter().enumerate() {
        expected[split].fill(rank as f32);
    }
    assert!(results.iter().all(|buffer| *buffer == expected));
}

#[test]
fn broadcast_reaches_every_rank() {
    #[track_caller]
    fn check(ranks: usize, bytes: usize) {
        let expected: Vec<u8> = (0..bytes).map(|at| (at * 31 % 251) as u8).collect();
        with_mesh(ranks, |mut mesh, _| {
            for root in 0..ranks {
                let own = mesh.rank() == root;
                let mut buffer = if own { expected.clone() } else { vec![0; bytes] };
                mesh.broadcast(root, ViewMut::of(&mut buffer), soon()).unwrap();
                assert!(buffer == expected, "rank {} from {root} of {ranks}", mesh.rank());
            }
        });
    }
    for ranks in 1..=4 {
        check(ranks, 0);
        check(ranks, 1000);
        check(ranks, (1 << 20) + 77);
    }
}

#[test]
fn all_to_all_transposes() {
    with_mesh(4, |mut mesh, _| {
        let own = mesh.rank();
        let size = |from: usize, to: usize| (from * 4 + to) * 40_000 % 170_000;
        let splits = |sizes: [usize; 4]| {
            let mut at = 0;
            sizes.map(|size| {
                at += size;
                at - size..at
            })
        };
        let to = splits(std::array::from_fn(|to| size(own, to)));
        let from = splits(std::array::from_fn(|from| size(from, own)));
        let mut send = vec![0_u8; to[3].end];
        for (rank, split) in to.iter().enumerate() {
            send[split.clone()].fill((own * 4 + rank) as u8);
        }
        let mut receive = vec![0_u8; from[3].end];
        let got = ViewMut::of(&mut receive);
        mesh.all_to_all(View::of(&send), &to, got, &from, soon()).unwrap();
        for (rank, split) in from.into_iter().enumerate() {
            assert!(receive[split].iter().all(|&byte| byte == (rank * 4 + own) as u8));
        }
    });
}
