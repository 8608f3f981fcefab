//! Which node a connection comes from: the kernel knows the process at its other
//! end.

use std::{fs, net::TcpStream};

use super::Shared;
use crate::harness::{Process, Role, processes};

/// The node whose process holds the other end; `None` for strangers.
pub(super) fn of(shared: &Shared, stream: &TcpStream) -> Option<usize> {
    let (there, here) = (stream.peer_addr().ok()?, stream.local_addr().ok()?);
    let inode = inode(&word(there)?, &word(here)?)?;
    let link = format!("socket:[{inode}]");
    let processes = processes(&shared.folder);
    let owner = processes.iter().find(|process| holds(process, &link))?;
    let agent = match owner.role {
        Role::Worker => processes.iter().find(|process| process.pid == owner.parent)?,
        _ => owner,
    };
    let Role::Agent(name) = &agent.role else { return None };
    name.strip_prefix('n')?.parse::<usize>().ok()?.checked_sub(1)
}

fn holds(process: &Process, link: &str) -> bool {
    let entries = fs::read_dir(format!("/proc/{}/fd", process.pid)).into_iter().flatten().flatten();
    let mut links = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    links.any(|found| found.as_os_str() == link)
}

/// As `/proc/net/tcp` writes an address.
fn word(address: std::net::SocketAddr) -> Option<String> {
    let std::net::SocketAddr::V4(address) = address else { return None };
    Some(format!("{:08X}:{:04X}", u32::from(*address.ip()).swap_bytes(), address.port()))
}

fn inode(local: &str, remote: &str) -> Option<u64> {
    let table = fs::read_to_string("/proc/net/tcp").ok()?;
    let mut rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let row = rows.find(|row| row.get(1) == Some(&local) && row.get(2) == Some(&remote))?;
    row.get(9)?.parse().ok()
}
