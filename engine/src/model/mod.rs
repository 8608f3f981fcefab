//! A Llama decoder as a chain of segments with explicit boundaries: embedding,
//! blocks, head. Each has its own autograd graph, so that collectives, pipeline
//! stages and recomputation can stand between them, and abort is polled there.
//!
//! Parameter names and order are torchtitan's ([`Shape::parameters`]). There is
//! one backward implementation for every placement (TRAJ-1): libtorch never
//! accumulates into `.grad`; the caller receives each gradient once.

mod attention;
mod block;
mod embedding;
mod feed_forward;
mod head;
mod norm;
mod pass;
pub mod registry;
mod rope;
mod segment;
mod weights;

use tch::{Kind, Tensor};

use self::{block::Block, embedding::Embedding, head::Head, rope::Rope, weights::Weights};
pub use self::{
    head::IGNORED,
    pass::{Part, Pass},
    registry::{RopeScaling, Shape},
};

/// What stops a forward or backward pass.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The caller's abort poll said so; nothing of this pass counts.
    #[error("aborted at a block boundary")]
    Aborted,
    /// Not as many tensors as parameters.
    #[error("the model declares {declared} parameters, {given} tensors were given")]
    Count {
        /// Number of parameters of the shape.
        declared: usize,
        /// Number of tensors.
        given: usize,
    },
    /// A tensor of another shape than its parameter.
    #[error("parameter {name} has shape {declared:?}, the tensor given for it {given:?}")]
    ShapeMismatch {
        /// The parameter.
        name: String,
        /// Its dimensions.
        declared: Vec<usize>,
        /// The tensor's dimensions.
        given: Vec<usize>,
    },
    /// Longer than the rotary table.
    #[error("a sequence of {given} tokens exceeds the context of {context}")]
    Context {
        /// Positions that the model was made for.
        context: usize,
        /// Tokens in the sequence.
        given: usize,
    },
    /// A token that the vocabulary does not have.
    #[error("token id {id} is outside the vocabulary of {vocab_size}")]
    Token {
        /// The offending id.
        id: i64,
        /// `model.vocab_size`.
        vocab_size: usize,
    },
    /// A unit ran out of turn.
    #[error("unit {unit} of the model runs {what}")]
    Order {
        /// Which unit.
        unit: usize,
        /// What is wrong.
        what: &'static str,
    },
    /// libtorch refused; the first line of what it said.
    #[error("libtorch: {0}")]
    Torch(String),
}

impl Error {
    fn order(unit: usize, what: &'static str) -> Self {
        Self::Order { unit, what }
    }
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        // The lines below the first are a C++ stack trace.
        Self::Torch(error.to_string().lines().next().unwrap_or_default().to_owned())
    }
}

/// Which blocks run forward again in the backward pass instead of keeping
/// their activations. The bits do not depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    /// No block.
    Never,
    /// Every n-th block, counted from 1; 1 means all.
    Every(usize),
}

impl Recompute {
    /// Whether block `block`, counted from 0, runs again.
    fn again(self, block: usize) -> bool {
        match self {
            Self::Never => false,
            Self::Every(n) => (block + 1).is_multiple_of(n.max(1)),
        }
    }
}

/// The decoder. Its parameters are views into memory of the caller.
#[derive(Debug)]
pub struct Model {
    shape: Shape,
    compute: Kind,
    recompute: Recompute,
    rope: Rope,
    embedding: Embedding,
    blocks: Vec<Block>,
    head: Head,
}

/// Token ids of one micro-batch, `[batch, time]` each, i64.
#[derive(Debug)]
pub struct MicroBatch {
    inputs: Tensor,
    targets: Tensor,
    counted: u64,
}

impl MicroBatch {
    /// From `batch` samples of `time + 1` ids each: inputs are the first
    /// `time`, targets the last `time`. A target may be [`IGNORED`].
    ///
    /// # Errors
    /// [`Error::Token`] for an id outside the vocabulary.
    ///
    /// # Panics
    /// When `ids` is not a whole number of samples.
    pub fn new(ids: &[i64], time: usize, vocab_size: usize) -> Result<Self, Error> {
        assert!(
            !ids.is_empty() && ids.len().is_multiple_of(time + 1),
            "samples of {} ids",
            time + 1
        );
        let known = |id: i64| (0..vocab_size as i64).contains(&id);
        let mut counted = 0;
        for sample in ids.chunks_exact(time + 1) {
            let (input, targets) = (&sample[..time], &sample[1..]);
            let bad = input.iter().find(|&&id| !known(id));
            let bad = bad.or_else(|| targets.iter().find(|&&id| !known(id) && id != IGNORED));
            if let Some(&id) = bad {
                return Err(Error::Token { id, vocab_size });
            }
            counted += targets.iter().filter(|&&id| id != IGNORED).count() as u64;
        }
        let samples = Tensor::from_slice(ids).f_view([-1, time as i64 + 1])?;
        let part = |start| samples.f_narrow(1, start, time as i64)?.f_contiguous();
        Ok(Self { inputs: part(0)?, targets: part(1)?, counted })
    }

