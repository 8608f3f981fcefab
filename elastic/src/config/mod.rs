//! The configuration: TOML with torchtitan's sections and names, and the
//! section `[elastic]`. Start with [`schema`], the one table of all keys; a
//! file and the command line become assignments in `source`, and `resolve`
//! turns them into a checked [`Config`].
//!
//! Only keys that are honoured exist. torchtitan's other keys are known by
//! name, so that a file written for it is either taken or refused with a reason.

mod check;
mod error;
mod identity;
mod parallel;
mod print;
mod resolve;
pub mod schema;
mod source;
#[cfg(test)]
mod tests;
mod torchtitan;
pub mod value;

use std::path::{Path, PathBuf};
use std::time::Duration;

use job::timeouts::{Inconsistent, Timeouts};

pub use error::{ConfigError, Origin, Problem};
pub use identity::Difference;
pub use print::reference;
pub use resolve::Resolved;
pub use schema::{Config, Key, Scope};
pub use source::split_arguments;
pub use value::Field;

impl Config {
    /// Reads a file, if there is one, and applies arguments (`--section.key
    /// value`, `--section.key=value`) over it.
    ///
    /// # Errors
    /// Everything that is wrong, each with its place.
    pub fn load(file: Option<&Path>, overrides: &[String]) -> Result<Self, ConfigError> {
        Resolved::load(file, overrides).map(|resolved| resolved.config)
    }

    /// All time limits.
    ///
    /// # Errors
    /// When budget and step limit do not fit together; a loaded configuration
    /// has none.
    pub fn timeouts(&self) -> Result<Timeouts, Inconsistent> {
        Timeouts::derive(
            Duration::from_millis(self.elastic.failure_budget_ms),
            Duration::from_secs_f64(self.elastic.step_timeout_s),
        )
    }

    /// Micro-batches of a step; `None` takes the data-parallel degree of the
    /// founding (DATA-2).
    #[must_use]
    pub fn micro_batches(&self) -> Option<u32> {
        let global = u64::try_from(self.training.global_batch_size).ok()?;
        u32::try_from(global / u64::from(self.training.local_batch_size)).ok()
    }

    /// Length of the learning-rate schedule.
    #[must_use]
    pub fn schedule_steps(&self) -> u64 {
        self.lr_scheduler.total_steps.unwrap_or(self.training.steps)
    }

    /// The checkpoint folder: within the dump folder unless it is absolute.
    #[must_use]
    pub fn checkpoint_folder(&self) -> PathBuf {
        Path::new(&self.job.dump_folder).join(&self.checkpoint.folder)
    }
}

impl Resolved {
    /// Like [`Config::load`], with the origin of each key.
    ///
    /// # Errors
    /// Everything that is wrong, each with its place.
    pub fn load(file: Option<&Path>, overrides: &[String]) -> Result<Self, ConfigError> {
        let file = file.map(source::read).transpose()?.unwrap_or_default();
        resolve::resolve(&[file, source::arguments(overrides)?])
    }
}
