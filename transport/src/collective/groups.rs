//! How the ranks of a mesh are divided into groups.

use super::Error;

/// A division of all ranks: each is in exactly one group, and its rank there is
/// its place in the list.
pub type Partition = Vec<Vec<usize>>;

/// The groups of ranks that differ only in the coordinates of `axes`, of a mesh
/// of this shape whose last axis varies fastest. Groups and members are in rank
/// order. For a mesh (pp, dp, tp), `groups(&shape, &[1])` are the data-parallel
/// groups and `groups(&shape, &[0, 1])` those of pp × dp.
#[must_use]
pub fn groups(shape: &[usize], axes: &[usize]) -> Partition {
    let size: usize = shape.iter().product();
    let mut found: Vec<(usize, Vec<usize>)> = Vec::new();
    for rank in 0..size {
        let (mut rest, mut stride, mut key) = (rank, 1, 0);
        for (axis, length) in shape.iter().enumerate().rev() {
            if !axes.contains(&axis) {
                key += rest % length * stride;
            }
            rest /= length;
            stride *= length;
        }
        match found.iter_mut().find(|(of, _)| *of == key) {
            Some((_, group)) => group.push(rank),
            None => found.push((key, vec![rank])),
        }
    }
    found.into_iter().map(|(_, group)| group).collect()
}

/// The group of a rank and its place there, once every rank is in one group.
pub(super) fn place(
    partition: &Partition,
    rank: usize,
    size: usize,
) -> Result<(&[usize], usize), Error> {
    let mut seen = vec![false; size];
    for &member in partition.iter().flatten() {
        match seen.get_mut(member) {
            Some(seen) if !*seen => *seen = true,
            Some(_) => return Err(Error::refused(format!("rank {member} is in two groups"))),
            None => return Err(Error::refused(format!("rank {member} is none of {size} ranks"))),
        }
    }
    if let Some(missing) = seen.iter().position(|seen| !seen) {
        return Err(Error::refused(format!("rank {missing} is in no group")));
    }
    let own = partition.iter().find_map(|group| {
        Some((group.as_slice(), group.iter().position(|member| *member == rank)?))
    });
    own.ok_or_else(|| Error::refused(format!("rank {rank} is in no group")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_differ_in_their_axes_only() {
        let shape = [2, 3, 2];
        assert_eq!(groups(&shape, &[2])[..2], [vec![0, 1], vec![2, 3]]);
        assert_eq!(groups(&shape, &[0])[0], [0, 6]);
        assert_eq!(groups(&shape, &[1])[1], [1, 3, 5]);
        assert_eq!(groups(&shape, &[0, 1])[1], [1, 3, 5, 7, 9, 11]);
        assert_eq!(groups(&shape, &[0, 1, 2]).len(), 1);
        assert_eq!(groups(&shape, &[]).len(), 12);
    }

    #[test]
    fn a_partition_has_every_rank_once() {
        #[track_caller]
        fn check(partition: &[&[usize]], expected: &str) {
            let partition = partition.iter().map(|group| group.to_vec()).collect();
            match place(&partition, 1, 3) {
                Ok((group, at)) => assert_eq!(format!("{group:?} {at}"), expected),
                Err(error) => assert_eq!(error.to_string(), format!("refused: {expected}")),
            }
        }
        check(&[&[2, 1], &[0]], "[2, 1] 1");
        check(&[&[2, 1], &[0, 1]], "rank 1 is in two groups");
        check(&[&[2, 1]], "rank 0 is in no group");
        check(&[&[2, 1, 0, 3]], "rank 3 is none of 3 ranks");
    }
}
