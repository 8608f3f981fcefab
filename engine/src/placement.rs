//! Which elements of the flat buffer a rank holds, gathers and sums.
//!
//! The model is cut by pipeline stages into runs of units, and those into
//! *buckets*, which are gathered and reduced in one go: a whole run where every
//! rank computes with all weights, a single unit where weights or gradients are
//! cut as they are used. A shard is one cut of every bucket of its stage, so
//! that it is a list of ranges: a [`Portion`].

use std::{ops::Range, sync::Arc};

use job::{
    mesh::{Parallel, split_layers},
    plan::Shard,
    spec::Sharding,
};

use crate::layout::Layout;

/// The rules by which the flat buffer is cut; they depend on no rank.
#[derive(Clone, Debug)]
pub(crate) struct Placement {
    layout: Arc<Layout>,
    /// Elements of each unit: embedding, blocks, head.
    units: Vec<Range<usize>>,
    sharding: Sharding,
    chunks: u32,
    /// What embedding and head weigh, in blocks.
    ends: (u32, u32),
}

/// Disjoint ranges of the flat buffer in order, and their places when packed one
/// behind the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Portion {
    ranges: Vec<Range<usize>>,
    starts: Vec<usize>,
    length: usize,
}

impl Placement {
    pub(crate) fn new(
        layout: Arc<Layout>,
        units: Vec<Range<usize>>,
        sharding: Sharding,
        parallel: &Parallel,
        ends: (u32, u32),
    ) -> Self {
        Self { layout, units, sharding, chunks: parallel.chunks(), ends }
    }

    /// Chunks of the model on a rank of a pipeline of so many stages.
    pub(crate) fn chunks(&self, stages: u32) -> u32 {
        if stages == 1 { 1 } else { self.chunks }
    }

    /// The units of part `chunk · stages + stage`.
    pub(crate) fn part(&self, stages: u32, stage: u32, chunk: u32) -> Range<usize> {
        let parts = stages * self.chunks(stages);
        let part = (chunk * stages + stage) as usize;
        let blocks = (self.units.len() - 2) as u32;
        let split = split_layers(blocks, parts, self.ends.0, self.ends.1);
        let own = &split[part];
        let start = if part == 0 { 0 } else { own.start as usize + 1 };
        let end = if part + 1 == split.len() { self.units.len() } else { own.end as usize + 1 };
        start..end
    }

    /// What a stage gathers and reduces in one go.
    pub(crate) fn buckets(&self, stages: u32, stage: u32) -> Vec<Range<usize>> {
        let parts = (0..self.chunks(stages)).map(|chunk| self.part(stages, stage, chunk));
        let elements = |units: Range<usize>| {
            let end = units.end.checked_sub(1).map_or(0, |last| self.units[last].end);
            self.units.get(units.start).map_or(end, |first| first.start)..end
        };
        match self.sharding.cuts_gradients() {
            true => parts.flatten().map(|unit| self.units[unit].clone()).collect(),
            false => parts.map(elements).collect(),
        }
    }

    /// The elements of a shard: its cut of each bucket of its stage.
    ///
    /// # Panics
    /// When there is no such shard.
    pub(crate) fn portion(&self, shard: Shard) -> Portion {
        let of = (shard.of / shard.stages) as usize;
        let (stage, cut) = (shard.index as usize / of, shard.index as usize % of);
        let buckets = self.buckets(shard.stages, stage as u32);
        Portion::new(buckets.iter().map(|bucket| self.layout.cut(bucket, of)[cut].clone()))
    }

    /// The `index`-th of `of` cuts of every range of a portion: the part for which
    /// one of its holders speaks.
    pub(crate) fn cut(&self, portion: &Portion, index: u32, of: u32) -> Portion {
        let cut =
            |range: &Range<usize>| self.layout.cut(range, of as usize)[index as usize].clone();
        Portion::new(portion.ranges.iter().map(cut))
    }

    /// The elements of a unit.
    pub(crate) fn unit(&self, unit: usize) -> Range<usize> {
        self.units[unit].clone()
    }

