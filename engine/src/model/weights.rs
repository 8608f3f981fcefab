//! Hands the parameters of a model to its parts, in declared order.

use tch::Tensor;

use super::Error;
use crate::layout::Declaration;

/// Parameters that wait to be taken.
pub(super) struct Weights {
    waiting: std::vec::IntoIter<(Declaration, Tensor)>,
}

impl Weights {
    /// Checks each tensor against its declaration.
    pub(super) fn new(declared: Vec<Declaration>, tensors: Vec<Tensor>) -> Result<Self, Error> {
        if declared.len() != tensors.len() {
            return Err(Error::Count { declared: declared.len(), given: tensors.len() });
        }
        let pairs: Vec<_> = declared.into_iter().zip(tensors).collect();
        for (parameter, tensor) in &pairs {
            let given: Vec<usize> = tensor.size().iter().map(|&d| d as usize).collect();
            if given != parameter.shape {
                let Declaration { name, shape, .. } = parameter.clone();
                return Err(Error::ShapeMismatch { name, declared: shape, given });
            }
        }
        Ok(Self { waiting: pairs.into_iter() })
    }

    /// The next parameter, as a leaf that gradients are asked for.
    pub(super) fn next(&mut self) -> Result<Tensor, Error> {
        // PANIC: the parts take exactly what `Shape::parameters` declares.
        let (_, tensor) = self.waiting.next().expect("a part takes an undeclared parameter");
        Ok(tensor.f_set_requires_grad(true)?)
    }
}
