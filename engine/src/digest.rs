//! Digests of weights, training state and loss that anyone can recompute from a
//! checkpoint with PyTorch (TRAJ-1): the oracle `digest.py` does.
//!
//! * `weights_sha256`: SHA-256 over the parameters in byte order of their names,
//!   each as name, shape (little-endian i64 per dimension) and values (f32
//!   little-endian, C order).
//! * `state_sha256`: the same, with the first moments (`exp_avg`) and the second
//!   moments (`exp_avg_sq`) behind each parameter's values, and at the end the
//!   number of steps applied (little-endian i64).
//! * `loss_sha256`: the chain h₀ = 32 zero bytes, hₛ₊₁ = SHA-256(hₛ ‖ lossₛ as
//!   f32 little-endian) over the committed steps *s*. It is part of the training
//!   state, so that it survives restarts.

use std::fmt;

use job::Step;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::layout::{Layout, Param};

/// The chained digest of all losses so far.
#[derive(Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LossChain([u8; 32]);

/// A text that is not a chain.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("loss chain {0:?} is not 64 hexadecimal digits")]
pub struct ParseChainError(String);

impl LossChain {
    /// Appends the loss of the next step.
    pub fn append(&mut self, loss: f32) {
        let hash = Sha256::new().chain_update(self.0).chain_update(loss.to_le_bytes());
        self.0 = hash.finalize().into();
    }

    /// The chain's bytes: `loss_sha256`.
    #[must_use]
    pub fn bytes(&self) -> [u8; 32] {
        self.0
    }

    /// Reads what [`fmt::Display`] wrote.
    ///
    /// # Errors
    /// When the text is not 64 hexadecimal digits.
    pub fn from_hex(text: &str) -> Result<Self, ParseChainError> {
        let mut bytes = [0; 32];
        let decoded = hex::decode_to_slice(text, &mut bytes);
        decoded.map(|()| Self(bytes)).map_err(|_| ParseChainError(text.chars().take(80).collect()))
    }
}

impl fmt::Display for LossChain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for LossChain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// `weights_sha256` of a flat buffer of weights.
///
/// # Panics
/// When the buffer is not of the layout.
#[must_use]
pub fn weights_sha256(layout: &Layout, weights: &[f32]) -> [u8; 32] {
    hash_params(layout, &[weights]).finalize().into()
}

/// `state_sha256` of flat buffers of weights and moments at a step.
///
/// # Panics
/// When a buffer is not of the layout.
#[must_use]
pub fn state_sha256(
    layout: &Layout,
    weights: &[f32],
    exp_avg: &[f32],
    exp_avg_sq: &[f32],
    step: Step,
) -> [u8; 32] {
    let hash = hash_params(layout, &[weights, exp_avg, exp_avg_sq]);
    hash.chain_update((step.0 as i64).to_le_bytes()).finalize().into()
}

/// Adds f32 values to a hash as little-endian bytes.
fn update_f32(hash: &mut Sha256, values: &[f32]) {
    let mut bytes = [0; 4096];
    for part in values.chunks(bytes.len() / 4) {
        for (to, value) in bytes.chunks_exact_mut(4).zip(part) {
            to.copy_from_slice(&value.to_le_bytes());
        }
        hash.update(&bytes[..4 * part.len()]);
    }
}

fn hash_params(layout: &Layout, buffers: &[&[f32]]) -> Sha256 {
    for buffer in buffers {
        assert_eq!(buffer.len(), layout.elements(), "a buffer of the layout");
    }
    let mut params: Vec<&Param> = layout.params().iter().collect();
    params.sort_unstable_by(|a, b| a.name.as_bytes().cmp(b.name.as_bytes()));
    let mut hash = Sha256::new();
    for param in params {
        hash.update(param.name.as_bytes());
        for size in &param.shape {
            hash.update((*size as i64).to_le_bytes());
        }
        for buffer in buffers {
            update_f32(&mut hash, &buffer[param.range()]);
        }
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Declaration;

    fn layout(names: &[&str]) -> Layout {
        let declare =
            |name: &&str| Declaration { name: name.to_string(), shape: vec![2, 3], decay: true };
        Layout::new(names.iter().map(declare)).expect("distinct names")
    }

    fn filled(layout: &Layout, scale: f32) -> Vec<f32> {
        let mut buffer = vec![0.0; layout.elements()];
        for param in layout.params() {
            let first = param.name.len() as f32;
            for (i, value) in buffer[param.range()].iter_mut().enumerate() {
                *value = scale * (first + i as f32);
            }
        }
        buffer
    }

    /// The values are those that Python's hashlib and struct give for the text
    /// in the module's documentation.
    #[test]
    fn digests_are_those_of_an_independent_program() {
        let layout = layout(&["b.weight", "a"]);
        let weights = filled(&layout, 0.5);
        assert_eq!(hex::encode(weights_sha256(&layout, &weights)), WEIGHTS);
        let (m, v) = (filled(&layout, 0.25), filled(&layout, 2.0));
        assert_eq!(hex::encode(state_sha256(&layout, &weights, &m, &v, Step(7))), STATE);
        let mut chain = LossChain::default();
        chain.append(6.125);
        chain.append(5.5);
        assert_eq!(chain.to_string(), LOSS);
        assert_eq!(LossChain::from_hex(LOSS), Ok(chain));
        assert!(LossChain::from_hex("zz").is_err());
    }

    #[test]
    fn the_order_in_the_buffer_does_not_matter() {
        let (one, other) = (layout(&["b", "a.x", "a"]), layout(&["a", "b", "a.x"]));
        assert_eq!(
            weights_sha256(&one, &filled(&one, 1.0)),
            weights_sha256(&other, &filled(&other, 1.0))
        );
    }

    const WEIGHTS: &str = "06f9ddd97e5bbb0538b181abaa9479914d6c4a171b9dd04bb1920126f38714af";
    const STATE: &str = "df2c438c7690925b34634552143fe2fc98c2fb271ff071bd0bb0e3385b89d0df";
    const LOSS: &str = "a7b6b60d757b109345f9ad03846af8fb34ac831907509a86a52fb9e82f341ee9";
}
