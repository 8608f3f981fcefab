//! Every operation, type, size and number of ranks against a plain reference,
//! over shared memory and over TCP.

use std::ops::Range;

use half::{bf16, f16};
use job::shares::TreeNode;
use proptest::prelude::*;

use super::*;

/// A mesh whose ranks share memory, or do not.
fn with_ranks<T: Send>(ranks: usize, shm: bool, run: impl Fn(HostMesh) -> T + Sync) -> Vec<T> {
    let listener = || if shm { listener() } else { listener().over_tcp_only() };
    let listeners: Vec<_> = (0..ranks).map(|_| listener()).collect();
    with_listeners(&listeners, 1, |mesh, _| {
        assert_eq!(mesh.shares_memory_with((mesh.rank() + 1) % ranks), shm && ranks > 1);
        run(mesh)
    })
}

/// Small whole numbers, exact in every type, of one rank.
fn values(dtype: Dtype, rank: usize, elements: usize) -> Buffer {
    let mut buffer = Buffer::ordinary(dtype, elements);
    let value = |at: usize| ((at * 7 + rank * 3) % 11) as u8;
    let bytes = buffer.view_mut().host().unwrap();
    macro_rules! fill {
        ($type:ty, $from:expr) => {
            for (at, to) in bytemuck::cast_slice_mut::<u8, $type>(bytes).iter_mut().enumerate() {
                *to = $from(value(at));
            }
        };
    }
    match dtype {
        Dtype::F32 => fill!(f32, f32::from),
        Dtype::Bf16 => fill!(bf16, bf16::from),
        Dtype::F16 => fill!(f16, f16::from),
        Dtype::F64 => fill!(f64, f64::from),
        Dtype::I64 => fill!(i64, i64::from),
        Dtype::I32 => fill!(i32, i32::from),
        Dtype::U8 => fill!(u8, |value| value),
    }
    buffer
}

/// The same elements as `f64`.
fn wide(view: View) -> Vec<f64> {
    let bytes = view.host().unwrap();
    macro_rules! widen {
        ($type:ty, $to:expr) => {
            bytemuck::cast_slice::<u8, $type>(bytes).iter().map(|value| $to(*value)).collect()
        };
    }
    match view.dtype() {
        Dtype::F32 => widen!(f32, f64::from),
        Dtype::Bf16 => widen!(bf16, |value: bf16| value.to_f64()),
        Dtype::F16 => widen!(f16, |value: f16| value.to_f64()),
        Dtype::F64 => widen!(f64, |value| value),
        Dtype::I64 => widen!(i64, |value| value as f64),
        Dtype::I32 => widen!(i32, f64::from),
        Dtype::U8 => widen!(u8, f64::from),
    }
}

fn reduced(how: Reduce, dtype: Dtype, ranks: usize, elements: usize) -> Vec<f64> {
    let all: Vec<_> = (0..ranks).map(|rank| wide(values(dtype, rank, elements).view())).collect();
    let reduce = |at: usize| {
        let column = all.iter().map(|values| values[at]);
        match how {
            Reduce::Sum => column.sum::<f64>(),
            Reduce::Max => column.fold(f64::MIN, f64::max),
            Reduce::Min => column.fold(f64::MAX, f64::min),
            Reduce::Mean => column.sum::<f64>() / ranks as f64,
        }
    };
    (0..elements).map(reduce).collect()
}

/// Uneven splits that cover everything, with an empty one.
fn uneven(ranks: usize, elements: usize) -> Vec<Range<usize>> {
    let bound =
        |at: usize| if at == ranks { elements } else { elements * at * at / (ranks * ranks) };
    (0..ranks).map(|rank| bound(rank)..bound(rank + 1)).collect()
}

