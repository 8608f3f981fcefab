//! How two ranks prove to each other that they belong to one generation.
//!
//! ```text
//! dialler  → acceptor   hello    who, to whom, token, nonce, MAC(all of it)
//! acceptor → dialler    answer   nonce, MAC(hello, nonce)
//! dialler  → acceptor   confirm  MAC(hello, answer)
//! ```
//!
//! MACs are HMAC-SHA256 under the generation's key. All three have fixed sizes,
//! so a stranger's bytes decide about no allocation (SEC-1); the third keeps a
//! recorded hello from being of use. What travels afterwards is not encrypted.

use hmac::{Hmac, Mac};
use job::{Era, Generation, JobId, Token};
use sha2::Sha256;
use uuid::Uuid;

use super::Error;

pub(super) const HELLO: usize = 120;
pub(super) const ANSWER: usize = 80;
pub(super) const CONFIRM: usize = 32;

const MAGIC: [u8; 8] = *b"elasmesh";
const VERSION: u16 = 1;
const NONCE: usize = 32;
const MAC: usize = 32;

/// The secret of one generation, from its plan.
#[derive(Clone, Copy)]
pub(super) struct Key(pub(super) [u8; 32]);

/// What a dialler says about itself, before any proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) token: Token,
    pub(super) from: u32,
    pub(super) to: u32,
    pub(super) size: u32,
}

/// What an answer turned out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// From a holder of the key; to be confirmed with these bytes.
    Genuine([u8; CONFIRM]),
    /// The acceptor has seen a newer token of this job. Nothing proves it, and
    /// nothing needs to: whoever can forge it can cut the connection as well.
    Stale,
    /// Something else.
    Foreign,
}

/// A nonce that has not been used before.
pub(super) fn nonce() -> Result<[u8; NONCE], Error> {
    let mut nonce = [0; NONCE];
    match rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty()) {
        Ok(NONCE) => Ok(nonce),
        Ok(short) => Err(Error::system("getrandom", format!("{short} bytes of {NONCE}"))),
        Err(errno) => Err(Error::system("getrandom", errno)),
    }
}

impl Key {
    fn mac(&self, label: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
        // The sizes of all parts are fixed, so their sequence is unambiguous.
        // HMAC pads a short key with zeros to the block of its hash.
        let mut block = [0; 64];
        block[..self.0.len()].copy_from_slice(&self.0);
        let mut mac = <Hmac<Sha256> as Mac>::new((&block).into());
        mac.update(label);
        for part in parts {
            mac.update(part);
        }
        mac
    }

    fn sign(&self, label: &[u8], parts: &[&[u8]]) -> [u8; MAC] {
        self.mac(label, parts).finalize().into_bytes().into()
    }

    fn verify(&self, label: &[u8], parts: &[&[u8]], mac: &[u8]) -> bool {
        self.mac(label, parts).verify_slice(mac).is_ok()
    }

    /// What a rank shows at the door of this name, at its mesh's meeting of this
    /// number.
    pub(super) fn proof(&self, round: u64, rank: usize, door: &[u8; 16]) -> [u8; MAC] {
        let (round, rank) = (round.to_le_bytes(), (rank as u64).to_le_bytes());
        self.sign(b"elastic mesh memory", &[&round, &rank, door])
    }

    /// Whether it is that, in constant time.
    pub(super) fn proves(&self, round: u64, rank: usize, door: &[u8; 16], proof: &[u8]) -> bool {
        let (round, rank) = (round.to_le_bytes(), (rank as u64).to_le_bytes());
        self.verify(b"elastic mesh memory", &[&round, &rank, door], proof)
    }

    /// The key of a mesh that is split off this one's.
    pub(super) fn child(&self, number: u64, leader: usize) -> Self {
        let (number, leader) = (number.to_le_bytes(), (leader as u64).to_le_bytes());
        Self(self.sign(b"elastic mesh split", &[&number, &leader]))
    }

    /// Whether a hello comes from a holder of this key.
    pub(super) fn knows(&self, hello: &[u8; HELLO]) -> bool {
        let (said, mac) = hello.split_at(HELLO - MAC);
        self.verify(b"elastic mesh hello", &[said], mac)
    }

    /// The answer to a hello.
    pub(super) fn answer(&self, hello: &[u8; HELLO], nonce: [u8; NONCE]) -> [u8; ANSWER] {
        let mut answer = [0; ANSWER];
        answer[..8].copy_from_slice(&MAGIC);
        answer[8] = 1;
        answer[16..48].copy_from_slice(&nonce);
        let mac = self.sign(b"elastic mesh answer", &[hello, &answer[..48]]);
        answer[48..].copy_from_slice(&mac);
        answer
    }

    /// What an answer to one's own hello is.
    pub(super) fn read(&self, hello: &[u8; HELLO], answer: &[u8; ANSWER]) -> Answer {
        if *answer == stale() {
            return Answer::Stale;
        }
        let (said, mac) = answer.split_at(ANSWER - MAC);
        if said[..8] != MAGIC || !self.verify(b"elastic mesh answer", &[hello, said], mac) {
            return Answer::Foreign;
        }
        Answer::Genuine(self.confirm(hello, answer))
    }

    /// What the dialler has to confirm with.
    pub(super) fn confirm(&self, hello: &[u8; HELLO], answer: &[u8; ANSWER]) -> [u8; CONFIRM] {
        self.sign(b"elastic mesh confirm", &[hello, answer])
    }

    /// Whether a confirmation is right, in constant time.
    pub(super) fn confirmed(
        &self,
        hello: &[u8; HELLO],
        answer: &[u8; ANSWER],
        confirm: &[u8; CONFIRM],
    ) -> bool {
        self.verify(b"elastic mesh confirm", &[hello, answer], confirm)
    }
}

/// The answer to a hello of an older token.
pub(super) fn stale() -> [u8; ANSWER] {
    let mut answer = [0; ANSWER];
    answer[..8].copy_from_slice(&MAGIC);
    answer
}

impl Hello {
    pub(super) fn encode(&self, nonce: [u8; NONCE], key: &Key) -> [u8; HELLO] {
        let mut to = [0; HELLO];
        to[..8].copy_from_slice(&MAGIC);
        to[8..10].copy_from_slice(&VERSION.to_le_bytes());
        to[12..16].copy_from_slice(&self.token.era.0.to_le_bytes());
        to[16..24].copy_from_slice(&self.token.generation.0.to_le_bytes());
        to[24..40].copy_from_slice(self.token.job.0.as_bytes());
        to[40..44].copy_from_slice(&self.from.to_le_bytes());
        to[44..48].copy_from_slice(&self.to.to_le_bytes());
        to[48..52].copy_from_slice(&self.size.to_le_bytes());
        to[56..88].copy_from_slice(&nonce);
        let mac = key.sign(b"elastic mesh hello", &[&to[..88]]);
        to[88..].copy_from_slice(&mac);
        to
    }

    /// What a hello says, unproven. `None` for anything else.
    pub(super) fn decode(from: &[u8; HELLO]) -> Option<Self> {
        let short = |at: usize| u32::from_le_bytes(from[at..at + 4].try_into().unwrap_or_default());
        let long = u64::from_le_bytes(from[16..24].try_into().ok()?);
        if from[..8] != MAGIC || from[8..10] != VERSION.to_le_bytes() {
            return None;
        }
        let job = JobId(Uuid::from_bytes(from[24..40].try_into().ok()?));
        let token = Token { job, era: Era(short(12)), generation: Generation(long) };
        Some(Self { token, from: short(40), to: short(44), size: short(48) })
    }
}
