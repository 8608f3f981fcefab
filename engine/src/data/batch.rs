//! From a step and a micro-batch to token ids (DATA-1, DATA-2).
//!
//! Sample *k* is the tokens `[k·T, k·T + T]` of the file, T inputs and the T
//! targets one further, so there are ⌊(tokens − 1)/T⌋ samples. With N samples and
//! global batch B, position j = s·B + i of the run holds sample
//! π(j mod N) of epoch j div N; micro-batch m of step s is the positions from
//! s·B + m·b on, b of them. A batch may straddle two epochs. Nothing here depends
//! on ranks: who computes a micro-batch is [`job::shares::Shares`]'s business.

use job::Step;
use sha2::{Digest, Sha256};

use super::{
    ledger::{self, Ledger},
    permutation::Permutation,
    tokens::{self, TokenFile},
};

/// Sizes of samples and batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// T: tokens of input per sequence.
    pub seq_len: usize,
    /// b: sequences per micro-batch.
    pub local_batch: usize,
    /// B: sequences per step, a multiple of b, the same for the whole run.
    pub global_batch: usize,
}

/// Token ids ready for the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Ids, `[b, T + 1]` in C order: inputs are columns `0..T`, targets `1..T+1`.
    pub ids: Vec<i64>,
    /// The b samples.
    pub samples: Vec<u64>,
    /// SHA-256 of their token bytes, one sample after the other.
    pub sha256: [u8; 32],
}

/// The training data of a run.
#[derive(Debug)]
pub struct Batches {
    tokens: TokenFile,
    sizes: Sizes,
    seed: u64,
    samples: u64,
}

/// The validation data of a run: micro-batches of consecutive samples. The last
/// samples, fewer than a micro-batch, are left out.
#[derive(Debug)]
pub struct Validation {
    tokens: TokenFile,
    seq_len: usize,
    local_batch: usize,
    batches: u64,
}

/// Why there is no batch.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The tokens cannot be read.
    #[error(transparent)]
    Tokens(#[from] tokens::Error),
    /// The ledger cannot be written.
    #[error(transparent)]
    Ledger(#[from] ledger::Error),
    /// Sizes that make no batches.
    #[error(
        "sequence length {seq_len}, local batch {local_batch} and global batch {global_batch} \
         must be at least 1, and the global batch a multiple of the local one"
    )]
    Sizes {
        /// T.
        seq_len: usize,
        /// b.
        local_batch: usize,
        /// B.
        global_batch: usize,
    },
    /// Too little text.
    #[error(
        "{path} has {tokens} tokens, which is too few: {samples} samples of {seq_len} + 1 tokens \
         need {needed}; use more text, a shorter sequence or a smaller batch"
    )]
    TooShort {
        /// The token file.
        path: std::path::PathBuf,
        /// Tokens in it.
        tokens: u64,
        /// Samples that are needed.
        samples: u64,
        /// T.
        seq_len: usize,
        /// Tokens that are needed.
        needed: u128,
    },
}

impl Batches {
    /// Batches over a token file, in the order of `seed`.
    ///
    /// # Errors
    /// [`Error::Sizes`], or [`Error::TooShort`] when there is not one sample.
    pub fn new(tokens: TokenFile, sizes: Sizes, seed: u64) -> Result<Self, Error> {
        sizes.check()?;
        let samples = samples_in(&tokens, sizes.seq_len, 1)?;
        Ok(Self { tokens, sizes, seed, samples })
    }

    /// N: samples of an epoch.
    #[must_use]
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// M: micro-batches of a step.
    #[must_use]
    pub fn micro_batches(&self) -> u32 {
        (self.sizes.global_batch / self.sizes.local_batch) as u32
    }

    /// The token file.
    #[must_use]
    pub fn tokens(&self) -> &TokenFile {
        &self.tokens
    }

