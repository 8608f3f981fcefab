//! The order of samples: a keyed bijection of `0..n` with random access
//! (DATA-1), written out here so that an outsider can recompute it; the oracle
//! `replay.py` does.
//!
//! All arithmetic is on u64 and wraps. `mix` is the finalizer of SplitMix64
//! (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
//! OOPSLA 2014) and G = 0x9E3779B97F4A7C15 its increment:
//!
//! ```text
//! mix(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9
//!          z ^= z >> 27;  z *= 0x94D049BB133111EB
//!          return z ^ (z >> 31)
//! key(seed, epoch)  = mix(mix(seed + G) + epoch * G)
//! round key r       = mix(key + (r + 1) * G)                      r = 0 … 7
//! h                 = ⌈b / 2⌉ bits, where 2^b is the least power of two ≥ n
//! encrypt(x):  (left, right) = (x >> h, x mod 2^h)
//!              eight times:  (left, right) = (right, left ^ (mix(right ^ round key r) mod 2^h))
//!              return left · 2^h + right
//! π(i) = encrypt(i), encrypted again while the result is not below n
//! ```
//!
//! A Feistel network is a bijection of 2^(2h) values whatever its round function
//! (Luby and Rackoff, 1988), and walking its cycles until the value is below *n*
//! keeps it one on `0..n` (Black and Rogaway, 2002). 2^(2h) is below 4n + 4, so a
//! walk takes fewer than four steps on average.

const INCREMENT: u64 = 0x9E37_79B9_7F4A_7C15;
const ROUNDS: usize = 8;

/// The order of the samples of one epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permutation {
    n: u64,
    half: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// The order of epoch `epoch` over `n` samples.
    #[must_use]
    pub fn new(seed: u64, epoch: u64, n: u64) -> Self {
        let bits = n.checked_sub(1).map_or(0, |last| u64::BITS - last.leading_zeros());
        let step = |times: u64| INCREMENT.wrapping_mul(times);
        let key = mix(mix(seed.wrapping_add(INCREMENT)).wrapping_add(step(epoch)));
        let keys = std::array::from_fn(|r| mix(key.wrapping_add(step(r as u64 + 1))));
        Self { n, half: bits.div_ceil(2), keys }
    }

    /// Number of samples.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.n
    }

    /// True for no samples at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// π(i): the sample at place `i` of the epoch.
    ///
    /// # Panics
    /// When `i` is not below [`Self::len`].
    #[must_use]
    pub fn at(&self, i: u64) -> u64 {
        assert!(i < self.n, "place {i} of {} samples", self.n);
        let mut x = self.encrypt(i);
        while x >= self.n {
            x = self.encrypt(x);
        }
        x
    }

    fn encrypt(&self, x: u64) -> u64 {
        // `half` is at most 32, so the shifts stay within 64 bits.
        let mask = (1 << self.half) - 1;
        let (left, right) = self
            .keys
            .iter()
            .fold((x >> self.half, x & mask), |(l, r), key| (r, l ^ (mix(r ^ key) & mask)));
        left << self.half | right
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn check(seed: u64, epoch: u64, n: u64) {
        let order = Permutation::new(seed, epoch, n);
        let mut seen = vec![false; n as usize];
        for i in 0..n {
            let sample = order.at(i) as usize;
            assert!(!std::mem::replace(&mut seen[sample], true), "{sample} twice of {n}");
        }
    }

    #[test]
    fn every_sample_comes_once_an_epoch() {
        for n in 0..300 {
            check(42, n % 7, n);
        }
        for n in [1 << 12, (1 << 12) + 1, 99_991] {
            check(7, 3, n);
        }
    }

    proptest! {
        #[test]
        fn for_any_seed_and_epoch(seed: u64, epoch: u64, n in 1u64..3000) {
            check(seed, epoch, n);
        }
    }

    #[test]
    fn huge_sets_of_samples_stay_within() {
        for n in [u64::MAX, (1 << 63) + 1, 1 << 40] {
            let order = Permutation::new(1, 2, n);
            assert!((0..1000).all(|i| order.at(n - 1 - i) < n));
        }
    }

    /// Places where the order is the identity, and neighbours that stay so, are
    /// as rare as in a random order.
    #[test]
    fn the_order_looks_random() {
        let n = 10_000;
        for (seed, epoch) in [(0, 0), (0, 1), (1, 0), (42, 9)] {
            let order = Permutation::new(seed, epoch, n);
            let fixed = (0..n).filter(|i| order.at(*i) == *i).count();
            let neighbours = (1..n).filter(|i| order.at(*i) == order.at(*i - 1) + 1).count();
            assert!(fixed < 8 && neighbours < 8, "{fixed} fixed, {neighbours} neighbours");
            let first_half: u64 = (0..n / 2).map(|i| u64::from(order.at(i) < n / 2)).sum();
            assert!(first_half.abs_diff(n / 4) < 250, "{first_half}");
        }
    }

    /// Pinned: another order would be another run. The values are those of an
    /// independent program that follows the documentation above.
    #[test]
    fn the_order_is_pinned() {
        let order = |seed, epoch, n| {
            let order = Permutation::new(seed, epoch, n);
            (0..8).map(|i| order.at(i)).collect::<Vec<_>>()
        };
        assert_eq!(order(42, 0, 10), PINNED[0]);
        assert_eq!(order(42, 1, 1000), PINNED[1]);
        assert_eq!(order(u64::MAX, u64::MAX, 1 << 33), PINNED[2]);
    }

    const PINNED: [[u64; 8]; 3] = [
        [1, 3, 8, 9, 5, 0, 7, 4],
        [768, 734, 601, 638, 698, 320, 361, 781],
        [
            3_143_980_326,
            6_197_425_527,
            7_221_333_685,
            2_073_734_688,
            1_422_659_346,
            8_242_143_882,
            2_604_888_717,
            3_424_565_469,
        ],
    ];
}