#[track_caller]
fn close(got: &[f64], expected: &[f64], dtype: Dtype, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    // A mean is rounded to the type.
    let precision = match dtype {
        Dtype::Bf16 => 1.0 / 128.0,
        Dtype::F16 => 1.0 / 1024.0,
        Dtype::F32 => 1e-6,
        _ => 1e-12,
    };
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (got - expected).abs();
        assert!(error <= expected.abs() * precision, "{what} at {at}: {got}, not {expected}");
    }
}

#[track_caller]
fn check(shm: bool, ranks: usize, dtype: Dtype, elements: usize, root: usize) {
    let hows = [Reduce::Sum, Reduce::Max, Reduce::Min, Reduce::Mean];
    let splits = uneven(ranks, elements);
    with_ranks(ranks, shm, |mut mesh| {
        let rank = mesh.rank();
        let own = values(dtype, rank, elements);
        let what = |op: &str| format!("{op} of {elements} {dtype} over {ranks}, shm {shm}");
        for how in hows.into_iter().filter(|how| dtype.is_float() || *how != Reduce::Mean) {
            let expected = reduced(how, dtype, ranks, elements);
            let mut buffer = values(dtype, rank, elements);
            mesh.all_reduce(how, buffer.view_mut(), soon()).unwrap();
            close(&wide(buffer.view()), &expected, dtype, &what("all_reduce"));

            // The same bits from buffers that all ranks have mapped.
            let mut shared = mesh.allocate(dtype, elements, soon()).unwrap();
            shared.view_mut().host().unwrap().copy_from_slice(own.view().host().unwrap());
            mesh.all_reduce(how, shared.view_mut(), soon()).unwrap();
            let (one, two) = (shared.view().host().unwrap(), buffer.view().host().unwrap());
            assert!(one == two, "{}", what("all_reduce of a shared buffer"));

            let mut part = Buffer::ordinary(dtype, splits[rank].len());
            mesh.reduce_scatter(how, own.view(), &splits, part.view_mut(), soon()).unwrap();
            let expected_part = &expected[splits[rank].clone()];
            close(&wide(part.view()), expected_part, dtype, &what("reduce_scatter"));

            let mut buffer = values(dtype, rank, elements);
            mesh.reduce(how, root, buffer.view_mut(), soon()).unwrap();
            let kept = wide(own.view());
            let at_root = if rank == root { &expected } else { &kept };
            close(&wide(buffer.view()), at_root, dtype, &what("reduce"));
        }
        let theirs = |of: usize| wide(values(dtype, of, elements).view());

        let mut buffer = values(dtype, rank, elements);
        mesh.all_gather(buffer.view_mut(), &splits, soon()).unwrap();
        let parts = splits.iter().enumerate();
        let gathered: Vec<f64> =
            parts.flat_map(|(of, split)| theirs(of)[split.clone()].to_vec()).collect();
        close(&wide(buffer.view()), &gathered, dtype, &what("all_gather"));

        let mut buffer = values(dtype, rank, elements);
        mesh.broadcast(root, buffer.view_mut(), soon()).unwrap();
        close(&wide(buffer.view()), &theirs(root), dtype, &what("broadcast"));

        // Rank r gets the whole of r's split from everybody, one after the other.
        let length = splits[rank].len();
        let into: Vec<_> = (0..ranks).map(|of| of * length..(of + 1) * length).collect();
        let mut buffer = Buffer::ordinary(dtype, ranks * length);
        mesh.all_to_all(own.view(), &splits, buffer.view_mut(), &into, soon()).unwrap();
        let transposed: Vec<f64> =
            (0..ranks).flat_map(|of| theirs(of)[splits[rank].clone()].to_vec()).collect();
        close(&wide(buffer.view()), &transposed, dtype, &what("all_to_all"));

        let mut buffer = values(dtype, rank, elements);
        let part = own.view().slice(splits[rank].clone());
        mesh.gather(root, part, &splits, buffer.view_mut(), soon()).unwrap();
        let kept = wide(own.view());
        let at_root = if rank == root { &gathered } else { &kept };
        close(&wide(buffer.view()), at_root, dtype, &what("gather"));

        let mut part = Buffer::ordinary(dtype, splits[rank].len());
        mesh.scatter(root, own.view(), &splits, part.view_mut(), soon()).unwrap();
        close(&wide(part.view()), &theirs(root)[splits[rank].clone()], dtype, &what("scatter"));

        if ranks > 1 {
            let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
            let mut buffer = Buffer::ordinary(dtype, elements);
            // All send first: nobody waits for a matching call. A barrier in
            // between: the order among messages holds whatever lies between.
            mesh.send(next, own.view(), soon()).unwrap();
            mesh.send(next, own.view().slice(0..elements / 2), soon()).unwrap();
            mesh.barrier(soon()).unwrap();
            mesh.receive(before, buffer.view_mut(), soon()).unwrap();
            close(&wide(buffer.view()), &theirs(before), dtype, &what("send"));
            let half = buffer.view_mut().slice(0..elements / 2);
            mesh.receive(before, half, soon()).unwrap();
        }
        mesh.barrier(soon()).unwrap();
    });
}

