//! Where a node keeps its store: a group that is formed again is another group,
//! with stores of its own (ID-1, LG-3).
//!
//! ```text
//! <node>/raft.redb, identity.pem           of the era in which it first came
//! <node>/era-<n>/raft.redb, identity.pem   of a later one
//! ```
//!
//! `identity.pem` is written last: a home without one was never moved into.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use job::Era;

pub(super) const IDENTITY: &str = "identity.pem";

/// Where the founder of the home's era lets others in.
const FOUNDER: &str = "founder";

/// The newest home that is complete, or else the first.
pub(super) fn current(node: &Path) -> PathBuf {
    eras(node)
        .into_iter()
        .rev()
        .map(|era| of_era(node, era))
        .find(|home| home.join(IDENTITY).exists())
        .unwrap_or_else(|| node.to_owned())
}

/// The home of a later era.
pub(super) fn of_era(node: &Path, era: Era) -> PathBuf {
    node.join(format!("era-{era}"))
}

/// Notes whom to ask in a home's era.
pub(super) fn note_founder(home: &Path, address: &str) -> io::Result<()> {
    fs::write(home.join(FOUNDER), address)
}

/// Whom to ask in a home's era, when it was joined after a re-forming.
pub(super) fn founder(home: &Path) -> Option<String> {
    let text = fs::read_to_string(home.join(FOUNDER)).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// Removes the homes of eras that are over: no vote of them may be given again.
pub(super) fn leave_older(node: &Path, home: &Path) {
    if home == node {
        return;
    }
    for name in ["raft.redb", IDENTITY] {
        let _ = fs::remove_file(node.join(name));
    }
    for older in eras(node).into_iter().map(|era| of_era(node, era)) {
        if older != home {
            let _ = fs::remove_dir_all(older);
        }
    }
}

fn eras(node: &Path) -> Vec<Era> {
    let entries = fs::read_dir(node).into_iter().flatten().flatten();
    let era = |entry: fs::DirEntry| {
        entry.file_name().to_str()?.strip_prefix("era-")?.parse().ok().map(Era)
    };
    let mut eras: Vec<Era> = entries.filter_map(era).collect();
    eras.sort_unstable();
    eras
}
