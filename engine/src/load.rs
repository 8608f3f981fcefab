//! Training state from a checkpoint that any mesh saved, we or torchtitan
//! (CKPT-2): every rank reads its own shard.

use std::{ops::Range, path::Path};

use dcp::{Checkpoint, Dtype, Region, Value};
use job::Step;

use crate::{
    Engine, Error, Progress,
    digest::LossChain,
    layout::{Layout, Param, Slice},
    snapshot::{EXP_AVG, EXP_AVG_SQ, LOSS_CHAIN, shape, state_key},
};

/// Bytes read at once, which bounds the scratch memory.
const PIECE: usize = 64 << 20;

impl Engine {
    /// Takes the state of a checkpoint, for this rank's place in the generation
    /// entered, or all of it before one is. Returns its step.
    ///
    /// # Errors
    /// [`Error::Mismatch`] when it is another model's or not a training
    /// checkpoint: the state is then what it was. [`Error::Checkpoint`] when
    /// its files are damaged: the rank may then be fresh.
    pub fn load(&mut self, folder: &Path) -> Result<Step, Error> {
        let checkpoint = Checkpoint::open(folder)?.with_torchtitan_names()?;
        let source = Source { checkpoint, folder };
        source.check_tensors(&self.layout)?;
        let progress = source.progress(&self.layout)?;
        self.discard();
        let target = self.target();
        self.state.begin(target);
        let layout = std::sync::Arc::clone(&self.layout);
        let held = self.state.held().clone();
        let parts = self.state.parts();
        for (range, packed) in held.pieces() {
            let name = |param: &Param| param.name.clone();
            source.read(&layout, &range, name, &mut parts.weights[range.clone()])?;
            for (moment, values) in
                [(EXP_AVG, &mut *parts.exp_avg), (EXP_AVG_SQ, &mut *parts.exp_avg_sq)]
            {
                let key = |param: &Param| state_key(&param.name, moment).0;
                source.read(&layout, &range, key, &mut values[packed.clone()])?;
            }
        }
        self.state.complete(progress);
        Ok(progress.step)
    }
}

struct Source<'a> {
    checkpoint: Checkpoint,
    folder: &'a Path,
}

impl Source<'_> {
    /// Every parameter is there with its moments, in f32 and of its shape, and
    /// the model has no other.
    fn check_tensors(&self, layout: &Layout) -> Result<(), Error> {
        for param in layout.params() {
            let expected = shape(param);
            let keys = [EXP_AVG, EXP_AVG_SQ].map(|moment| state_key(&param.name, moment).0);
            for fqn in [&param.name].into_iter().chain(&keys) {
                let Some(tensor) = self.checkpoint.tensor(fqn) else {
                    return Err(self.mismatch(format!("has no tensor {fqn}")));
                };
                if (tensor.shape, tensor.dtype) != (&expected, Dtype::F32) {
                    let (dtype, shape) = (tensor.dtype.torch_name(), tensor.shape);
                    return Err(self.mismatch(format!(
                        "{fqn} is {dtype} {shape:?}, the model needs float32 {expected:?}"
                    )));
                }
            }
        }
        let other = self.checkpoint.tensors().find(|tensor| {
            !tensor.fqn.starts_with("optimizer.") && layout.param(tensor.fqn).is_none()
        });
        match other {
            None => Ok(()),
            Some(tensor) => {
                Err(self.mismatch(format!("has {}, which the model does not have", tensor.fqn)))
            }
        }
    }

    fn progress(&self, layout: &Layout) -> Result<Progress, Error> {
        let step = self.count("train_state.step")?;
        let tokens = self.count("train_state.ntokens_seen")?;
        let chain = format!("train_state.{LOSS_CHAIN}");
        // torchtitan keeps no chain: it begins anew.
        let loss_chain = if self.checkpoint.objects().any(|fqn| fqn == chain) {
            match self.checkpoint.object(&chain)? {
                Value::Str(text) => LossChain::from_hex(&text)
                    .map_err(|error| self.mismatch(format!("{chain}: {error}")))?,
                other => return Err(self.mismatch(format!("{chain} is {other:?}, not a text"))),
            }
        } else {
            LossChain::default()
        };
        let updates = match layout.params().first() {
            Some(param) => self.updates(&state_key(&param.name, "step").0)?,
            None => 0,
        };
        Ok(Progress { step: Step(step), updates, tokens, loss_chain })
    }

    fn count(&self, fqn: &str) -> Result<u64, Error> {
        let value = self.checkpoint.object(fqn)?;
        let count = value.as_int().and_then(|count| u64::try_from(count).ok());
        count.ok_or_else(|| self.mismatch(format!("{fqn} is {value:?}, not a count")))
    }

    /// The optimizer's own count of its updates, which is a float in PyTorch.
    fn updates(&self, fqn: &str) -> Result<u64, Error> {
        match self.checkpoint.tensor(fqn) {
            Some(tensor) if tensor.dtype == Dtype::F32 && tensor.shape.is_empty() => {}
            other => return Err(self.mismatch(format!("{fqn} is {other:?}, not a float32"))),
        }
        let mut bytes = [0; 4];
        self.checkpoint.read(fqn, &Region::whole(&[]), &mut bytes)?;
        Ok(f32::from_le_bytes(bytes) as u64)
    }

    /// The elements `range` of a buffer of the layout, into `values`.
    fn read(
        &self,
        layout: &Layout,
        range: &Range<usize>,
        key: impl Fn(&Param) -> String,
        values: &mut [f32],
    ) -> Result<(), Error> {
        let mut scratch = Vec::new();
        for Slice { param, rows, elements } in layout.slices(range) {
            let param = &layout.params()[param];
            let (fqn, shape, row) = (key(param), shape(param), param.row_elements());
            let at_once = (PIECE / (4 * row.max(1))).max(1);
            for first in rows.clone().step_by(at_once) {
                let count = at_once.min(rows.end - first);
                scratch.resize(4 * count * row, 0);
                let region = Region::rows(&shape, first as u64, count as u64);
                self.checkpoint.read(&fqn, &region, &mut scratch)?;
                let start = elements.start - range.start + (first - rows.start) * row;
                let out = &mut values[start..start + count * row];
                for (value, bytes) in out.iter_mut().zip(scratch.as_chunks::<4>().0) {
                    *value = f32::from_le_bytes(*bytes);
                }
            }
        }
        Ok(())
    }

    fn mismatch(&self, detail: String) -> Error {
        Error::Mismatch { folder: self.folder.display().to_string(), detail }
    }
}
