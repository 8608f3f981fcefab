//! Strangers that need no handshake.

use std::{io, net::SocketAddr};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UdpSocket},
    time::timeout,
};

use super::{HOLD, Kind};
use crate::harness::Random;

pub(super) async fn knock(kind: Kind, door: SocketAddr, random: &mut Random) -> io::Result<()> {
    let bytes = match kind {
        Kind::Garbage => noise(random, 20_000),
        Kind::HalfHello => noise(random, 10),
        Kind::WrongHello => noise(random, 256),
        Kind::Silent => Vec::new(),
        _ => {
            let socket = UdpSocket::bind("127.0.0.1:0").await?;
            for _ in 0..4 {
                let mut bytes = noise(random, 1200);
                // The long header of QUIC version 1: it looks like a beginning.
                bytes[..6].copy_from_slice(&[0xc3, 0, 0, 0, 1, 8]);
                socket.send_to(&bytes, door).await?;
            }
            return Ok(());
        }
    };
    // A full backlog is the node's right.
    let Ok(Ok(mut stream)) = timeout(HOLD, TcpStream::connect(door)).await else { return Ok(()) };
    let _ = stream.write_all(&bytes).await;
    let wait = if kind == Kind::Silent { HOLD } else { HOLD / 30 };
    let _ = timeout(wait, stream.read(&mut [0; 64])).await;
    Ok(())
}

fn noise(random: &mut Random, length: usize) -> Vec<u8> {
    (0..length).map(|_| u8::try_from(random.below(256)).unwrap_or_default()).collect()
}
