//! Faults: what is done to which process.

use std::{
    fs,
    path::Path,
    thread::sleep,
    time::{Duration, Instant},
};

use nix::sys::signal::{
    Signal::{self, SIGCONT, SIGKILL, SIGSTOP},
    kill,
};

use super::{Random, Run, send};

/// What happens to one node, or to two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// SIGKILL to a worker; its agent starts another one.
    Worker,
    /// SIGKILL to an agent; the launcher starts it again with its store.
    Agent,
    /// SIGKILL to an agent and its worker at once.
    Both,
    /// SIGKILL to the agent that leads the control group.
    Leader,
    /// SIGKILL to an agent, and its folder is gone: it comes back as a new member.
    Fresh,
    /// An agent, and inside the recovery from that another node's worker.
    Pair,
}

/// Longest time from a fault to a committed step (LIVE-1), on a busy machine.
const RECOVERY: Duration = Duration::from_secs(30);

impl Run {
    /// Does it to somebody, waits until steps commit again (LIVE-1), and prints
    /// one line about it.
    ///
    /// # Panics
    /// When nothing commits within half a minute.
    #[track_caller]
    pub fn inject(&mut self, fault: Fault, random: &mut Random) {
        let nodes = self.nodes_with_worker();
        let mut order = nodes.clone();
        random.shuffle(&mut order);
        let first = match fault {
            Fault::Leader => self.wait("leader", RECOVERY, Self::leader),
            _ => order.first().cloned().unwrap_or_else(|| "n1".into()),
        };
        let second = order.into_iter().find(|node| *node != first);
        let second = second.unwrap_or_else(|| first.clone());
        let before = self.step();
        let started = Instant::now();
        let hit = match fault {
            Fault::Worker => send(self.worker(&first), SIGKILL),
            Fault::Agent | Fault::Leader => send(self.agent(&first), SIGKILL),
            Fault::Both => {
                let (agent, worker) = (self.agent(&first), self.worker(&first));
                send(worker, SIGKILL) & send(agent, SIGKILL)
            }
            Fault::Fresh => self.lose_disk(&first),
            Fault::Pair => {
                let planned = self.history().generation();
                let hit = send(self.agent(&first), SIGKILL);
                self.wait("plan after the first loss", RECOVERY, |run| {
                    (run.history().generation() > planned).then_some(())
                });
                hit & send(self.worker(&second), SIGKILL)
            }
        };
        // A step in flight may still be applied by all; the ones after it need
        // a new generation.
        self.wait_step(before + 3, RECOVERY);
        eprintln!(
            "  {:6.2} s: {fault:?} of {first}{} at step {before}, hit {hit}, step {} after {:.0} ms",
            self.age(),
            if fault == Fault::Pair { format!(" and {second}") } else { String::new() },
            before + 3,
            started.elapsed().as_secs_f64() * 1e3,
        );
    }

    /// Waits until all nodes compute again and the control group has its voters.
    ///
    /// # Panics
    /// When that takes longer than half a minute.
    #[track_caller]
    pub fn settle(&mut self) {
        self.settle_mesh(self.setup.nodes as usize);
        self.settle_voters();
    }

    /// Waits until at least so many nodes compute.
    ///
    /// # Panics
    /// When that takes longer than half a minute.
    #[track_caller]
    pub fn settle_mesh(&mut self, least: usize) {
        self.wait("mesh", RECOVERY, |run| {
            let status = run.status()?;
            let ranks = status["status"]["job"]["plan"]["members"].as_array()?.len();
            (ranks >= least && run.nodes_with_worker().len() >= least).then_some(())
        });
    }

    /// Waits until the control group has its voters: only then does the loss of a
    /// disk leave a majority.
    ///
    /// # Panics
    /// When that takes longer than half a minute.
    #[track_caller]
    pub fn settle_voters(&mut self) {
        self.wait("voters", RECOVERY, |run| {
            let status = run.status()?;
            let voters = status["status"]["voters"].as_array()?;
            let known = voters.iter().filter(|voter| {
                voter
                    .as_str()
                    .is_some_and(|name| status["status"]["job"]["nodes"].get(name).is_some())
            });
            let wanted = run.setup.nodes as usize;
            let voters_wanted = (wanted - 1 + wanted % 2).min(5);
            let settled = known.count() == voters_wanted && voters.len() == voters_wanted;
            settled.then_some(())
        });
    }

    /// Nodes whose agent and worker both run.
    #[must_use]
    pub fn nodes_with_worker(&self) -> Vec<String> {
        let names = (1..=self.setup.nodes).map(|node| format!("n{node}"));
        names.filter(|node| self.worker(node).is_some()).collect()
    }

    /// SIGKILL to an agent whose disk is lost with it. The launcher is held until
    /// the disk is empty, so that nothing of the old store comes back.
    fn lose_disk(&self, node: &str) -> bool {
        let launcher = self.launcher();
        let hold = |signal: Signal| launcher.is_some_and(|pid| kill(pid, signal).is_ok());
        let held = hold(SIGSTOP);
        let worker = self.worker(node);
        let hit = send(self.agent(node), SIGKILL);
        // Its worker dies with it; until then it writes into the folder.
        let _ = send(worker, SIGKILL);
        let folder = self.folder().join("nodes").join(node);
        let emptied = empty(&folder);
        held & hold(SIGCONT) & hit & emptied
    }
}

fn empty(folder: &Path) -> bool {
    for _ in 0..100 {
        if fs::remove_dir_all(folder).is_ok() || !folder.exists() {
            return true;
        }
        sleep(Duration::from_millis(2));
    }
    false
}
