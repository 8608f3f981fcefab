//! Randomness as a function: the same (seed, place) gives the same bits on every
//! rank of every mesh and after every restart, and there is no generator state
//! to save or to lose (TRAJ-1).
//!
//! A [`Stream`] is a 64-bit key; element *i* of it is a pure function of key and
//! *i*. The key is the first 8 bytes (little-endian) of SHA-256 over a label of
//! what the numbers are for. The bits are those of Philox4x32-10 (Salmon,
//! Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11) at
//! counter ⌊i/2⌋: words 0 and 1 for even *i*, words 2 and 3 for odd, the lower
//! word first.
//!
//! Every value takes one element: uniforms are (⌊bits/2¹¹⌋ + ½)·2⁻⁵³, normals
//! their image under the inverse normal distribution function (Wichura,
//! algorithm AS 241, PPND16), truncated normals as in PyTorch's `trunc_normal_`.
//! Only additions, multiplications, divisions and square roots are used, which
//! IEEE 754 rounds in one way: the bits do not depend on a mathematics library
//! or a vector width.

use std::f64::consts::{LN_2, SQRT_2};

use sha2::{Digest, Sha256};

/// A sequence of random values with random access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    key: [u32; 2],
}

impl Stream {
    /// The initial values of a parameter, element by element in C order. Label:
    /// `elastic initial`, the seed (u64, little-endian), the name.
    #[must_use]
    pub fn parameter(seed: u64, name: &str) -> Self {
        Self::keyed(&[b"elastic initial", &seed.to_le_bytes(), name.as_bytes()])
    }

    /// The draws of one generation of text. Label: `elastic generate`, the seed.
    #[must_use]
    pub fn generate(seed: u64) -> Self {
        Self::keyed(&[b"elastic generate", &seed.to_le_bytes()])
    }

    fn keyed(label: &[&[u8]]) -> Self {
        let hash = label.iter().fold(Sha256::new(), |hash, part| hash.chain_update(part));
        let hash: [u8; 32] = hash.finalize().into();
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| hash[at + i]));
        Self { key: [word(0), word(4)] }
    }

    /// 64 random bits.
    #[must_use]
    pub fn bits(&self, element: u64) -> u64 {
        let counter = element / 2;
        let [a, b, c, d] = philox([counter as u32, (counter >> 32) as u32, 0, 0], self.key);
        let (low, high) = if element.is_multiple_of(2) { (a, b) } else { (c, d) };
        u64::from(low) | u64::from(high) << 32
    }

    /// Uniform in the open interval (0, 1).
    #[must_use]
    pub fn uniform(&self, element: u64) -> f64 {
        ((self.bits(element) >> 11) as f64 + 0.5) * (1.0 / (1u64 << 53) as f64)
    }

    /// Normal with mean 0 and standard deviation 1.
    #[must_use]
    pub fn normal(&self, element: u64) -> f64 {
        inverse_normal(self.uniform(element))
    }

    /// Fills `out` with normal values; `out[0]` is element `first`.
    pub fn fill_normal(&self, first: u64, mean: f64, std: f64, out: &mut [f32]) {
        for (element, value) in (first..).zip(out) {
            *value = (mean + std * self.normal(element)) as f32;
        }
    }

    /// Fills `out` with normal values conditioned on lying in `[low, high]` (not
    /// multiples of `std`, as in PyTorch's `trunc_normal_`); `out[0]` is element
    /// `first`.
    ///
    /// # Panics
    /// Unless `std` is positive and `low` below `high`.
    pub fn fill_truncated_normal(
        &self,
        first: u64,
        mean: f64,
        std: f64,
        (low, high): (f64, f64),
        out: &mut [f32],
    ) {
        assert!(std > 0.0 && low < high, "std {std}, bounds {low}..{high}");
        let (from, to) = (normal_cdf((low - mean) / std), normal_cdf((high - mean) / std));
        for (element, value) in (first..).zip(out) {
            let probability = from + (to - from) * self.uniform(element);
            *value = (mean + std * inverse_normal(probability)).clamp(low, high) as f32;
        }
    }
}

/// Philox4x32-10.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let [a, b, c, d] = counter;
        let (x, y) = (u64::from(a) * 0xD251_1F53, u64::from(c) * 0xCD9E_8D57);
        counter =
            [(y >> 32) as u32 ^ b ^ key[0], y as u32, (x >> 32) as u32 ^ d ^ key[1], x as u32];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

/// The x below which a standard normal value lies with probability `p`; relative
/// error about 10⁻¹⁶ (AS 241, PPND16).
fn inverse_normal(p: f64) -> f64 {
    let q = p - 0.5;
    if q.abs() <= 0.425 {
        let r = 0.180_625 - q * q;
        return q * ratio(&CENTRE, r);
    }
    let tail = if q < 0.0 { p } else { 1.0 - p };
    if tail <= 0.0 {
        return f64::INFINITY.copysign(q);
    }
    let r = (-ln(tail)).sqrt();
    let x = if r <= 5.0 { ratio(&MIDDLE, r - 1.6) } else { ratio(&FAR, r - 5.0) };
    x.copysign(q)
}

