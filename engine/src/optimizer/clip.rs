//! The global gradient norm and what it clips to (TRAJ-1, rule 7 of the
//! arithmetic).
//!
//! The norm is a sum of squares over the fixed blocks of a [`Layout`], each
//! summed in f64 in a fixed order, joined by the reduction [`tree`] over block
//! numbers. A rank sums the blocks of its own shard and contributes a few
//! partial sums to the vote (ST-2); together they give the same bits on any mesh.
//! Padding is in no block. Squares of f32 values cannot overflow f64, so the sum
//! is finite exactly when every gradient is.

use std::ops::Range;

use job::shares::TreeNode;

use crate::{layout::Layout, tree};

/// The partial sums of squares of the blocks of `cut`, one of
/// [`Layout::cuts`]. `gradient` holds the elements of `cut`.
///
/// # Panics
/// When `gradient` and `cut` differ in length, or the cut is not on blocks.
#[must_use]
pub fn norm_partials(
    layout: &Layout,
    cut: &Range<usize>,
    gradient: &[f32],
) -> Vec<(TreeNode, f64)> {
    assert_eq!(gradient.len(), cut.len(), "the gradient of the cut {cut:?}");
    let blocks = layout.blocks_of(cut);
    let sums = blocks.clone().map(|block| {
        let elements = layout.block(block);
        sum_of_squares(&gradient[elements.start - cut.start..elements.end - cut.start])
    });
    tree::partials(blocks.start, layout.blocks(), sums, |a, b| a + b)
}

/// The global L2 norm from the partial sums of all ranks in rank order. Not
/// finite when a gradient is not.
///
/// # Errors
/// [`tree::Error`] when the partial sums are not those of all blocks.
pub fn global_norm(
    layout: &Layout,
    pieces: impl IntoIterator<Item = (TreeNode, f64)>,
) -> Result<f64, tree::Error> {
    let sum = tree::combine(layout.blocks(), pieces, |a, b| a + b)?;
    Ok(sum.unwrap_or(0.0).sqrt())
}

/// What gradients of norm `norm` are multiplied by so that it becomes at most
/// `max_norm`: PyTorch's `clip_grad_norm_`, in f32. An infinite `max_norm`
/// gives 1.
#[must_use]
pub fn coefficient(norm: f64, max_norm: f64) -> f32 {
    let coefficient = max_norm as f32 / (norm as f32 + 1e-6);
    // Not `min`, which would hide a NaN.
    if coefficient > 1.0 { 1.0 } else { coefficient }
}

/// Eight interleaved sums, which a compiler can keep in vector registers,
/// joined in a fixed order: the bits depend on the values alone.
fn sum_of_squares(values: &[f32]) -> f64 {
    let mut sums = [0f64; 8];
    let chunks = values.chunks_exact(sums.len());
    let tail = chunks.remainder();
    for chunk in chunks {
        for (sum, value) in sums.iter_mut().zip(chunk) {
            *sum += f64::from(*value) * f64::from(*value);
        }
    }
    for (sum, value) in sums.iter_mut().zip(tail) {
        *sum += f64::from(*value) * f64::from(*value);
    }
    let [a, b, c, d, e, f, g, h] = sums;
    ((a + b) + (c + d)) + ((e + f) + (g + h))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Declaration;

    fn layout() -> Layout {
        let shapes: [&[usize]; 6] = [&[256, 128], &[128], &[3, 5000], &[], &[0], &[123, 45]];
        let declare = |(i, shape): (usize, &&[usize])| Declaration {
            name: format!("p{i}"),
            shape: shape.to_vec(),
            decay: true,
        };
        Layout::new(shapes.iter().enumerate().map(declare)).expect("distinct names")
    }

    fn gradient(layout: &Layout) -> Vec<f32> {
        let mut gradient = vec![0.0; layout.elements()];
        for (i, value) in layout.params().iter().flat_map(|p| p.range()).enumerate() {
            gradient[value] = ((i * 7919) % 1013) as f32 / 311.0 - 1.6;
        }
        gradient
    }

    fn norm(layout: &Layout, gradient: &[f32], ranks: usize) -> f64 {
        let cuts = layout.cuts(ranks);
        let pieces = cuts.iter().flat_map(|cut| norm_partials(layout, cut, &gradient[cut.clone()]));
        global_norm(layout, pieces).expect("all blocks")
    }

    /// TRAJ-1.
    #[test]
    fn the_norm_does_not_depend_on_the_mesh() {
        let layout = layout();
        let gradient = gradient(&layout);
        let plain = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        let one = norm(&layout, &gradient, 1);
        assert!((one / plain - 1.0).abs() < 1e-12, "{one}, not {plain}");
        for ranks in 2..20 {
            assert_eq!(norm(&layout, &gradient, ranks).to_bits(), one.to_bits(), "{ranks} ranks");
        }
    }

    #[test]
    fn padding_is_not_counted_and_every_bad_value_is_seen() {
        let layout = layout();
        let mut gradient = gradient(&layout);
        let clean = norm(&layout, &gradient, 3);
        let padding = layout.param("p3").expect("the scalar").range().end;
        gradient[padding] = 1e9;
        assert_eq!(norm(&layout, &gradient, 3), clean);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, padding - 1, layout.params()[5].range().end - 1] {
                let good = std::mem::replace(&mut gradient[at], bad);
                assert!(!norm(&layout, &gradient, 4).is_finite(), "{bad} at {at}");
                gradient[at] = good;
            }
        }
        gradient.fill(f32::MAX);
        assert!(norm(&layout, &gradient, 2).is_finite(), "f64 holds squares of any f32");
    }

    #[test]
    fn coefficients_are_those_of_pytorch() {
        #[track_caller]
        fn check(norm: f64, max_norm: f64, expected: f32) {
            let coefficient = coefficient(norm, max_norm);
            assert_eq!(coefficient.to_bits(), expected.to_bits(), "{coefficient}");
        }
        check(0.0, 1.0, 1.0);
        check(0.5, 1.0, 1.0);
        check(2.0, 1.0, 1.0 / (2.0 + 1e-6));
        check(2.0, f64::INFINITY, 1.0);
        check(f64::INFINITY, 1.0, 0.0);
        assert!(coefficient(f64::NAN, 1.0).is_nan());
    }

    #[test]
    fn a_missing_rank_is_an_error() {
        let layout = layout();
        let gradient = gradient(&layout);
        let cuts = layout.cuts(3);
        let pieces = cuts[..2].iter().flat_map(|c| norm_partials(&layout, c, &gradient[c.clone()]));
        assert!(matches!(global_norm(&layout, pieces), Err(tree::Error::Short { .. })));
    }
}
