//! One item of a data file: the archive that `torch.save` would have written
//! for a tensor or an object.

use std::io::Read;

use ruzstd::decoding::StreamingDecoder;

use crate::dtype::Dtype;
use crate::error::SliceError;
use crate::index::check_shape;
use crate::pickle;
use crate::pickle::read::{Id, Node, Pickle};
use crate::pickle::write::Writer;
use crate::region::{elements, strides};
use crate::storage::Object;
use crate::value::Value;
use crate::zip::read::{Record, find, records};

/// A tensor's `data.pkl` has about 200 bytes.
const DESCRIPTION_LIMIT: u64 = 1 << 20;
/// Objects may be large: data loader states of many workers.
pub(crate) const OBJECT_LIMIT: u64 = 256 << 20;
/// No zstd stream grows by more: a block of 128 KiB needs 4 bytes.
pub(crate) const ZSTD_RATIO: u64 = 32 << 10;
/// Small records, directory and padding of an archive; torch's has 1.6 KB.
const ARCHIVE_OVERHEAD: u64 = 64 << 10;
/// The window of streams that zstd's usual levels write.
const ZSTD_WINDOW: u64 = 8 << 20;
/// PyTorch's own limit.
const MAX_DIMENSIONS: usize = 64;

/// A tensor in its archive.
#[derive(Debug)]
pub(crate) struct Tensor {
    pub(crate) dtype: Dtype,
    pub(crate) sizes: Vec<u64>,
    /// Where the elements lie in the storage, when not in C order from its start.
    pub(crate) scattered: Option<Scattered>,
    /// Imaginary parts are stored with the other sign.
    pub(crate) conjugate: bool,
    /// The storage: its bytes are known to be in the archive.
    pub(crate) storage: Record,
    /// Where the storage begins in the archive.
    pub(crate) at: u64,
}

/// A layout other than C order, in elements; known to stay in the storage.
#[derive(Debug)]
pub(crate) struct Scattered {
    pub(crate) first: u64,
    pub(crate) strides: Vec<u64>,
}

impl Tensor {
    /// A tensor whose elements fill a slice of `bytes` bytes in C order.
    pub(crate) fn raw(dtype: Dtype, sizes: &[u64], bytes: u64) -> Result<Self, SliceError> {
        let expected = elements(sizes).saturating_mul(dtype.size() as u64);
        if bytes != expected {
            let found = format!("{bytes} bytes of elements");
            let expected = format!("{expected} of {dtype}, {sizes:?}");
            return Err(SliceError::Mismatch { found, expected });
        }
        let (sizes, storage) = (sizes.to_vec(), Record::raw(bytes));
        Ok(Self { dtype, sizes, scattered: None, conjugate: false, storage, at: 0 })
    }
}

/// The description of a tensor of C order.
pub(crate) fn describe(dtype: Dtype, sizes: &[u64]) -> Result<Vec<u8>, pickle::Error> {
    let mut p = Writer::new();
    tensor_call(&mut p, dtype, sizes, "0")?;
    Ok(p.finish())
}

/// The call that rebuilds a tensor of C order from the storage of this key.
pub(crate) fn tensor_call(
    p: &mut Writer,
    dtype: Dtype,
    sizes: &[u64],
    key: &str,
) -> Result<(), pickle::Error> {
    let count = elements(sizes);
    let class = dtype.storage_class();
    let function = if class.is_some() { "_rebuild_tensor_v2" } else { "_rebuild_tensor_v3" };
    p.call("torch._utils", function, |p| {
        p.tuple(|p| {
            p.text("storage")?;
            match class {
                Some(class) => p.global("torch", class)?,
                None => p.global("torch.storage", "UntypedStorage")?,
            }
            p.text(key)?;
            p.text("cpu")?;
            p.uint(if class.is_some() { count } else { count * dtype.size() as u64 });
            Ok(())
        })?;
        p.op(b'Q');
        p.uint(0);
        p.uints(sizes)?;
        p.uints(&strides(sizes))?;
        p.bool(false); // requires_grad
        p.call("collections", "OrderedDict", |_| Ok(()))?; // no hooks
        if class.is_none() { p.global("torch", dtype.torch_name()) } else { Ok(()) }
    })
}

/// The description of an object.
pub(crate) fn describe_object(value: &Value) -> Result<Vec<u8>, pickle::Error> {
    let mut p = Writer::new();
    p.value(value)?;
    Ok(p.finish())
}

/// The object of an archive.
pub(crate) fn object(from: &dyn Object) -> Result<Value, SliceError> {
    let records = records(from)?;
    let bytes = find(&records, "data.pkl")?.read(from, OBJECT_LIMIT)?;
    let pickle = Pickle::parse(&bytes)?;
    Ok(pickle.value(pickle.root)?)
}

/// Checks that bytes are an archive whose records are what was stored.
pub(crate) fn check_archive(bytes: &Vec<u8>) -> Result<(), SliceError> {
    records(bytes)?.iter().try_for_each(|record| record.read(bytes, u64::MAX).map(|_| ()))?;
    Ok(())
}

