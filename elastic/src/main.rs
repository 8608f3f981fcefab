//! The `elastic` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    elastic::command::main().into()
}
