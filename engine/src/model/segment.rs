//! Segment autograd: a stretch of the model between two boundaries, with its
//! own graph. What flows over a boundary is a plain tensor, forward and back,
//! so that a collective, a pipeline stage or a recomputation can stand there.
//! Gradients have the bits of a whole-graph backward pass.

use tch::{Kind, Tensor};

use super::Error;

/// A segment that ran forward and waits for the gradient of its output.
#[derive(Debug)]
pub(super) struct Segment {
    /// Leaf that the segment started from; none when it starts from token ids.
    input: Option<Tensor>,
    output: Tensor,
}

/// What a backward pass of a segment yields.
#[derive(Debug)]
pub(super) struct Gradients {
    /// For the segment before; none when this one starts from token ids.
    pub(super) input: Option<Tensor>,
    /// One for each parameter that was asked for.
    pub(super) parameters: Vec<Tensor>,
}

impl Segment {
    /// Runs `forward` on a fresh leaf with the values of `input`.
    pub(super) fn run(
        input: &Tensor,
        forward: impl FnOnce(&Tensor) -> Result<Tensor, Error>,
    ) -> Result<Self, Error> {
        let leaf = input.f_detach()?.f_set_requires_grad(true)?;
        let output = forward(&leaf)?;
        Ok(Self { input: Some(leaf), output })
    }

    /// A segment whose input has no gradient.
    pub(super) fn first(output: Tensor) -> Self {
        Self { input: None, output }
    }

    /// The values at the boundary after this segment.
    pub(super) fn output(&self) -> &Tensor {
        &self.output
    }

    /// Backward pass; `upstream` is the gradient of the output, and none means
    /// that the output is the scalar loss itself. Never touches `.grad`.
    pub(super) fn backward(
        self,
        upstream: Option<&Tensor>,
        parameters: &[&Tensor],
    ) -> Result<Gradients, Error> {
        let root = self.root(upstream)?;
        let inputs: Vec<&Tensor> = self.input.iter().chain(parameters.iter().copied()).collect();
        let (keep_graph, create_graph) = (false, false);
        let mut all = Tensor::f_run_backward(&[root], &inputs, keep_graph, create_graph)?;
        let parameters = all.split_off(usize::from(self.input.is_some()));
        Ok(Gradients { input: all.pop(), parameters })
    }

    /// The gradient of the input alone; the graph stays for that of the weights.
    pub(super) fn input_gradient(
        &self,
        upstream: Option<&Tensor>,
    ) -> Result<Option<Tensor>, Error> {
        let Some(input) = &self.input else { return Ok(None) };
        let (keep_graph, create_graph) = (true, false);
        let root = self.root(upstream)?;
        Ok(Tensor::f_run_backward(&[root], &[input], keep_graph, create_graph)?.pop())
    }

    /// The gradient of the input is known.
    pub(super) fn forget_input(&mut self) {
        self.input = None;
    }

    /// The scalar that a backward pass starts from.
    fn root(&self, upstream: Option<&Tensor>) -> Result<Tensor, Error> {
        // tch has no `grad_outputs`: the gradient of sum(y·g) with respect to
        // y is g times one, exactly.
        let Some(gradient) = upstream else { return Ok(self.output.shallow_clone()) };
        let exact = match gradient.kind() {
            Kind::Double => Kind::Double,
            _ => Kind::Float,
        };
        Ok(self.output.f_mul(gradient)?.f_sum(exact)?)
    }
}
