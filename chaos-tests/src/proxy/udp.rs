//! Datagrams: what node A sends to the face of node B leaves from the face of A,
//! so that the answer finds its way back.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::Ordering::Relaxed,
        mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    },
    time::{Duration, Instant},
};

use super::{Plane, Shared};
use crate::harness::Random;

/// Datagrams under way to one node; more are dropped, as a router would.
const QUEUE: usize = 4096;
/// The largest datagram.
const LARGEST: usize = 64 << 10;
/// How often a thread looks whether the network is gone.
const LOOK: Duration = Duration::from_millis(100);

/// What was held up; ordered by when it is due, and then by when it came.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Late {
    due: Instant,
    number: u64,
    from: usize,
    bytes: Vec<u8>,
}

/// Starts the threads of all faces.
pub(super) fn serve(shared: &Arc<Shared>) -> io::Result<()> {
    let bind = |node: usize| UdpSocket::bind(shared.face(node, Plane::Control));
    let faces: Arc<[UdpSocket]> = (0..shared.nodes).map(bind).collect::<io::Result<_>>()?;
    for to in 0..shared.nodes {
        let (queue, late) = sync_channel(QUEUE);
        let (rules, sockets) = (Arc::clone(shared), Arc::clone(&faces));
        std::thread::Builder::new()
            .name(format!("udp to {to}"))
            .spawn(move || receive(&rules, &sockets, to, &queue))?;
        let (rules, sockets) = (Arc::clone(shared), Arc::clone(&faces));
        std::thread::Builder::new()
            .name(format!("late to {to}"))
            .spawn(move || deliver(&rules, &sockets, to, &late))?;
    }
    Ok(())
}

fn receive(shared: &Shared, faces: &[UdpSocket], to: usize, queue: &SyncSender<Late>) {
    let mut random = Random::from(to as u64);
    let mut buffer = vec![0; LARGEST];
    let target = shared.real(to, Plane::Control);
    // Without a limit the thread would outlive the network.
    if faces[to].set_read_timeout(Some(LOOK)).is_err() {
        return;
    }
    // When the last delayed datagram in each direction is due.
    let mut busy: Vec<Instant> = vec![Instant::now(); shared.nodes];
    while !shared.rules.is_closed() {
        // A face whose node is down reports that the last datagram was refused.
        let Ok((length, source)) = faces[to].recv_from(&mut buffer) else { continue };
        let from = node_at(shared, source);
        let condition = shared.rules.of(Plane::Control, from, to);
        let Some(from) = from else { continue };
        let lost = random.below(1000) < condition.lost_per_mille as usize;
        if !condition.open || lost {
            shared.dropped.fetch_add(1, Relaxed);
            continue;
        }
        let bytes = &buffer[..length];
        let now = Instant::now();
        let duration = condition.duration(length);
        if duration.is_zero() && busy[from] <= now {
            send(&faces[from], bytes, target);
            continue;
        }
        let begin = busy[from].max(now);
        busy[from] = begin + (duration - condition.delay);
        let due = begin + duration;
        if queue.try_send(Late { due, number: 0, from, bytes: bytes.to_vec() }).is_err() {
            shared.dropped.fetch_add(1, Relaxed);
        }
    }
}

/// Sends what was held up, in the order in which it is due.
fn deliver(shared: &Shared, faces: &[UdpSocket], to: usize, late: &Receiver<Late>) {
    let target = shared.real(to, Plane::Control);
    let mut waiting: BinaryHeap<Reverse<Late>> = BinaryHeap::new();
    let mut numbers = 0..;
    while !shared.rules.is_closed() {
        let now = Instant::now();
        while let Some(Reverse(late)) = waiting.peek()
            && late.due <= now
        {
            if let Some(Reverse(late)) = waiting.pop() {
                send(&faces[late.from], &late.bytes, target);
            }
        }
        let next = waiting.peek().map_or(LOOK, |Reverse(late)| late.due - now);
        match late.recv_timeout(next.min(LOOK)) {
            Ok(late) => {
                let number = numbers.next().unwrap_or(u64::MAX);
                waiting.push(Reverse(Late { number, ..late }));
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

fn send(face: &UdpSocket, bytes: &[u8], target: SocketAddr) {
    // A full buffer or a dead target is a lost datagram.
    let _ = face.send_to(bytes, target);
}

fn node_at(shared: &Shared, source: SocketAddr) -> Option<usize> {
    let is = |node: &usize| -> bool {
        let real: IpAddr = shared.real(*node, Plane::Control).ip();
        real == source.ip()
    };
    (0..shared.nodes).find(is)
}
