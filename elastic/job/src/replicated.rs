//! What the control group replicates: a deterministic state machine.
//!
//! Every member applies the same commands in the same order to the same state,
//! so [`StateMachine::apply`] must be a function of its arguments alone: no
//! clock, no randomness, no iteration over hash maps whose order is random.

use serde::{Serialize, de::DeserializeOwned};

/// A state that changes only by committed commands.
pub trait StateMachine: Clone + Send + Sync + 'static {
    /// An imperative (`Admit`, `Plan`, `Seal`), proposed by any member.
    type Command: Serialize + DeserializeOwned + Clone + Send + 'static;
    /// A fact that became true by a command, in the past tense.
    type Event: Clone + Send + Sync + 'static;

    /// Applies one committed command and tells what became true. A command that
    /// no longer makes sense changes nothing and yields no event, or one that
    /// says why it was refused.
    fn apply(&mut self, command: Self::Command) -> Vec<Self::Event>;

    /// The whole state as bytes, for [`StateMachine::restore`].
    fn snapshot(&self) -> Vec<u8>;

    /// The state that [`StateMachine::snapshot`] wrote.
    ///
    /// # Errors
    /// Says what in the bytes is not a state of this machine.
    fn restore(bytes: &[u8]) -> Result<Self, String>;
}