/// Decodes an archive whose large record has at most `expected` bytes.
pub(crate) fn unzstd(mut stream: &[u8], expected: u64) -> Result<Vec<u8>, SliceError> {
    let wrong = |error: &dyn std::fmt::Display| SliceError::Zstd(error.to_string());
    let most = (stream.len() as u64).saturating_mul(ZSTD_RATIO);
    let limit = expected.saturating_add(ARCHIVE_OVERHEAD).min(most);
    let mut bytes = Vec::new();
    while !stream.is_empty() {
        let window = limit.max(ZSTD_WINDOW);
        let frame = StreamingDecoder::new_with_max_window_size(&mut stream, window)
            .map_err(|e| wrong(&e))?;
        let left = limit - bytes.len() as u64;
        frame.take(left + 1).read_to_end(&mut bytes).map_err(|e| wrong(&e))?;
        if bytes.len() as u64 > limit {
            return Err(wrong(&format_args!("it decodes to more than {limit} bytes")));
        }
    }
    Ok(bytes)
}

/// The tensor of an archive; its storage is not read.
pub(crate) fn tensor(from: &dyn Object) -> Result<Tensor, SliceError> {
    let records = records(from)?;
    if let Ok(order) = find(&records, "byteorder") {
        let order = order.read(from, DESCRIPTION_LIMIT)?;
        if order != b"little" {
            let order = String::from_utf8_lossy(&order).into_owned();
            return Err(SliceError::Unsupported(format!("byte order {order:?}")));
        }
    }
    let bytes = find(&records, "data.pkl")?.read(from, DESCRIPTION_LIMIT)?;
    let pickle = Pickle::parse(&bytes)?;
    let view = View::of(&pickle, pickle.root)?;
    let storage = find(&records, &format!("data/{}", view.key))?.clone();
    let item = view.dtype.size() as u64;
    if view.storage_bytes != Some(storage.size) {
        return Err(SliceError::Mismatch {
            found: format!("a storage of {} bytes", storage.size),
            expected: format!("one of {:?}", view.storage_bytes),
        });
    }
    let fits = check_shape(view.dtype, &view.sizes).is_ok() && view.inside(storage.size / item);
    if !fits {
        return Err(SliceError::Unsupported("the tensor reaches out of its storage".to_owned()));
    }
    let at = storage.locate(from)?;
    let packed = storage.size == elements(&view.sizes) * item;
    let scattered = view.scattered(packed);
    Ok(Tensor {
        dtype: view.dtype,
        sizes: view.sizes,
        scattered,
        conjugate: view.conjugate,
        storage,
        at,
    })
}

/// What `data.pkl` says.
pub(crate) struct View {
    pub(crate) dtype: Dtype,
    /// Of the storage.
    pub(crate) key: String,
    pub(crate) storage_bytes: Option<u64>,
    /// In elements, as the strides.
    pub(crate) first: u64,
    pub(crate) sizes: Vec<u64>,
    pub(crate) strides: Vec<u64>,
    /// Imaginary parts are stored with the other sign.
    pub(crate) conjugate: bool,
}

impl View {
    /// `_rebuild_tensor_v2(storage, first, sizes, strides, requires_grad, hooks
    /// [, metadata])`; v3 has the dtype before the metadata.
    pub(crate) fn of(pickle: &Pickle<'_>, id: Id) -> Result<Self, pickle::Error> {
        const REBUILD: &str = "a call of torch._utils._rebuild_tensor_v2 or _v3";
        let wrong = || pickle.unexpected(REBUILD, id);
        let Node::Object { callable, args, .. } = pickle.node(id) else {
            return Err(wrong());
        };
        let (&Node::Global { module: "torch._utils", name }, Node::Tuple(args)) =
            (pickle.node(*callable), pickle.node(*args))
        else {
            return Err(wrong());
        };
        let (&[storage, first, sizes, strides, _, _, ref rest @ ..], version) =
            (args.as_slice(), name)
        else {
            return Err(wrong());
        };
        let (dtype, metadata) = match (version, rest) {
            ("_rebuild_tensor_v2", metadata) => (None, metadata),
            ("_rebuild_tensor_v3", [dtype, metadata @ ..]) => {
                (Some(dtype_of(pickle, *dtype)?), metadata)
            }
            _ => return Err(wrong()),
        };
        let (storage_dtype, key, numel) = storage_of(pickle, storage)?;
        let dtype = dtype.or(storage_dtype).ok_or_else(wrong)?;
        // An untyped storage counts bytes.
        let unit = storage_dtype.map_or(1, Dtype::size) as u64;
        let view = Self {
            dtype,
            key,
            storage_bytes: numel.checked_mul(unit),
            first: uint(pickle, first)?,
            sizes: uints(pickle, sizes)?,
            strides: uints(pickle, strides)?,
            conjugate: conjugate(pickle, metadata)? && dtype.imaginary().is_some(),
        };
        if view.sizes.len() != view.strides.len() || view.sizes.len() > MAX_DIMENSIONS {
            return Err(pickle.unexpected("one stride per dimension, at most 64", strides));
        }
        Ok(view)
    }

