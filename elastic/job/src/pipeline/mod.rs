//! Pipeline schedules as data: what each rank of a pipeline computes, and when.
//!
//! A *part* is a consecutive stretch of the model; part `chunk · stages + rank`
//! lies on `rank`. Every micro-batch goes forward through all parts in order and
//! backward the other way round. A [`Timeline`] is made by playing a simple rule
//! on a clock in which a forward pass takes one unit and a backward pass two; the
//! engine follows each rank's order and ignores the times, `elastic plan` prints
//! them. No schedule changes a bit of the result (TRAJ-1): backward passes of a
//! part come in the order of the micro-batches.

mod picture;

use serde::{Deserialize, Serialize};

/// A rule by which the ranks of a pipeline choose their next action.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Schedule {
    /// All forward, then all backward (arXiv 1811.06965).
    GPipe,
    /// One forward, one backward: as few activations as stages (arXiv 2006.09503).
    #[default]
    OneForwardOneBackward,
    /// The same over several chunks of the model on each rank, which shortens
    /// the bubble (arXiv 2104.04473).
    Interleaved,
    /// One forward, one backward, and the gradients of weights fill the bubble
    /// (ZB-H1 of arXiv 2401.10241).
    ZeroBubble,
}

/// A kind of pass through a part of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Forward.
    Forward,
    /// Backward, of the input and of the weights.
    Backward,
    /// Backward of the input alone.
    Input,
    /// Backward of the weights alone, later.
    Weight,
}

/// One action of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Action {
    /// What is computed.
    pub pass: Pass,
    /// Which of the rank's chunks of the model.
    pub chunk: u32,
    /// Which micro-batch of the pipeline, counted from 0.
    pub micro_batch: u32,
}

/// An action and its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// When it begins, in units of a forward pass through one part.
    pub start: u32,
    /// The action.
    pub action: Action,
}

/// What all ranks of a pipeline do in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeline {
    /// Ranks.
    pub stages: u32,
    /// Chunks of the model on each.
    pub chunks: u32,
    /// Micro-batches.
    pub micro_batches: u32,
    /// Each rank's actions in order.
    pub ranks: Vec<Vec<Slot>>,
}

impl Pass {
    /// Units of time: a backward pass computes twice what a forward pass does.
    #[must_use]
    pub fn length(self) -> u32 {
        match self {
            Self::Backward => 2,
            Self::Forward | Self::Input | Self::Weight => 1,
        }
    }
}

impl Action {
    /// When the action ends that begins at `start`.
    fn end(self, start: u32) -> u32 {
        start + self.pass.length()
    }
}

impl Schedule {
    /// Chunks of each rank: only the interleaved schedule has more than one.
    #[must_use]
    pub fn chunks(self) -> u32 {
        if self == Self::Interleaved { 2 } else { 1 }
    }

    /// The timeline over `stages` ranks with `chunks` chunks each.
    ///
    /// # Panics
    /// When `stages` or `chunks` is zero.
    #[must_use]
    pub fn timeline(self, stages: u32, chunks: u32, micro_batches: u32) -> Timeline {
        assert!(stages > 0 && chunks > 0, "a pipeline has a stage and a chunk");
        Player::new(self, stages, chunks, micro_batches).play()
    }

    /// The share of the time in which ranks wait, in closed form: (p−1)/(m+p−1),
    /// with v·m instead of m over v chunks; of a zero bubble none is known.
    #[must_use]
    pub fn bubble(self, stages: u32, chunks: u32, micro_batches: u32) -> Option<f64> {
        let (waits, work) = (f64::from(stages) - 1.0, f64::from(micro_batches * chunks));
        (self != Self::ZeroBubble).then(|| waits / (work + waits))
    }
}

impl Timeline {
    /// Units from the first action to the end of the last.
    #[must_use]
    pub fn span(&self) -> u32 {
        let ends = self.ranks.iter().filter_map(|slots| slots.last());
        ends.map(|slot| slot.action.end(slot.start)).max().unwrap_or(0)
    }

    /// The share of the span in which ranks wait.
    #[must_use]
    pub fn bubble(&self) -> f64 {
        let busy: u32 = self.ranks.iter().flatten().map(|slot| slot.action.pass.length()).sum();
        let all = f64::from(self.span()) * f64::from(self.stages);
        if all == 0.0 { 0.0 } else { 1.0 - f64::from(busy) / all }
    }

    /// Most micro-batches of whose activations a rank keeps some.
    #[must_use]
    pub fn kept(&self, rank: u32) -> u32 {
        let (mut kept, mut most) = (0_u32, 0);
        for slot in &self.ranks[rank as usize] {
            match slot.action.pass {
                Pass::Forward => kept += 1,
                Pass::Backward | Pass::Weight => kept = kept.saturating_sub(1),
                Pass::Input => {}
            }
            most = most.max(kept);
        }
        most
    }
}

