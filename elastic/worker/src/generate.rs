//! `elastic generate`: a trained model continues a text.

use std::{io::Write, path::PathBuf, process::ExitCode};

use clap::Args;
use elastic::config::Config;
use engine::Engine;

use crate::settings::engine_config;

/// Arguments of `elastic generate`.
#[derive(Clone, Debug, Args)]
pub struct Arguments {
    /// A checkpoint, `…/checkpoint/step-N`.
    #[arg(long, value_name = "DIR")]
    ckpt: PathBuf,
    /// The configuration that it was trained with.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The text to continue.
    #[arg(long, default_value = "ROMEO:\n")]
    prompt: String,
    /// Tokens to generate.
    #[arg(long, default_value_t = 500)]
    tokens: usize,
    /// 0 takes the likeliest token, higher is more varied.
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// The same seed draws the same text.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Further keys, as `--set training.seq_len=128`.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// Runs the command.
#[must_use]
pub fn run(arguments: &Arguments) -> ExitCode {
    match generate(arguments) {
        Ok(text) => {
            let mut out = std::io::stdout().lock();
            let written = out
                .write_all(arguments.prompt.as_bytes())
                .and_then(|()| out.write_all(&text))
                .and_then(|()| out.write_all(b"\n"));
            // A reader that has seen enough is no failure.
            if written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(why) => {
            eprintln!("elastic: {why}");
            ExitCode::FAILURE
        }
    }
}

fn generate(arguments: &Arguments) -> Result<Vec<u8>, String> {
    let overrides: Vec<String> = arguments.set.iter().map(|set| format!("--{set}")).collect();
    let config =
        Config::load(arguments.config.as_deref(), &overrides).map_err(|error| error.to_string())?;
    let micro_batches = config.micro_batches().unwrap_or(1);
    let mut engine =
        Engine::new(engine_config(&config, micro_batches)?).map_err(|e| e.to_string())?;
    engine.load(&arguments.ckpt).map_err(|error| error.to_string())?;
    engine
        .generate(
            arguments.prompt.as_bytes(),
            arguments.tokens,
            arguments.temperature,
            arguments.seed,
        )
        .map_err(|error| error.to_string())
}
