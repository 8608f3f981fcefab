//! Where this process stands. One process is one node's agent or one device's
//! worker, so its place is a fact of the process: every log line carries it,
//! whichever thread writes the line.

use std::sync::{Mutex, PoisonError};

use job::{Generation, NodeId, Step};
use serde::Serialize;

static PLACE: Mutex<Place> =
    Mutex::new(Place { node: None, rank: None, generation: None, step: None });

/// What is known of it; nothing is, before the job is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Place {
    /// The node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
    /// A worker's rank in that generation; none of an agent, or when the plan goes
    /// without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The newest generation that was heard of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation: Option<Generation>,
    /// A worker's newest step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<Step>,
}

impl Place {
    /// This process's place now.
    #[must_use]
    pub fn now() -> Self {
        PLACE.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes this process's place.
    pub(crate) fn change(change: impl FnOnce(&mut Self)) {
        change(&mut PLACE.lock().unwrap_or_else(PoisonError::into_inner));
    }
}
