//! What the machine could do at best: copies in memory, and bytes through a
//! bare socket.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    time::{Duration, Instant},
};

/// Larger than caches.
const COPY: usize = 64 << 20;

/// What goes through the socket for a measurement.
const STREAM: usize = 256 << 20;

/// At best.
pub(super) struct Limits {
    processors: usize,
    /// Bytes read and written by copies on all processors, in a second.
    copy: f64,
    /// Bytes through one loopback connection, in a second.
    socket: Option<f64>,
}

pub(super) fn measure() -> Limits {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    Limits { processors, copy: copies(processors), socket: socket() }
}

impl Limits {
    pub(super) fn text(&self) -> String {
        let Self { processors, copy, socket } = self;
        let socket = socket.map_or("not measured".to_owned(), gbps);
        format!(
            "# memory copy on all {processors} processors: {} read and written\n\
             # one loopback socket: {socket}\n",
            gbps(*copy)
        )
    }
}

fn gbps(rate: f64) -> String {
    format!("{:.2} GB/s", rate / 1e9)
}

/// Medians of five, on threads that copy at the same time.
fn copies(processors: usize) -> f64 {
    let copy = || {
        let (from, mut to) = (vec![1_u8; COPY], vec![0_u8; COPY]);
        let mut times: Vec<Duration> = (0..5)
            .map(|_| {
                let start = Instant::now();
                to.copy_from_slice(std::hint::black_box(&from));
                std::hint::black_box(&mut to);
                start.elapsed()
            })
            .collect();
        times.sort_unstable();
        2.0 * COPY as f64 / times[2].as_secs_f64()
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..processors).map(|_| scope.spawn(copy)).collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()).sum()
    })
}

fn socket() -> Option<f64> {
    let listener = TcpListener::bind("127.0.0.1:0").ok()?;
    let mut sender = TcpStream::connect(listener.local_addr().ok()?).ok()?;
    let (mut receiver, _) = listener.accept().ok()?;
    let start = Instant::now();
    let sending = std::thread::spawn(move || {
        let piece = vec![1_u8; 1 << 20];
        (0..STREAM / piece.len()).try_for_each(|_| sender.write_all(&piece))
    });
    let (mut piece, mut got) = (vec![0_u8; 1 << 20], 0);
    while got < STREAM {
        match receiver.read(&mut piece).ok()? {
            0 => return None,
            bytes => got += bytes,
        }
    }
    sending.join().ok()?.ok()?;
    Some(got as f64 / start.elapsed().as_secs_f64())
}
