//! Values of keys, before and after they have a type.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A value as a file, the command line or JSON gives it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Value {
    /// No value: an optional key that is left out.
    Unset,
    /// A boolean.
    Bool(bool),
    /// An integer.
    Integer(i64),
    /// A number with a fraction or an exponent.
    Real(f64),
    /// A string.
    Text(String),
    /// A list: a TOML array, or commas on the command line.
    List(Vec<Value>),
}

/// What kind of value a key takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `true` or `false`.
    Bool,
    /// A whole number.
    Integer,
    /// A number.
    Real,
    /// Any text.
    Text,
}

/// The values that a key allows, beyond their kind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Allowed {
    /// Every value of the type.
    Anything,
    /// Text that is not empty.
    NonEmpty,
    /// `low ..= high`.
    Integers(i64, i64),
    /// -1, which lets elastic choose, or `low ..= high`.
    AutoOr(i64, i64),
    /// `low ..= high`.
    Reals(f64, f64),
    /// `low < x ≤ high`.
    Above(f64, f64),
    /// `low ≤ x < high`.
    Below(f64, f64),
}

/// A Rust type that a key can have.
pub trait Field: Sized {
    /// What it is written as.
    const KIND: Kind;
    /// Whether the key may be left without a value.
    const OPTIONAL: bool = false;
    /// The only values, if they are few.
    const CHOICES: &'static [&'static str] = &[];

    /// The typed value; `None` when `value` is of another kind or no choice.
    fn from_value(value: &Value) -> Option<Self>;
    /// The value that [`Field::from_value`] takes back unchanged.
    fn to_value(&self) -> Value;
    /// The value as plain text, for names that other crates look up.
    fn text(&self) -> String {
        match self.to_value() {
            Value::Text(text) => text,
            value => value.to_string(),
        }
    }
}

/// Implements [`Field`] for an enum: the first name is the one it prints, the
/// further ones are accepted spellings.
macro_rules! choices {
    ($type:ty { $($variant:path = $name:literal $(| $alias:literal)*),+ $(,)? }) => {
        impl $crate::config::value::Field for $type {
            const KIND: $crate::config::value::Kind = $crate::config::value::Kind::Text;
            const CHOICES: &'static [&'static str] = &[$($name),+];

            fn from_value(value: &$crate::config::value::Value) -> Option<Self> {
                let $crate::config::value::Value::Text(text) = value else { return None };
                $(if [$name $(, $alias)*].iter().any(|name| name.eq_ignore_ascii_case(text)) {
                    return Some($variant);
                })+
                None
            }

            fn to_value(&self) -> $crate::config::value::Value {
                match self {
                    $($variant => $crate::config::value::Value::Text($name.into()),)+
                }
            }
        }
    };
}
pub(crate) use choices;

impl Value {
    /// Reads an argument of the command line as a value of `kind`; `none` and
    /// `unset` take the value from an `optional` key.
    pub(crate) fn from_argument(text: &str, kind: Kind, optional: bool) -> Self {
        if optional && matches!(text, "none" | "None" | "unset") {
            return Self::Unset;
        }
        let plain = text.replace('_', "");
        let parsed = match kind {
            Kind::Bool if text.eq_ignore_ascii_case("true") => Some(Self::Bool(true)),
            Kind::Bool if text.eq_ignore_ascii_case("false") => Some(Self::Bool(false)),
            Kind::Integer => plain.parse().ok().map(Self::Integer),
            Kind::Real => plain.parse().ok().map(Self::Real),
            Kind::Bool | Kind::Text => None,
        };
        // What does not parse stays text, so that the error shows it as written.
        parsed.unwrap_or_else(|| Self::Text(text.into()))
    }

    /// Reads an argument of a key without a schema: the value that TOML would see.
    pub(crate) fn guess(text: &str) -> Self {
        if text.contains(',') {
            return Self::List(text.split(',').map(|item| Self::guess(item.trim())).collect());
        }
        for kind in [Kind::Bool, Kind::Integer, Kind::Real] {
            match Self::from_argument(text, kind, true) {
                Self::Text(_) => {}
                value => return value,
            }
        }
        Self::Text(text.into())
    }
}

