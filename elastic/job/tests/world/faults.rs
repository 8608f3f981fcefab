//! What goes wrong.

use crate::sim::{Millis, Sim};

impl Sim {
    pub(crate) fn faults(&mut self) {
        if self.now < self.next_fault {
            return;
        }
        // Long quiet spells between storms.
        self.next_fault = self.now
            + match self.random.percent(40) {
                true => self.random.range(10, 300),
                false => self.random.range(500, 3_000),
            };
        let running: Vec<usize> =
            (0..self.nodes.len()).filter(|node| self.nodes[*node].agent.is_some()).collect();
        let Some(node) = self.random.pick(&running) else { return };
        match self.random.range(0, 99) {
            0..=21 => self.kill_worker(node),
            22..=35 => self.kill_agent(node),
            36..=43 => {
                if let Some(leader) = self.leader.as_ref().map(|leader| leader.node) {
                    self.kill_agent(leader);
                }
            }
            44..=51 => self.silence(node),
            52..=59 => self.pause(node),
            60..=67 => self.cut(node),
            68..=73 => {
                if self.nodes.len() < 16 {
                    self.add_node();
                }
            }
            74..=79 => self.drain(node),
            80..=85 => {
                // Deposed without a death.
                if let Some(leader) = self.leader.as_ref().map(|leader| leader.node) {
                    self.lose_leader(leader, false);
                }
            }
            86..=91 => {
                // Not one that was just verified to be restored.
                let newest = self.saved.keys().next_back().copied();
                if let Some(step) = newest.filter(|_| self.truth().is_sealed()) {
                    self.note(format!("the checkpoint of step {step} is damaged"));
                    self.damaged.insert(step);
                }
            }
            _ => self.wipe_out(),
        }
    }

    fn kill_worker(&mut self, node: usize) {
        if let Some(worker) = self.worker_of(node) {
            self.note(format!("worker {worker} is killed"));
            self.workers[worker].alive = false;
        }
    }

    fn kill_agent(&mut self, node: usize) {
        self.note(format!("agent {} is killed", self.nodes[node].name));
        let orphan_for = self.random.range(0, 600);
        self.end_agent(node, orphan_for);
    }

    fn silence(&mut self, node: usize) {
        let until = self.now + self.random.range(200, 3_000);
        self.note(format!("agent {} is silent until {until}", self.nodes[node].name));
        if let Some(agent) = &mut self.nodes[node].agent {
            agent.silent_until = until;
        }
        self.lose_leader(node, false);
    }

    fn pause(&mut self, node: usize) {
        let (now, until) = (self.now, self.now + self.random.range(100, 3_000));
        if let Some(worker) = self.worker_of(node) {
            self.note(format!("worker {worker} is paused until {until}"));
            self.workers[worker].paused_since = now;
            self.workers[worker].paused_until = until;
        }
    }

    fn cut(&mut self, a: usize) {
        let all: Vec<usize> = (0..self.nodes.len()).filter(|b| *b != a).collect();
        let until: Millis = self.now + self.random.range(50, 6_000);
        if let Some(b) = self.random.pick(&all) {
            self.note(format!("no tensors between nodes {a} and {b} until {until}"));
            self.broken.push((a, b, until));
        }
    }

    fn drain(&mut self, node: usize) {
        let stay = self
            .nodes
            .iter()
            .filter(|node| !node.left && node.agent.as_ref().is_none_or(|agent| !agent.leaving));
        if stay.count() > self.truth().spec.min_nodes as usize + 1 {
            self.note(format!("{} is drained", self.nodes[node].name));
            if let Some(agent) = &mut self.nodes[node].agent {
                agent.leaving = true;
            }
        }
    }

    /// Every agent of the newest generation is killed at once; their workers live
    /// on for a moment.
    fn wipe_out(&mut self) {
        let truth = self.truth();
        let members: Vec<usize> = (0..self.nodes.len())
            .filter(|node| {
                let mut members = truth.plan.iter().flat_map(|plan| &plan.members);
                members.any(|member| member.worker.node == self.nodes[*node].name)
            })
            .collect();
        self.note("the whole generation is wiped out".into());
        members.into_iter().for_each(|node| self.kill_agent(node));
    }

    fn worker_of(&self, node: usize) -> Option<usize> {
        self.nodes[node].agent.as_ref()?.worker
    }
}