    /// Number of units.
    pub(crate) fn units(&self) -> usize {
        self.units.len()
    }
}

impl Portion {
    pub(crate) fn new(ranges: impl IntoIterator<Item = Range<usize>>) -> Self {
        let ranges: Vec<_> = ranges.into_iter().collect();
        let mut length = 0;
        let place = |range: &Range<usize>| {
            length += range.len();
            length - range.len()
        };
        let starts = ranges.iter().map(place).collect();
        Self { ranges, starts, length }
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// The ranges in order; some may be empty.
    pub(crate) fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// Each range, and where it lies when packed.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let place =
            |(range, start): (&Range<usize>, &usize)| (range.clone(), *start..start + range.len());
        self.ranges.iter().zip(&self.starts).map(place)
    }

    /// Where the packed elements lie that are also in `range`.
    pub(crate) fn within(
        &self,
        range: &Range<usize>,
    ) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let range = range.clone();
        self.pieces().filter_map(move |(own, packed)| {
            let both = own.start.max(range.start)..own.end.min(range.end);
            let start = packed.start + both.start.checked_sub(own.start)?;
            (both.start < both.end).then(|| (both.clone(), start..start + both.len()))
        })
    }

    /// Where the whole of `range` lies when packed.
    pub(crate) fn packed(&self, range: &Range<usize>) -> Option<Range<usize>> {
        self.within(range).find(|(both, _)| both == range).map(|(_, packed)| packed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Declaration;

    fn placement(sharding: Sharding, chunks: u32) -> Placement {
        let sizes = [900, 70, 70, 70, 70, 70, 70, 500];
        let declare = |(i, size): (usize, &usize)| Declaration {
            name: format!("p{i}"),
            shape: vec![*size, 16],
            decay: true,
        };
        let layout = Layout::new(sizes.iter().enumerate().map(declare)).expect("distinct names");
        let units = layout.params().iter().map(|param| param.range()).collect();
        let parallel = Parallel { chunks, layers: 6, ..Default::default() };
        Placement::new(Arc::new(layout), units, sharding, &parallel, (1, 1))
    }

    /// The shards of every layout are the whole, once.
    #[track_caller]
    fn check(sharding: Sharding, chunks: u32, stages: u32, cuts: u32) {
        let placement = placement(sharding, chunks);
        let of = stages * cuts;
        let mut ranges: Vec<_> = (0..of)
            .flat_map(|index| placement.portion(Shard { index, of, stages }).ranges().to_vec())
            .filter(|range| !range.is_empty())
            .collect();
        ranges.sort_by_key(|range| range.start);
        assert_eq!(ranges.first().map(|range| range.start), Some(0));
        assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start), "{ranges:?}");
        assert_eq!(ranges.last().map(|range| range.end), Some(placement.layout.elements()));
        for index in 0..of {
            let portion = placement.portion(Shard { index, of, stages });
            for range in portion.ranges() {
                assert!(placement.layout.blocks_of(range).len() <= range.len());
            }
            let thirds = (0..3).map(|cut| placement.cut(&portion, cut, 3).len()).sum::<usize>();
            assert_eq!(thirds, portion.len());
        }
    }

    #[test]
    fn the_shards_of_every_mesh_are_the_whole_once() {
        let all = [Sharding::Replicated, Sharding::Zero1, Sharding::Zero2, Sharding::Zero3];
        for sharding in all {
            for (stages, chunks) in [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (4, 1), (6, 1)] {
                for cuts in [1, 2, 3, 7] {
                    check(sharding, chunks, stages, cuts);
                }
            }
        }
    }

    #[test]
    fn packed_places_follow_the_ranges() {
        let portion = Portion::new([10..20, 30..30, 40..45]);
        assert_eq!(portion.len(), 15);
        let within = |range| portion.within(&range).collect::<Vec<_>>();
        assert_eq!(within(15..42), [(15..20, 5..10), (40..42, 10..12)]);
        assert_eq!(within(0..5), []);
        assert_eq!(portion.packed(&(41..45)), Some(11..15));
        assert_eq!(portion.packed(&(19..21)), None);
    }
}
