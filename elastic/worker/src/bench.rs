//! `elastic bench step`: how fast one rank computes a step.

use std::{
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::{Args, Subcommand};
use elastic::{config::Config, exit::Exit};
use engine::Engine;
use job::{Era, Generation, JobId, Token, shares::Shares};
use serde::Serialize;
use transport::collective::Solo;

use crate::{dataset, settings::engine_config};

/// What to measure.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// A training step on one rank.
    Step(StepArguments),
}

/// Arguments of `elastic bench step`.
#[derive(Clone, Debug, Args)]
pub struct StepArguments {
    /// The configuration.
    config: PathBuf,
    /// Steps to measure, after two to warm up.
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Write the figures here.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Row {
    micro_batches: u32,
    tokens: u64,
    median_ms: f64,
    min_ms: f64,
    max_ms: f64,
    tokens_per_s: f64,
}

/// Runs the command.
#[must_use]
pub fn run(command: &Command) -> ExitCode {
    let Command::Step(arguments) = command;
    let (exit, done) = match configuration(arguments) {
        Ok(config) => (Exit::Failed, step(arguments, &config)),
        Err(why) => (Exit::Usage, Err(why)),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("elastic: {why}");
            exit.into()
        }
    }
}

fn configuration(arguments: &StepArguments) -> Result<Config, String> {
    let config = Config::load(Some(&arguments.config), &[]).map_err(|error| error.to_string())?;
    dataset::check(&config)?;
    Ok(config)
}

fn step(arguments: &StepArguments, config: &Config) -> Result<(), String> {
    let micro_batches = config.micro_batches().unwrap_or(1);
    let mut engine =
        Engine::new(engine_config(config, micro_batches)?).map_err(|error| error.to_string())?;
    let token = Token { job: JobId(uuid_of_bench()), era: Era(0), generation: Generation(1) };
    let mut solo = Solo::new(token);
    let text = |error: engine::Error| error.to_string();
    engine.enter(token, 0, 1, &Shares::even(micro_batches, 1)).map_err(text)?;
    engine.initialize();
    let mut times = Vec::new();
    let mut tokens = 0;
    for index in 0..arguments.steps.max(1) + WARM_UP {
        let started = Instant::now();
        let deadline = started + Duration::from_secs(600);
        let ballot = engine.prepare(&mut solo, &|| false, deadline).map_err(text)?;
        let verdict = engine.tally(&[ballot]).map_err(text)?;
        tokens = engine.apply(&verdict).map_err(text)?.tokens;
        if index >= WARM_UP {
            times.push(started.elapsed().as_secs_f64() * 1e3);
        }
    }
    times.sort_by(f64::total_cmp);
    let median_ms = times[times.len() / 2];
    let row = Row {
        micro_batches,
        tokens,
        median_ms,
        min_ms: times[0],
        max_ms: times[times.len() - 1],
        tokens_per_s: tokens as f64 / median_ms * 1e3,
    };
    println!("micro-batches  tokens   median ms      min      max   tokens/s");
    println!(
        "{:>13}  {:>6}  {:>10.1} {:>8.1} {:>8.1} {:>10.0}",
        row.micro_batches, row.tokens, row.median_ms, row.min_ms, row.max_ms, row.tokens_per_s
    );
    if let Some(path) = &arguments.json {
        let json = serde_json::to_vec_pretty(&[row]).map_err(|error| error.to_string())?;
        std::fs::write(path, json)
            .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    }
    Ok(())
}

const WARM_UP: usize = 2;

/// A mesh of one rank talks to nobody: any job will do.
fn uuid_of_bench() -> uuid::Uuid {
    uuid::Uuid::nil()
}
