//! Token embedding.

use tch::{Kind, Tensor};

use super::{Error, weights::Weights};

#[derive(Debug)]
pub(super) struct Embedding {
    weight: Tensor,
}

impl Embedding {
    pub(super) fn new(weights: &mut Weights) -> Result<Self, Error> {
        Ok(Self { weight: weights.next()? })
    }

    /// Ids `[batch, time]` to `[batch, time, dim]` in `kind`.
    pub(super) fn forward(&self, ids: &Tensor, kind: Kind) -> Result<Tensor, Error> {
        let (no_padding, by_frequency, sparse) = (-1, false, false);
        let rows = Tensor::f_embedding(&self.weight, ids, no_padding, by_frequency, sparse)?;
        Ok(rows.f_to_kind(kind)?)
    }

    pub(super) fn weight(&self) -> &Tensor {
        &self.weight
    }
}
