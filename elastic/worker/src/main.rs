//! The `elastic-worker` program.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use worker::{bench, generate};

/// What needs the model. Without a command it is a worker of `elastic run`.
#[derive(Debug, Parser)]
#[command(name = "elastic-worker", version)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Continue a text with a trained model.
    Generate(generate::Arguments),
    /// Measure.
    #[command(subcommand)]
    Bench(bench::Command),
}

fn main() -> ExitCode {
    match Cli::parse().command {
        None => worker::run(),
        Some(Command::Generate(arguments)) => generate::run(&arguments),
        Some(Command::Bench(command)) => bench::run(&command),
    }
}
