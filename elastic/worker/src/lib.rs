//! The `elastic-worker` process: the engine as a trainer, and what else needs
//! the model: generating text and measuring steps.
//!
//! A user's own model gets a worker of its own by linking this crate and passing
//! its program as `elastic.worker_bin`.

pub mod bench;
mod cuda;
mod dataset;
pub mod generate;
mod settings;
mod trainer;

use std::process::ExitCode;

use actors::worker::{Factory, Settings, Start, Trainer};

pub use settings::engine_config;

/// Builds the engine for a job's configuration.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineFactory;

impl Factory for EngineFactory {
    fn build(self, start: &Start) -> Result<(Box<dyn Trainer>, Settings), String> {
        let (trainer, settings) = trainer::build(start)?;
        Ok((Box::new(trainer), settings))
    }
}

/// Runs a worker process until its agent ends it.
#[must_use]
pub fn run() -> ExitCode {
    elastic::log::to(std::io::stderr);
    cuda::find();
    actors::worker::run(EngineFactory)
}
