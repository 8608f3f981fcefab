//! From assignments to a configuration: the command line wins over the file,
//! the file over the defaults. Every problem is reported, not only the first.

use std::collections::BTreeMap;

use super::error::{ConfigError, Origin, Problem};
use super::schema::{Config, Key, SECTIONS};
use super::source::{Assignment, nearest};
use super::torchtitan::{self, Verdict};
use super::value::{Allowed, Kind, Value};
use super::{check, schema};

/// Other names of keys.
const ALIASES: &[(&str, &str)] = &[("debug.seed", "training.seed")];

/// A configuration and how it came about.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// The configuration.
    pub config: Config,
    /// Where each key that is not a default was set.
    pub origins: BTreeMap<String, Origin>,
    /// Accepted keys that do nothing here, one line each.
    pub notes: Vec<String>,
}

/// The name in the schema of a key that may be written differently.
pub(super) fn canonical(key: &str) -> &str {
    ALIASES.iter().find(|(alias, _)| *alias == key).map_or(key, |(_, key)| key)
}

/// Applies layers of assignments, weakest first, then checks the whole.
pub(super) fn resolve(layers: &[Vec<Assignment>]) -> Result<Resolved, ConfigError> {
    let mut resolved =
        Resolved { config: Config::default(), origins: BTreeMap::new(), notes: Vec::new() };
    let mut problems = Vec::new();
    for layer in layers {
        let mut seen = BTreeMap::new();
        for assignment in layer {
            let key = canonical(&assignment.key);
            if let Some(before) = seen.insert(key.to_owned(), assignment.origin.clone()) {
                problems.push(Problem::Twice {
                    origin: assignment.origin.clone(),
                    key: assignment.key.clone(),
                    before,
                });
            } else if let Err(error) = assign(&mut resolved, key, assignment) {
                problems.extend(error.0);
            }
        }
    }
    // Keys that are wrong by themselves would only be reported twice.
    if problems.is_empty() {
        problems.extend(check::conflicts(&resolved.config).into_iter().map(Problem::Conflict));
    }
    if problems.is_empty() { Ok(resolved) } else { Err(ConfigError(problems)) }
}

fn assign(resolved: &mut Resolved, name: &str, given: &Assignment) -> Result<(), ConfigError> {
    let Some(key) = Key::find(name) else { return elsewhere(resolved, given) };
    set(&mut resolved.config, key, &given.value, &given.origin)?;
    resolved.origins.insert(name.to_owned(), given.origin.clone());
    Ok(())
}

/// Sets one key, checked for type and range.
pub(super) fn set(
    config: &mut Config,
    key: &Key,
    value: &Value,
    origin: &Origin,
) -> Result<(), ConfigError> {
    let refuse = || Problem::Value {
        origin: origin.clone(),
        key: key.full_name(),
        value: value.clone(),
        expected: expected(key),
    };
    let before = (key.get)(config);
    if !(key.set)(config, value) {
        return Err(refuse().into());
    }
    // The range is that of the typed value: `lr = 1` is the real 1.0.
    if !key.allowed.permits(&(key.get)(config)) {
        (key.set)(config, &before);
        return Err(refuse().into());
    }
    Ok(())
}

fn expected(key: &Key) -> String {
    let unset = if key.optional { ", or unset" } else { "" };
    if !key.choices.is_empty() {
        return format!("{}{unset}", key.choices.join(" or "));
    }
    match (key.kind, key.allowed) {
        (Kind::Bool, _) | (_, Allowed::Anything) => format!("{}{unset}", key.kind),
        (Kind::Text, _) => format!("text that is not empty{unset}"),
        (kind, allowed) => format!("{kind}, {allowed}{unset}"),
    }
}

/// A key outside the schema: torchtitan's, or nobody's.
fn elsewhere(resolved: &mut Resolved, given: &Assignment) -> Result<(), ConfigError> {
    let Assignment { key, value, origin } = given.clone();
    let problem = match torchtitan::judge(&key, &value) {
        Some(Verdict::Neutral) => return Ok(()),
        Some(Verdict::NoEffect(why)) => {
            resolved.notes.push(format!("{origin}: {key} has no effect: {why}"));
            return Ok(());
        }
        Some(Verdict::Unsupported { only, hint }) => {
            let hint = if hint.is_empty() { String::new() } else { format!(" ({hint})") };
            Problem::Unsupported { origin, key, value, only, hint }
        }
        None => Problem::Unknown { origin, hint: hint(&key), key },
    };
    Err(problem.into())
}

fn hint(key: &str) -> String {
    if let Some(nearest) = nearest(key) {
        return format!(": did you mean {nearest}?");
    }
    let section = key.split('.').next().unwrap_or_default();
    let names: Vec<_> =
        schema::KEYS.iter().filter(|key| key.section == section).map(|key| key.name).collect();
    if names.is_empty() {
        let sections: Vec<_> = SECTIONS.iter().map(|(name, _)| *name).collect();
        format!(": the sections are {}", sections.join(", "))
    } else {
        format!(": {section} has {}", names.join(", "))
    }
}
