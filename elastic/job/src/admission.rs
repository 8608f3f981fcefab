//! Join tokens: who may come in. They are replicated, so that any member admits
//! and all of them forget a token at once.

use serde::{Deserialize, Serialize};

use crate::plan::Timestamp;

/// The id of the token that the job was founded with.
pub const FOUNDING: &str = "founding";

/// Tokens that may be open at a time: each costs every newcomer a check.
pub const MOST_TOKENS: usize = 32;

/// A token that opens the gate.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TokenRecord {
    /// What a joiner has to prove that it knows.
    pub secret: String,
    /// When it was made.
    pub made: Timestamp,
    /// When it expires, on the clock of whoever lets a joiner in; none never does.
    pub expires: Option<Timestamp>,
}

/// What a person asks for.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum TokenChange {
    /// One more opens the gate.
    Add {
        /// Its id.
        id: String,
        /// The token.
        token: TokenRecord,
    },
    /// One opens it no more. Nodes that came in with it stay.
    Revoke {
        /// Its id.
        id: String,
    },
}

impl TokenRecord {
    /// Whether it opens the gate now.
    #[must_use]
    pub fn is_valid(&self, now: Timestamp) -> bool {
        self.expires.is_none_or(|expires| now < expires)
    }
}
