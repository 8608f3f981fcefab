//! SwiGLU feed-forward layer (arXiv 2002.05202): `w2(silu(w1 x) · w3 x)`.

use tch::Tensor;

use super::{Error, linear, weights::Weights};

#[derive(Debug)]
pub(super) struct FeedForward {
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
}

impl FeedForward {
    pub(super) fn new(weights: &mut Weights) -> Result<Self, Error> {
        Ok(Self { w1: weights.next()?, w2: weights.next()?, w3: weights.next()? })
    }

    /// `[batch, time, dim]` to the same.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor, Error> {
        let gate = linear(x, &self.w1)?.f_silu()?;
        linear(&gate.f_mul(&linear(x, &self.w3)?)?, &self.w2)
    }

    pub(super) fn weights(&self) -> [&Tensor; 3] {
        [&self.w1, &self.w2, &self.w3]
    }
}
