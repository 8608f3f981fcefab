//! Ctrl-C and SIGTERM: once leaves without losing a step, twice ends now.

use std::io;

use actors::agent::Wish;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
};

/// What signals ask for, in order.
pub(super) fn wishes() -> io::Result<mpsc::Receiver<Wish>> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let (sender, wishes) = mpsc::channel(4);
    tokio::spawn(async move {
        let mut wish = Wish::Leave;
        loop {
            let came = tokio::select! {
                came = interrupt.recv() => came,
                came = terminate.recv() => came,
            };
            if came.is_none() || sender.send(wish).await.is_err() {
                return;
            }
            wish = Wish::EndNow;
        }
    });
    Ok(wishes)
}
