//! One seed decides which faults hit whom, and when.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Environment variable that repeats a seed.
pub const SEED: &str = "ELASTIC_CHAOS_SEED";

/// splitmix64.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// From [`SEED`], or a new seed; prints it either way.
    ///
    /// # Panics
    /// When the variable holds no number.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "a new seed each time")]
    pub fn seeded() -> Self {
        let seed = std::env::var(SEED).ok().map_or_else(
            || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs()),
            |text| text.parse().unwrap_or_else(|_| panic!("{SEED}={text} is no number")),
        );
        eprintln!("seed={seed}");
        Self(seed)
    }

    /// From a seed that needs no print.
    #[must_use]
    pub fn from(seed: u64) -> Self {
        Self(seed)
    }

    /// A number in `0..bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % bound.max(1) as u64) as usize
    }

    /// A pause between two limits in milliseconds.
    pub fn pause(&mut self, least: usize, most: usize) -> Duration {
        Duration::from_millis((least + self.below(most - least)) as u64)
    }

    /// One of several; `None` of none.
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        from.get(self.below(from.len()))
    }

    /// Any order.
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for end in (1..list.len()).rev() {
            list.swap(end, self.below(end + 1));
        }
    }
}
