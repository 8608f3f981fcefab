//! Leaders that die, disks that come back and those that do not, partitions.

use std::time::{Duration, Instant};

use job::voters::Change;

use super::cluster::{Cluster, until};
use crate::control_group::{Applied, ProposeError, ReadError, Role};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lone_founder_leads_at_once_and_commits() {
    let mut cluster = Cluster::new();
    let begun = Instant::now();
    let (id, mut events) = cluster.add().await;
    let leader = cluster.leader().await;
    assert!(begun.elapsed() < Duration::from_millis(400), "{:?}", begun.elapsed());
    leader.read_barrier().await.expect("a lone voter is its own majority");
    let proposed = leader.propose(7).await.expect("commits");
    assert_eq!(proposed.events, [7]);
    assert_eq!(leader.state().borrow().state.0, [7], "who proposed reads what it wrote");
    let heard = events.recv().await.expect("an event");
    assert_eq!(*heard, Applied::Events { index: proposed.index, events: vec![7] });
    assert_eq!(leader.id(), id);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_members_hold_the_same_state_and_only_the_leader_commits() {
    let (cluster, ids) = Cluster::of(3).await;
    let leader = cluster.leader().await;
    for command in 0..20 {
        leader.propose(command).await.expect("commits");
    }
    let all: Vec<u64> = (0..20).collect();
    for &id in &ids {
        cluster.settle(id, &all).await;
    }
    let follower = cluster.handle(*ids.iter().find(|&&id| id != leader.id()).expect("one"));
    let not_leader = Some(leader.id());
    assert_eq!(follower.propose(1).await, Err(ProposeError::NotLeader { leader: not_leader }));
    assert_eq!(follower.read_barrier().await, Err(ReadError::NotLeader { leader: not_leader }));
    leader.read_barrier().await.expect("a majority answers");
    let status = leader.status().borrow().clone();
    assert_eq!(status.voters.len(), 3);
    assert_eq!(status.last_contact.len(), 2);
}

/// Median of several deaths of a leader, in a group of three whose dead member
/// comes back between them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_certainly_died_is_replaced_at_once() {
    let (cluster, ids) = Cluster::of(3).await;
    let mut took = Vec::new();
    for round in 0..7u64 {
        let leader = cluster.leader().await;
        leader.propose(round).await.expect("commits");
        let dead = leader.id();
        cluster.kill(dead).await;
        let begun = Instant::now();
        for &id in ids.iter().filter(|&&id| id != dead) {
            cluster.handle(id).leader_died(dead);
        }
        let next = cluster.leader().await;
        next.propose(100 + round).await.expect("commits under the next leader");
        took.push(begun.elapsed());
        cluster.restart(dead);
        let expected: Vec<u64> = (0..=round).flat_map(|r| [r, 100 + r]).collect();
        cluster.settle(dead, &expected).await;
    }
    took.sort();
    println!("leader_died to the first commit of the next leader: {took:?}");
    assert!(took[3] <= Duration::from_millis(150), "{took:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_hint_silence_elects_as_well() {
    let (cluster, _) = Cluster::of(3).await;
    let dead = cluster.leader().await.id();
    cluster.kill(dead).await;
    let begun = Instant::now();
    let next = cluster.leader().await;
    assert_ne!(next.id(), dead);
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_claim_of_death_disturbs_nothing_for_long() {
    let (cluster, ids) = Cluster::of(3).await;
    let leader = cluster.leader().await;
    for &id in &ids {
        cluster.handle(id).leader_died(leader.id());
        cluster.handle(id).leader_died(12345);
    }
    // Someone leads after it, and commits; the first attempt may meet the change.
    let ticket = leader.ticket();
    while cluster.leader().await.propose_as(ticket, 1).await.is_err() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for &id in &ids {
        cluster.settle(id, &[1]).await;
    }
}

/// All of a group dies and comes back with its disks: the same members, the
/// same log, and every event is heard again (ID-1).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_that_kept_its_disks_goes_on_where_it_was() {
    let (cluster, ids) = Cluster::of(3).await;
    let leader = cluster.leader().await;
    for command in 0..10 {
        leader.propose(command).await.expect("commits");
    }
    for &id in &ids {
        cluster.kill(id).await;
    }
    let mut heard: Vec<_> = ids.iter().map(|&id| cluster.restart(id)).collect();
    let leader = cluster.leader().await;
    leader.propose(10).await.expect("commits");
    let all: Vec<u64> = (0..=10).collect();
    for &id in &ids {
        cluster.settle(id, &all).await;
    }
    let mut commands: Vec<u64> = Vec::new();
    while let Ok(applied) = heard[0].try_recv() {
        match &*applied {
            Applied::Events { events, .. } => commands.extend(events),
            Applied::Restored { index } => panic!("took a whole state at {index}"),
        }
    }
    assert_eq!(commands, all);
}

/// GEN-2, LS-1: the minority grants nothing, while the majority goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_minority_commits_nothing_and_passes_no_barrier() {
    let (cluster, ids) = Cluster::of(3).await;
    let old = cluster.leader().await;
    let others: Vec<u64> = ids.iter().copied().filter(|&id| id != old.id()).collect();
    old.propose(1).await.expect("commits");
    cluster.part(&[old.id()], &others);
    let (lost, barrier) = tokio::join!(old.propose(666), old.read_barrier());
    assert_eq!(lost, Err(ProposeError::Unknown));
    assert!(barrier.is_err());
    let next = until(|| {
        let leads = |&id: &u64| cluster.handle(id).status().borrow().role == Role::Leader;
        others.iter().find(|id| leads(id)).map(|&id| cluster.handle(id))
    })
    .await;
    next.propose(2).await.expect("the majority commits");
    next.read_barrier().await.expect("the majority answers");
    for _ in 0..5 {
        assert!(old.read_barrier().await.is_err());
        assert!(old.propose(667).await.is_err());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    cluster.heal();
    for &id in &ids {
        cluster.settle(id, &[1, 2]).await;
    }
}

/// A caller that does not know the outcome asks again, of another leader.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ticket_is_applied_once_over_a_change_of_leader() {
    let (cluster, ids) = Cluster::of(3).await;
    let old = cluster.leader().await;
    let ticket = old.ticket();
    old.propose_as(ticket, 5).await.expect("commits");
    cluster.kill(old.id()).await;
    for &id in ids.iter().filter(|&&id| id != old.id()) {
        cluster.handle(id).leader_died(old.id());
    }
    let next = cluster.leader().await;
    let again = next.propose_as(ticket, 5).await.expect("commits");
    assert!(again.duplicate && again.events.is_empty());
    assert!(!next.propose(6).await.expect("commits").duplicate);
    assert_eq!(next.state().borrow().state.0, [5, 6]);
    cluster.restart(old.id());
    cluster.settle(old.id(), &[5, 6]).await;
}

/// ID-1: a directory that was lost is a new member, and the old id stays dead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_store_comes_back_as_another_member() {
    let (mut cluster, ids) = Cluster::of(3).await;
    let leader = cluster.leader().await;
    leader.propose(1).await.expect("commits");
    let lost = *ids.iter().find(|&&id| id != leader.id()).expect("a follower");
    cluster.kill(lost).await;
    std::fs::remove_dir_all(cluster.dir(lost)).expect("the disk is gone");
    let (new, _) = cluster.add().await;
    assert_ne!(new, lost);
    for change in [Change::AddLearner(new), Change::Promote(new), Change::Remove(lost)] {
        cluster.change(change).await;
    }
    cluster.settle(new, &[1]).await;
    let voters = cluster.leader().await.status().borrow().voters.clone();
    assert!(voters.contains(&new) && !voters.contains(&lost), "{voters:?}");
}
