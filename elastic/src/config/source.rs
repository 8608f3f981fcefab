//! Reads assignments `section.key = value` from a file or the command line,
//! each with its place. What the keys mean is decided by [`super::resolve`].

use std::path::Path;

use toml::de::{DeTable, DeValue};

use super::error::{ConfigError, Origin, Problem};
use super::resolve::canonical;
use super::schema::{KEYS, Key, SECTIONS};
use super::torchtitan;
use super::value::{Kind, Value};

/// One assignment.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Assignment {
    pub key: String,
    pub value: Value,
    pub origin: Origin,
}

/// Reads a TOML file.
pub(super) fn read(file: &Path) -> Result<Vec<Assignment>, ConfigError> {
    let text = std::fs::read_to_string(file)
        .map_err(|error| Problem::Read { file: file.to_owned(), error })?;
    parse(file, &text)
}

/// Reads TOML; `file` is only a name.
pub(super) fn parse(file: &Path, text: &str) -> Result<Vec<Assignment>, ConfigError> {
    let line = |offset: usize| 1 + text.bytes().take(offset).filter(|&b| b == b'\n').count();
    let at = |offset: usize| Origin::File(file.to_owned(), line(offset));
    let document = DeTable::parse(text).map_err(|error| Problem::Syntax {
        origin: at(error.span().map_or(0, |span| span.start)),
        detail: error.message().to_owned(),
    })?;
    let mut found = Vec::new();
    flatten("", document.get_ref(), &at, &mut found)?;
    // The parser sorts keys by name; people read errors from top to bottom.
    found.sort_by_key(|&(offset, _)| offset);
    Ok(found.into_iter().map(|(_, assignment)| assignment).collect())
}

fn flatten(
    prefix: &str,
    table: &DeTable<'_>,
    at: &dyn Fn(usize) -> Origin,
    found: &mut Vec<(usize, Assignment)>,
) -> Result<(), ConfigError> {
    for (name, value) in table {
        let key = format!("{prefix}{}", name.get_ref());
        let offset = name.span().start;
        if let DeValue::Table(inner) = value.get_ref() {
            if prefix.is_empty() && inner.is_empty() && !is_section(&key) {
                found.push((offset, Assignment { key, value: Value::Unset, origin: at(offset) }));
            } else {
                flatten(&format!("{key}."), inner, at, found)?;
            }
            continue;
        }
        let origin = at(offset);
        let value = plain(value.get_ref()).ok_or_else(|| Problem::Syntax {
            origin: origin.clone(),
            detail: format!(
                "{key}: dates, tables in lists and numbers beyond 64 bits have no use here"
            ),
        })?;
        found.push((offset, Assignment { key, value, origin }));
    }
    Ok(())
}

fn is_section(name: &str) -> bool {
    SECTIONS.iter().any(|(section, _)| *section == name) || torchtitan::has_section(name)
}

fn plain(value: &DeValue<'_>) -> Option<Value> {
    Some(match value {
        DeValue::Boolean(x) => Value::Bool(*x),
        DeValue::String(x) => Value::Text(x.to_string()),
        DeValue::Integer(x) => {
            Value::Integer(i64::from_str_radix(&x.as_str().replace('_', ""), x.radix()).ok()?)
        }
        DeValue::Float(x) => Value::Real(x.as_str().replace('_', "").parse().ok()?),
        DeValue::Array(items) => {
            Value::List(items.iter().map(|x| plain(x.get_ref())).collect::<Option<_>>()?)
        }
        DeValue::Table(_) | DeValue::Datetime(_) => return None,
    })
}

/// Takes the arguments `--section.key …`, values included, out of a command
/// line: the first list is what remains, the second goes to
/// [`super::Config::load`].
#[must_use]
pub fn split_arguments(arguments: Vec<String>) -> (Vec<String>, Vec<String>) {
    let (mut rest, mut overrides) = (Vec::new(), Vec::new());
    let mut arguments = arguments.into_iter().peekable();
    while let Some(argument) = arguments.next() {
        let Some(written) = Written::of(&argument) else {
            rest.push(argument);
            continue;
        };
        let takes = match (written.value, written.flag()) {
            (Some(_), _) => false,
            (None, true) => arguments.peek().is_some_and(|next| is_bool(next)),
            (None, false) => arguments.peek().is_some_and(|next| !next.starts_with("--")),
        };
        overrides.push(argument);
        if takes {
            overrides.extend(arguments.next());
        }
    }
    (rest, overrides)
}