/// The probability that a standard normal value lies below `x`, by bisection of
/// its inverse, so that both agree; absolute error below 10⁻¹⁶. Slow, and used
/// twice per tensor.
fn normal_cdf(x: f64) -> f64 {
    let (mut low, mut high) = (0.0f64, 1.0f64);
    for _ in 0..64 {
        let middle = low + (high - low) / 2.0;
        if inverse_normal(middle) < x { low = middle } else { high = middle }
    }
    low + (high - low) / 2.0
}

/// The natural logarithm of a positive, normal number, from IEEE basic
/// operations alone: x = m·2ᵉ with m in [√½, √2), ln m = 2·atanh((m−1)/(m+1)).
fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = ((bits >> 52) & 0x7ff) as i32 - 1023;
    let mut mantissa = f64::from_bits(bits & ((1 << 52) - 1) | 1023 << 52);
    if mantissa > SQRT_2 {
        mantissa /= 2.0;
        exponent += 1;
    }
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    // |s| < 0.172: the terms fall by 34 each, eleven reach 2⁻⁵⁴.
    let series = (0..11).rev().fold(0.0, |sum, k| sum * square + 1.0 / f64::from(2 * k + 1));
    f64::from(exponent) * LN_2 + 2.0 * s * series
}

/// A rational function: numerator and denominator by Horner, highest power first.
fn ratio(coefficients: &[[f64; 8]; 2], x: f64) -> f64 {
    let horner = |c: &[f64; 8]| c.iter().fold(0.0, |sum, c| sum * x + c);
    horner(&coefficients[0]) / horner(&coefficients[1])
}

#[expect(clippy::excessive_precision, reason = "the digits as published, to compare")]
const CENTRE: [[f64; 8]; 2] = [
    [
        2.509_080_928_730_122_672_7e3,
        3.343_057_558_358_812_810_5e4,
        6.726_577_092_700_870_085_3e4,
        4.592_195_393_154_987_145_7e4,
        1.373_169_376_550_946_112_5e4,
        1.971_590_950_306_551_442_7e3,
        1.331_416_678_917_843_774_5e2,
        3.387_132_872_796_366_608_0e0,
    ],
    [
        5.226_495_278_852_854_561_0e3,
        2.872_908_573_572_194_267_4e4,
        3.930_789_580_009_271_061_0e4,
        2.121_379_430_158_659_586_7e4,
        5.394_196_021_424_751_107_7e3,
        6.871_870_074_920_579_083_0e2,
        4.231_333_070_160_091_125_2e1,
        1.0,
    ],
];

#[expect(clippy::excessive_precision, reason = "the digits as published, to compare")]
const MIDDLE: [[f64; 8]; 2] = [
    [
        7.745_450_142_783_414_076_4e-4,
        2.272_384_498_926_918_458_33e-2,
        2.417_807_251_774_506_117_70e-1,
        1.270_458_252_452_368_382_58e0,
        3.647_848_324_763_204_605_04e0,
        5.769_497_221_460_691_405_50e0,
        4.630_337_846_156_545_295_90e0,
        1.423_437_110_749_683_577_34e0,
    ],
    [
        1.050_750_071_644_416_843_24e-9,
        5.475_938_084_995_344_946_00e-4,
        1.519_866_656_361_645_719_66e-2,
        1.481_039_764_274_800_745_90e-1,
        6.897_673_349_851_000_045_50e-1,
        1.676_384_830_183_803_849_40e0,
        2.053_191_626_637_758_821_87e0,
        1.0,
    ],
];