#[test]
fn every_operation_is_that_of_the_reference() {
    for shm in [true, false] {
        for (number, dtype) in Dtype::ALL.into_iter().enumerate() {
            for ranks in [1, 2, 3, 5] {
                for elements in [0, 1, 33, 5000] {
                    check(shm, ranks, dtype, elements, number % ranks);
                }
            }
        }
        check(shm, 8, Dtype::F32, 100_001, 7);
        check(shm, 2, Dtype::Bf16, 3_000_001, 1);
        check(shm, 4, Dtype::I64, 700_001, 2);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..Default::default() })]
    #[test]
    fn any_operation_is_that_of_the_reference(
        shm: bool, ranks in 1..=8_usize, dtype in 0..7_usize, elements in 0..200_000_usize,
        root in 0..8_usize,
    ) {
        check(shm, ranks, Dtype::ALL[dtype], elements, root % ranks);
    }
}

/// TRAJ-1, the strided form: any number of leaves over any number of ranks.
#[track_caller]
fn check_waves(shm: bool, ranks: usize, total: u32, elements: usize) {
    let value = |leaf: u32, at: usize| (f64::from(leaf + 1) * 0.37 + at as f64 * 0.11).sin() as f32;
    let leaf = |leaf: u32| (0..elements).map(|at| value(leaf, at)).collect::<Vec<_>>();
    let leaves: Vec<_> = (0..total).map(leaf).collect();
    let nodes: Vec<_> = (0..total).map(|index| TreeNode { level: 0, index }).collect();
    let pieces: Vec<_> = nodes.into_iter().zip(leaves.iter().map(Vec::as_slice)).collect();
    let mut expected = vec![0.0; elements];
    tree::combine(total, &pieces, &mut expected).unwrap();
    let splits = uneven(ranks, elements);
    with_ranks(ranks, shm, |mut mesh| {
        let rank = mesh.rank();
        let mut sum = Counter::new(total, splits[rank].len());
        while sum.next() < total {
            let leaf = leaves.get(sum.next() as usize + rank).map(View::from);
            mesh.reduce_scatter_wave(leaf, &splits, &mut sum, soon()).unwrap();
        }
        let mut out = vec![0.0; splits[rank].len()];
        sum.finish(&mut out).unwrap();
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        let part = &expected[splits[rank].clone()];
        assert_eq!(bits(&out), bits(part), "{total} leaves over {ranks} ranks, shm {shm}");
    });
}

#[test]
fn strided_waves_have_the_bits_of_the_sequential_tree() {
    for shm in [true, false] {
        for total in [1, 2, 3, 5, 8, 13, 16, 21] {
            for ranks in [1, 2, 3, 4, 7] {
                check_waves(shm, ranks, total, 301);
            }
        }
        check_waves(shm, 3, 7, 200_003);
    }
}

