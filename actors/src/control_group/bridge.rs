//! What raft logs through slog, as tracing events one level quieter: elections
//! and configuration changes are this module's own news, not raft's.

use std::fmt::{self, Write};

use slog::{Drain, KV, Key, Level, Logger, OwnedKVList, Record, Serializer};

/// A logger for a Raft node.
pub(super) fn logger() -> Logger {
    Logger::root(Bridge, slog::o!())
}

struct Bridge;

impl Drain for Bridge {
    type Ok = ();
    type Err = slog::Never;

    fn log(&self, record: &Record<'_>, values: &OwnedKVList) -> Result<(), slog::Never> {
        let enabled = match record.level() {
            Level::Critical | Level::Error => tracing::enabled!(tracing::Level::WARN),
            Level::Warning => tracing::enabled!(tracing::Level::INFO),
            Level::Info => tracing::enabled!(tracing::Level::DEBUG),
            Level::Debug | Level::Trace => tracing::enabled!(tracing::Level::TRACE),
        };
        if !enabled {
            return Ok(());
        }
        let mut line = Line(record.msg().to_string());
        // Writing into a string does not fail.
        let _ = record.kv().serialize(record, &mut line);
        let _ = values.serialize(record, &mut line);
        let line = line.0;
        match record.level() {
            Level::Critical | Level::Error => tracing::warn!(target: "raft", "{line}"),
            Level::Warning => tracing::info!(target: "raft", "{line}"),
            Level::Info => tracing::debug!(target: "raft", "{line}"),
            Level::Debug | Level::Trace => tracing::trace!(target: "raft", "{line}"),
        }
        Ok(())
    }
}

struct Line(String);

impl Serializer for Line {
    fn emit_arguments(&mut self, key: Key, value: &fmt::Arguments<'_>) -> slog::Result {
        write!(self.0, ", {key}: {value}").map_err(slog::Error::from)
    }
}
