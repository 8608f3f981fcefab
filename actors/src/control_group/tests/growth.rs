//! Members that join late, gain and lose votes.

use job::voters::Change;

use super::cluster::{Cluster, until};
use crate::control_group::{Applied, ChangeError, Role};

/// The log that a joiner would need is gone: it takes a whole state.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_joiner_takes_a_state_and_gains_a_vote() {
    let mut cluster = Cluster::new();
    cluster.options.snapshot_every = 32;
    cluster.options.keep_entries = 8;
    let (founder, _) = cluster.add().await;
    let leader = cluster.leader().await;
    let mut all: Vec<u64> = (0..100).collect();
    for &command in &all {
        leader.propose(command).await.expect("commits");
    }
    let (late, mut heard) = cluster.add().await;
    assert_eq!(cluster.handle(late).status().borrow().role, Role::Outsider);
    cluster.change(Change::AddLearner(late)).await;
    cluster.settle(late, &all).await;
    assert!(
        matches!(*heard.recv().await.expect("news"), Applied::Restored { index } if index > 90)
    );
    cluster.change(Change::Promote(late)).await;
    leader.propose(100).await.expect("commits with two voters");
    all.push(100);
    cluster.settle(late, &all).await;
    until(|| (cluster.handle(late).status().borrow().role == Role::Follower).then_some(())).await;

    // It restarts on what it took, and the founder on its compacted log.
    cluster.kill(late).await;
    cluster.kill(founder).await;
    cluster.restart(founder);
    cluster.restart(late);
    cluster.leader().await.propose(101).await.expect("commits");
    all.push(101);
    cluster.settle(late, &all).await;
    cluster.settle(founder, &all).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_are_checked_and_come_one_at_a_time() {
    let (mut cluster, ids) = Cluster::of(3).await;
    let leader = cluster.leader().await;
    let me = leader.id();
    let other = *ids.iter().find(|&&id| id != me).expect("a follower");
    let refused = |r: Result<(), ChangeError>| matches!(r, Err(ChangeError::Refused { .. }));

    // What is so already is fine, what makes no sense is refused.
    leader.change(Change::AddLearner(other)).await.expect("a voter receives the log as well");
    leader.change(Change::Promote(other)).await.expect("is a voter");
    leader.change(Change::Remove(999)).await.expect("is no member");
    assert!(refused(leader.change(Change::Promote(999)).await));
    assert!(refused(leader.change(Change::Demote(999)).await));
    assert!(refused(leader.change(Change::AddLearner(0)).await));
    assert_eq!(
        cluster.handle(other).change(Change::Remove(other)).await,
        Err(ChangeError::NotLeader { leader: Some(me) })
    );

    // A learner that was never heard of is not promoted.
    cluster.change(Change::AddLearner(77)).await;
    let early = leader.change(Change::Promote(77)).await;
    assert!(matches!(early, Err(ChangeError::NotReady { id: 77, .. })), "{early:?}");

    // Two at once: one of them is told to wait.
    let (a, b) =
        tokio::join!(leader.change(Change::AddLearner(78)), leader.change(Change::AddLearner(79)));
    let results = [a, b];
    assert!(results.contains(&Ok(())) && results.contains(&Err(ChangeError::Busy)), "{results:?}");

    // Demoted, and a learner again.
    cluster.change(Change::Demote(other)).await;
    let demoted = cluster.handle(other);
    until(|| (demoted.status().borrow().role == Role::Learner).then_some(())).await;
    cluster.change(Change::Promote(other)).await;
    let (extra, _) = cluster.add().await;
    cluster.change(Change::AddLearner(extra)).await;
    cluster.change(Change::Promote(extra)).await;
    assert_eq!(leader.status().borrow().voters.len(), 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_hands_over_before_it_leaves() {
    let (cluster, _) = Cluster::of(3).await;
    let old = cluster.leader().await;
    let leaving = old.change(Change::Remove(old.id())).await;
    assert!(matches!(leaving, Err(ChangeError::Transferring { .. })), "{leaving:?}");
    cluster.change(Change::Remove(old.id())).await;
    let next = cluster.leader().await;
    assert_ne!(next.id(), old.id());
    next.propose(1).await.expect("commits");
    assert!(!next.status().borrow().voters.contains(&old.id()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_voter_stays_and_no_change_loses_the_majority() {
    let (cluster, ids) = Cluster::of(3).await;
    let leader = cluster.leader().await;
    let others: Vec<u64> = ids.iter().copied().filter(|&id| id != leader.id()).collect();
    // One voter is dead. Without the other living one there is no majority.
    cluster.kill(others[1]).await;
    until(|| {
        let last = leader.status().borrow().last_contact.get(&others[1]).copied();
        last.is_none_or(|at| at.elapsed().as_millis() > 1200).then_some(())
    })
    .await;
    let change = Change::Demote(others[0]);
    let lossy = leader.change(change).await;
    assert!(matches!(lossy, Err(ChangeError::Refused { .. })), "{lossy:?}");
    cluster.change(Change::Remove(others[1])).await;
    cluster.change(Change::Demote(others[0])).await;
    let last = leader.change(Change::Remove(leader.id())).await;
    assert!(matches!(last, Err(ChangeError::Refused { .. })), "{last:?}");
    cluster.kill(others[0]).await;
    leader.propose(9).await.expect("a lone voter commits");
    leader.read_barrier().await.expect("a lone voter is its own majority");
}
