//! The model and the weights that its tensors view.

use std::sync::Arc;

use super::{pages::Pages, runtime::prepare_libtorch, view::view};
use crate::{
    config::Config,
    layout::Layout,
    model::{self, Model},
};

/// Weights in one flat buffer, and a model over them without a copy. Borrowing
/// keeps the two apart: the model computes under `&self`, weights change under
/// `&mut self`. What a [`crate::model::Pass`] keeps may share the buffer; it is
/// looked at again only by the model, and whoever releases weights in between
/// gathers the same values first.
#[derive(Debug)]
pub(crate) struct Replica {
    // Dropped before the memory that it views.
    model: Model,
    weights: Pages,
}

impl Replica {
    /// A model with zero weights.
    pub(crate) fn new(config: &Config, layout: &Arc<Layout>) -> Result<Self, model::Error> {
        prepare_libtorch();
        let weights = Pages::zeroed(layout.elements())
            .map_err(|error| model::Error::Torch(format!("no memory for the weights: {error}")))?;
        let tensors = layout
            .params()
            .iter()
            // SAFETY: the buffer's memory never moves, `model` is dropped first,
            // and writing needs `&mut self`, under which no computation runs.
            .map(|param| unsafe { view(&weights, param.offset, &param.shape) })
            .collect::<Result<Vec<_>, _>>()?;
        let training = &config.training;
        let (kind, recompute) = (training.kind(), training.recompute());
        let model = Model::new(&config.model, tensors, training.seq_len, kind, recompute)?;
        Ok(Self { model, weights })
    }

    pub(crate) fn model(&self) -> &Model {
        &self.model
    }

    /// The flat buffer.
    pub(crate) fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// The flat buffer, to write.
    pub(crate) fn weights_mut(&mut self) -> &mut [f32] {
        &mut self.weights
    }

    /// Gives the memory of a range of weights back: they are zeros then.
    pub(crate) fn release(&mut self, range: std::ops::Range<usize>) {
        self.weights.release(range);
    }
}
