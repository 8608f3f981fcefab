//! Commands that need the model: they are the worker's, and become it.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use super::fail;
use crate::exit::Exit;

/// File name of the worker program.
pub const WORKER: &str = "elastic-worker";

/// Where the worker program is if the configuration names none: beside this
/// program.
///
/// # Errors
/// When the path of this program is unknown, which needs a broken `/proc`.
pub fn beside() -> std::io::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(WORKER))
}

/// Becomes `elastic-worker COMMAND ARGUMENTS`.
pub(super) fn exec(command: &[&str], arguments: &[String]) -> Exit {
    let worker = match beside() {
        Ok(worker) => worker,
        Err(error) => return fail(Exit::Failed, &format!("cannot find this program: {error}")),
    };
    // On success this does not return.
    let error = Command::new(&worker).args(command).args(arguments).exec();
    let text = format!(
        "cannot start {}: {error}: build it with `make build`, it belongs beside `elastic`",
        worker.display()
    );
    fail(Exit::Failed, &text)
}
