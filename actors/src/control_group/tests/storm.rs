//! Everything at once: members die and come back, links break, clients do not
//! know what became of their commands and ask again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::cluster::{Cluster, until};
use crate::control_group::{ProposeError, Ticket};

/// A small generator, so that the storm needs no clock for its choices.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % n
    }
}

/// One client: a command at a time, each until it is known to be committed.
async fn client(cluster: Arc<Cluster>, number: u64, commands: u64) {
    let first = cluster.leader().await.ticket();
    for n in 0..commands {
        let ticket = Ticket { client: first.client ^ number, seq: n + 1 };
        loop {
            let leader = cluster.leader().await;
            let answer = leader.propose_as(ticket, number * 1000 + n);
            match tokio::time::timeout(Duration::from_secs(2), answer).await {
                Ok(Ok(_)) => break,
                Ok(Err(ProposeError::TooLarge { .. })) => panic!("it is small"),
                _ => tokio::time::sleep(Duration::from_millis(3)).await,
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_command_is_applied_exactly_once_in_its_clients_order() {
    let mut cluster = Cluster::new();
    cluster.options.snapshot_every = 16;
    cluster.options.keep_entries = 4;
    let (cluster, ids) = cluster.grown(3).await;
    let cluster = Arc::new(cluster);
    let calm = Arc::new(AtomicBool::new(false));
    let weather = tokio::spawn({
        let (cluster, calm, ids) = (Arc::clone(&cluster), Arc::clone(&calm), ids.clone());
        async move {
            let mut dice = Dice(7);
            while !calm.load(Ordering::Relaxed) {
                let victim = ids[dice.below(3) as usize];
                let others: Vec<u64> = ids.iter().copied().filter(|&id| id != victim).collect();
                if dice.below(2) == 0 {
                    cluster.part(&[victim], &others);
                    tokio::time::sleep(Duration::from_millis(50 + dice.below(700))).await;
                    cluster.heal();
                } else {
                    cluster.kill(victim).await;
                    for &id in &others {
                        tokio::time::sleep(Duration::from_millis(dice.below(20))).await;
                        cluster.handle(id).leader_died(victim);
                    }
                    tokio::time::sleep(Duration::from_millis(dice.below(300))).await;
                    cluster.restart(victim);
                }
                tokio::time::sleep(Duration::from_millis(dice.below(200))).await;
            }
        }
    });
    let (clients, commands) = (4, 60);
    let tasks: Vec<_> = (1..=clients)
        .map(|number| tokio::spawn(client(Arc::clone(&cluster), number, commands)))
        .collect();
    for task in tasks {
        task.await.expect("every command is committed in the end");
    }
    calm.store(true, Ordering::Relaxed);
    weather.await.expect("the storm ends");

    let leader = cluster.leader().await;
    until(|| {
        let state = leader.state().borrow().state.0.len();
        (state as u64 == clients * commands).then_some(())
    })
    .await;
    let journal = leader.state().borrow().state.0.clone();
    for number in 1..=clients {
        let of: Vec<u64> = journal.iter().copied().filter(|c| c / 1000 == number).collect();
        let expected: Vec<u64> = (0..commands).map(|n| number * 1000 + n).collect();
        assert_eq!(of, expected, "client {number}");
    }
    for id in ids {
        cluster.settle(id, &journal).await;
    }
}
