//! AdamW with decoupled weight decay (Loshchilov and Hutter, ICLR 2019), and
//! Adam, whose decay is part of the gradient, in the order of operations of PyTorch's single-tensor implementation
//! (`torch/optim/adam.py`, `_single_tensor_adam`, torch 2.11, not capturable).
//!
//! The update of an element uses additions, multiplications, divisions and a
//! square root, each rounded to f32 on its own: Rust never fuses a multiply and
//! an add. So an element gets the same bits at every offset, length and
//! alignment and on every vector width (TRAJ-1), and the loop below is plain
//! Rust that the compiler vectorises.

use serde::{Deserialize, Serialize};

/// The constants of the optimizer, PyTorch's names and defaults apart from what
/// the configuration says.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decay of the weights per unit of learning rate, where a parameter decays.
    pub weight_decay: f64,
    /// Whether the decay acts on the weights apart from the moments (AdamW), or
    /// is a part of the gradient (Adam).
    pub decoupled: bool,
}

/// One element-wise pass: what is the same for every element of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// Learning rate of this step.
    pub lr: f64,
    /// Number of this update, 1 for the first: PyTorch's `step` in the bias
    /// corrections.
    pub number: u64,
    /// The gradient is first multiplied by this: constant/N (see the divisor
    /// rule of the arithmetic).
    pub scale: f32,
    /// Then by this: the clipping coefficient, 1 when the norm is small.
    pub clip: f32,
    /// Whether weight decay applies to these elements.
    pub decay: bool,
}

impl AdamW {
    /// Updates weights and both moments in place. All four slices are the same
    /// elements of buffers of one layout.
    ///
    /// # Panics
    /// When the slices differ in length.
    pub fn apply(
        &self,
        update: Update,
        weights: &mut [f32],
        exp_avg: &mut [f32],
        exp_avg_sq: &mut [f32],
        gradient: &[f32],
    ) {
        let length = weights.len();
        assert!(
            exp_avg.len() == length && exp_avg_sq.len() == length && gradient.len() == length,
            "weights, moments and gradient are the same elements"
        );
        let constants = self.constants(update);
        if self.decoupled || constants.decay == 0.0 {
            sweep::<true>(constants, weights, exp_avg, exp_avg_sq, gradient);
        } else {
            sweep::<false>(constants, weights, exp_avg, exp_avg_sq, gradient);
        }
    }

    /// Scalars are computed in f64 and rounded once, as Python's are.
    fn constants(&self, update: Update) -> Constants {
        let correction1 = 1.0 - power(self.beta1, update.number);
        let correction2 = 1.0 - power(self.beta2, update.number);
        let decay = if update.decay { self.weight_decay } else { 0.0 };
        Constants {
            scale: update.scale,
            clip: update.clip,
            keep: (1.0 - update.lr * decay) as f32,
            decay: decay as f32,
            weight1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            weight2: (1.0 - self.beta2) as f32,
            root_correction2: correction2.sqrt() as f32,
            eps: self.eps as f32,
            minus_step: -(update.lr / correction1) as f32,
        }
    }
}

#[derive(Clone, Copy)]
struct Constants {
    scale: f32,
    clip: f32,
    keep: f32,
    decay: f32,
    weight1: f32,
    beta2: f32,
    weight2: f32,
    root_correction2: f32,
    eps: f32,
    minus_step: f32,
}

/// One pass over the elements.
fn sweep<const DECOUPLED: bool>(
    constants: Constants,
    weights: &mut [f32],
    exp_avg: &mut [f32],
    exp_avg_sq: &mut [f32],
    gradient: &[f32],
) {
    let moments = exp_avg.iter_mut().zip(exp_avg_sq);
    for (((w, (m, v)), g), c) in
        weights.iter_mut().zip(moments).zip(gradient).zip(std::iter::repeat(constants))
    {
        let g = (g * c.scale) * c.clip;
        let (g, decayed) = if DECOUPLED { (g, *w * c.keep) } else { (g + *w * c.decay, *w) };
        *m += c.weight1 * (g - *m);
        *v = *v * c.beta2 + (c.weight2 * g) * g;
        let denominator = v.sqrt() / c.root_correction2 + c.eps;
        *w = decayed + (c.minus_step * *m) / denominator;
    }
}

