//! One decoder block: `h = x + attention(norm(x))`, `h + feed_forward(norm(h))`.

use tch::Tensor;

use super::{
    Error, Rope, Shape, attention::Attention, feed_forward::FeedForward, norm::RmsNorm,
    weights::Weights,
};

#[derive(Debug)]
pub(super) struct Block {
    attention: Attention,
    feed_forward: FeedForward,
    attention_norm: RmsNorm,
    ffn_norm: RmsNorm,
}

impl Block {
    pub(super) fn new(weights: &mut Weights, shape: &Shape) -> Result<Self, Error> {
        Ok(Self {
            attention: Attention::new(weights, shape)?,
            feed_forward: FeedForward::new(weights)?,
            attention_norm: RmsNorm::new(weights, shape.norm_eps)?,
            ffn_norm: RmsNorm::new(weights, shape.norm_eps)?,
        })
    }

    /// `[batch, time, dim]` to the same.
    pub(super) fn forward(&self, x: &Tensor, rope: &Rope) -> Result<Tensor, Error> {
        let hidden = x.f_add(&self.attention.forward(&self.attention_norm.forward(x)?, rope)?)?;
        Ok(hidden.f_add(&self.feed_forward.forward(&self.ffn_norm.forward(&hidden)?)?)?)
    }

    /// In the order of [`Shape::parameters`].
    pub(super) fn weights(&self) -> Vec<&Tensor> {
        let mut all = Vec::from(self.attention.weights());
        all.extend(self.feed_forward.weights());
        all.extend([self.attention_norm.weight(), self.ffn_norm.weight()]);
        all
    }
}
