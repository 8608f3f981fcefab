//! The most memory that this process had, as Linux counts it.

use std::fs;

/// Bytes that `work` needed at its peak beyond what was there before.
pub(super) fn extra(work: impl FnOnce() -> Result<(), String>) -> Result<u64, String> {
    // 5 forgets the peak so far.
    fs::write("/proc/self/clear_refs", "5")
        .map_err(|error| format!("cannot write /proc/self/clear_refs: {error}"))?;
    let before = status("VmRSS:")?;
    work()?;
    Ok(status("VmHWM:")?.saturating_sub(before))
}

fn status(key: &str) -> Result<u64, String> {
    let text = fs::read_to_string("/proc/self/status")
        .map_err(|error| format!("cannot read /proc/self/status: {error}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    let kibibytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kibibytes.map(|k| k << 10).ok_or_else(|| format!("/proc/self/status has no {key}"))
}
