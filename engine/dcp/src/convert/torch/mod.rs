//! The single file of `torch.save(state_dict)`.

mod nest;
mod read;
mod write;

pub use read::TorchFile;
pub use write::to_torch;