/// Plays a rule until all is computed.
struct Player {
    schedule: Schedule,
    stages: u32,
    chunks: u32,
    micro_batches: u32,
    /// When each pass ends that has begun: by part and micro-batch.
    forward: Vec<Option<u32>>,
    backward: Vec<Option<u32>>,
    ranks: Vec<Rank>,
}

/// One rank while playing.
#[derive(Default)]
struct Rank {
    free: u32,
    /// Passes begun, as positions in the fixed orders.
    forward: u32,
    backward: u32,
    weight: u32,
    slots: Vec<Slot>,
}

impl Player {
    fn new(schedule: Schedule, stages: u32, chunks: u32, micro_batches: u32) -> Self {
        let cells = (stages * chunks * micro_batches) as usize;
        let ranks = (0..stages).map(|_| Rank::default()).collect();
        let (forward, backward) = (vec![None; cells], vec![None; cells]);
        Self { schedule, stages, chunks, micro_batches, forward, backward, ranks }
    }

    fn play(mut self) -> Timeline {
        let all = self.chunks * self.micro_batches;
        let done = |rank: &Rank, split: bool| {
            rank.forward == all && rank.backward == all && (!split || rank.weight == all)
        };
        let split = self.schedule == Schedule::ZeroBubble;
        let mut now = 0;
        while !self.ranks.iter().all(|rank| done(rank, split)) {
            // Decisions of one moment see only what ended before it.
            for rank in 0..self.stages {
                if self.ranks[rank as usize].free <= now
                    && let Some(action) = self.choose(rank, now)
                {
                    self.begin(rank, action, now);
                }
            }
            now += 1;
        }
        let (stages, chunks, micro_batches) = (self.stages, self.chunks, self.micro_batches);
        let ranks = self.ranks.into_iter().map(|rank| rank.slots).collect();
        Timeline { stages, chunks, micro_batches, ranks }
    }

    /// Position n of the order in which a rank goes through its chunks: groups of
    /// as many micro-batches as there are stages, chunk by chunk.
    fn nth(&self, n: u32, backward: bool) -> (u32, u32) {
        let full = self.stages * self.chunks;
        let (group, within) = (n / full, n % full);
        let size = self.stages.min(self.micro_batches - group * self.stages);
        let (chunk, index) = (within / size, within % size);
        let chunk = if backward { self.chunks - 1 - chunk } else { chunk };
        (chunk, group * self.stages + index)
    }

    fn choose(&self, rank: u32, now: u32) -> Option<Action> {
        let player = &self.ranks[rank as usize];
        let (forward, backward) = (self.forward(rank, now), self.backward(rank, now));
        if self.schedule == Schedule::ZeroBubble {
            let weight = (player.weight < player.backward).then(|| {
                let (chunk, micro_batch) = self.nth(player.weight, true);
                Action { pass: Pass::Weight, chunk, micro_batch }
            });
            return backward.or(forward).or(weight);
        }
        // Forward first while there is room: the stages behind wait for it.
        forward.or(backward)
    }

    /// The next backward pass of a rank, if what it needs is there.
    fn backward(&self, rank: u32, now: u32) -> Option<Action> {
        let player = &self.ranks[rank as usize];
        let all = self.chunks * self.micro_batches;
        let held_back = self.schedule == Schedule::GPipe && player.forward < all;
        if player.backward == all || held_back {
            return None;
        }
        let (chunk, micro_batch) = self.nth(player.backward, true);
        let (part, last) = (chunk * self.stages + rank, self.stages * self.chunks - 1);
        let own = ended(self.forward[self.cell(part, micro_batch)], now);
        let behind = part == last || ended(self.backward[self.cell(part + 1, micro_batch)], now);
        let split = self.schedule == Schedule::ZeroBubble;
        let pass = if split { Pass::Input } else { Pass::Backward };
        (own && behind).then_some(Action { pass, chunk, micro_batch })
    }

    /// The next forward pass of a rank, if what it needs and room are there.
    fn forward(&self, rank: u32, now: u32) -> Option<Action> {
        let player = &self.ranks[rank as usize];
        let split = self.schedule == Schedule::ZeroBubble;
        let finished = if split { player.weight } else { player.backward };
        let all = self.chunks * self.micro_batches;
        if player.forward == all || player.forward - finished >= self.limit(rank) {
            return None;
        }
        let (chunk, micro_batch) = self.nth(player.forward, false);
        let part = chunk * self.stages + rank;
        let ready = part == 0 || ended(self.forward[self.cell(part - 1, micro_batch)], now);
        ready.then_some(Action { pass: Pass::Forward, chunk, micro_batch })
    }

    /// Most forward passes whose activations a rank may keep.
    fn limit(&self, rank: u32) -> u32 {
        let behind = self.stages - 1 - rank;
        match self.schedule {
            Schedule::GPipe => u32::MAX,
            Schedule::OneForwardOneBackward | Schedule::ZeroBubble => behind + 1,
            Schedule::Interleaved => 2 * behind + (self.chunks - 1) * self.stages + 1,
        }
    }

