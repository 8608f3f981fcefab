//! From an [`Index`] to the pickle of a `Metadata` object.

use crate::dtype::Dtype;
use crate::error::Error;
use crate::pickle;
use crate::pickle::write::Writer;
use crate::value::Segment;

use super::{FILES, Index, Place, TYPES, TensorEntry};

type Written = Result<(), pickle::Error>;

/// The bytes of `.metadata`. `save_id` is any UUID.
pub(crate) fn pickle(index: &Index, save_id: &str) -> Result<Vec<u8>, Error> {
    let wrap = |source| Error::Value { fqn: super::METADATA.to_owned(), source };
    write(index, save_id).map_err(wrap)
}

fn write(index: &Index, save_id: &str) -> Result<Vec<u8>, pickle::Error> {
    let mut p = Writer::new();
    object(&mut p, TYPES, "Metadata", |p| {
        p.name("state_dict_metadata")?;
        p.dict(|p| {
            for (fqn, tensor) in &index.tensors {
                p.name(fqn)?;
                tensor_metadata(p, tensor)?;
            }
            for fqn in index.objects.keys() {
                p.name(fqn)?;
                p.new_object(TYPES, "BytesStorageMetadata")?;
            }
            Ok(())
        })?;
        p.name("planner_data")?;
        p.dict(|p| index.paths.iter().try_for_each(|(fqn, path)| planner_path(p, fqn, path)))?;
        p.name("storage_data")?;
        p.dict(|p| {
            for (fqn, tensor) in &index.tensors {
                for (hint, chunk) in tensor.chunks.iter().enumerate() {
                    let key = Some((hint as u64, chunk.region.offsets.as_slice()));
                    storage(p, index, fqn, key, chunk.place)?;
                }
            }
            index.objects.iter().try_for_each(|(fqn, place)| storage(p, index, fqn, None, *place))
        })?;
        p.name("storage_meta")?;
        object(p, TYPES, "StorageMeta", |p| {
            // The directory is renamed when it is published: it does not know its own name.
            p.name("checkpoint_id")?;
            p.text(".")?;
            p.name("save_id")?;
            p.text(save_id)?;
            p.name("load_id")?;
            p.none();
            p.name("modules")?;
            p.list(|_| Ok(()))
        })?;
        p.name("version")?;
        p.text("1.0.0")
    })?;
    Ok(p.finish())
}

fn tensor_metadata(p: &mut Writer, tensor: &TensorEntry) -> Written {
    object(p, TYPES, "TensorStorageMetadata", |p| {
        p.name("properties")?;
        properties(p, tensor.dtype)?;
        p.name("size")?;
        size(p, &tensor.shape)?;
        p.name("chunks")?;
        p.list(|p| {
            tensor.chunks.iter().try_for_each(|chunk| {
                object(p, TYPES, "ChunkStorageMetadata", |p| {
                    p.name("offsets")?;
                    size(p, &chunk.region.offsets)?;
                    p.name("sizes")?;
                    size(p, &chunk.region.sizes)
                })
            })
        })
    })
}

/// One object per dtype: (dtype, layout, requires_grad, memory format, pinned).
fn properties(p: &mut Writer, dtype: Dtype) -> Written {
    p.remembered(&["properties ", dtype.torch_name()], |p| {
        p.new_object(TYPES, "TensorProperties")?;
        p.tuple(|p| {
            p.global("torch", dtype.torch_name())?;
            p.call("torch.serialization", "_get_layout", |p| p.name("torch.strided"))?;
            p.bool(false);
            p.call(TYPES, "_MEM_FORMAT_ENCODING", |p| {
                p.int(0);
                Ok(())
            })?;
            p.bool(false);
            Ok(())
        })?;
        p.op(b'b');
        Ok(())
    })
}

fn planner_path(p: &mut Writer, fqn: &str, path: &[Segment]) -> Written {
    p.name(fqn)?;
    p.tuple(|p| {
        path.iter().try_for_each(|segment| match segment {
            Segment::Key(key) => p.name(key),
            Segment::Index(index) => {
                p.uint(*index);
                Ok(())
            }
        })
    })
}

/// One pair of `storage_data`; objects have no offset, and no index hint.
fn storage(
    p: &mut Writer,
    index: &Index,
    fqn: &str,
    chunk: Option<(u64, &[u64])>,
    place: Place,
) -> Written {
    object(p, TYPES, "MetadataIndex", |p| {
        p.name("fqn")?;
        p.name(fqn)?;
        p.name("index")?;
        match chunk {
            None => p.none(),
            Some((hint, offsets)) => {
                p.uint(hint);
                p.name("offset")?;
                size(p, offsets)?;
            }
        }
        Ok(())
    })?;
    object(p, FILES, "_StorageInfo", |p| {
        p.name("relative_path")?;
        p.name(&index.files[place.file as usize])?;
        p.name("offset")?;
        p.uint(place.offset);
        p.name("length")?;
        p.uint(place.length);
        Ok(())
    })
}

fn size(p: &mut Writer, sizes: &[u64]) -> Written {
    p.call("torch", "Size", |p| p.uints(sizes))
}

fn object(
    p: &mut Writer,
    module: &str,
    name: &str,
    fields: impl FnOnce(&mut Writer) -> Written,
) -> Written {
    p.new_object(module, name)?;
    p.dict(fields)?;
    p.op(b'b');
    Ok(())
}
