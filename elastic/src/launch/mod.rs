//! Starting nodes: several on this machine ([`standalone`]).

mod standalone;
mod voices;

use std::path::Path;

use crate::config::Config;

pub(crate) use standalone::{die_with_launcher, standalone};

/// Set for the nodes of a standalone group: their launcher speaks for them.
pub(crate) const STANDALONE: &str = "ELASTIC_STANDALONE";

/// `--fresh`: node stores go, checkpoints are moved aside and kept.
pub(crate) fn start_anew(config: &Config) -> Result<(), String> {
    let nodes = Path::new(&config.job.dump_folder).join("nodes");
    match std::fs::remove_dir_all(&nodes) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(format!("cannot remove {}: {error}", nodes.display()));
        }
        _ => {}
    }
    let checkpoints = config.checkpoint_folder();
    if !checkpoints.exists() {
        return Ok(());
    }
    let aside = (1..)
        .map(|n| checkpoints.with_extension(format!("old-{n}")))
        .find(|path| !path.exists())
        .unwrap_or_else(|| checkpoints.with_extension("old"));
    std::fs::rename(&checkpoints, &aside).map_err(|error| {
        format!("cannot move {} to {}: {error}", checkpoints.display(), aside.display())
    })?;
    eprintln!("elastic: the earlier job's checkpoints are kept in {}", aside.display());
    Ok(())
}