#[expect(clippy::excessive_precision, reason = "the digits as published, to compare")]
const FAR: [[f64; 8]; 2] = [
    [
        2.010_334_399_292_288_132_65e-7,
        2.711_555_568_743_487_578_15e-5,
        1.242_660_947_388_078_438_60e-3,
        2.653_218_952_657_612_309_30e-2,
        2.965_605_718_285_048_912_30e-1,
        1.784_826_539_917_291_335_80e0,
        5.463_784_911_164_114_369_90e0,
        6.657_904_643_501_103_777_20e0,
    ],
    [
        2.044_263_103_389_939_785_64e-15,
        1.421_511_758_316_445_888_70e-7,
        1.846_318_317_510_054_681_80e-5,
        7.868_691_311_456_132_591_00e-4,
        1.487_536_129_085_061_485_25e-2,
        1.369_298_809_227_358_053_10e-1,
        5.998_322_065_558_879_376_90e-1,
        1.0,
    ],
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_matches_the_published_answers() {
        // Random123 1.09, tests/kat_vectors, philox4x32 with 10 rounds.
        #[track_caller]
        fn check(counter: [u32; 4], key: [u32; 2], expected: [u32; 4]) {
            assert_eq!(philox(counter, key), expected);
        }
        check([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        check([!0; 4], [!0; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        check(
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        );
    }

    #[test]
    fn the_logarithm_is_exact_to_a_unit_or_two() {
        for i in 1..20_000 {
            let x = f64::from(i) / 20_000.0;
            let (own, library) = (ln(x), x.ln());
            assert!((own - library).abs() <= 4.0 * f64::EPSILON * library.abs(), "ln {x}: {own}");
        }
        assert!((ln(1e-300) / 1e-300f64.ln() - 1.0).abs() < 1e-15);
    }

    #[test]
    fn quantiles_of_the_normal_distribution() {
        #[track_caller]
        fn check(p: f64, x: f64) {
            assert!((inverse_normal(p) - x).abs() <= 2e-15 * x.abs().max(1.0), "{p}");
            assert!((normal_cdf(x) - p).abs() <= 3e-16, "{x}: {}", normal_cdf(x));
        }
        // The check values of AS 241, and the symmetric ones.
        check(0.25, -0.674_489_750_196_081_7);
        check(0.001, -3.090_232_306_167_813_5);
        check(1e-20, -9.262_340_089_798_408);
        check(0.5, 0.0);
        check(0.975, 1.959_963_984_540_054);
        assert_eq!(inverse_normal(0.0), f64::NEG_INFINITY);
        assert_eq!(inverse_normal(1.0), f64::INFINITY);
    }

    #[test]
    fn values_have_the_distribution_they_claim() {
        let stream = Stream::parameter(42, "layers.0.attention.wq.weight");
        #[track_caller]
        fn check(values: &[f32], mean: f64, std: f64, bound: f64) {
            let n = values.len() as f64;
            let average = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
            let variance =
                values.iter().map(|v| (f64::from(*v) - average).powi(2)).sum::<f64>() / n;
            let error = 4.0 * std / n.sqrt();
            assert!((average - mean).abs() < error, "mean {average}");
            assert!((variance.sqrt() - std).abs() < error, "std {}", variance.sqrt());
            assert!(values.iter().all(|v| f64::from(v.abs()) <= bound));
        }
        let mut values = vec![0.0; 1 << 16];
        stream.fill_normal(0, 0.0, 1.0, &mut values);
        check(&values, 0.0, 1.0, 6.0);
        stream.fill_truncated_normal(0, 0.0, 0.02, (-2.0, 2.0), &mut values);
        check(&values, 0.0, 0.02, 2.0);
        stream.fill_truncated_normal(0, 0.0, 1.0, (-1.0, 1.0), &mut values);
        check(&values, 0.0, 0.539_560, 1.0);
        stream.fill_truncated_normal(0, 1.0, 0.5, (0.0, 2.0), &mut values);
        check(&values, 1.0, 0.5 * 0.879_626, 2.0);
    }

    /// TRAJ-1: a shard initialises its own part, whatever the cut.
    #[test]
    fn a_part_is_the_part_of_the_whole() {
        let stream = Stream::parameter(7, "norm.weight");
        let mut whole = vec![0.0; 100];
        stream.fill_truncated_normal(0, 0.0, 1.0, (-3.0, 3.0), &mut whole);
        for cut in 0..=100 {
            let mut part = vec![0.0; 100 - cut];
            stream.fill_truncated_normal(cut as u64, 0.0, 1.0, (-3.0, 3.0), &mut part);
            assert_eq!(part, whole[cut..]);
        }
    }

    #[test]
    fn streams_differ_by_everything_that_names_them() {
        let streams = [
            Stream::parameter(1, "a"),
            Stream::parameter(2, "a"),
            Stream::parameter(1, "b"),
            Stream::generate(1),
        ];
        for (i, a) in streams.iter().enumerate() {
            assert!(streams[..i].iter().all(|b| a.bits(0) != b.bits(0)), "stream {i}");
        }
    }

    /// Pinned: a change of these bits changes every run that is seeded. The values
    /// are those of an independent program (Philox in Python, `NormalDist.inv_cdf`).
    #[test]
    fn the_bits_are_pinned() {
        let stream = Stream::parameter(42, "tok_embeddings.weight");
        let mut values = [0.0; 4];
        stream.fill_normal(0, 0.0, 1.0, &mut values);
        assert_eq!(values.map(f32::to_bits), PINNED);
    }

    const PINNED: [u32; 4] = [0xc00e_0136, 0xbe05_8e10, 0x4007_c828, 0xbe7f_5369];
}