    /// The samples of a micro-batch of a step.
    ///
    /// # Panics
    /// When there is no such micro-batch.
    #[must_use]
    pub fn sample_ids(&self, step: Step, micro_batch: u32) -> Vec<u64> {
        assert!(micro_batch < self.micro_batches(), "micro-batch {micro_batch}");
        let Sizes { local_batch, global_batch, .. } = self.sizes;
        // 128 bits: a step far beyond any run must not wrap into the past.
        let first = u128::from(step.0) * global_batch as u128
            + u128::from(micro_batch) * local_batch as u128;
        let n = u128::from(self.samples);
        let mut order: Option<(u64, Permutation)> = None;
        let sample = |position: u128| {
            let (epoch, place) = ((position / n) as u64, (position % n) as u64);
            let (_, permutation) = match order {
                Some(known) if known.0 == epoch => known,
                _ => *order.insert((epoch, Permutation::new(self.seed, epoch, self.samples))),
            };
            permutation.at(place)
        };
        (first..first + local_batch as u128).map(sample).collect()
    }

    /// Reads a micro-batch of a step and writes it down, if there is a ledger,
    /// before anything is computed on it.
    ///
    /// # Errors
    /// [`Error::Tokens`] and [`Error::Ledger`].
    ///
    /// # Panics
    /// When there is no such micro-batch.
    pub fn micro_batch(
        &self,
        step: Step,
        micro_batch: u32,
        ledger: Option<&mut Ledger>,
    ) -> Result<Batch, Error> {
        let samples = self.sample_ids(step, micro_batch);
        let batch = read(&self.tokens, self.sizes.seq_len, samples)?;
        if let Some(ledger) = ledger {
            ledger.record(step, micro_batch, &batch.samples, &batch.sha256)?;
        }
        Ok(batch)
    }
}

impl Validation {
    /// Batches over a validation file; of `sizes` the global batch plays no part.
    ///
    /// # Errors
    /// [`Error::Sizes`], or [`Error::TooShort`] when there is not one micro-batch.
    pub fn new(tokens: TokenFile, sizes: Sizes) -> Result<Self, Error> {
        sizes.check()?;
        let Sizes { seq_len, local_batch, .. } = sizes;
        let samples = samples_in(&tokens, seq_len, local_batch as u64)?;
        Ok(Self { tokens, seq_len, local_batch, batches: samples / local_batch as u64 })
    }

    /// Number of micro-batches.
    #[must_use]
    pub fn batches(&self) -> u64 {
        self.batches
    }

    /// Reads one micro-batch.
    ///
    /// # Errors
    /// [`Error::Tokens`].
    ///
    /// # Panics
    /// When there is no such micro-batch.
    pub fn batch(&self, index: u64) -> Result<Batch, Error> {
        assert!(index < self.batches, "validation batch {index} of {}", self.batches);
        let first = index * self.local_batch as u64;
        let samples = (first..first + self.local_batch as u64).collect();
        Ok(read(&self.tokens, self.seq_len, samples)?)
    }
}

impl Sizes {
    fn check(self) -> Result<(), Error> {
        let Self { seq_len, local_batch, global_batch } = self;
        let whole = global_batch.checked_rem(local_batch) == Some(0);
        let countable = whole && u32::try_from(global_batch / local_batch).is_ok();
        if seq_len > 0 && global_batch > 0 && countable {
            Ok(())
        } else {
            Err(Error::Sizes { seq_len, local_batch, global_batch })
        }
    }
}

/// Samples in a file; an error when they are fewer than `needed`.
fn samples_in(tokens: &TokenFile, seq_len: usize, needed: u64) -> Result<u64, Error> {
    let count = tokens.header().count;
    let samples = count.saturating_sub(1) / seq_len as u64;
    if samples >= needed {
        return Ok(samples);
    }
    Err(Error::TooShort {
        path: tokens.path().to_owned(),
        tokens: count,
        samples: needed,
        seq_len,
        needed: u128::from(needed) * seq_len as u128 + 1,
    })
}

fn read(tokens: &TokenFile, seq_len: usize, samples: Vec<u64>) -> Result<Batch, tokens::Error> {
    let mut ids = Vec::with_capacity(samples.len() * (seq_len + 1));
    let mut hash = Sha256::new();
    for sample in &samples {
        tokens.read(sample * seq_len as u64, seq_len + 1, &mut ids, &mut hash)?;
    }
    Ok(Batch { ids, samples, sha256: hash.finalize().into() })
}

#[cfg(test)]
mod tests {
    use job::tokens::Width;

    use super::*;
    use crate::data::tokens::tests::write;

