//! Conversion between element types, on request only, as PyTorch's `copy_`
//! does it: to the nearest value, ties to even; a float becomes an integer by
//! cutting off its fraction, and `bool` means "not zero".

use half::{bf16, f16};

use crate::dtype::Dtype;

/// Whether elements of one type can become elements of another: real numbers
/// can, complex ones and the block-scaling types only stay what they are.
#[must_use]
pub fn is_possible(from: Dtype, to: Dtype) -> bool {
    let number = |dtype: Dtype| {
        dtype.imaginary().is_none() && !matches!(dtype, Dtype::F4E2M1FnX2 | Dtype::F8E8M0Fnu)
    };
    from == to || number(from) && number(to)
}

/// Converts elements; `into` has room for as many as `bytes` holds.
///
/// # Panics
/// When the conversion [is not possible](is_possible).
pub fn convert(from: Dtype, bytes: &[u8], to: Dtype, into: &mut [u8]) {
    use Dtype::{BF16, F16, F32, F64};
    // The conversions of models, without a detour.
    match (from, to) {
        (BF16, F32) => each(bytes, into, |b| bf16::from_le_bytes(b).to_f32().to_le_bytes()),
        (F32, BF16) => {
            each(bytes, into, |b| bf16::from_f32(f32::from_le_bytes(b)).to_le_bytes());
        }
        (F16, F32) => each(bytes, into, |b| f16::from_le_bytes(b).to_f32().to_le_bytes()),
        (F32, F16) => each(bytes, into, |b| f16::from_f32(f32::from_le_bytes(b)).to_le_bytes()),
        (F32, F64) => each(bytes, into, |b| f64::from(f32::from_le_bytes(b)).to_le_bytes()),
        (F64, F32) => each(bytes, into, |b| (f64::from_le_bytes(b) as f32).to_le_bytes()),
        _ if from == to => into.copy_from_slice(bytes),
        _ => {
            let elements = bytes.chunks_exact(from.size());
            for (element, into) in elements.zip(into.chunks_exact_mut(to.size())) {
                write(to, read(from, element), into);
            }
        }
    }
}

fn each<const N: usize, const M: usize>(
    bytes: &[u8],
    into: &mut [u8],
    convert: impl Fn([u8; N]) -> [u8; M],
) {
    let (bytes, into) = (bytes.as_chunks::<N>().0, into.as_chunks_mut::<M>().0);
    bytes.iter().zip(into).for_each(|(&element, into)| *into = convert(element));
}

/// A number of any real type.
#[derive(Clone, Copy)]
enum Number {
    Int(i128),
    Float(f64),
}

