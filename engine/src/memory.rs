//! Whether a model fits before it is allocated: an allocation that fails later
//! ends the process without a word.

use job::spec::Sharding;

use crate::{Config, Error};

/// The machine has room for what a rank needs at least when it holds the whole
/// model: weights, a leaf, a partial sum and the summed gradient, and both moments
/// unless they are sharded; all f32. What is left when gradients, weights or
/// layers are cut as well depends on the mesh.
pub(crate) fn check(config: &Config, elements: usize) -> Result<(), Error> {
    let buffers = match config.sharding {
        _ if config.parallelism.mesh.stages() > 1 => return Ok(()),
        Sharding::Replicated => 6,
        Sharding::Zero1 => 4,
        Sharding::Zero2 => 1,
        Sharding::Zero3 => return Ok(()),
    };
    let needed = elements as u64 * 4 * buffers;
    match of_this_machine() {
        Some(available) if available < needed => Err(Error::Memory { needed, available }),
        _ => Ok(()),
    }
}

/// Bytes of memory and swap, where the system says so.
fn of_this_machine() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kibibytes = |key: &str| -> Option<u64> {
        let value = text.lines().find_map(|line| line.strip_prefix(key))?;
        value.trim().trim_end_matches(" kB").parse().ok()
    };
    Some(1024 * (kibibytes("MemTotal:")? + kibibytes("SwapTotal:").unwrap_or(0)))
}