    fn begin(&mut self, rank: u32, action: Action, now: u32) {
        let part = action.chunk * self.stages + rank;
        let (cell, end) = (self.cell(part, action.micro_batch), action.end(now));
        let player = &mut self.ranks[rank as usize];
        match action.pass {
            Pass::Forward => {
                self.forward[cell] = Some(end);
                player.forward += 1;
            }
            Pass::Backward | Pass::Input => {
                self.backward[cell] = Some(end);
                player.backward += 1;
            }
            Pass::Weight => player.weight += 1,
        }
        player.free = end;
        player.slots.push(Slot { start: now, action });
    }

    fn cell(&self, part: u32, micro_batch: u32) -> usize {
        (part * self.micro_batches + micro_batch) as usize
    }
}

fn ended(end: Option<u32>, now: u32) -> bool {
    end.is_some_and(|end| end <= now)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    const ALL: [Schedule; 4] = [
        Schedule::GPipe,
        Schedule::OneForwardOneBackward,
        Schedule::Interleaved,
        Schedule::ZeroBubble,
    ];

    /// Everything is computed once, after what it needs, and the backward passes
    /// of a part come in the order of the micro-batches (TRAJ-1).
    #[track_caller]
    fn check(schedule: Schedule, stages: u32, chunks: u32, micro_batches: u32) -> Timeline {
        let timeline = schedule.timeline(stages, chunks, micro_batches);
        let mut ends = HashMap::new();
        for (rank, slots) in timeline.ranks.iter().enumerate() {
            let mut free = 0;
            let mut last: HashMap<(Pass, u32), u32> = HashMap::new();
            for Slot { start, action } in slots {
                assert!(*start >= free, "rank {rank} does two things at once");
                free = action.end(*start);
                let part = action.chunk * stages + rank as u32;
                let key = (action.pass, part, action.micro_batch);
                assert_eq!(ends.insert(key, free), None, "{action:?} twice");
                let before = last.insert((action.pass, action.chunk), action.micro_batch);
                assert!(before.is_none_or(|before| before < action.micro_batch), "{slots:?}");
            }
        }
        let backward = if schedule == Schedule::ZeroBubble { Pass::Input } else { Pass::Backward };
        let starts = |rank: usize| &timeline.ranks[rank];
        for rank in 0..stages as usize {
            for Slot { start, action } in starts(rank) {
                let part = action.chunk * stages + rank as u32;
                let need = |pass, part| {
                    let end = ends.get(&(pass, part, action.micro_batch));
                    assert!(end.is_some_and(|end| end <= start), "{action:?} on {rank} too early");
                };
                match action.pass {
                    Pass::Forward if part > 0 => need(Pass::Forward, part - 1),
                    Pass::Forward => {}
                    Pass::Weight => need(Pass::Input, part),
                    Pass::Backward | Pass::Input => {
                        need(Pass::Forward, part);
                        if part + 1 < stages * chunks {
                            need(backward, part + 1);
                        }
                    }
                }
            }
        }
        let kinds = if schedule == Schedule::ZeroBubble { 3 } else { 2 };
        assert_eq!(ends.len() as u32, kinds * stages * chunks * micro_batches);
        timeline
    }

    #[test]
    fn every_schedule_computes_everything_once_in_order() {
        for stages in 1..=5 {
            for micro_batches in 0..=11 {
                for schedule in ALL {
                    check(schedule, stages, 1, micro_batches);
                }
                for chunks in 2..=3 {
                    check(Schedule::Interleaved, stages, chunks, micro_batches);
                }
            }
        }
    }

    #[test]
    fn bubbles_are_those_of_the_closed_form() {
        for stages in 1..=8 {
            for micro_batches in stages..=3 * stages {
                for schedule in [Schedule::GPipe, Schedule::OneForwardOneBackward] {
                    let timeline = schedule.timeline(stages, 1, micro_batches);
                    let closed = schedule.bubble(stages, 1, micro_batches).expect("known");
                    assert!((timeline.bubble() - closed).abs() < 1e-12, "{stages} {micro_batches}");
                }
            }
        }
        for (stages, micro_batches) in [(2, 4), (4, 8), (4, 16)] {
            let timeline = Schedule::Interleaved.timeline(stages, 2, micro_batches);
            let closed = Schedule::Interleaved.bubble(stages, 2, micro_batches).expect("known");
            assert!((timeline.bubble() - closed).abs() < 1e-12, "{stages} {micro_batches}");
        }
    }

    #[test]
    fn memory_and_bubbles_rank_as_published() {
        let timeline = |schedule: Schedule| schedule.timeline(4, schedule.chunks(), 8);
        let [gpipe, plain, interleaved, zero] = ALL.map(timeline);
        assert_eq!((gpipe.kept(0), plain.kept(0), zero.kept(0)), (8, 4, 4));
        assert!(interleaved.bubble() < plain.bubble(), "more chunks, less waiting");
        assert!(zero.bubble() < plain.bubble(), "weight gradients fill the bubble");
        assert_eq!(gpipe.bubble(), plain.bubble());
    }
}
