//! Rotary position embedding, interleaved: elements `2i` and `2i + 1` of a
//! head are one complex number, turned by `position · theta^(-2i/head_dim)`
//! (RoFormer, arXiv 2104.09864; pairing and scaling as torchtitan has them).

use tch::{Kind, Tensor};

use super::{Error, Shape};

/// The rotations of every position of a context.
#[derive(Debug)]
pub(super) struct Rope {
    /// Complex, `[positions, head_dim / 2]`.
    rotations: Tensor,
    kind: Kind,
}

impl Rope {
    /// The table for `positions` positions; angles are computed in `kind`
    /// (f32 as PyTorch does, f64 for references).
    pub(super) fn new(shape: &Shape, positions: usize, kind: Kind) -> Result<Self, Error> {
        let device = tch::Device::Cpu;
        let head_dim = shape.head_dim() as i64;
        let exponents =
            Tensor::f_arange_start_step(0, head_dim, 2, (kind, device))?.f_div_scalar(head_dim)?;
        let frequencies = Tensor::f_pow_scalar(shape.rope_theta, &exponents)?.f_reciprocal()?;
        let frequencies = scale(&frequencies, shape)?;
        let angles = Tensor::f_arange(positions as i64, (kind, device))?.f_outer(&frequencies)?;
        let rotations = Tensor::f_polar(&angles.f_ones_like()?, &angles)?;
        Ok(Self { rotations, kind })
    }

    /// Number of positions in the table.
    pub(super) fn positions(&self) -> usize {
        self.rotations.size()[0] as usize
    }

    /// Turns `[batch, time, heads, head_dim]`, whose first position is 0.
    pub(super) fn turn(&self, x: &Tensor) -> Result<Tensor, Error> {
        let size = x.size();
        let (time, half) = (size[1], size[3] / 2);
        let pairs = x.f_to_kind(self.kind)?.f_reshape([size[0], time, size[2], half, 2])?;
        let rotations = self.rotations.f_narrow(0, 0, time)?.f_view([1, time, 1, half])?;
        let turned = pairs.f_view_as_complex()?.f_mul(&rotations)?.f_view_as_real()?;
        Ok(turned.f_reshape(&size)?.f_to_kind(x.kind())?)
    }
}

/// Stretches the long wavelengths (Llama 3.1).
fn scale(frequencies: &Tensor, shape: &Shape) -> Result<Tensor, Error> {
    let Some(scaling) = &shape.rope_scaling else {
        return Ok(frequencies.shallow_clone());
    };
    let (low, high) = (scaling.low_freq_factor, scaling.high_freq_factor);
    let context = scaling.original_context as f64;
    let turns = frequencies.f_reciprocal()?.f_mul_scalar(std::f64::consts::TAU)?;
    let turns = turns.f_reciprocal()?.f_mul_scalar(context)?;
    let stretched = frequencies.f_div_scalar(scaling.factor)?;
    let smooth = turns.f_sub_scalar(low)?.f_div_scalar(high - low)?;
    let smooth = smooth.f_clamp(0.0, 1.0)?;
    let kept = smooth.f_mul(frequencies)?;
    let rest = smooth.f_neg()?.f_add_scalar(1.0)?.f_mul(&stretched)?;
    Ok(kept.f_add(&rest)?)
}