/// baseⁿ by squaring: no library function, whose bits could differ by platform.
fn power(base: f64, mut n: u64) -> f64 {
    let (mut result, mut square) = (1.0, base);
    while n > 0 {
        if n & 1 == 1 {
            result *= square;
        }
        square *= square;
        n >>= 1;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADAMW: AdamW =
        AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, decoupled: true };

    fn update(number: u64) -> Update {
        Update { lr: 3e-3, number, scale: 0.75, clip: 0.3, decay: true }
    }

    /// Four buffers of one step, from a few bits each so that rounding matters.
    fn state(length: usize) -> [Vec<f32>; 4] {
        let mut x = 0x2545_f491_4f6c_dd1du64;
        let mut next = |scale: f32| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            ((x >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
        };
        let mut fill = |scale| (0..length).map(|_| next(scale)).collect::<Vec<f32>>();
        let (w, m, g) = (fill(1.0), fill(0.1), fill(0.5));
        let v = fill(0.01).into_iter().map(f32::abs).collect();
        [w, m, v, g]
    }

    fn apply(update: Update, [w, m, v, g]: &mut [Vec<f32>; 4], range: std::ops::Range<usize>) {
        let [w, m, v, g] = [w, m, v, g].map(|b| &mut b[range.clone()]);
        ADAMW.apply(update, w, m, v, g);
    }

    fn bits(state: &[Vec<f32>; 4]) -> Vec<u32> {
        state.iter().flatten().map(|x| x.to_bits()).collect()
    }

    /// TRAJ-1: one element at a time is the same as all at once, at every offset
    /// and length.
    #[test]
    fn bits_do_not_depend_on_offset_length_or_alignment() {
        let mut single = state(200);
        for i in 0..200 {
            apply(update(3), &mut single, i..i + 1);
        }
        for offset in 0..64 {
            for length in 0..=130 {
                let mut parts = state(200);
                apply(update(3), &mut parts, 0..offset);
                apply(update(3), &mut parts, offset..offset + length);
                apply(update(3), &mut parts, offset + length..200);
                assert_eq!(bits(&parts), bits(&single), "{offset} + {length}");
            }
        }
    }

    /// Padding has zero gradient and moments: it stays zero.
    #[test]
    fn zeros_stay_zeros() {
        let mut zeros = [const { vec![] }; 4].map(|_: Vec<f32>| vec![0.0; 33]);
        for number in 1..5 {
            apply(update(number), &mut zeros, 0..33);
        }
        assert!(bits(&zeros).iter().all(|bits| *bits == 0));
    }

    #[test]
    fn the_first_update_moves_by_the_learning_rate() {
        let mut state = [vec![1.0], vec![0.0], vec![0.0], vec![2.0]];
        let no_decay = Update { decay: false, scale: 1.0, clip: 1.0, ..update(1) };
        apply(no_decay, &mut state, 0..1);
        assert!((state[0][0] - (1.0 - 3e-3)).abs() < 1e-7, "{}", state[0][0]);
    }

    /// The values are those of torch 2.11, `AdamW(foreach=False)` and `Adam(foreach=False)`.
    /// Its vector code fuses multiplies and adds and its scalar code does not, so
    /// its own bits depend on the offset: a unit in the last place is all one can
    /// ask for.
    #[track_caller]
    fn check_against_pytorch(decoupled: bool, weights: [f32; 5], expected: [[f32; 5]; 3]) {
        let optimizer = AdamW { decoupled, ..ADAMW };
        let mut state = [weights.to_vec(), vec![0.0; 5], vec![0.0; 5], vec![]];
        for number in 1..=10 {
            let gradient = |i: u64| (((number * 7 + i * 5) % 11) as f32 - 5.0) / 8.0;
            state[3] = (0..5).map(gradient).collect();
            let [w, m, v, g] = &mut state;
            optimizer.apply(Update { scale: 1.0, clip: 1.0, ..update(number) }, w, m, v, g);
        }
        for (own, torch) in state.iter().flatten().zip(expected.as_flattened()) {
            assert!((own - torch).abs() <= 2.0 * f32::EPSILON * torch.abs(), "{own}, not {torch}");
        }
    }

    #[test]
    fn ten_updates_of_pytorch() {
        check_against_pytorch(
            true,
            [1.0, -0.5, 0.25, 3.0, -2.0],
            [
                [0.987_420_86, -0.491_391_33, 0.248_660_84, 2.995_076_2, -1.987_683_4],
                [0.026_872_022, 0.027_874_967, -0.054_543_167, 0.019_532_917, -0.024_583_368],
                [0.052_620_567, 0.069_039_4, 0.053_676_058, 0.066_877_26, 0.059_515_156],
            ],
        );
        check_against_pytorch(
            false,
            // None is near its decay's opposite: moments of terms that cancel
            // have few digits to compare.
            [1.0, 0.5, -2.5, 3.0, -2.0],
            [
                [0.984_328_03, 0.503_943_56, -2.480_359, 2.988_234, -1.980_599_3],
                [0.091_385_216, 0.060_713_883, -0.216_670_47, 0.214_685_86, -0.154_091_43],
                [0.060_729_303, 0.070_936_21, 0.093_120_836, 0.108_217_73, 0.082_346_33],
            ],
        );
    }

    #[test]
    fn powers_by_squaring() {
        for (base, n) in [(0.9f64, 0u64), (0.9, 1), (0.95, 7), (0.999, 1000), (0.5, 1 << 20)] {
            let (own, library) = (power(base, n), base.powf(n as f64));
            assert!((own - library).abs() <= 1e-13 * library, "{base}^{n}: {own}");
        }
    }
}
