//! Element types, with the names PyTorch gives them on disk.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The type of a tensor's elements. Values are little-endian on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are PyTorch's own: see `torch_name`")]
pub enum Dtype {
    F64,
    F32,
    F16,
    BF16,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    Bool,
    C128,
    C64,
    C32,
    F8E4M3Fn,
    F8E4M3Fnuz,
    F8E5M2,
    F8E5M2Fnuz,
    F8E8M0Fnu,
    /// Two 4-bit floats in a byte; PyTorch counts bytes as elements.
    F4E2M1FnX2,
}

/// Name, bytes, and the typed storage class (`None`: an untyped storage).
type Row = (Dtype, &'static str, usize, Option<&'static str>);

const TABLE: [Row; 22] = [
    (Dtype::F64, "float64", 8, Some("DoubleStorage")),
    (Dtype::F32, "float32", 4, Some("FloatStorage")),
    (Dtype::F16, "float16", 2, Some("HalfStorage")),
    (Dtype::BF16, "bfloat16", 2, Some("BFloat16Storage")),
    (Dtype::I64, "int64", 8, Some("LongStorage")),
    (Dtype::I32, "int32", 4, Some("IntStorage")),
    (Dtype::I16, "int16", 2, Some("ShortStorage")),
    (Dtype::I8, "int8", 1, Some("CharStorage")),
    (Dtype::U64, "uint64", 8, None),
    (Dtype::U32, "uint32", 4, None),
    (Dtype::U16, "uint16", 2, None),
    (Dtype::U8, "uint8", 1, Some("ByteStorage")),
    (Dtype::Bool, "bool", 1, Some("BoolStorage")),
    (Dtype::C128, "complex128", 16, Some("ComplexDoubleStorage")),
    (Dtype::C64, "complex64", 8, Some("ComplexFloatStorage")),
    (Dtype::C32, "complex32", 4, None),
    (Dtype::F8E4M3Fn, "float8_e4m3fn", 1, None),
    (Dtype::F8E4M3Fnuz, "float8_e4m3fnuz", 1, None),
    (Dtype::F8E5M2, "float8_e5m2", 1, None),
    (Dtype::F8E5M2Fnuz, "float8_e5m2fnuz", 1, None),
    (Dtype::F8E8M0Fnu, "float8_e8m0fnu", 1, None),
    (Dtype::F4E2M1FnX2, "float4_e2m1fn_x2", 1, None),
];

impl Dtype {
    /// Every type of the format.
    pub fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|row| row.0)
    }

    /// Bytes of one element.
    #[must_use]
    pub fn size(self) -> usize {
        self.row().2
    }

    /// The name below `torch.`, as in `torch.bfloat16`.
    #[must_use]
    pub fn torch_name(self) -> &'static str {
        self.row().1
    }

    /// The type of a name below `torch.`.
    #[must_use]
    pub fn from_torch_name(name: &str) -> Option<Self> {
        TABLE.iter().find(|row| row.1 == name).map(|row| row.0)
    }

    /// The class below `torch.` of a typed storage; types without one are
    /// stored as bytes in a `torch.storage.UntypedStorage`.
    pub(crate) fn storage_class(self) -> Option<&'static str> {
        self.row().3
    }

    /// The inverse of [`storage_class`](Self::storage_class).
    pub(crate) fn from_storage_class(name: &str) -> Option<Self> {
        TABLE.iter().find(|row| row.3 == Some(name)).map(|row| row.0)
    }

    /// Bytes of the imaginary part at the end of an element, for complex types.
    pub(crate) fn imaginary(self) -> Option<usize> {
        matches!(self, Self::C32 | Self::C64 | Self::C128).then(|| self.size() / 2)
    }

    fn row(self) -> &'static Row {
        // The table is in the order of the enum, which a test holds true.
        &TABLE[self as usize]
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.torch_name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enum() {
        for (at, row) in TABLE.iter().enumerate() {
            assert_eq!(row.0 as usize, at);
            assert_eq!(Dtype::from_torch_name(row.1), Some(row.0));
            if let Some(class) = row.3 {
                assert_eq!(Dtype::from_storage_class(class), Some(row.0));
            }
        }
    }
}
