//! One micro-batch on its way through units of the model, forward and back.
//!
//! A *unit* is the embedding, a block or the head: the smallest part that is
//! gathered, released or placed on another stage. Between units nothing but a
//! tensor flows, so that whoever drives the pass may do anything there: gather
//! weights, send an activation to the next stage, reduce a gradient.

use tch::{Kind, Tensor};

use super::{Error, MicroBatch, Model, segment::Segment};

/// What a backward pass computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The gradients of the input and of the weights.
    Both,
    /// That of the input; those of the weights come later.
    Input,
    /// Those of the weights, after that of the input.
    Weights,
}

/// A micro-batch, what flows at the unit it has reached, and what its backward
/// pass needs of the units behind it.
#[derive(Debug)]
pub struct Pass {
    batch: MicroBatch,
    divisor: f64,
    /// Output of the last unit that ran forward.
    hidden: Option<Tensor>,
    /// Gradient of the input of the last unit that ran backward.
    gradient: Option<Tensor>,
    kept: Vec<Kept>,
    loss: Option<f64>,
}

/// A unit between its passes.
#[derive(Debug)]
struct Kept {
    unit: usize,
    what: What,
}

#[derive(Debug)]
enum What {
    /// The graph of its forward pass.
    Activations(Segment),
    /// Its input alone.
    Input(Tensor),
    /// A graph whose input gradient is computed, and the gradient of its output.
    Weights(Segment, Option<Tensor>),
}

impl Pass {
    /// Before the first unit. The loss is divided by `divisor`.
    #[must_use]
    pub fn new(batch: MicroBatch, divisor: f64) -> Self {
        Self { batch, divisor, hidden: None, gradient: None, kept: Vec::new(), loss: None }
    }

    /// The micro-batch.
    #[must_use]
    pub fn batch(&self) -> &MicroBatch {
        &self.batch
    }

    /// The loss, once the head ran forward.
    #[must_use]
    pub fn loss(&self) -> Option<f64> {
        self.loss
    }

    /// Takes out what the next unit continues from, for another stage.
    pub fn take_hidden(&mut self) -> Option<Tensor> {
        self.hidden.take()
    }

    /// Puts in what another stage computed.
    pub fn set_hidden(&mut self, hidden: Tensor) {
        self.hidden = Some(hidden);
    }

    /// Takes out the gradient that the unit before continues from.
    pub fn take_gradient(&mut self) -> Option<Tensor> {
        self.gradient.take()
    }

    /// Puts in the gradient that another stage computed.
    pub fn set_gradient(&mut self, gradient: Tensor) {
        self.gradient = Some(gradient);
    }

    fn take_kept(&mut self, unit: usize) -> Result<What, Error> {
        let at = self.kept.iter().rposition(|kept| kept.unit == unit);
        let at = at.ok_or_else(|| Error::order(unit, "backward before its forward pass"))?;
        Ok(self.kept.swap_remove(at).what)
    }
}

impl Model {
    /// Number of units.
    #[must_use]
    pub fn units(&self) -> usize {
        self.blocks.len() + 2
    }

    /// Runs a unit forward: from what the unit before left in the pass.
    ///
    /// # Errors
    /// [`Error::Order`] when that is not there, or what libtorch refuses.
    pub fn forward(&self, unit: usize, pass: &mut Pass) -> Result<(), Error> {
        if unit == 0 {
            self.check_context(&pass.batch.inputs)?;
            let segment = Segment::first(self.embedding.forward(&pass.batch.inputs, self.compute)?);
            pass.hidden = Some(segment.output().f_detach()?);
            pass.kept.push(Kept { unit, what: What::Activations(segment) });
            return Ok(());
        }
        let input = pass.hidden.take();
        let input = input.ok_or_else(|| Error::order(unit, "forward before the unit before it"))?;
        let Some(block) = self.blocks.get(unit - 1) else {
            let (targets, divisor) = (&pass.batch.targets, pass.divisor);
            let segment = Segment::run(&input, |x| self.head.loss(x, targets, divisor))?;
            pass.loss = Some(segment.output().f_double_value(&[])?);
            pass.kept.push(Kept { unit, what: What::Activations(segment) });
            return Ok(());
        };
        let what = if self.recompute.again(unit - 1) {
            pass.hidden = Some(tch::no_grad(|| block.forward(&input, &self.rope))?);
            What::Input(input)
        } else {
            let segment = Segment::run(&input, |x| block.forward(x, &self.rope))?;
            pass.hidden = Some(segment.output().f_detach()?);
            What::Activations(segment)
        };
        pass.kept.push(Kept { unit, what });
        Ok(())
    }

