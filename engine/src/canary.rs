//! Whether two machines compute the same bits: a canned step whose digest nodes
//! compare before they train together (CG). Mixed processor types would break
//! TRAJ-1 silently.

use sha2::{Digest, Sha256};
use tch::{Kind, Tensor};

use crate::{
    ffi::prepare_libtorch,
    layout::Declaration,
    model::{self, MicroBatch, Model, Recompute, Shape, registry},
    optimizer::{AdamW, adamw},
    random::Stream,
};

/// Long enough for vector bodies and tails of every kernel of a block.
const TIME: usize = 67;

/// SHA-256 of the losses and updated weights of one forward, backward and
/// optimizer step of a small model in f32, then of its loss in bf16. Equal on
/// machines whose processors take the same paths. Costs tens of milliseconds.
///
/// # Errors
/// When libtorch refuses.
pub fn arithmetic_digest() -> Result<[u8; 32], model::Error> {
    prepare_libtorch();
    let llama =
        registry::find("llama3", "byte-1M").map_err(|e| model::Error::Torch(e.to_string()))?;
    let shape = Shape { dim: 96, n_layers: 1, n_heads: 4, n_kv_heads: 2, multiple_of: 32, ..llama };
    let values: Vec<Vec<f32>> = shape.parameters().iter().map(initial).collect();
    let model = |kind| Model::new(&shape, tensors(&shape, &values)?, TIME, kind, Recompute::Never);
    let draws = Stream::generate(0);
    let ids: Vec<i64> = (0..2 * (TIME as u64 + 1)).map(|i| (draws.bits(i) % 256) as i64).collect();
    let batch = MicroBatch::new(&ids, TIME, shape.vocab_size)?;
    let mut hash = Sha256::new();

    let mut gradients = vec![Vec::new(); values.len()];
    let mut take = |param: usize, gradient: &Tensor| {
        gradients[param] = Vec::<f32>::try_from(gradient.f_flatten(0, -1)?)?;
        Ok(())
    };
    let never = || false;
    let loss = model(Kind::Float)?.forward_backward(&batch, 1.0, &never, &mut take)?;
    hash.update(loss.to_le_bytes());
    let adamw = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, decoupled: true };
    let update = adamw::Update { lr: 1e-3, number: 1, scale: 0.5, clip: 0.25, decay: true };
    for (weights, gradient) in values.iter().zip(&gradients) {
        let (mut weights, zeros) = (weights.clone(), vec![0.0; weights.len()]);
        adamw.apply(update, &mut weights, &mut zeros.clone(), &mut zeros.clone(), gradient);
        weights.iter().for_each(|weight| hash.update(weight.to_le_bytes()));
    }
    hash.update(model(Kind::BFloat16)?.loss(&batch, 1.0, &never)?.to_le_bytes());
    Ok(hash.finalize().into())
}

fn initial(param: &Declaration) -> Vec<f32> {
    let mut values = vec![0.0; param.shape.iter().product()];
    Stream::parameter(0, &param.name).fill_normal(0, 0.0, 0.1, &mut values);
    values
}

fn tensors(shape: &Shape, values: &[Vec<f32>]) -> Result<Vec<Tensor>, model::Error> {
    let pairs = shape.parameters().into_iter().zip(values);
    let tensor = |(param, values): (Declaration, &Vec<f32>)| {
        let size: Vec<i64> = param.shape.iter().map(|&size| size as i64).collect();
        Ok(Tensor::f_from_slice(values)?.f_view(&*size)?)
    };
    pairs.map(tensor).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_agrees_with_itself_on_any_thread() {
        let digest = arithmetic_digest().expect("libtorch computes");
        let other = std::thread::spawn(|| arithmetic_digest().expect("libtorch computes"));
        assert_eq!(other.join().expect("no panic"), digest);
    }
}
