//! Which job a configuration describes. Keys of [`Scope::Identity`] define the
//! trajectory (TRAJ-1) and are fixed when the job is founded; all nodes take the
//! founder's [`Scope::Job`] keys; [`Scope::Node`] keys are each node's own.
//!
//! Outside the digest, on purpose: how many nodes there are, where files lie,
//! when it is logged, saved and validated, all time limits, and the sharding,
//! because none of them changes a bit of the result. `training.steps` counts
//! only as the length of the schedule when `lr_scheduler.total_steps` is unset:
//! a job with a fixed schedule can be prolonged. The dataset is known by its
//! content, not by its path.

use std::collections::BTreeMap;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest, Sha256};

use super::error::Origin;
use super::resolve::resolve;
use super::schema::{Config, KEYS, Key, SECTIONS, Scope};
use super::source::Assignment;
use super::value::Value;

/// A key with two values.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// `section.name`.
    pub key: String,
    /// Whose decision it is.
    pub scope: Scope,
    /// This configuration's value.
    pub mine: Value,
    /// The other one's.
    pub theirs: Value,
}

impl Config {
    /// SHA-256 over the keys of [`Scope::Identity`], one line `section.key =
    /// value` each as TOML writes it, in byte order, after a version line. A key
    /// that came later counts when it has another value than its default.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        let default = Self::default();
        let counts = |key: &&Key| {
            key.scope == Scope::Identity
                && !(key.came_later && (key.get)(self) == (key.get)(&default))
        };
        let mut lines: Vec<_> = KEYS
            .iter()
            .filter(counts)
            .map(|key| format!("{} = {}\n", key.full_name(), self.identity_value(key)))
            .collect();
        lines.sort();
        let mut hash = Sha256::new();
        hash.update(b"elastic configuration 1\n");
        lines.iter().for_each(|line| hash.update(line.as_bytes()));
        hash.finalize().into()
    }

    /// Every key in which the two differ, in the order of the schema.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Vec<Difference> {
        KEYS.iter()
            .map(|key| Difference {
                key: key.full_name(),
                scope: key.scope,
                mine: self.identity_value(key),
                theirs: other.identity_value(key),
            })
            .filter(|difference| difference.mine != difference.theirs)
            .collect()
    }

    /// This node's own keys within the configuration of the `job`.
    #[must_use]
    pub fn adopt(&self, job: &Self) -> Self {
        let mut adopted = job.clone();
        for key in KEYS.iter().filter(|key| key.scope == Scope::Node) {
            (key.set)(&mut adopted, &(key.get)(self));
        }
        adopted
    }

    fn identity_value(&self, key: &Key) -> Value {
        match (key.section, key.name) {
            ("lr_scheduler", "total_steps") => {
                Value::Integer(i64::try_from(self.schedule_steps()).unwrap_or(i64::MAX))
            }
            _ => (key.get)(self),
        }
    }
}

/// `{"section": {"key": value}}`, with every key.
impl Serialize for Config {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(SECTIONS.iter().map(|(section, _)| {
            let keys: BTreeMap<_, _> = KEYS
                .iter()
                .filter(|key| key.section == *section)
                .map(|key| (key.name, (key.get)(self)))
                .collect();
            (section, keys)
        }))
    }
}

/// Through the same checks as a file; keys that are left out have their defaults.
impl<'de> Deserialize<'de> for Config {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let sections = BTreeMap::<String, BTreeMap<String, Value>>::deserialize(deserializer)?;
        let assignments = sections.into_iter().flat_map(|(section, keys)| {
            keys.into_iter().map(move |(name, value)| Assignment {
                key: format!("{section}.{name}"),
                value,
                origin: Origin::Json,
            })
        });
        let resolved = resolve(&[assignments.collect()]).map_err(D::Error::custom)?;
        Ok(resolved.config)
    }
}
