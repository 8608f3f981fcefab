//! `elastic run`.

use super::fail;
use crate::cli::RunArgs;
use crate::exit::Exit;

/// Runs this node.
pub(super) fn run(args: RunArgs) -> Exit {
    match args.resolve() {
        Ok(_) => unavailable(),
        Err(error) => fail(Exit::Usage, &error),
    }
}

/// This build has no agent.
pub(super) fn unavailable() -> Exit {
    fail(Exit::Failed, &"this build has no node agent")
}
