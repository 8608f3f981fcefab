//! What a process holds, read from `/proc`: descriptors and sockets by kind,
//! threads by name, shared memory, resident memory (LIVE-2).

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use super::process::{Process, number};

/// What one process holds.
#[derive(Clone, Debug, Default)]
pub struct Resources {
    /// Descriptors by kind: `file`, `pidfd`, `tcp listening`, `udp`, `unix`, …
    pub descriptors: BTreeMap<String, usize>,
    /// Threads by name.
    pub threads: BTreeMap<String, usize>,
    /// Mappings that other processes can share: memfd, `/dev/shm`, System V.
    pub shared: usize,
    /// Resident memory in KiB.
    pub kib: u64,
}

/// A socket of the kernel's tables.
#[derive(Clone, Debug)]
struct Socket {
    kind: String,
    port: Option<u16>,
}

/// Sockets by inode.
#[derive(Clone, Debug)]
pub struct Sockets(BTreeMap<u64, Socket>);

impl Process {
    /// What it holds now; `None` when it is gone.
    #[must_use]
    pub fn resources(&self) -> Option<Resources> {
        let folder = format!("/proc/{}", self.pid);
        let sockets = Sockets::of(&folder);
        let mut found = Resources::default();
        for link in links(&folder)? {
            *found.descriptors.entry(sockets.kind(&link)).or_default() += 1;
        }
        for task in fs::read_dir(format!("{folder}/task")).ok()?.flatten() {
            let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            *found.threads.entry(name.trim().to_owned()).or_default() += 1;
        }
        let maps = fs::read_to_string(format!("{folder}/maps")).ok()?;
        let shared =
            |line: &&str| ["/memfd:", "/dev/shm/", "/SYSV"].iter().any(|at| line.contains(at));
        found.shared = maps.lines().filter(shared).count();
        found.kib = number(&fs::read_to_string(format!("{folder}/status")).ok()?, "VmRSS:")?;
        Some(found)
    }

    /// Ports on which it listens or that its datagram sockets have.
    #[must_use]
    pub fn ports(&self) -> BTreeSet<u16> {
        let folder = format!("/proc/{}", self.pid);
        let sockets = Sockets::of(&folder);
        let own = links(&folder).unwrap_or_default().into_iter();
        let own = own.filter_map(|link| sockets.0.get(&inode(&link)?));
        own.filter(|socket| socket.kind == "tcp listening" || socket.kind == "udp")
            .filter_map(|socket| socket.port)
            .collect()
    }
}

impl Resources {
    /// All descriptors.
    #[must_use]
    pub fn open(&self) -> usize {
        self.descriptors.values().sum()
    }

    /// All threads.
    #[must_use]
    pub fn running(&self) -> usize {
        self.threads.values().sum()
    }

    /// Kinds of which there are more than `more` beyond `before`.
    #[must_use]
    pub fn grown(&self, before: &Self, more: usize) -> Vec<String> {
        let kinds = [(&self.descriptors, &before.descriptors), (&self.threads, &before.threads)];
        let mut grown = Vec::new();
        for (after, before) in kinds {
            for (kind, count) in after {
                let was = before.get(kind).copied().unwrap_or_default();
                if *count > was + more {
                    grown.push(format!("{kind}: {was} -> {count}"));
                }
            }
        }
        if self.shared > before.shared {
            grown.push(format!("shared mappings: {} -> {}", before.shared, self.shared));
        }
        grown
    }
}

impl Sockets {
    /// Of this machine.
    #[must_use]
    pub fn all() -> Self {
        Self::of("/proc/self")
    }

    /// Connections at these ports that no process owns, those aside that the
    /// kernel keeps for a minute on purpose. An owned one is somebody else's, who
    /// was given the port since.
    #[must_use]
    pub fn orphans(&self, ports: &BTreeSet<u16>) -> Vec<u16> {
        let sockets = self.0.iter().filter(|(inode, _)| **inode > u64::MAX / 2);
        sockets.filter_map(|(_, socket)| socket.port).filter(|port| ports.contains(port)).collect()
    }

    /// As a process sees them, whose network may be its own.
    fn of(process: &str) -> Self {
        let mut sockets = BTreeMap::new();
        for (table, port_at, state_at, inode_at) in [
            ("tcp", 1, Some(3), 9),
            ("tcp6", 1, Some(3), 9),
            ("udp", 1, None, 9),
            ("udp6", 1, None, 9),
        ] {
            let text = fs::read_to_string(format!("{process}/net/{table}")).unwrap_or_default();
            for line in text.lines().skip(1) {
                let words: Vec<&str> = line.split_whitespace().collect();
                let word = |at: usize| words.get(at).copied().unwrap_or_default();
                let port = word(port_at).rsplit(':').next();
                let port = port.and_then(|port| u16::from_str_radix(port, 16).ok());
                let kind = match state_at.map(word) {
                    Some(TIME_WAIT) => continue,
                    Some(LISTEN) => "tcp listening",
                    Some(_) => "tcp",
                    None => "udp",
                };
                if let Ok(inode) = word(inode_at).parse() {
                    // Orphans of the kernel have inode 0 in common.
                    let key = if inode == 0 { u64::MAX - sockets.len() as u64 } else { inode };
                    sockets.insert(key, Socket { kind: kind.into(), port });
                }
            }
        }
        let unix = fs::read_to_string(format!("{process}/net/unix")).unwrap_or_default();
        for line in unix.lines().skip(1) {
            if let Some(inode) = line.split_whitespace().nth(6).and_then(|word| word.parse().ok()) {
                sockets.insert(inode, Socket { kind: "unix".into(), port: None });
            }
        }
        Self(sockets)
    }

    fn kind(&self, link: &str) -> String {
        if let Some(inode) = inode(link) {
            return self.0.get(&inode).map_or_else(|| "socket".into(), |found| found.kind.clone());
        }
        match link.strip_prefix("anon_inode:") {
            Some(kind) => kind.trim_matches(['[', ']']).to_owned(),
            None if link.starts_with("pipe:") => "pipe".into(),
            None if link.starts_with("/memfd:") => "memfd".into(),
            None => "file".into(),
        }
    }
}

/// States of the kernel's table.
const LISTEN: &str = "0A";
const TIME_WAIT: &str = "06";

fn links(folder: &str) -> Option<Vec<String>> {
    let entries = fs::read_dir(Path::new(folder).join("fd")).ok()?.flatten();
    let links = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    Some(links.map(|link| link.to_string_lossy().into_owned()).collect())
}

fn inode(link: &str) -> Option<u64> {
    link.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// Shared memory of this machine that outlives processes: files of `/dev/shm` and
/// segments of System V.
#[must_use]
pub fn shared_memory() -> BTreeSet<String> {
    let entries = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let files = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let segments = fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default();
    let id = |line: &str| line.split_whitespace().nth(1).map(|id| format!("segment {id}"));
    files.chain(segments.lines().skip(1).filter_map(id)).collect()
}
