//! CG: nodes of one job train on one dataset and compute the same bits.

use super::*;
use crate::report::Digests;

fn digests(dataset: u8, arithmetic: u8) -> Digests {
    Digests { dataset: [dataset; 32], arithmetic: [arithmetic; 32] }
}

/// Nodes of these digests found a job together, in order.
fn founded(exact: bool, nodes: &[(u8, u8)]) -> World {
    let mut world = World::empty(|spec| spec.exact = exact);
    for (number, (dataset, arithmetic)) in (1..).zip(nodes) {
        world.join(number);
        world.worker(number).digests = Some(digests(*dataset, *arithmetic));
    }
    world.act();
    world.pass(100);
    world
}

#[test]
fn what_most_have_is_recorded_and_others_are_turned_away_before_they_train() {
    let mut world = founded(true, &[(1, 9), (1, 3), (1, 3), (2, 3)]);
    check(&mut world, &["record 1 3"]);
    check(
        &mut world,
        &[
            "refuse n1: a canned training step gives the digest 09.. there and 03.. on the nodes \
             of this job",
            "refuse n4: its dataset has the digest 02.. the job's has 01..",
            "plan 1 [n2 n3] now: founded with 2 ranks",
        ],
    );
    assert_eq!(world.state.nodes[&id(1)].fenced().map(|(_, refused)| refused), Some(true));
    // Trying again changes nothing.
    world.start(1);
    world.report(1).boot = 101;
    let said = lines(&world.act());
    assert_eq!(said[0], "admit n1");
    world.worker(1).state = WorkerState::Ready;
    world.worker(1).digests = Some(digests(1, 9));
    let lines = lines(&world.act());
    assert!(lines[0].starts_with("refuse n1"), "{lines:?}");
}

#[test]
fn of_equally_many_the_first_rank_decides() {
    let mut world = founded(true, &[(1, 4), (1, 3)]);
    check(&mut world, &["record 1 4"]);
}

#[test]
fn a_joiner_of_another_kind_is_refused_or_in_a_job_that_is_not_exact_recorded() {
    let joined = |exact| {
        let mut world = founded(exact, &[(1, 3), (1, 3)]);
        world.follow();
        world.seal_members(|_| Position::Fresh);
        world.follow();
        world.step(10);
        world.follow();
        world.join(3);
        world.worker(3).digests = Some(digests(1, 9));
        world
    };
    let mut world = joined(true);
    let said = lines(&world.act());
    assert!(said[0] == "admit n3" && said[1].starts_with("refuse n3"), "{said:?}");
    world.pass(100);
    assert!(lines(&world.act()).is_empty(), "no plan with it");

    let mut world = joined(false);
    let said = lines(&world.act());
    assert!(said[0] == "admit n3" && said[1].starts_with("tolerate n3"), "{said:?}");
    world.pass(100);
    check(&mut world, &["plan 2 [n1 n2 n3] at the boundary: n3 joins"]);
}
