//! Named points at which a fake worker can be made to die (fault injection).
//!
//! `ELASTIC_FAKE_TRAPS` is a folder. A worker that reaches a point and finds a file
//! of its name there takes the file away and sends itself SIGKILL: a real death at
//! exactly that point, of one process. Without the variable nothing is looked for.

use std::{fs, path::PathBuf, sync::OnceLock};

use nix::{
    sys::signal::{Signal, raise},
    unistd::Pid,
};

/// Environment variable with the folder of traps.
pub const TRAPS: &str = "ELASTIC_FAKE_TRAPS";

/// Where a worker can die.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// Computing a micro-batch: `Open(s)`.
    Open,
    /// The vote is over and its result not yet used: `Prepared(s)`.
    Prepared,
    /// The weights are new, the step is not.
    Applying,
    /// Stopped for a plan, about to say where it stands.
    Sealing,
    /// Reading a checkpoint.
    Loading,
    /// Its share of a checkpoint is half written.
    Saving,
    /// About to receive the state of others.
    Growing,
    /// About to give its state to others.
    Giving,
}

impl Point {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Open,
        Self::Prepared,
        Self::Applying,
        Self::Sealing,
        Self::Loading,
        Self::Saving,
        Self::Growing,
        Self::Giving,
    ];

    /// The trap's file.
    #[must_use]
    pub fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }

    /// The file that a trap becomes when it was hit.
    #[must_use]
    pub fn hit(self) -> String {
        format!("{}.hit", self.name())
    }

    /// Dies here if a trap is set.
    pub(super) fn pass(self) {
        static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
        let Some(folder) = FOLDER.get_or_init(|| std::env::var_os(TRAPS).map(PathBuf::from)) else {
            return;
        };
        let taken = folder.join(format!("{}.{}", self.name(), Pid::this()));
        // One of all processes that look gets it.
        if fs::rename(folder.join(self.name()), &taken).is_ok() {
            let _ = fs::rename(&taken, folder.join(self.hit()));
            let _ = raise(Signal::SIGKILL);
        }
    }
}
