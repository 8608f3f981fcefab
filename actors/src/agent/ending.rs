//! How an agent ends: workers first, then whoever still needs to hear the news.

use std::time::Duration;

use job::{command::LEFT, message::ToWorker, state::Node};
use ractor::ActorRef;

use super::{
    Ended, Outcome, Wish,
    node_agent::{Message, State},
};
use crate::clock;

/// How and until when an agent ends.
pub(super) struct Ending {
    /// None to go on in a newer era.
    outcome: Option<Outcome>,
    speaks: bool,
    kill_at: Duration,
    give_up_at: Duration,
}

impl State {
    /// The group goes on without this process start.
    pub(super) fn gone(&mut self, myself: &ActorRef<Message>, cause: String, refused: bool) {
        let outcome = match (refused, self.leaving || cause == LEFT) {
            (true, _) => Outcome::Refused(cause),
            (false, true) => Outcome::Left,
            (false, false) => Outcome::Fenced(cause),
        };
        self.end(myself, outcome);
    }

    /// Whether a newer incarnation than any of this process start has the name:
    /// this one had an incarnation when its workers started.
    pub(super) fn was_admitted(&self, other: &Node) -> bool {
        other.boot != self.boot && self.slots.workers().next().is_some()
    }

    pub(super) fn wish(&mut self, myself: &ActorRef<Message>, wish: Wish) {
        match wish {
            Wish::EndNow => self.end(myself, Outcome::Interrupted),
            Wish::StopJob => self.stop_the_job(myself),
            // Who is in no group yet has nothing to hand over.
            Wish::Leave if self.myself().is_none() => self.end(myself, Outcome::Left),
            Wish::Leave => self.leaving = true,
        }
        self.beat(myself);
    }

    pub(super) fn stop_the_job(&mut self, myself: &ActorRef<Message>) {
        self.stop_job = true;
        self.beat(myself);
    }

    /// Ends workers, lets the others hear what is to be heard, and then ends.
    pub(super) fn end(&mut self, _: &ActorRef<Message>, outcome: Outcome) {
        self.begin_end(Some(outcome));
    }

    /// Ends in this era, to begin again in a newer one.
    pub(super) fn leave_era(&mut self) {
        self.begin_end(None);
    }

    fn begin_end(&mut self, outcome: Option<Outcome>) {
        if self.ending.is_some() {
            return;
        }
        let now = clock::now();
        let reap = match outcome {
            None | Some(Outcome::Interrupted | Outcome::Fenced(_) | Outcome::Refused(_)) => {
                Duration::ZERO
            }
            _ => self.options.timeouts.reap,
        };
        let speaks = self.speaks();
        for worker in self.slots.workers() {
            match reap {
                Duration::ZERO => worker.handle.kill(),
                _ => worker.handle.send(ToWorker::End),
            }
        }
        self.ending = Some(Ending {
            outcome,
            speaks,
            kill_at: now + reap,
            give_up_at: now + reap + self.options.timeouts.budget,
        });
        self.finish_ending();
    }

    /// Ends once no worker is left and, for a leader, the others have heard.
    pub(super) fn finish_ending(&mut self) {
        let Some(ending) = &self.ending else { return };
        let now = clock::now();
        let working = self.slots.workers().next().is_some();
        if working && now >= ending.kill_at {
            for worker in self.slots.workers() {
                worker.handle.kill();
            }
        }
        let needed = match ending.outcome {
            // Who leaves a running job leads nothing any more: until it is gone, nobody
            // commits a checkpoint or answers a death (LIVE-1).
            None
            | Some(
                Outcome::Interrupted | Outcome::Fenced(_) | Outcome::Refused(_) | Outcome::Left,
            ) => false,
            // A leader that goes first would leave the others without the news.
            _ => self.leads() && !self.linked.is_empty(),
        };
        if (working || needed) && now < ending.give_up_at {
            return;
        }
        let Some(ending) = self.ending.take() else { return };
        if let Some(ended) = self.ended.take() {
            let state = (self.job.applied > 0).then(|| self.shared_state());
            let speaks = ending.speaks;
            let over = ending.outcome.map(|outcome| Ended { outcome, state, speaks });
            let _ = ended.send(over);
        }
    }

    /// Whether this agent is on its way out.
    pub(super) fn is_ending(&self) -> bool {
        self.ending.is_some() || self.ended.is_none()
    }
}
