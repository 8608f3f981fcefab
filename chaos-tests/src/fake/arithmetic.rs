//! State, gradient and update of the fake trainer: everything is a function of
//! (seed, step, micro-batch, element), never of placement (TRAJ-1).

use super::Point;
use job::shares::TreeNode;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use transport::collective::tree;

/// A SHA-256.
pub(super) type Hash = [u8; 32];

/// Weights.
pub(super) const SIZE: usize = 4096;

/// The training state after `step` steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Steps applied.
    pub step: u64,
    /// The weights.
    pub weights: Vec<f32>,
    /// First moments of the gradient.
    pub moments: Vec<f32>,
    /// Chain over the losses: SHA-256 of the chain before and the loss.
    pub losses: Hash,
}

impl State {
    /// Learning rate.
    pub(super) const RATE: f32 = 0.05;
    const MOMENTUM: f32 = 0.9;

    pub(super) fn initial(seed: u64) -> Self {
        let weights = (0..SIZE as u64).map(|i| noise([seed, u64::MAX, 0, i])).collect();
        Self { step: 0, weights, moments: vec![0.0; SIZE], losses: [0; 32] }
    }

    /// Gradient of one micro-batch, and behind it its loss.
    pub(super) fn gradient(&self, seed: u64, micro_batch: u32) -> Vec<f32> {
        let mut loss = 0.0;
        let mut leaf: Vec<f32> = self
            .weights
            .iter()
            .enumerate()
            .map(|(i, &weight)| {
                let target = noise([seed, self.step, u64::from(micro_batch), i as u64]);
                let away = weight - target;
                loss += away * away;
                away
            })
            .collect();
        leaf.push(loss / SIZE as f32);
        leaf
    }

    /// Goes on by one step. Returns the norm of the mean gradient.
    pub(super) fn apply(&mut self, sum: &Sum, micro_batches: u32) -> f32 {
        let scale = 1.0 / micro_batches as f32;
        let mut squares = 0.0;
        for ((weight, moment), gradient) in
            self.weights.iter_mut().zip(&mut self.moments).zip(&sum.0)
        {
            let gradient = gradient * scale;
            squares += gradient * gradient;
            *moment = Self::MOMENTUM * *moment + gradient;
            *weight -= Self::RATE * *moment;
        }
        Point::Applying.pass();
        let mut chain = Sha256::new();
        chain.update(self.losses);
        chain.update(sum.loss(micro_batches).to_le_bytes());
        self.losses = chain.finalize().into();
        self.step += 1;
        squares.sqrt()
    }

    /// Length of its encoding: it is the same for every state.
    pub(super) fn encoded_len() -> usize {
        job::codec::encode(&Self::initial(0)).len()
    }

    /// Little-endian bytes.
    pub(super) fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }
}

/// The gradient and the loss, summed over all micro-batches.
#[derive(Clone, Debug)]
pub(super) struct Sum(Vec<f32>);

impl Sum {
    pub(super) fn empty() -> Self {
        Self(vec![0.0; SIZE + 1])
    }

    pub(super) fn as_mut(&mut self) -> &mut [f32] {
        &mut self.0
    }

    pub(super) fn digest(&self) -> Hash {
        hash(&State::bytes(&self.0))
    }

    pub(super) fn loss(&self, micro_batches: u32) -> f32 {
        self.0[SIZE] / micro_batches as f32
    }
}

pub(super) fn hash(bytes: &[u8]) -> Hash {
    Sha256::digest(bytes).into()
}

/// The sum below a node of the tree; `leaves[i]` belongs to micro-batch `first + i`.
pub(super) fn partial(node: TreeNode, total: u32, first: u32, leaves: &[Vec<f32>]) -> Vec<f32> {
    if node.level == 0 {
        return leaves[(node.index - first) as usize].clone();
    }
    let child = |index| TreeNode { level: node.level - 1, index };
    let mut sum = partial(child(2 * node.index), total, first, leaves);
    let right = child(2 * node.index + 1);
    if !right.range(total).is_empty() {
        tree::add_assign(&mut sum, &partial(right, total, first, leaves));
    }
    sum
}

/// A number in [-1, 1) by a counter: splitmix64 over its parts.
fn noise(counter: [u64; 4]) -> f32 {
    let mixed = counter.into_iter().fold(0_u64, |state, part| {
        let mut z = (state ^ part).wrapping_add(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    });
    // 24 bits: exact in f32.
    (mixed >> 40) as f32 / (1 << 23) as f32 - 1.0
}

#[cfg(test)]
mod tests {
    use job::shares::Shares;

    use super::*;

    #[track_caller]
    fn check(total: u32, ranks: u32) {
        let state = State::initial(7);
        let leaves: Vec<_> = (0..total).map(|m| state.gradient(7, m)).collect();
        let shares = Shares::even(total, ranks);
        let mut pieces = Vec::new();
        for rank in 0..ranks as usize {
            let own = shares.of(rank);
            let range = own.start as usize..own.end as usize;
            for node in shares.pieces(rank) {
                pieces.push((node, partial(node, total, own.start, &leaves[range.clone()])));
            }
        }
        let pieces: Vec<_> = pieces.iter().map(|(node, sum)| (*node, sum.as_slice())).collect();
        let mut whole = Sum::empty();
        tree::combine(total, &pieces, whole.as_mut()).expect("the pieces cover everything");
        let mut one = Sum::empty();
        let leaves: Vec<_> = (0..total)
            .map(|m| (TreeNode { level: 0, index: m }, leaves[m as usize].as_slice()))
            .collect();
        tree::combine(total, &leaves, one.as_mut()).expect("leaves cover everything");
        assert_eq!(whole.digest(), one.digest(), "{total} micro-batches on {ranks} ranks");
    }

    #[test]
    fn traj_1_the_sum_depends_on_no_placement() {
        for (total, ranks) in [(1, 1), (8, 1), (8, 3), (8, 4), (7, 5), (16, 7), (3, 5)] {
            check(total, ranks);
        }
    }
}
