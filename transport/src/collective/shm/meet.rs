//! How the ranks of one machine hand each other their memory files: over Unix
//! sockets with random names that only the keyed mesh knows.
//!
//! Every rank opens a *door* and calls at the doors of the others, leaving one
//! message with the files and a proof that it holds the generation's key. There
//! are no answers, so nobody waits for anybody in a circle.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, acceptfrom_with,
        bind, connect, listen, recvmsg, sendmsg, socket_with,
    },
};
use sha2::{Digest, Sha256};

use crate::collective::{
    Error,
    exchange::{Wire, timespec},
    handshake::{Key, nonce},
};

/// Bytes of a name.
pub(in crate::collective) const NAME: usize = 16;

/// Bytes of a host's identity.
pub(in crate::collective) const HOST: usize = 32;

/// Files of one message, at most.
const FILES: usize = 2;

/// Sender, and proof.
const MESSAGE: usize = 4 + 32;

/// Callers that have not left their message; the oldest give way.
const CALLERS: usize = 64;

/// Between attempts at a door whose queue is full.
const PAUSE: Duration = Duration::from_millis(1);

/// Where peers leave files.
#[derive(Debug)]
pub(in crate::collective) struct Door {
    socket: OwnedFd,
    name: [u8; NAME],
}

/// Who is at which door.
pub(in crate::collective) struct Neighbour {
    /// Its rank in this mesh.
    pub(in crate::collective) rank: usize,
    /// Its door.
    pub(in crate::collective) name: [u8; NAME],
}

/// What tells two machines apart: the boot, and the network namespace in which
/// names of sockets hold. None where the system does not say.
pub(in crate::collective) fn host() -> Option<[u8; HOST]> {
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = rustix::fs::stat("/proc/self/ns/net").ok()?;
    let mut hash = Sha256::new();
    hash.update(&boot);
    hash.update(namespace.st_ino.to_le_bytes());
    hash.update(rustix::process::getuid().as_raw().to_le_bytes());
    Some(hash.finalize().into())
}

impl Door {
    pub(in crate::collective) fn open() -> Result<Self, Error> {
        let failed = |errno| Error::system("bind of a Unix socket", errno);
        let mut random = [0; NAME];
        random.copy_from_slice(&nonce()?[..NAME]);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(failed)?;
        bind(&socket, &address(&random).map_err(failed)?).map_err(failed)?;
        listen(&socket, CALLERS as i32).map_err(failed)?;
        Ok(Self { socket, name: random })
    }

    pub(in crate::collective) fn name(&self) -> [u8; NAME] {
        self.name
    }

    /// Hands these files to every neighbour and returns theirs, in the order of
    /// the neighbours. `round` tells the meetings of a mesh apart.
    pub(in crate::collective) fn meet(
        &self,
        wire: &mut Wire,
        (key, rank, round): (&Key, usize, u64),
        neighbours: &[Neighbour],
        files: &[OwnedFd],
        deadline: Instant,
    ) -> Result<Vec<Vec<OwnedFd>>, Error> {
        let mut left: Vec<Option<Vec<OwnedFd>>> = neighbours.iter().map(|_| None).collect();
        let mut to_call: Vec<_> = neighbours.iter().collect();
        let mut callers: Vec<OwnedFd> = Vec::new();
        loop {
            wire.check_alive()?;
            to_call.retain(|neighbour| {
                let proof = key.proof(round, rank, &neighbour.name);
                call(neighbour, rank, &proof, files).is_err()
            });
            while let Ok(caller) =
                acceptfrom_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
                    .map(|(caller, _)| caller)
            {
                if callers.len() == CALLERS {
                    callers.remove(0);
                }
                callers.push(caller);
            }
            callers.retain(|caller| match take(caller) {
                Err(Errno::AGAIN | Errno::INTR) => true,
                Err(_) => false,
                Ok((message, files)) => {
                    let from = neighbours.iter().position(|neighbour| {
                        message[..4] == (neighbour.rank as u32).to_le_bytes()
                            && key.proves(round, neighbour.rank, &self.name, &message[4..])
                    });
                    if let Some(from) = from {
                        left[from] = Some(files);
                    }
                    false
                }
            });
            if to_call.is_empty() && left.iter().all(Option::is_some) {
                return Ok(left.into_iter().flatten().collect());
            }
            let now = Instant::now();
            if now >= deadline {
                let missing = neighbours.iter().zip(&left).filter(|(_, files)| files.is_none());
                let waiting_for =
                    missing.map(|(neighbour, _)| wire.names[neighbour.rank]).collect();
                return Err(Error::Deadline { op: "connect", waiting_for });
            }
            let patience = if to_call.is_empty() { deadline - now } else { PAUSE };
            let mut set = vec![PollFd::new(&self.socket, PollFlags::IN)];
            set.extend(callers.iter().map(|caller| PollFd::new(caller, PollFlags::IN)));
            set.push(PollFd::from_borrowed_fd(wire.abort.as_fd(), PollFlags::IN));
            let streams = wire.peers.iter().flatten();
            set.extend(streams.map(|(stream, _)| PollFd::new(stream, PollFlags::RDHUP)));
            match poll(&mut set, Some(&timespec(patience))) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(Error::system("poll", errno)),
            }
        }
    }
}

fn call(
    neighbour: &Neighbour,
    rank: usize,
    proof: &[u8; 32],
    files: &[OwnedFd],
) -> rustix::io::Result<()> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    connect(&socket, &address(&neighbour.name)?)?;
    let mut message = [0; MESSAGE];
    message[..4].copy_from_slice(&(rank as u32).to_le_bytes());
    message[4..].copy_from_slice(proof);
    let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&files));
    }
    sendmsg(&socket, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn take(caller: &OwnedFd) -> rustix::io::Result<([u8; MESSAGE], Vec<OwnedFd>)> {
    let mut message = [0; MESSAGE];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut into = [IoSliceMut::new(&mut message)];
    let got = recvmsg(caller, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    if got.bytes != MESSAGE {
        return Err(Errno::PROTO);
    }
    let files = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let files = files.flatten().collect();
    Ok((message, files))
}

fn address(name: &[u8; NAME]) -> rustix::io::Result<SocketAddrUnix> {
    let mut text = b"elastic-mesh-".to_vec();
    text.extend(hex::encode(name).bytes());
    SocketAddrUnix::new_abstract_name(&text)
}
