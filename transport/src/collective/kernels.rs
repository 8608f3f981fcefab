//! Element-wise reductions over the ranks' inputs, in rank order.

use half::{bf16, f16};

use super::{Dtype, Element, Error, Reduce};

/// Elements at a time: the accumulator stays in the first-level cache, and
/// loops over slices of one length become vector instructions.
const BLOCK: usize = 2048;

/// What may be reduced how.
pub(super) fn check(how: Reduce, dtype: Dtype) -> Result<(), Error> {
    if how == Reduce::Mean && !dtype.is_float() {
        return Err(Error::refused(format!("a mean of {dtype}, which has no fractions; sum it")));
    }
    Ok(())
}

/// `out` = the inputs reduced, in their order. With `own`, what lies in `out` is
/// the input of that place and the others close up around it. All have one
/// length, a whole number of aligned elements.
pub(super) fn reduce(
    how: Reduce,
    dtype: Dtype,
    inputs: &[&[u8]],
    own: Option<usize>,
    out: &mut [u8],
) {
    match dtype {
        Dtype::F32 => exact::<f32>(how, inputs, own, out),
        Dtype::F64 => exact::<f64>(how, inputs, own, out),
        Dtype::I64 => exact::<i64>(how, inputs, own, out),
        Dtype::I32 => exact::<i32>(how, inputs, own, out),
        Dtype::U8 => exact::<u8>(how, inputs, own, out),
        Dtype::Bf16 => widened::<bf16>(how, inputs, own, out),
        Dtype::F16 => widened::<f16>(how, inputs, own, out),
    }
}

/// Arithmetic of one type.
trait Number: Element {
    fn plus(self, other: Self) -> Self;
    fn larger(self, other: Self) -> Self;
    fn smaller(self, other: Self) -> Self;
    fn over(self, ranks: usize) -> Self;
}

/// A short type that is computed with as `f32`.
trait Short: Element {
    fn widen(self) -> f32;
    fn narrow(value: f32) -> Self;
}

fn exact<'a, T: Number>(how: Reduce, inputs: &[&'a [u8]], own: Option<usize>, out: &mut [u8]) {
    let step = BLOCK * size_of::<T>();
    let ranks = inputs.len() + usize::from(own.is_some());
    let mut before = [T::zeroed(); BLOCK];
    for (block, out) in out.chunks_mut(step).enumerate() {
        let range = block * step..block * step + out.len();
        let part = |input: &&'a [u8]| -> &'a [T] { bytemuck::cast_slice(&input[range.clone()]) };
        let out = bytemuck::cast_slice_mut::<u8, T>(out);
        let (left, right) = inputs.split_at(own.unwrap_or(0));
        let mut left = left.iter().map(part);
        let mut right = right.iter().map(part);
        match (own, left.next()) {
            (None, _) => out.copy_from_slice(right.next().unwrap_or_default()),
            (Some(_), None) => {}
            (Some(_), Some(first)) => {
                let before = &mut before[..out.len()];
                before.copy_from_slice(first);
                left.for_each(|input| fold(how, before, input));
                fold(how, before, out);
                out.copy_from_slice(before);
            }
        }
        right.for_each(|input| fold(how, out, input));
        if how == Reduce::Mean {
            out.iter_mut().for_each(|value| *value = value.over(ranks));
        }
    }
}

fn widened<T: Short>(how: Reduce, inputs: &[&[u8]], own: Option<usize>, out: &mut [u8]) {
    let step = BLOCK * size_of::<T>();
    let ranks = inputs.len() + usize::from(own.is_some());
    let mut sum = [0.0_f32; BLOCK];
    let mut next = [0.0_f32; BLOCK];
    for (block, out) in out.chunks_mut(step).enumerate() {
        let range = block * step..block * step + out.len();
        let out = bytemuck::cast_slice_mut::<u8, T>(out);
        let (sum, next) = (&mut sum[..out.len()], &mut next[..out.len()]);
        for rank in 0..ranks {
            let input = match own {
                Some(own) if own == rank => &*out,
                Some(own) if own < rank => {
                    bytemuck::cast_slice::<u8, T>(&inputs[rank - 1][range.clone()])
                }
                _ => bytemuck::cast_slice(&inputs[rank][range.clone()]),
            };
            let to = if rank == 0 { &mut *sum } else { &mut *next };
            to.iter_mut().zip(input).for_each(|(to, from)| *to = from.widen());
            if rank > 0 {
                fold(how, sum, next);
            }
        }
        if how == Reduce::Mean {
            sum.iter_mut().for_each(|value| *value = value.over(ranks));
        }
        out.iter_mut().zip(&*sum).for_each(|(to, from)| *to = T::narrow(*from));
    }
}

fn fold<T: Number>(how: Reduce, to: &mut [T], from: &[T]) {
    let pairs = to.iter_mut().zip(from);
    match how {
        Reduce::Sum | Reduce::Mean => pairs.for_each(|(to, &from)| *to = to.plus(from)),
        Reduce::Max => pairs.for_each(|(to, &from)| *to = to.larger(from)),
        Reduce::Min => pairs.for_each(|(to, &from)| *to = to.smaller(from)),
    }
}