    /// Token *i* has the value *i*.
    fn file(count: u32) -> (tempfile::TempDir, TokenFile) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("train.tok");
        write(&path, Width::Two, 65_536, &(0..count).collect::<Vec<_>>());
        let file = TokenFile::open(&path).expect("sound");
        (folder, file)
    }

    fn sizes(seq_len: usize, local_batch: usize, global_batch: usize) -> Sizes {
        Sizes { seq_len, local_batch, global_batch }
    }

    #[test]
    fn a_sample_is_inputs_and_the_targets_one_further() {
        let (_folder, file) = file(41);
        let batches = Batches::new(file, sizes(4, 3, 6), 1).expect("enough text");
        assert_eq!((batches.samples(), batches.micro_batches()), (10, 2));
        let batch = batches.micro_batch(Step(3), 1, None).expect("read");
        let expected: Vec<i64> =
            batch.samples.iter().flat_map(|k| (0..5).map(|i| (*k * 4 + i) as i64)).collect();
        assert_eq!(batch.ids, expected);
        let bytes: Vec<u8> = expected.iter().flat_map(|t| (*t as u16).to_le_bytes()).collect();
        assert_eq!(batch.sha256, <[u8; 32]>::from(Sha256::digest(bytes)));
    }

    /// DATA-1: whatever the batch sizes, the run reads one order, each epoch each
    /// sample once, and batches straddle epochs.
    #[test]
    fn the_run_reads_every_sample_once_an_epoch() {
        #[track_caller]
        fn check(tokens: u32, sizes: Sizes) {
            let (_folder, file) = file(tokens);
            let batches = Batches::new(file, sizes, 42).expect("enough text");
            let n = batches.samples();
            let steps = 3 * n / sizes.global_batch as u64 + 2;
            let run: Vec<u64> = (0..steps)
                .flat_map(|s| (0..batches.micro_batches()).map(move |m| (s, m)))
                .flat_map(|(s, m)| batches.sample_ids(Step(s), m))
                .collect();
            for (epoch, read) in run.chunks(n as usize).enumerate() {
                let order = Permutation::new(42, epoch as u64, n);
                let expected: Vec<_> = (0..read.len() as u64).map(|i| order.at(i)).collect();
                assert_eq!(read, expected, "epoch {epoch}");
            }
        }
        check(101, sizes(10, 2, 4));
        check(101, sizes(10, 4, 4));
        check(101, sizes(10, 8, 16));
        check(101, sizes(10, 1, 7));
        check(11, sizes(10, 3, 3));
    }

    #[test]
    fn a_step_far_beyond_any_run_does_not_overflow() {
        let (_folder, file) = file(100);
        let batches = Batches::new(file, sizes(3, 2, 64), 0).expect("enough text");
        assert_eq!(batches.sample_ids(Step(u64::MAX), 31).len(), 2);
    }

    #[test]
    fn validation_is_in_order_and_whole_batches_only() {
        let (_folder, file) = file(50);
        let validation = Validation::new(file, sizes(4, 5, 5)).expect("enough text");
        assert_eq!(validation.batches(), 2);
        assert_eq!(validation.batch(1).expect("read").samples, [5, 6, 7, 8, 9]);
    }

    #[test]
    fn impossible_sizes_are_refused_with_the_numbers() {
        #[track_caller]
        fn check(tokens: u32, sizes: Sizes, train: &str, validation: &str) {
            let (_folder, one) = file(tokens);
            let (_folder, other) = file(tokens);
            let errors = [
                (Batches::new(one, sizes, 0).map(drop), train),
                (Validation::new(other, sizes).map(drop), validation),
            ];
            for (result, part) in errors {
                match result {
                    Ok(()) => assert_eq!(part, ""),
                    Err(error) => {
                        let text = error.to_string();
                        assert!(!part.is_empty() && text.contains(part), "{text}");
                    }
                }
            }
        }
        check(4, sizes(4, 1, 1), "has 4 tokens", "1 samples of 4 + 1 tokens need 5");
        check(5, sizes(4, 1, 1), "", "");
        check(5, sizes(4, 2, 2), "", "2 samples of 4 + 1 tokens need 9");
        check(99, sizes(4, 2, 3), "global batch 3", "global batch 3");
        check(99, sizes(4, 0, 3), "local batch 0", "local batch 0");
        check(99, sizes(0, 1, 3), "sequence length 0", "sequence length 0");
        check(99, sizes(4, 1, 0), "global batch 0", "global batch 0");
    }
}
