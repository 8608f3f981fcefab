//! Where nodes without a quorum find each other (LG-3). Blocking.
//!
//! The group's list holds the addresses that its nodes had. When all were killed
//! and come back elsewhere, none can tell the others, so each process start leaves
//! its address in the checkpoint folder, and who has no quorum looks there.

use std::{fs, io, net::SocketAddr, path::PathBuf};

use dcp::Folder;
use job::NodeId;

/// Before a node's name.
const PREFIX: &str = ".node-";
/// More nodes than this are not dialled.
const MOST: usize = 1024;

fn place(folder: &Folder) -> PathBuf {
    folder.root().join("ledger")
}

/// Replaces the address under which a node can be met. Not durable on purpose: a
/// process that a power cut ended is not there any more.
pub(super) fn leave(folder: &Folder, node: &NodeId, address: SocketAddr) -> io::Result<()> {
    let path = place(folder).join(format!("{PREFIX}{node}"));
    // A name of its own, which no node has: a reader finds an address or none.
    let draft = place(folder).join(format!(".draft-{node}-{}", std::process::id()));
    fs::write(&draft, address.to_string())?;
    fs::rename(&draft, &path)
}

/// Where the other nodes were met last, as far as it can be read.
pub(super) fn read(folder: &Folder, me: &NodeId) -> Vec<SocketAddr> {
    let entries = fs::read_dir(place(folder)).into_iter().flatten().flatten();
    let others = entries.filter(|entry| {
        let name = entry.file_name();
        name.to_str()
            .and_then(|name| name.strip_prefix(PREFIX))
            .is_some_and(|name| name != me.as_str())
    });
    let address = |entry: fs::DirEntry| fs::read_to_string(entry.path()).ok()?.parse().ok();
    others.take(MOST).filter_map(address).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lg_3_a_node_finds_the_newest_address_of_every_other() {
        let root = std::env::temp_dir().join(format!("elastic-meeting-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let folder = Folder::open(&root).expect("a folder");
        let name = |name: &str| NodeId::new(name).expect("a good name");
        let at = |port: u16| SocketAddr::from(([10, 0, 0, 1], port));
        for (node, port) in [("a", 1), ("b", 2), ("c", 3), ("b", 4)] {
            leave(&folder, &name(node), at(port)).expect("the folder works");
        }
        fs::write(root.join("ledger/.node-d"), "not an address").expect("the folder works");
        let mut met = read(&folder, &name("a"));
        met.sort();
        assert_eq!(met, [at(3), at(4)]);
        assert!(folder.records().expect("the ledger is sound").is_empty(), "no record of it");
        let _ = fs::remove_dir_all(&root);
    }
}
