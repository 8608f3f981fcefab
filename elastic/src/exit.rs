//! How the command ends, for people, shell scripts and cluster schedulers.

use std::process::ExitCode;

/// The exit codes of `elastic`. They are an interface: a code never changes its
/// meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// The job, or the command, finished.
    Finished = 0,
    /// The job, or the command, failed; a restart may help.
    Failed = 1,
    /// The command line or the configuration was refused; nothing was started.
    Usage = 2,
    /// The same failure would come again (a crash loop, a diverged model, another
    /// job's checkpoint folder): a scheduler should not requeue.
    DoNotRequeue = 3,
    /// No job was found where the command looked, or it did not answer.
    NoJob = 4,
    /// The node left before the end, drained or preempted; started again, it
    /// rejoins. The value is `EX_TEMPFAIL` of `sysexits.h`.
    Left = 75,
    /// The group went on without this node, which had been silent or could not
    /// work; started again, it rejoins. The value is `EX_PROTOCOL`.
    Fenced = 76,
    /// Interrupted from the keyboard (SIGINT).
    Interrupted = 130,
    /// Ended by SIGTERM before it could leave in order.
    Terminated = 143,
}

/// The table for `--help`.
pub(crate) const EXIT_CODES: &str = "\
Exit codes:
  0    finished
  1    failed; a restart may help
  2    command line or configuration refused, nothing was started
  3    do not requeue: the same failure would come again
  4    no such job, or it does not answer
  75   the node left early (drained or preempted); start it again to rejoin
  76   the group went on without this node; start it again to rejoin
  130  interrupted (SIGINT)
  143  ended by SIGTERM before it could leave in order";

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}
