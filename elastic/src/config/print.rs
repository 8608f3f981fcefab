//! The configuration for people: `--print-config`, which is itself a valid
//! file, and the reference of all keys.

use std::fmt::Write as _;

use job::timeouts::Rule;

use super::error::Origin;
use super::resolve::Resolved;
use super::schema::{Config, KEYS, Key, SECTIONS, one_line};
use super::value::Value;

impl Resolved {
    /// Every key with value, range, default and where it was set; then the time
    /// limits that follow.
    #[must_use]
    pub fn print(&self) -> String {
        let mut text =
            String::from("# The configuration of this run. It is itself a valid file.\n");
        for (section, about) in SECTIONS {
            let _ = write!(text, "\n# {}\n[{section}]\n", one_line(about));
            for key in KEYS.iter().filter(|key| key.section == *section) {
                let value = match (key.get)(&self.config) {
                    Value::Unset => format!("# {} is unset", key.name),
                    value => format!("{} = {value}", key.name),
                };
                let origin = self.origins.get(&key.full_name()).unwrap_or(&Origin::Default);
                let _ = writeln!(text, "{value:<34}  # {}; {origin}", facts(key));
            }
        }
        text.push_str("\n# Time limits that follow from elastic.failure_budget_ms and elastic.step_timeout_s:\n");
        match self.config.timeouts() {
            Ok(timeouts) => {
                timeouts.table().iter().for_each(|(name, limit, why)| {
                    let _ = writeln!(text, "# {name:<14} {:>8} ms  {why}", limit.as_millis());
                });
                text.push_str("# They keep:\n");
                for Rule { rule, left, right, .. } in timeouts.rules() {
                    let (left, right) = (left.as_millis(), right.as_millis());
                    let _ = writeln!(text, "# {rule:<34}  {left} ≤ {right} ms");
                }
            }
            Err(inconsistent) => {
                let _ = writeln!(text, "# none: {inconsistent}");
            }
        }
        text
    }
}

/// All keys with their meaning, for `--help`.
#[must_use]
pub fn reference() -> String {
    let mut text = String::from("Configuration keys (--section.key VALUE, or in the file):\n");
    for (section, about) in SECTIONS {
        let _ = writeln!(text, "\n[{section}]  {}", one_line(about));
        for key in KEYS.iter().filter(|key| key.section == *section) {
            let _ = writeln!(text, "  {:<19} {}", key.name, key.help());
            let _ = writeln!(text, "  {:<19} {}", "", facts(key));
        }
    }
    text
}

fn facts(key: &Key) -> String {
    format!("{}; default {}", key.range(), (key.get)(&Config::default()))
}
