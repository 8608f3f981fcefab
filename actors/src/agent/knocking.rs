//! A node that waits to be let in says so once that has lasted: at whom it asks, what
//! they answer, and for how long it goes on.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{sync::mpsc, task::JoinSet};

use super::{Notice, Options};

/// Being let in by then needs no line.
const SOON: Duration = Duration::from_secs(1);

/// Asking to be let in. The telling ends with it.
pub(super) struct Knocking {
    answer: Arc<Mutex<String>>,
    _telling: JoinSet<()>,
}

impl Knocking {
    pub(super) fn new(
        options: &Options,
        patience: Duration,
        notices: mpsc::Sender<Notice>,
    ) -> Self {
        let answer = Arc::new(Mutex::new("no answer yet".to_owned()));
        let addresses: Vec<String> = options.join.iter().map(ToString::to_string).collect();
        let addresses = addresses.join(", ");
        let seconds = patience.saturating_sub(SOON).as_secs();
        let then = if options.founds { "founds the job" } else { "gives up" };
        let mut telling = JoinSet::new();
        let newest = Arc::clone(&answer);
        telling.spawn(async move {
            tokio::time::sleep(SOON).await;
            let answer = newest.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let line = format!(
                "asking {addresses} to let this node in ({answer}): it asks again for {seconds} s, \
                 then it {then}"
            );
            let _ = notices.try_send(Notice::Warning(line));
        });
        Self { answer, _telling: telling }
    }

    /// Takes note of an answer that lets this node in not yet.
    pub(super) fn not_yet(&self, why: String) {
        *self.answer.lock().unwrap_or_else(PoisonError::into_inner) = why;
    }

    /// The newest answer.
    pub(super) fn answer(&self) -> String {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
