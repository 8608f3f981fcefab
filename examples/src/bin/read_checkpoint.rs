//! Reads a checkpoint without PyTorch, and a tensor of it into a `Vec<f32>`.
//!
//! ```sh
//! cargo run --release -p examples --bin read_checkpoint -- \
//!     outputs/shakespeare/checkpoint/step-200 tok_embeddings.weight
//! ```
//!
//! It does not matter how many ranks wrote the checkpoint or whether that was
//! elastic, torchtitan or plain PyTorch: [`dcp::Checkpoint::read_f32`] puts the
//! shards together, or says which one is damaged (CKPT-1, CKPT-2).

use std::{error::Error, path::Path, process::ExitCode};

use dcp::{Checkpoint, Region};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match arguments.as_slice() {
        [directory] => list(Path::new(directory)),
        [directory, tensor] => show(Path::new(directory), tensor),
        _ => Err("usage: read_checkpoint CHECKPOINT [TENSOR]".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("read_checkpoint: {error}");
            ExitCode::FAILURE
        }
    }
}

fn list(directory: &Path) -> Result<(), Box<dyn Error>> {
    let checkpoint = Checkpoint::open(directory)?;
    for tensor in checkpoint.tensors() {
        println!("{:<60} {:?} {:?}", tensor.fqn, tensor.dtype, tensor.shape);
    }
    let step = checkpoint.object("train_state.step")?;
    println!("step {}", step.as_int().ok_or("train_state.step is no integer")?);
    Ok(())
}

fn show(directory: &Path, name: &str) -> Result<(), Box<dyn Error>> {
    let values = load(directory, name)?;
    let mean = values.iter().map(|value| f64::from(*value)).sum::<f64>() / values.len() as f64;
    let largest = values.iter().fold(0_f32, |largest, value| largest.max(value.abs()));
    println!("{name}: {} elements, mean {mean:.6}, largest {largest:.6}", values.len());
    println!("{:?} …", &values[..values.len().min(6)]);
    Ok(())
}

/// A tensor's elements in C order, whatever their type in the file.
fn load(directory: &Path, name: &str) -> Result<Vec<f32>, Box<dyn Error>> {
    // torchtitan renamed some tensors over time: these are the names of v0.2.2.
    let checkpoint = Checkpoint::open(directory)?.with_torchtitan_names()?;
    let tensor = checkpoint.tensor(name).ok_or_else(|| format!("there is no tensor {name:?}"))?;
    // Any box would do: a row, a column, one rank's part.
    Ok(checkpoint.read_f32(name, &Region::whole(tensor.shape))?)
}