/// Reads the second list of [`split_arguments`].
pub(super) fn arguments(overrides: &[String]) -> Result<Vec<Assignment>, ConfigError> {
    let mut found = Vec::new();
    let mut overrides = overrides.iter().peekable();
    while let Some(argument) = overrides.next() {
        let written = Written::of(argument).ok_or_else(|| Problem::Argument {
            argument: argument.clone(),
            detail: "write --section.key VALUE or --section.key=VALUE".into(),
        })?;
        let value = match written.value {
            Some(value) => value.to_owned(),
            None if written.flag() => overrides
                .next_if(|next| is_bool(next))
                .map_or_else(|| "true".to_owned(), Clone::clone),
            None => {
                overrides.next_if(|next| !next.starts_with("--")).cloned().ok_or_else(|| {
                    Problem::Argument {
                        argument: argument.clone(),
                        detail: "needs a value: write --section.key VALUE".into(),
                    }
                })?
            }
        };
        let value = match written.schema {
            Some(key) => Value::from_argument(&value, key.kind, key.optional),
            None => Value::guess(&value),
        };
        let value = match value {
            Value::Bool(x) => Value::Bool(x != written.negated),
            _ if written.negated => {
                return Err(ConfigError::from(Problem::Argument {
                    argument: argument.clone(),
                    detail: "takes no value but true or false".into(),
                }));
            }
            value => value,
        };
        found.push(Assignment {
            key: written.key,
            value,
            origin: Origin::CommandLine(argument.clone()),
        });
    }
    Ok(found)
}

/// An argument taken apart.
struct Written<'a> {
    key: String,
    schema: Option<&'static Key>,
    negated: bool,
    value: Option<&'a str>,
}

impl<'a> Written<'a> {
    /// `None` when the argument is not of the form `--section.key[=value]`.
    fn of(argument: &'a str) -> Option<Self> {
        let body = argument.strip_prefix("--")?;
        let (name, value) = match body.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (body, None),
        };
        let key = name.replace('-', "_");
        let (section, last) = key.rsplit_once('.')?;
        if section.is_empty() || last.is_empty() || key.contains(char::is_whitespace) {
            return None;
        }
        if let Some(schema) = Key::find(canonical(&key)) {
            return Some(Self { key, schema: Some(schema), negated: false, value });
        }
        let positive = last.strip_prefix("no_").map(|last| format!("{section}.{last}"));
        let bool_key = |key: &String| match Key::find(key) {
            Some(known) => known.kind == Kind::Bool,
            None => torchtitan::is_bool(key),
        };
        Some(match positive.filter(bool_key) {
            Some(key) => Self { schema: Key::find(&key), key, negated: true, value },
            None => Self { key, schema: None, negated: false, value },
        })
    }

    /// Whether the argument may stand alone.
    fn flag(&self) -> bool {
        match self.schema {
            Some(key) => key.kind == Kind::Bool,
            None => torchtitan::is_bool(&self.key),
        }
    }
}

fn is_bool(text: &str) -> bool {
    text.eq_ignore_ascii_case("true") || text.eq_ignore_ascii_case("false")
}

/// The key that a person who wrote `key` most likely meant.
pub(super) fn nearest(key: &str) -> Option<String> {
    let name = |key: &str| key.rsplit('.').next().unwrap_or_default().to_owned();
    let wanted = name(key);
    KEYS.iter()
        .map(|known| {
            let whole = strsim::damerau_levenshtein(key, &known.full_name());
            // The right name in the wrong section is one mistake.
            let within = 1 + strsim::damerau_levenshtein(&wanted, known.name);
            (whole.min(within), known)
        })
        .min_by_key(|(distance, _)| *distance)
        .filter(|(distance, _)| *distance <= 1 + wanted.len() / 3)
        .map(|(_, known)| known.full_name())
}