    /// Number of targets that count in the loss.
    #[must_use]
    pub fn counted(&self) -> u64 {
        self.counted
    }

    /// Another handle on the same ids.
    fn share(&self) -> Self {
        let Self { inputs, targets, counted } = self;
        Self { inputs: inputs.shallow_clone(), targets: targets.shallow_clone(), counted: *counted }
    }
}

impl Model {
    /// A decoder over `tensors`, one for each of [`Shape::parameters`], for
    /// sequences of at most `context` tokens. Forward and backward compute in
    /// `compute`; gradients have the kind of the parameters.
    ///
    /// # Errors
    /// When the tensors do not fit the shape.
    pub fn new(
        shape: &Shape,
        tensors: Vec<Tensor>,
        context: usize,
        compute: Kind,
        recompute: Recompute,
    ) -> Result<Self, Error> {
        let rope_kind = if compute == Kind::Double { Kind::Double } else { Kind::Float };
        let mut weights = Weights::new(shape.parameters(), tensors)?;
        Ok(Self {
            shape: shape.clone(),
            compute,
            recompute,
            rope: Rope::new(shape, context, rope_kind)?,
            embedding: Embedding::new(&mut weights)?,
            blocks: (0..shape.n_layers)
                .map(|_| Block::new(&mut weights, shape))
                .collect::<Result<_, _>>()?,
            head: Head::new(&mut weights, shape)?,
        })
    }

    /// Forward and backward of one micro-batch. Returns the sum of the losses
    /// over its targets, divided by `divisor`; `take(p, gradient)` receives the
    /// gradient of that for each parameter `p` of [`Shape::parameters`] once,
    /// contiguous, last parameter first.
    ///
    /// # Errors
    /// [`Error::Aborted`] as soon as `abort` says so at a block boundary.
    pub fn forward_backward(
        &self,
        batch: &MicroBatch,
        divisor: f64,
        abort: &dyn Fn() -> bool,
        take: &mut dyn FnMut(usize, &Tensor) -> Result<(), Error>,
    ) -> Result<f64, Error> {
        let mut pass = Pass::new(batch.share(), divisor);
        for unit in 0..self.units() {
            poll(abort)?;
            self.forward(unit, &mut pass)?;
        }
        for unit in (0..self.units()).rev() {
            poll(abort)?;
            self.backward(unit, &mut pass, Part::Both, take)?;
        }
        Ok(pass.loss().unwrap_or_default())
    }

    /// The loss of [`Self::forward_backward`] alone, without a graph.
    ///
    /// # Errors
    /// [`Error::Aborted`] as soon as `abort` says so at a block boundary.
    pub fn loss(
        &self,
        batch: &MicroBatch,
        divisor: f64,
        abort: &dyn Fn() -> bool,
    ) -> Result<f64, Error> {
        let _no_graph = tch::no_grad_guard();
        let last = self.hidden(&batch.inputs, abort)?;
        Ok(self.head.loss(&last, &batch.targets, divisor)?.f_double_value(&[])?)
    }

    /// Logits after each of `ids`, `[time, vocab_size]`, without a graph.
    ///
    /// # Errors
    /// When the sequence exceeds the context or has an unknown token.
    pub fn logits(&self, ids: &[i64]) -> Result<Tensor, Error> {
        let _no_graph = tch::no_grad_guard();
        let vocab_size = self.shape.vocab_size;
        if let Some(&id) = ids.iter().find(|&&id| !(0..vocab_size as i64).contains(&id)) {
            return Err(Error::Token { id, vocab_size });
        }
        let inputs = Tensor::from_slice(ids).f_unsqueeze(0)?;
        Ok(self.head.logits(&self.hidden(&inputs, &|| false)?)?.f_squeeze_dim(0)?)
    }

    /// Longest sequence, in tokens.
    #[must_use]
    pub fn context(&self) -> usize {
        self.rope.positions()
    }

    fn hidden(&self, inputs: &Tensor, abort: &dyn Fn() -> bool) -> Result<Tensor, Error> {
        self.check_context(inputs)?;
        let first = self.embedding.forward(inputs, self.compute)?;
        self.blocks.iter().try_fold(first, |x, block| {
            poll(abort)?;
            block.forward(&x, &self.rope)
        })
    }

    fn check_context(&self, inputs: &Tensor) -> Result<(), Error> {
        let (given, context) = (inputs.size()[1] as usize, self.context());
        if given > context { Err(Error::Context { context, given }) } else { Ok(()) }
    }
}

/// `x · weightᵀ` in the kind of `x`; casting inside the graph gives gradients
/// in the kind of the weight.
fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor, Error> {
    Ok(x.f_linear(&weight.f_to_kind(x.kind())?, None::<&Tensor>)?)
}

fn poll(abort: &dyn Fn() -> bool) -> Result<(), Error> {
    if abort() { Err(Error::Aborted) } else { Ok(()) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests;