    /// Runs a unit backward: from the gradient that the unit behind left in the
    /// pass. `take(p, gradient)` receives the gradient of each of the unit's
    /// parameters once, contiguous, numbered as [`super::Shape::parameters`].
    ///
    /// # Errors
    /// [`Error::Order`], what libtorch refuses, or what `take` returns.
    pub fn backward(
        &self,
        unit: usize,
        pass: &mut Pass,
        part: Part,
        take: &mut dyn FnMut(usize, &Tensor) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (mut segment, upstream) = match pass.take_kept(unit)? {
            What::Weights(segment, upstream) => (segment, upstream),
            what => {
                let upstream = pass.gradient.take();
                if upstream.is_none() && unit + 1 < self.units() {
                    return Err(Error::order(unit, "backward before the unit behind it"));
                }
                (self.segment(unit, what)?, upstream)
            }
        };
        if part == Part::Input {
            pass.gradient = segment.input_gradient(upstream.as_ref())?;
            pass.kept.push(Kept { unit, what: What::Weights(segment, upstream) });
            return Ok(());
        }
        let weights = self.unit_weights(unit);
        if part == Part::Weights {
            segment.forget_input();
        }
        let gradients = segment.backward(upstream.as_ref(), &weights)?;
        if part == Part::Both {
            pass.gradient = gradients.input;
        }
        let first = self.unit_parameters(unit).start;
        let mut gradients = gradients.parameters.iter().enumerate();
        gradients.try_for_each(|(i, gradient)| take(first + i, &gradient.f_contiguous()?))
    }

    /// The loss, or the next hidden values, of a unit without a graph.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn evaluate(&self, unit: usize, pass: &mut Pass) -> Result<(), Error> {
        let _no_graph = tch::no_grad_guard();
        if unit == 0 {
            self.check_context(&pass.batch.inputs)?;
            pass.hidden = Some(self.embedding.forward(&pass.batch.inputs, self.compute)?);
            return Ok(());
        }
        let input = pass.hidden.take();
        let input = input.ok_or_else(|| Error::order(unit, "forward before the unit before it"))?;
        match self.blocks.get(unit - 1) {
            Some(block) => pass.hidden = Some(block.forward(&input, &self.rope)?),
            None => {
                let loss = self.head.loss(&input, &pass.batch.targets, pass.divisor)?;
                pass.loss = Some(loss.f_double_value(&[])?);
            }
        }
        Ok(())
    }

    /// The parameters of a unit, as [`super::Shape::parameters`] numbers them.
    #[must_use]
    pub fn unit_parameters(&self, unit: usize) -> std::ops::Range<usize> {
        let of = |unit: usize| self.unit_weights(unit).len();
        let start = (0..unit).map(of).sum();
        start..start + of(unit)
    }

    /// The shape of what flows between units for a batch of `samples` sequences
    /// of `time` tokens, and its element type.
    #[must_use]
    pub fn boundary(&self, samples: usize, time: usize) -> ([i64; 3], Kind) {
        ([samples as i64, time as i64, self.shape.dim as i64], self.compute)
    }

    fn segment(&self, unit: usize, what: What) -> Result<Segment, Error> {
        match (what, unit.checked_sub(1).and_then(|block| self.blocks.get(block))) {
            (What::Activations(segment) | What::Weights(segment, _), _) => Ok(segment),
            (What::Input(x), Some(block)) => Segment::run(&x, |x| block.forward(x, &self.rope)),
            (What::Input(_), None) => Err(Error::order(unit, "recomputed, which blocks alone are")),
        }
    }

    fn unit_weights(&self, unit: usize) -> Vec<&Tensor> {
        match unit.checked_sub(1) {
            None => vec![self.embedding.weight()],
            Some(block) => match self.blocks.get(block) {
                Some(block) => block.weights(),
                None => self.head.weights().to_vec(),
            },
        }
    }
}
