//! Checkpoints of the fake trainer in DCP, each rank a range of rows (CKPT-2).

use std::path::Path;

use actors::worker::{Snapshot, TrainerError};
use dcp::{Checkpoint, Dtype, Region, ShardIndex, ShardWriter, Value};

use super::arithmetic::{SIZE, State};

const SHAPE: [u64; 1] = [SIZE as u64];

/// A copy of the state, to be written by one of `ranks` ranks.
pub(super) struct Copied {
    pub(super) state: State,
    pub(super) ranks: u64,
}

impl Snapshot for Copied {
    fn write(self: Box<Self>, stage: &Path, rank: u32) -> Result<ShardIndex, String> {
        self.write_rows(stage, rank).map_err(|error| error.to_string())
    }
}

impl Copied {
    fn write_rows(&self, stage: &Path, rank: u32) -> Result<ShardIndex, dcp::Error> {
        let state = &self.state;
        let mut writer = ShardWriter::create(stage, rank)?;
        if rank == 0 {
            let mut object = |key: &str, value: &Value| {
                writer.object(
                    &format!("train_state.{key}"),
                    &["train_state".into(), key.into()],
                    value,
                )
            };
            object("step", &Value::Int(i64::try_from(state.step).unwrap_or(i64::MAX)))?;
            object("losses", &Value::Str(hex::encode(state.losses)))?;
        }
        let cut = |rank: u64| SHAPE[0] * rank / self.ranks;
        let (start, end) = (cut(u64::from(rank)), cut(u64::from(rank) + 1));
        let region = Region::rows(&SHAPE, start, end - start);
        for (name, values) in [("weights", &state.weights), ("moments", &state.moments)] {
            let rows = State::bytes(&values[start as usize..end as usize]);
            writer.tensor(name, &[name.into()], Dtype::F32, &SHAPE, &region, &rows)?;
        }
        writer.finish()
    }
}

/// Reads a checkpoint that any number of ranks wrote.
pub(super) fn load(folder: &Path) -> Result<State, TrainerError> {
    let other = format!("{} is not a checkpoint of the fake trainer", folder.display());
    match read(folder) {
        Ok(state) => state.ok_or(TrainerError::Fatal(other)),
        Err(error) if error.is_damage() => Err(TrainerError::Damaged(error.to_string())),
        Err(error) => Err(TrainerError::Fatal(error.to_string())),
    }
}

fn read(folder: &Path) -> Result<Option<State>, dcp::Error> {
    let checkpoint = Checkpoint::open(folder)?;
    let step = checkpoint.object("train_state.step")?.as_int().and_then(|n| u64::try_from(n).ok());
    let losses = checkpoint.object("train_state.losses")?;
    let losses = losses.as_str().and_then(|text| hex::decode(text).ok()?.try_into().ok());
    let (weights, moments) = (tensor(&checkpoint, "weights")?, tensor(&checkpoint, "moments")?);
    Ok(step.zip(losses).map(|(step, losses)| State { step, weights, moments, losses }))
}

fn tensor(checkpoint: &Checkpoint, name: &str) -> Result<Vec<f32>, dcp::Error> {
    let mut bytes = vec![0; 4 * SIZE];
    checkpoint.read(name, &Region::whole(&SHAPE), &mut bytes)?;
    Ok(bytes.as_chunks().0.iter().map(|chunk| f32::from_le_bytes(*chunk)).collect())
}
