//! Final norm, output projection and cross entropy.

use tch::{Kind, Reduction, Tensor};

use super::{Error, Shape, linear, norm::RmsNorm, weights::Weights};

/// A target with this id counts neither in the loss nor in the gradient.
pub const IGNORED: i64 = -100;

#[derive(Debug)]
pub(super) struct Head {
    norm: RmsNorm,
    output: Tensor,
}

impl Head {
    pub(super) fn new(weights: &mut Weights, shape: &Shape) -> Result<Self, Error> {
        Ok(Self { norm: RmsNorm::new(weights, shape.norm_eps)?, output: weights.next()? })
    }

    /// `[batch, time, dim]` to logits `[batch, time, vocab_size]`.
    pub(super) fn logits(&self, x: &Tensor) -> Result<Tensor, Error> {
        linear(&self.norm.forward(x)?, &self.output)
    }

    /// Sum of the cross entropies over all targets that count, divided by
    /// `divisor`: a scalar of at least f32.
    pub(super) fn loss(&self, x: &Tensor, targets: &Tensor, divisor: f64) -> Result<Tensor, Error> {
        let logits = self.logits(x)?.f_flatten(0, 1)?;
        let exact = match logits.kind() {
            Kind::Double => Kind::Double,
            _ => Kind::Float,
        };
        let (weight, smoothing) = (None::<&Tensor>, 0.0);
        let sum = logits.f_to_kind(exact)?.f_cross_entropy_loss(
            &targets.f_flatten(0, 1)?,
            weight,
            Reduction::Sum,
            IGNORED,
            smoothing,
        )?;
        Ok(sum.f_div_scalar(divisor)?)
    }

    pub(super) fn weights(&self) -> [&Tensor; 2] {
        [self.norm.weight(), &self.output]
    }
}
