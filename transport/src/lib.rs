//! How bytes travel: control links over QUIC, tensor collectives over TCP.

#[cfg(feature = "collective")]
pub mod collective;
#[cfg(feature = "control")]
pub mod control;
