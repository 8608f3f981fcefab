//! Answers to people who ask this node.

use std::collections::BTreeMap;

use job::{NodeId, state::JobState};
use ractor::ActorRef;

use super::{
    admin::{Request, Response, Status, WorkerStatus},
    node_agent::{Message, State},
};
use crate::{clock, observer::tokens_per_s};

impl State {
    pub(super) fn admin(&mut self, myself: &ActorRef<Message>, request: Request) -> Response {
        match request {
            Request::Status => Response::Status(Box::new(self.status_for_people())),
            Request::Drain { node } => match self.job().nodes.get(&node) {
                Some(known) if known.is_live() => {
                    self.drain(myself, &node);
                    Response::Accepted(format!("node {node} will leave after the step in progress"))
                }
                _ => Response::Refused(format!(
                    "node {node} is not a live member; live are: {}",
                    self.job()
                        .live_nodes()
                        .map(|(name, _)| name.as_str())
                        .collect::<Vec<_>>()
                        .join(", ")
                )),
            },
            Request::Stop => {
                self.stop_the_job(myself);
                Response::Accepted("the job will save a checkpoint and stop".into())
            }
        }
    }

    fn status_for_people(&self) -> Status {
        let status = self.group.status().borrow().clone();
        let name = |raft_id: u64| self.job().node_of_raft(raft_id).map(|(name, _)| name.clone());
        let mut job: JobState = self.job().clone();
        "hidden".clone_into(&mut job.spec.authority);
        "hidden".clone_into(&mut job.spec.join_secret);
        if let Some(plan) = &mut job.plan {
            plan.key = [0; 32];
        }
        let ranks: BTreeMap<u64, u32> = job
            .plan
            .iter()
            .flat_map(|plan| plan.members.iter().enumerate())
            .filter(|(_, member)| {
                member.worker.node == self.options.node
                    && Some(member.worker.incarnation) == self.incarnation()
            })
            .map(|(rank, member)| (member.worker.worker.0, rank as u32))
            .collect();
        let workers = self.slots.workers().map(|worker| WorkerStatus {
            slot: worker.report.slot,
            pid: worker.report.pid,
            rank: ranks.get(&worker.report.worker.0).copied(),
            state: worker.report.state.clone(),
            step: worker.report.progress.map(|progress| progress.step.0),
            loss: worker.report.progress.map(|progress| progress.loss),
            tokens_per_s: worker.report.progress.as_ref().map(tokens_per_s),
        });
        Status {
            node: self.options.node.clone(),
            pid: std::process::id(),
            leader: status.leader.and_then(name),
            voters: status
                .voters
                .iter()
                .map(|id| name(*id).map_or_else(|| format!("member {id}"), NodeId::into))
                .collect(),
            lease_micros: (i128::from(self.lease_until) - i128::from(clock::now_micros())) as i64,
            waiting: self.waiting.clone(),
            workers: workers.collect(),
            job,
        }
    }
}
