//! What the elements of a buffer are.

use std::fmt;

/// The type of a buffer's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Dtype {
    /// 32-bit floating point.
    F32,
    /// The upper half of an `F32`.
    Bf16,
    /// IEEE half precision.
    F16,
    /// 64-bit floating point.
    F64,
    /// 64-bit signed integer.
    I64,
    /// 32-bit signed integer.
    I32,
    /// Bytes.
    U8,
}

/// A Rust type that elements can be. Sealed: exactly one type per [`Dtype`].
pub trait Element: bytemuck::Pod + Send + Sync + sealed::Sealed {
    /// The type's name here.
    const DTYPE: Dtype;
}

impl Dtype {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::F32, Self::Bf16, Self::F16, Self::F64, Self::I64, Self::I32, Self::U8];

    /// Bytes of one element.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::U8 => 1,
        }
    }

    /// Whether elements have fractions, so that a mean is defined.
    #[must_use]
    pub fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::Bf16 | Self::F16 | Self::F64)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F64 => "f64",
            Self::I64 => "i64",
            Self::I32 => "i32",
            Self::U8 => "u8",
        })
    }
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($type:ty => $dtype:ident),* $(,)?) => {$(
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: Dtype = Dtype::$dtype;
        }
    )*};
}

elements! {
    f32 => F32,
    half::bf16 => Bf16,
    half::f16 => F16,
    f64 => F64,
    i64 => I64,
    i32 => I32,
    u8 => U8,
}
