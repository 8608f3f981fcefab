//! Causal grouped-query attention (arXiv 2305.13245) with rotary positions.

use tch::Tensor;

use super::{Error, Rope, Shape, linear, weights::Weights};

#[derive(Debug)]
pub(super) struct Attention {
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    wo: Tensor,
    head_dim: i64,
    grouped: bool,
}

impl Attention {
    pub(super) fn new(weights: &mut Weights, shape: &Shape) -> Result<Self, Error> {
        Ok(Self {
            wq: weights.next()?,
            wk: weights.next()?,
            wv: weights.next()?,
            wo: weights.next()?,
            head_dim: shape.head_dim() as i64,
            grouped: shape.n_kv_heads != shape.n_heads,
        })
    }

    /// `[batch, time, dim]` to the same.
    pub(super) fn forward(&self, x: &Tensor, rope: &Rope) -> Result<Tensor, Error> {
        let (batch, time, _) = x.size3()?;
        let heads = |weight: &Tensor| -> Result<Tensor, Error> {
            Ok(linear(x, weight)?.f_view([batch, time, -1, self.head_dim])?)
        };
        let query = rope.turn(&heads(&self.wq)?)?.f_transpose(1, 2)?;
        let key = rope.turn(&heads(&self.wk)?)?.f_transpose(1, 2)?;
        let value = heads(&self.wv)?.f_transpose(1, 2)?;
        let (mask, dropout, causal) = (None::<&Tensor>, 0.0, true);
        let mixed = Tensor::f_scaled_dot_product_attention(
            &query,
            &key,
            &value,
            mask,
            dropout,
            causal,
            None,
            self.grouped,
        )?;
        linear(&mixed.f_transpose(1, 2)?.f_reshape([batch, time, -1])?, &self.wo)
    }

    pub(super) fn weights(&self) -> [&Tensor; 4] {
        [&self.wq, &self.wk, &self.wv, &self.wo]
    }
}
