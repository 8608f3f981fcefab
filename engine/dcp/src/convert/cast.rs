//! The same tensors in another type.

use crate::dtype::Dtype;
use crate::load::convert::{convert, is_possible};
use crate::region::Region;
use crate::value::Value;

use super::{Error, Object, Source, Tensor};

/// A source whose floating-point tensors have another type.
pub struct Cast<'a> {
    source: &'a dyn Source,
    own: Vec<Tensor>,
    to: Option<Dtype>,
}

/// Converts floating-point tensors to `to`, rounding to the nearest value; `None`
/// leaves all as they are. Integers stay integers.
#[must_use]
pub fn cast(source: &dyn Source, to: Option<Dtype>) -> Cast<'_> {
    Cast { source, own: source.tensors(), to }
}

impl Cast<'_> {
    fn target(&self, dtype: Dtype) -> Dtype {
        match self.to {
            Some(to) if is_float(dtype) && is_possible(dtype, to) => to,
            _ => dtype,
        }
    }
}

fn is_float(dtype: Dtype) -> bool {
    dtype.torch_name().contains("float")
}

impl Source for Cast<'_> {
    fn tensors(&self) -> Vec<Tensor> {
        let mut tensors = self.own.clone();
        tensors.iter_mut().for_each(|tensor| tensor.dtype = self.target(tensor.dtype));
        tensors
    }

    fn read(&self, tensor: &Tensor, region: &Region, into: &mut [u8]) -> Result<(), Error> {
        let at = self.own.binary_search_by(|own| own.fqn.cmp(&tensor.fqn));
        let own = at.map_or(None, |at| self.own.get(at));
        let own = own.ok_or_else(|| Error::Missing(tensor.fqn.clone()))?;
        if own.dtype == tensor.dtype {
            return self.source.read(own, region, into);
        }
        let mut bytes = vec![0; region.elements() as usize * own.dtype.size()];
        self.source.read(own, region, &mut bytes)?;
        convert(own.dtype, &bytes, tensor.dtype, into);
        Ok(())
    }

    fn objects(&self) -> Vec<Object> {
        self.source.objects()
    }

    fn value(&self, object: &Object) -> Result<Value, Error> {
        self.source.value(object)
    }

    fn archive(&self, object: &Object) -> Result<Option<Vec<u8>>, Error> {
        self.source.archive(object)
    }
}