macro_rules! floats {
    ($($type:ty),*) => {$(
        impl Number for $type {
            #[inline]
            fn plus(self, other: Self) -> Self {
                self + other
            }
            #[inline]
            fn larger(self, other: Self) -> Self {
                if other > self || other.is_nan() { other } else { self }
            }
            #[inline]
            fn smaller(self, other: Self) -> Self {
                if other < self || other.is_nan() { other } else { self }
            }
            #[inline]
            fn over(self, ranks: usize) -> Self {
                self / ranks as Self
            }
        }
    )*};
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Number for $type {
            #[inline]
            fn plus(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline]
            fn larger(self, other: Self) -> Self {
                self.max(other)
            }
            #[inline]
            fn smaller(self, other: Self) -> Self {
                self.min(other)
            }
            #[inline]
            fn over(self, _: usize) -> Self {
                // `check` refuses means of integers.
                self
            }
        }
    )*};
}

floats!(f32, f64);
integers!(i64, i32, u8);

impl Short for bf16 {
    #[inline]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline]
    fn narrow(value: f32) -> Self {
        // To nearest, ties to even, without a branch for vectors' sake: a NaN
        // keeps its upper bits and is quiet.
        let bits = value.to_bits();
        let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
        let nan = (bits >> 16) as u16 | 0x0040;
        Self::from_bits(if value.is_nan() { nan } else { rounded })
    }
}

impl Short for f16 {
    #[inline]
    fn widen(self) -> f32 {
        self.to_f32()
    }

    #[inline]
    fn narrow(value: f32) -> Self {
        Self::from_f32(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check<T: Element + PartialEq + std::fmt::Debug>(how: Reduce, inputs: &[T], expected: T) {
        let inputs: Vec<_> = inputs.iter().map(|&value| vec![value; BLOCK + 5]).collect();
        let inputs: Vec<_> = inputs.iter().map(|input| bytemuck::cast_slice(input)).collect();
        let mut out = vec![T::zeroed(); BLOCK + 5];
        reduce(how, T::DTYPE, &inputs, None, bytemuck::cast_slice_mut(&mut out));
        assert!(
            out.iter().all(|&value| value == expected),
            "{how:?} {:?}, not {expected:?}",
            out[0]
        );
        // The same with one of the inputs in place.
        for own in 0..inputs.len() {
            let mut others = inputs.clone();
            let mut out: Vec<T> = bytemuck::cast_slice(others.remove(own)).to_vec();
            reduce(how, T::DTYPE, &others, Some(own), bytemuck::cast_slice_mut(&mut out));
            assert!(out.iter().all(|&value| value == expected), "{how:?} in place of {own}");
        }
    }

    #[test]
    fn every_type_reduces() {
        check(Reduce::Sum, &[1.5_f32, 2.5, -1.0], 3.0);
        check(Reduce::Mean, &[1.0_f64, 2.0], 1.5);
        check(Reduce::Max, &[-3_i64, -9, -4], -3);
        check(Reduce::Min, &[3_i32, -9, 4], -9);
        check(Reduce::Sum, &[i64::MAX, 1], i64::MIN);
        check(Reduce::Sum, &[250_u8, 10], 4);
        check(Reduce::Sum, &[f16::from_f32(0.5); 5], f16::from_f32(2.5));
        check(Reduce::Max, &[bf16::from_f32(-1.0), bf16::from_f32(2.0)], bf16::from_f32(2.0));
    }

    #[test]
    fn short_types_are_rounded_once() {
        // 256 + 1 is 256 in bf16, so that step by step nothing would be added.
        let mut inputs = vec![bf16::from_f32(1.0); 9];
        inputs[0] = bf16::from_f32(256.0);
        check(Reduce::Sum, &inputs, bf16::from_f32(264.0));
    }

    #[test]
    fn narrowing_to_bf16_is_that_of_half() {
        for bits in (0..=u32::MAX).step_by(65_521).chain([0x7f80_0001, 0xff80_0000, 0x7f7f_ffff]) {
            let value = f32::from_bits(bits);
            let (own, theirs) = (<bf16 as Short>::narrow(value), bf16::from_f32(value));
            assert_eq!(own.to_bits(), theirs.to_bits(), "{bits:#x}");
        }
    }

    #[test]
    fn a_nan_of_any_rank_is_in_the_result() {
        for how in [Reduce::Sum, Reduce::Mean, Reduce::Max, Reduce::Min] {
            for at in 0..3 {
                let mut inputs = [1.0_f32; 3];
                inputs[at] = f32::NAN;
                let inputs: Vec<&[u8]> = inputs.chunks(1).map(bytemuck::cast_slice).collect();
                let mut out = [0_f32];
                exact::<f32>(how, &inputs, None, bytemuck::cast_slice_mut(&mut out));
                assert!(out[0].is_nan(), "{how:?} with a NaN of rank {at}");
            }
        }
    }

    #[test]
    fn a_mean_of_integers_is_refused() {
        assert!(super::check(Reduce::Mean, Dtype::I32).is_err());
        assert!(super::check(Reduce::Mean, Dtype::F16).is_ok());
        assert!(super::check(Reduce::Sum, Dtype::I32).is_ok());
    }
}
