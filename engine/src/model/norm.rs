//! Root mean square normalisation (arXiv 1910.07467).

use tch::Tensor;

use super::{Error, weights::Weights};

#[derive(Debug)]
pub(super) struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

impl RmsNorm {
    pub(super) fn new(weights: &mut Weights, eps: f64) -> Result<Self, Error> {
        Ok(Self { weight: weights.next()?, eps })
    }

    /// Normalises the last dimension.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor, Error> {
        let weight = self.weight.f_to_kind(x.kind())?;
        Ok(x.f_rms_norm(self.weight.size(), Some(&weight), self.eps)?)
    }

    pub(super) fn weight(&self) -> &Tensor {
        &self.weight
    }
}
