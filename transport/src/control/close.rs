//! How connections end, and how that reads to a person: the side that closes
//! says why, and the other side can show it.

use quinn::{Connection, ConnectionError, TransportErrorCode, VarInt, WriteError};

use super::{event::DownReason, turned::Reason};

/// Application close codes. The text that goes along is for people, the code for
/// programs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Code {
    /// The process leaves, or a join is complete.
    Done = 0,
    /// The hello or the request does not fit.
    Refused = 1,
    /// The two already have a link.
    Duplicate = 2,
    /// A newer connection took the link over.
    Replaced = 3,
    /// A rule of the protocol was broken.
    Protocol = 4,
    /// Over a limit: try again later.
    Busy = 5,
    /// The join token is wrong.
    Token = 6,
    /// This node admits nobody at present.
    NoGate = 7,
}

impl Code {
    pub(super) fn close(self, connection: &Connection, text: &str) {
        connection.close(VarInt::from_u32(self as u32), text.as_bytes());
    }

    pub(super) fn is(self, error: &ConnectionError) -> bool {
        matches!(error, ConnectionError::ApplicationClosed(close)
            if close.error_code == VarInt::from_u32(self as u32))
    }
}

/// What stopped a task of a connection.
#[derive(Debug)]
pub(super) enum Fault {
    /// The connection is over.
    Ended(ConnectionError),
    /// The peer broke a rule.
    Protocol(String),
}

pub(super) fn written(error: WriteError) -> Fault {
    match error {
        WriteError::ConnectionLost(error) => Fault::Ended(error),
        error => Fault::Protocol(error.to_string()),
    }
}

/// What kind of stranger a handshake failed with.
pub(super) fn handshake_failure(error: &ConnectionError) -> Reason {
    match error {
        ConnectionError::TimedOut => Reason::Slow,
        ConnectionError::TransportError(error)
            if alert(error.code).is_some_and(is_about_certificates) =>
        {
            Reason::Certificate
        }
        _ => Reason::Handshake,
    }
}

// TLS alerts, RFC 8446 section 6.
const BAD_CERTIFICATE: u8 = 42;
const UNKNOWN_CA: u8 = 48;
const CERTIFICATE_REQUIRED: u8 = 116;
const NO_PROTOCOL: u8 = 120;

fn is_about_certificates(alert: u8) -> bool {
    matches!(alert, BAD_CERTIFICATE..=UNKNOWN_CA | CERTIFICATE_REQUIRED)
}

/// Why a connection ended, in words. Texts from the network are made harmless.
pub(super) fn readable(error: &ConnectionError) -> String {
    match error {
        ConnectionError::ApplicationClosed(close) => harmless(&close.reason),
        ConnectionError::ConnectionClosed(close) => match alert(close.error_code) {
            Some(NO_PROTOCOL) => "it speaks another protocol version: install the same release \
                                  of elastic on every node"
                .into(),
            Some(alert) if is_about_certificates(alert) => {
                "it does not accept this node's certificate: it belongs to another job".into()
            }
            _ => harmless(close.to_string().as_bytes()),
        },
        ConnectionError::TransportError(error) if alert(error.code).is_some() => {
            format!("its certificate is not of this job: {}", error.reason)
        }
        ConnectionError::TimedOut => "no answer".into(),
        other => other.to_string(),
    }
}

/// Why a link that was up went down.
pub(super) fn down_reason(error: &ConnectionError) -> DownReason {
    match error {
        _ if Code::Replaced.is(error) => DownReason::Replaced,
        ConnectionError::ApplicationClosed(_) => DownReason::Closed(readable(error)),
        ConnectionError::TimedOut => DownReason::Silent,
        ConnectionError::LocallyClosed => DownReason::Shutdown,
        _ => DownReason::Lost(readable(error)),
    }
}

/// Text from the network, cut and without control characters.
pub(super) fn harmless(text: &[u8]) -> String {
    const LONGEST: usize = 400;
    let text = String::from_utf8_lossy(text);
    text.chars().filter(|c| !c.is_control()).take(LONGEST).collect()
}

/// The TLS alert inside a QUIC crypto error, RFC 9001 section 4.8.
fn alert(code: TransportErrorCode) -> Option<u8> {
    let code = u64::from(code);
    (0x100..0x200).contains(&code).then_some((code & 0xff) as u8)
}