#[test]
fn sub_communicators_of_a_mesh_are_made_together_and_name_ranks_of_the_mesh() {
    for shm in [true, false] {
        // (pp 2, dp 2, tp 2)
        let shape = [2, 2, 2];
        let axes: [&[usize]; 5] = [&[0], &[1], &[2], &[0, 1], &[]];
        let partitions: Vec<_> = axes.iter().map(|axes| groups(&shape, axes)).collect();
        let errors = with_ranks(8, shm, |mut mesh| {
            let rank = mesh.rank();
            let mut children = mesh.split(&partitions, soon()).unwrap();
            for (child, partition) in children.iter_mut().zip(&partitions) {
                let group = partition.iter().find(|group| group.contains(&rank)).unwrap();
                assert_eq!(group[child.rank()], rank);
                let mut sum = [rank as f32];
                child.all_reduce(Reduce::Sum, ViewMut::of(&mut sum), soon()).unwrap();
                assert_eq!(sum[0], group.iter().sum::<usize>() as f32);
            }
            mesh.barrier(soon()).unwrap();
            // Rank 5 never comes to its tensor-parallel group, {4, 5}.
            if rank == 5 {
                mesh.barrier(soon()).unwrap();
                return None;
            }
            let soon = Instant::now() + Duration::from_millis(if rank == 4 { 50 } else { 5000 });
            let ended = if rank == 4 { children[2].barrier(soon).err() } else { None };
            mesh.barrier(super::soon()).unwrap();
            ended
        });
        let error = errors.into_iter().flatten().next().unwrap();
        assert_eq!(error.peer(), Some(5), "{error}");
    }
}

#[test]
fn a_rank_that_shares_no_memory_is_reached_over_tcp() {
    let listeners = [listener(), listener().over_tcp_only(), listener()];
    let sums = with_listeners(&listeners, 1, |mut mesh, _| {
        let shares: Vec<_> = (0..3).map(|rank| mesh.shares_memory_with(rank)).collect();
        let expected = [[false, false, true], [false; 3], [true, false, false]];
        assert_eq!(shares, expected[mesh.rank()]);
        let mut buffer = mesh.allocate(Dtype::F32, 100_000, soon()).unwrap();
        buffer.typed_mut::<f32>().unwrap().fill(mesh.rank() as f32);
        mesh.all_reduce(Reduce::Sum, buffer.view_mut(), soon()).unwrap();
        buffer.typed::<f32>().unwrap().to_vec()
    });
    assert!(sums.iter().flatten().all(|sum| *sum == 3.0));
}

#[test]
fn work_that_was_started_comes_before_later_calls() {
    with_ranks(3, true, |mesh| {
        let mut overlapped = Overlapped::new(mesh).unwrap();
        let comm: &mut dyn Communicator = &mut overlapped;
        // It goes on while this thread does something else: waiting for rank 0.
        let started = comm.start(|comm| comm.barrier(soon()));
        started.wait().unwrap();
        let panics = comm.start(|_| -> Result<(), Error> { panic!("a job's own fault") });
        assert!(panics.wait().is_err());
        let started: Vec<_> = (0..5_i64)
            .map(|number| {
                comm.start(move |comm| {
                    let mut value = [number];
                    comm.all_reduce(Reduce::Sum, ViewMut::of(&mut value), soon())?;
                    Ok(value[0])
                })
            })
            .collect();
        comm.barrier(soon()).unwrap();
        let sums: Vec<_> = started.into_iter().map(|sum| sum.wait().unwrap()).collect();
        assert_eq!(sums, [0, 3, 6, 9, 12]);
        // The first that waits goes on without a call of the others' callers.
        let gathering = comm.start(|comm| comm.all_gather_bytes(&[1], 1, soon()));
        drop(overlapped);
        assert_eq!(gathering.wait().unwrap().len(), 3);
    });
}
