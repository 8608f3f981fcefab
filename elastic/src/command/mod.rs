//! What the commands do. Each is a function from its arguments to an [`Exit`];
//! failures are one line on standard error that says what to do.

mod bench;
mod checkpoint;
mod data;
mod job;
mod plan;
mod print;
mod run;
mod token;
pub mod worker;

use std::ffi::OsString;
use std::fmt;

use clap::Parser;

use crate::cli::{BenchCommand, Cli, Command, DataCommand, RunArgs};
use crate::config::split_arguments;
use crate::exit::Exit;
pub(crate) use bench::{Backend, Op};
pub(crate) use job::ask;
pub(crate) use print::print;
pub(crate) use run::{FOUNDER, JOIN_LINE, uncreatable};

/// Runs the command line of this process.
#[must_use]
pub fn main() -> Exit {
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let payload = panic.payload();
        let what = payload
            .downcast_ref::<&str>()
            .copied()
            .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
            .unwrap_or("no message");
        eprintln!("elastic: internal error at {place}: {what}. This is a bug, please report it.");
    }));
    match parse(std::env::args_os().collect()) {
        Ok(cli) => std::panic::catch_unwind(|| dispatch(cli)).unwrap_or(Exit::Failed),
        Err(exit) => exit,
    }
}

/// Runs one command.
#[must_use]
pub fn dispatch(cli: Cli) -> Exit {
    match cli.command {
        Command::Run(args) if args.print_config => print_config(&args),
        Command::Run(args) => run::run(*args),
        Command::Status(args) => job::status(&args),
        Command::Events(args) => job::events(&args),
        Command::Plan(args) => plan::plan(&args),
        Command::Drain(args) => job::drain(&args),
        Command::Stop(args) => job::stop(&args),
        Command::Token(command) => token::run(&command),
        Command::Ckpt(command) => checkpoint::run(command),
        Command::Data(DataCommand::Prepare(args)) => data::prepare(&args),
        Command::Generate(args) => worker::exec(&["generate"], &args.arguments),
        Command::Bench(BenchCommand::Recovery(args)) => bench::recovery(&args),
        Command::Bench(BenchCommand::Checkpoint(args)) => bench::checkpoint(&args),
        Command::Bench(BenchCommand::Step(args)) => {
            worker::exec(&["bench", "step"], &args.arguments)
        }
        Command::Bench(BenchCommand::Collectives(args)) => bench::collectives(&args),
    }
}

/// Reports a failure. An indented line is one to paste, and is left as it is.
pub(crate) fn fail(exit: Exit, error: &dyn fmt::Display) -> Exit {
    for line in error.to_string().lines() {
        let who = if line.starts_with(' ') { "" } else { "elastic: " };
        eprintln!("{who}{line}");
    }
    exit
}

fn parse(arguments: Vec<OsString>) -> Result<Cli, Exit> {
    let arguments = arguments.into_iter().map(OsString::into_string).collect::<Result<Vec<_>, _>>();
    let arguments = arguments
        .map_err(|argument| fail(Exit::Usage, &format!("argument {argument:?} is not UTF-8")))?;
    // Only these take keys; other commands may have dots in their arguments.
    let command: Vec<&str> = arguments.iter().skip(1).take(2).map(String::as_str).collect();
    let (rest, overrides) = match command[..] {
        ["run" | "plan", ..] | ["bench", "recovery"] => split_arguments(arguments),
        _ => (arguments, Vec::new()),
    };
    let mut cli = Cli::try_parse_from(rest).map_err(|error| {
        // A closed pipe on the other side is no failure of ours.
        let _ = error.print();
        if error.use_stderr() { Exit::Usage } else { Exit::Finished }
    })?;
    match &mut cli.command {
        Command::Run(args) => args.overrides = overrides,
        Command::Bench(BenchCommand::Recovery(args)) => args.overrides = overrides,
        Command::Plan(args) => args.overrides = overrides,
        _ => {}
    }
    Ok(cli)
}

fn print_config(args: &RunArgs) -> Exit {
    match args.resolve() {
        Ok(resolved) => {
            resolved.notes.iter().for_each(|note| eprintln!("elastic: note: {note}"));
            print(&resolved.print());
            Exit::Finished
        }
        Err(error) => fail(Exit::Usage, &error),
    }
}
