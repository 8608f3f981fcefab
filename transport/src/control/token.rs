//! The join token: a secret that the user hands to new machines, optionally with
//! the fingerprint of the job's authority. Rotatable at any time; it opens the
//! gate and nothing else (CG).

use std::{fmt, str::FromStr};

use hmac::{Hmac, Mac};
use rustls::crypto::ring;
use sha2::Sha256;

use super::certs::{CertError, Fingerprint, crypto};

/// A shorter secret could be guessed from one recorded join.
pub const MIN_SECRET: usize = 16;
const MAX_TOKEN: usize = 512;
const PREFIX: &str = "E1.";

/// `E1.secret`, `E1.secret.fingerprint`, or any other text of at least
/// [`MIN_SECRET`] characters, which then is the secret itself.
///
/// Without a fingerprint, whoever answers at the dialled address gets to see a
/// value that a weak secret could be guessed from: let the machine make it.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    secret: String,
    pin: Option<Fingerprint>,
}

/// A text that is no token.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// Too short or too long.
    #[error(
        "the join token's secret has {0} characters; it needs {MIN_SECRET} to {MAX_TOKEN}: \
         copy it whole, or let the founder make one"
    )]
    Length(usize),
    /// Starts like a machine-made token, but is not one.
    #[error("the join token starts with {PREFIX} but is not {PREFIX}secret[.fingerprint]: {0}")]
    Form(&'static str),
}

impl JoinToken {
    /// A new secret of 160 bits, with the authority's fingerprint where given.
    ///
    /// # Errors
    /// [`CertError::Crypto`] when the system has no randomness.
    pub fn generate(pin: Option<Fingerprint>) -> Result<Self, CertError> {
        let mut bytes = [0; 20];
        ring::default_provider()
            .secure_random
            .fill(&mut bytes)
            .map_err(|error| crypto("make a token")(format!("{error:?}")))?;
        Ok(Self { secret: hex::encode(bytes), pin })
    }

    /// The same secret with the authority's fingerprint, as handed to joiners.
    #[must_use]
    pub fn pinned(&self, pin: Fingerprint) -> Self {
        Self { secret: self.secret.clone(), pin: Some(pin) }
    }

    /// The authority's fingerprint, where the token has one.
    #[must_use]
    pub fn pin(&self) -> Option<Fingerprint> {
        self.pin
    }

    /// Proves knowledge of the secret on one channel: HMAC-SHA256 over the role,
    /// the channel's exporter and the message.
    pub(super) fn proof(&self, role: &str, exporter: &[u8; 32], message: &[u8]) -> [u8; 32] {
        self.mac(role, exporter, message).finalize().into_bytes().into()
    }

    /// Checks a proof in constant time.
    pub(super) fn proves(
        &self,
        proof: &[u8],
        role: &str,
        exporter: &[u8; 32],
        message: &[u8],
    ) -> bool {
        self.mac(role, exporter, message).verify_slice(proof).is_ok()
    }

    fn mac(&self, role: &str, exporter: &[u8; 32], message: &[u8]) -> Hmac<Sha256> {
        // PANIC: HMAC takes keys of any length.
        let mut mac = <Hmac<Sha256> as Mac>::new_from_slice(self.secret.as_bytes())
            .expect("any key length fits");
        mac.update(role.as_bytes());
        mac.update(exporter);
        mac.update(message);
        mac
    }
}

impl FromStr for JoinToken {
    type Err = TokenError;
    fn from_str(text: &str) -> Result<Self, TokenError> {
        let text = text.trim();
        let (secret, pin) = match text.strip_prefix(PREFIX) {
            None => (text, None),
            // The secret may hold dots of its own: the fingerprint is the last part.
            Some(rest) => match rest.rsplit_once('.') {
                None => (rest, None),
                Some((secret, pin)) => {
                    let pin = pin
                        .parse()
                        .map_err(|_| TokenError::Form("a fingerprint is 64 hex digits"))?;
                    (secret, Some(pin))
                }
            },
        };
        let length = secret.chars().count();
        if !(MIN_SECRET..=MAX_TOKEN).contains(&length) {
            return Err(TokenError::Length(length));
        }
        Ok(Self { secret: secret.to_owned(), pin })
    }
}

/// Shows the secret: this is the text to hand to joiners.
impl fmt::Display for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pin {
            Some(pin) => write!(f, "{PREFIX}{}.{pin}", self.secret),
            None => f.write_str(&self.secret),
        }
    }
}

/// Hides the secret.
impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinToken").field("pin", &self.pin).finish_non_exhaustive()
    }
}