    /// True when every element lies in a storage of `count` elements.
    pub(crate) fn inside(&self, count: u64) -> bool {
        if self.sizes.contains(&0) {
            return true;
        }
        let last =
            self.sizes.iter().zip(&self.strides).try_fold(self.first, |at, (size, stride)| {
                at.checked_add((size - 1).checked_mul(*stride)?)
            });
        last.is_some_and(|last| last < count)
    }

    /// `None` when the storage is exactly the elements in C order.
    fn scattered(&self, packed: bool) -> Option<Scattered> {
        let matters = |size: u64| size != 1 && !self.sizes.contains(&0);
        let c_order = strides(&self.sizes);
        let plain = packed
            && self.first == 0
            && self
                .sizes
                .iter()
                .zip(&self.strides)
                .zip(&c_order)
                .all(|((&size, stride), expected)| !matters(size) || stride == expected);
        (!plain).then(|| Scattered { first: self.first, strides: self.strides.clone() })
    }
}

/// The persistent id `("storage", class, key, location, numel)`.
fn storage_of(pickle: &Pickle<'_>, id: Id) -> Result<(Option<Dtype>, String, u64), pickle::Error> {
    let wrong = || pickle.unexpected("a storage", id);
    let &Node::Persistent(inner) = pickle.node(id) else { return Err(wrong()) };
    let Node::Tuple(fields) = pickle.node(inner) else { return Err(wrong()) };
    let &[kind, class, key, _location, numel] = fields.as_slice() else { return Err(wrong()) };
    let (Node::Str("storage"), &Node::Global { module, name }, &Node::Str(key)) =
        (pickle.node(kind), pickle.node(class), pickle.node(key))
    else {
        return Err(wrong());
    };
    let dtype = match (module, name) {
        ("torch", class) => Some(
            Dtype::from_storage_class(class)
                .ok_or_else(|| pickle.unexpected("a known storage class", fields[1]))?,
        ),
        ("torch.storage", "UntypedStorage") => None,
        _ => return Err(wrong()),
    };
    Ok((dtype, key.to_owned(), uint(pickle, numel)?))
}

/// `torch.float32` and its kind.
pub(crate) fn dtype_of(pickle: &Pickle<'_>, id: Id) -> Result<Dtype, pickle::Error> {
    match pickle.node(id) {
        &Node::Global { module: "torch", name } => Dtype::from_torch_name(name),
        _ => None,
    }
    .ok_or_else(|| pickle.unexpected("a known torch dtype", id))
}

/// A size, an offset or a count.
pub(crate) fn uint(pickle: &Pickle<'_>, id: Id) -> Result<u64, pickle::Error> {
    match pickle.node(id) {
        &Node::Int(value) => u64::try_from(value).ok(),
        _ => None,
    }
    .ok_or_else(|| pickle.unexpected("a count", id))
}

/// A tuple of counts, or a `torch.Size` of one.
pub(crate) fn uints(pickle: &Pickle<'_>, id: Id) -> Result<Vec<u64>, pickle::Error> {
    let items = match pickle.node(id) {
        Node::Tuple(items) => items,
        Node::Object { callable, args, .. } => match (pickle.node(*callable), pickle.node(*args)) {
            (Node::Global { module: "torch", name: "Size" }, Node::Tuple(args))
                if args.len() == 1 =>
            {
                match pickle.node(args[0]) {
                    Node::Tuple(items) => items,
                    _ => return Err(pickle.unexpected("a tuple of counts", args[0])),
                }
            }
            _ => return Err(pickle.unexpected("a torch.Size", id)),
        },
        _ => return Err(pickle.unexpected("a tuple of counts", id)),
    };
    // One tuple may be referred to very often.
    if items.len() > MAX_DIMENSIONS {
        return Err(pickle.unexpected("at most 64 counts", id));
    }
    items.iter().map(|&item| uint(pickle, item)).collect()
}

/// The lazy conjugation of complex tensors; the other lazy bit is not read.
fn conjugate(pickle: &Pickle<'_>, metadata: &[Id]) -> Result<bool, pickle::Error> {
    let [metadata] = metadata else { return Ok(false) };
    let wrong = || pickle.unexpected("{'conj': bool}", *metadata);
    let pairs = match pickle.node(*metadata) {
        Node::None => return Ok(false),
        Node::Dict(pairs) => pairs,
        _ => return Err(wrong()),
    };
    let mut conjugate = false;
    for &(key, value) in pairs {
        match (pickle.node(key), pickle.node(value)) {
            (Node::Str("conj"), Node::Bool(value)) => conjugate = *value,
            (_, Node::Bool(false)) => {}
            _ => return Err(wrong()),
        }
    }
    Ok(conjugate)
}