impl Allowed {
    /// Whether `value` lies within.
    #[must_use]
    pub fn permits(self, value: &Value) -> bool {
        match (self, value) {
            (Self::Anything, _) | (_, Value::Unset) => true,
            (Self::NonEmpty, Value::Text(text)) => !text.trim().is_empty(),
            (Self::Integers(low, high), Value::Integer(x)) => (low..=high).contains(x),
            (Self::AutoOr(low, high), Value::Integer(x)) => *x == -1 || (low..=high).contains(x),
            (Self::Reals(low, high), Value::Real(x)) => low <= *x && *x <= high,
            (Self::Above(low, high), Value::Real(x)) => low < *x && *x <= high,
            (Self::Below(low, high), Value::Real(x)) => low <= *x && *x < high,
            _ => false,
        }
    }
}

impl fmt::Display for Allowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Anything => f.write_str("any"),
            Self::NonEmpty => f.write_str("not empty"),
            Self::Integers(low, i64::MAX) => write!(f, "≥ {low}"),
            Self::Integers(low, high) => write!(f, "{low} to {high}"),
            Self::AutoOr(low, i64::MAX) => write!(f, "-1 or ≥ {low}"),
            Self::AutoOr(low, high) => write!(f, "-1 or {low} to {high}"),
            Self::Reals(low, f64::MAX) => write!(f, "≥ {low}"),
            Self::Reals(low, high) => write!(f, "{low} to {high}"),
            Self::Above(low, f64::MAX) => write!(f, "> {low}"),
            Self::Above(low, high) => write!(f, "> {low} and ≤ {high}"),
            Self::Below(low, high) => write!(f, "≥ {low} and < {high}"),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bool => "true or false",
            Self::Integer => "an integer",
            Self::Real => "a number",
            Self::Text => "text",
        })
    }
}

/// As TOML writes it.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unset => f.write_str("unset"),
            Self::Bool(x) => x.fmt(f),
            Self::Integer(x) => x.fmt(f),
            // Debug always has a fraction or an exponent and reads back to the same bits.
            Self::Real(x) => write!(f, "{x:?}"),
            Self::Text(x) => toml::Value::String(x.clone()).fmt(f),
            Self::List(items) => {
                f.write_str("[")?;
                for (i, item) in items.iter().enumerate() {
                    write!(f, "{}{item}", if i == 0 { "" } else { ", " })?;
                }
                f.write_str("]")
            }
        }
    }
}

impl Field for bool {
    const KIND: Kind = Kind::Bool;
    fn from_value(value: &Value) -> Option<Self> {
        if let Value::Bool(x) = value { Some(*x) } else { None }
    }
    fn to_value(&self) -> Value {
        Value::Bool(*self)
    }
}

impl Field for f64 {
    const KIND: Kind = Kind::Real;
    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Real(x) => Some(*x),
            Value::Integer(x) => Some(*x as f64),
            _ => None,
        }
    }
    fn to_value(&self) -> Value {
        Value::Real(*self)
    }
}

impl Field for String {
    const KIND: Kind = Kind::Text;
    fn from_value(value: &Value) -> Option<Self> {
        if let Value::Text(x) = value { Some(x.clone()) } else { None }
    }
    fn to_value(&self) -> Value {
        Value::Text(self.clone())
    }
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Field for $type {
            const KIND: Kind = Kind::Integer;
            fn from_value(value: &Value) -> Option<Self> {
                if let Value::Integer(x) = value { (*x).try_into().ok() } else { None }
            }
            fn to_value(&self) -> Value {
                // Every integer key is bounded by i64, TOML's own limit.
                Value::Integer(i64::try_from(*self).unwrap_or(i64::MAX))
            }
        }
    )*};
}
integers!(u32, u64, i64);

impl<T: Field> Field for Option<T> {
    const KIND: Kind = T::KIND;
    const OPTIONAL: bool = true;
    const CHOICES: &'static [&'static str] = T::CHOICES;
    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Unset => Some(None),
            value => T::from_value(value).map(Some),
        }
    }
    fn to_value(&self) -> Value {
        self.as_ref().map_or(Value::Unset, T::to_value)
    }
}
