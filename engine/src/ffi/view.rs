//! Tensors over memory that Rust owns.

use tch::{Device, Kind, Tensor};

/// An f32 tensor over `memory[offset..]`, without a copy.
///
/// # Errors
/// When libtorch refuses the shape.
///
/// # Panics
/// When the tensor would reach beyond the memory.
///
/// # Safety
/// The memory stays allocated at its place while the tensor or anything that
/// shares its storage lives, and nobody writes to it while libtorch computes.
pub(crate) unsafe fn view(
    memory: &[f32],
    offset: usize,
    shape: &[usize],
) -> Result<Tensor, tch::TchError> {
    let elements: usize = shape.iter().product();
    let data = memory[offset..offset + elements].as_ptr().cast();
    let shape: Vec<i64> = shape.iter().map(|&d| d as i64).collect();
    let contiguous = &[];
    // SAFETY: the slice above is in bounds and initialised; the caller keeps it alive.
    unsafe { Tensor::f_from_blob(data, &shape, contiguous, Kind::Float, Device::Cpu) }
}