fn read(dtype: Dtype, bytes: &[u8]) -> Number {
    let mut wide = [0; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    let bits = u64::from_le_bytes(wide);
    let int = |value: i64| Number::Int(value.into());
    match dtype {
        Dtype::F64 => Number::Float(f64::from_bits(bits)),
        Dtype::F32 => Number::Float(f32::from_bits(bits as u32).into()),
        Dtype::F16 => Number::Float(f16::from_bits(bits as u16).to_f64()),
        Dtype::BF16 => Number::Float(bf16::from_bits(bits as u16).to_f64()),
        Dtype::I64 => int(bits as i64),
        Dtype::I32 => int((bits as i32).into()),
        Dtype::I16 => int((bits as i16).into()),
        Dtype::I8 => int((bits as i8).into()),
        Dtype::Bool => int((bits != 0).into()),
        Dtype::U64 | Dtype::U32 | Dtype::U16 | Dtype::U8 => Number::Int(bits.into()),
        other => match Small::of(other) {
            Some(small) => Number::Float(small.value(bits as u8)),
            None => unreachable!("{other} is no real number"),
        },
    }
}

fn write(dtype: Dtype, number: Number, into: &mut [u8]) {
    // PyTorch goes through float to each shorter one.
    let float = match number {
        Number::Int(value) => value as f32,
        Number::Float(value) => value as f32,
    };
    let int = match number {
        Number::Int(value) => value as i64,
        Number::Float(value) => value as i64,
    };
    let bits: u64 = match dtype {
        Dtype::F64 => match number {
            Number::Int(value) => (value as f64).to_bits(),
            Number::Float(value) => value.to_bits(),
        },
        Dtype::F32 => float.to_bits().into(),
        Dtype::F16 => f16::from_f32(float).to_bits().into(),
        Dtype::BF16 => bf16::from_f32(float).to_bits().into(),
        Dtype::Bool => match number {
            Number::Int(value) => (value != 0).into(),
            Number::Float(value) => (value != 0.0).into(),
        },
        Dtype::U64 => match number {
            Number::Int(value) => value as u64,
            Number::Float(value) if value >= 0.0 => value as u64,
            Number::Float(value) => value as i64 as u64,
        },
        Dtype::I64 | Dtype::I32 | Dtype::I16 | Dtype::I8 | Dtype::U32 | Dtype::U16 | Dtype::U8 => {
            int as u64
        }
        other => match Small::of(other) {
            Some(small) => small.nearest(float).into(),
            None => unreachable!("{other} is no real number"),
        },
    };
    into.copy_from_slice(&bits.to_le_bytes()[..into.len()]);
}

/// An 8-bit float.
struct Small {
    mantissa: u32,
    bias: i32,
    /// The largest finite code without its sign.
    largest: u8,
    /// What is too large becomes this code, with its sign or without.
    overflow: (u8, bool),
    /// NaN, and whether zero has a sign.
    nan: u8,
    signed_zero: bool,
}

impl Small {
    fn of(dtype: Dtype) -> Option<Self> {
        let small = |mantissa, bias, largest, overflow, nan, signed_zero| Self {
            mantissa,
            bias,
            largest,
            overflow,
            nan,
            signed_zero,
        };
        Some(match dtype {
            Dtype::F8E4M3Fn => small(3, 7, 0x7e, (0x7f, true), 0x7f, true),
            Dtype::F8E5M2 => small(2, 15, 0x7b, (0x7c, true), 0x7f, true),
            Dtype::F8E4M3Fnuz => small(3, 8, 0x7f, (0x80, false), 0x80, false),
            Dtype::F8E5M2Fnuz => small(2, 16, 0x7f, (0x80, false), 0x80, false),
            _ => return None,
        })
    }

    fn value(&self, code: u8) -> f64 {
        let magnitude = code & 0x7f;
        let sign = if code >= 0x80 { -1.0 } else { 1.0 };
        if !self.signed_zero && code == 0x80 {
            return f64::NAN;
        }
        if magnitude > self.largest {
            let infinite = self.mantissa == 2 && magnitude == 0x7c;
            return if infinite { sign * f64::INFINITY } else { f64::NAN };
        }
        sign * self.magnitude(magnitude.into())
    }

    /// The value of a code without its sign, also of the first beyond the largest.
    fn magnitude(&self, code: u32) -> f64 {
        let (exponent, mantissa) = (code >> self.mantissa, code & ((1 << self.mantissa) - 1));
        let (unit, exponent) = (1u32 << self.mantissa, exponent as i32);
        let (significand, exponent) =
            if exponent == 0 { (mantissa, 1) } else { (unit + mantissa, exponent) };
        f64::from(significand) / f64::from(unit) * 2f64.powi(exponent - self.bias)
    }

    /// The code of the nearest value, ties to even.
    fn nearest(&self, value: f32) -> u8 {
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        if value.is_nan() {
            return if self.signed_zero { self.nan | sign } else { self.nan };
        }
        let magnitude = f64::from(value.abs());
        let (mut low, mut high) = (0u32, u32::from(self.largest) + 1);
        while high - low > 1 {
            let middle = u32::midpoint(low, high);
            if self.magnitude(middle) <= magnitude { low = middle } else { high = middle }
        }
        let halfway = f64::midpoint(self.magnitude(low), self.magnitude(high));
        let up = magnitude > halfway || magnitude == halfway && low % 2 == 1;
        let code = if up { high } else { low };
        if code > self.largest.into() {
            let (code, signed) = self.overflow;
            return if signed { code | sign } else { code };
        }
        if code == 0 && !self.signed_zero { 0 } else { code as u8 | sign }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check<const N: usize>(from: Dtype, bytes: [u8; N], to: Dtype, expected: &[u8]) {
        let mut into = vec![0xa5; N / from.size() * to.size()];
        convert(from, &bytes, to, &mut into);
        assert_eq!(into, expected, "{from} {bytes:?} to {to}");
    }

    #[test]
    fn values_become_the_nearest_of_the_other_type() {
        let f32 = |value: f32| value.to_le_bytes();
        check(Dtype::F32, f32(1.0), Dtype::BF16, &[0x80, 0x3f]);
        check(Dtype::F32, f32(-2.75), Dtype::I8, &[0xfe]);
        check(Dtype::F32, f32(0.1), Dtype::Bool, &[1]);
        check(Dtype::I64, (-1i64).to_le_bytes(), Dtype::F32, &f32(-1.0));
        check(Dtype::I16, (-1i16).to_le_bytes(), Dtype::U32, &[0xff; 4]);
        check(
            Dtype::U64,
            u64::MAX.to_le_bytes(),
            Dtype::F64,
            &18446744073709551615f64.to_le_bytes(),
        );
        // As PyTorch: 448 is the largest, 464 a tie, 465 too large.
        for (value, code) in [(448.0, 0x7e), (464.0, 0x7e), (465.0, 0x7f), (-0.0, 0x80), (2e-3, 1)]
        {
            check(Dtype::F32, f32(value), Dtype::F8E4M3Fn, &[code]);
        }
        for (value, code) in [(57344.0, 0x7b), (1e9, 0x7c), (f32::NEG_INFINITY, 0xfc)] {
            check(Dtype::F32, f32(value), Dtype::F8E5M2, &[code]);
        }
        check(Dtype::F32, f32(-0.0), Dtype::F8E4M3Fnuz, &[0]);
        check(Dtype::F32, f32(f32::NAN), Dtype::F8E5M2Fnuz, &[0x80]);
    }

    #[test]
    fn small_floats_survive_a_detour() {
        for dtype in [Dtype::F8E4M3Fn, Dtype::F8E5M2, Dtype::F8E4M3Fnuz, Dtype::F8E5M2Fnuz] {
            for code in 0..=u8::MAX {
                let (mut wide, mut back) = ([0; 4], [0; 1]);
                convert(dtype, &[code], Dtype::F32, &mut wide);
                convert(Dtype::F32, &wide, dtype, &mut back);
                let nan = f32::from_le_bytes(wide).is_nan();
                assert!(back[0] == code || nan, "{dtype} {code:#x} became {:#x}", back[0]);
            }
        }
    }
}
