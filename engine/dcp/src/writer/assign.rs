//! Which rank writes what several ranks have: every box once, and every rank
//! about as many bytes as the others.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use crate::region::Region;

/// A box of a tensor, or an object (no region), that a rank could write.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Offer {
    /// The key.
    pub fqn: String,
    /// The box; `None` for an object.
    pub region: Option<Region>,
    /// Bytes to write.
    pub bytes: u64,
}

/// Chooses a writer for every box among the ranks that offer it. What only one
/// rank has is counted first; the others go, largest first, to the rank with
/// the fewest bytes so far, the lowest of equals. All ranks that know all
/// offers come to the same result. Returns per rank the positions of the offers
/// that it is to write, in their order.
///
/// ```
/// use dcp::writer::{Offer, assign};
///
/// let offer = |fqn: &str, bytes| Offer { fqn: fqn.into(), region: None, bytes };
/// let replica = vec![offer("a", 30), offer("b", 20), offer("c", 20)];
/// assert_eq!(assign(&[replica.clone(), replica]), [vec![0], vec![1, 2]]);
/// ```
#[must_use]
pub fn assign(offers: &[Vec<Offer>]) -> Vec<Vec<usize>> {
    // Who offers what, in order of first appearance.
    let mut number = HashMap::new();
    let mut boxes: Vec<(u64, Vec<(usize, usize)>)> = Vec::new();
    for (rank, offers) in offers.iter().enumerate() {
        for (at, offer) in offers.iter().enumerate() {
            let n = *number.entry((&offer.fqn, &offer.region)).or_insert(boxes.len());
            if n == boxes.len() {
                boxes.push((offer.bytes, Vec::new()));
            }
            // A rank that offers a box twice writes it once.
            if boxes[n].1.last().is_none_or(|&(last, _)| last != rank) {
                boxes[n].1.push((rank, at));
            }
        }
    }
    let mut load = vec![0u64; offers.len()];
    let mut chosen = vec![Vec::new(); offers.len()];
    let (single, mut shared): (Vec<_>, Vec<_>) =
        boxes.into_iter().partition(|(_, holders)| holders.len() == 1);
    shared.sort_by_key(|(bytes, _)| Reverse(*bytes));
    let mut by_holders = HashMap::new();
    for (bytes, holders) in single.into_iter().chain(shared) {
        let pick = match holders.as_slice() {
            [only] => Some(*only),
            many => lightest(&mut by_holders, &load, many),
        };
        let Some((rank, at)) = pick else { continue };
        load[rank] += bytes;
        chosen[rank].push(at);
    }
    chosen.iter_mut().for_each(|chosen| chosen.sort_unstable());
    chosen
}

/// Ranks by load, the lightest on top.
type Heap = BinaryHeap<Reverse<(u64, usize)>>;

/// The holder with the least load. Groups of replicas are few and large: each
/// keeps a heap, whose entries are brought up to date when they come up.
fn lightest(
    groups: &mut HashMap<Vec<usize>, Heap>,
    load: &[u64],
    holders: &[(usize, usize)],
) -> Option<(usize, usize)> {
    let ranks: Vec<usize> = holders.iter().map(|holder| holder.0).collect();
    let heap = groups
        .entry(ranks)
        .or_insert_with(|| holders.iter().map(|&(rank, _)| Reverse((load[rank], rank))).collect());
    loop {
        let mut top = heap.peek_mut()?;
        let Reverse((known, rank)) = *top;
        if known == load[rank] {
            return holders.iter().find(|holder| holder.0 == rank).copied();
        }
        *top = Reverse((load[rank], rank));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(fqn: &str, bytes: u64) -> Offer {
        Offer { fqn: fqn.into(), region: None, bytes }
    }

    #[track_caller]
    fn check(offers: &[&[Offer]], expected: &[&[usize]]) {
        let offers: Vec<Vec<Offer>> = offers.iter().map(|offers| offers.to_vec()).collect();
        assert_eq!(assign(&offers), expected);
    }

    #[test]
    fn every_box_has_one_writer_and_ranks_are_even() {
        check(&[], &[]);
        check(&[&[offer("a", 1)], &[]], &[&[0], &[]]);
        check(&[&[offer("a", 1), offer("a", 1)]], &[&[0]]);
        let (a, b, c) = (offer("a", 8), offer("b", 8), offer("own", 9));
        // The rank with something of its own gets less of what both have.
        check(&[&[a.clone(), b.clone(), c], &[a.clone(), b.clone()]], &[&[2], &[0, 1]]);
        let both = [a.clone(), b.clone()];
        check(&[std::slice::from_ref(&b), &both, std::slice::from_ref(&a)], &[&[0], &[0], &[]]);
    }

    #[test]
    fn many_replicas_share_evenly() {
        let all: Vec<Offer> = (0..10_000).map(|n| offer(&n.to_string(), 1 + n % 97)).collect();
        let offers = vec![all.clone(); 8];
        let started = std::time::Instant::now();
        let chosen = assign(&offers);
        println!("80,000 offers assigned in {:?}", started.elapsed());
        let load = |rank: &Vec<usize>| rank.iter().map(|&at| all[at].bytes).sum::<u64>();
        let loads: Vec<u64> = chosen.iter().map(load).collect();
        let (low, high) = (loads.iter().min().unwrap_or(&0), loads.iter().max().unwrap_or(&0));
        assert!(high - low <= 97, "{loads:?}");
        assert_eq!(chosen.iter().map(Vec::len).sum::<usize>(), all.len());
    }
}
