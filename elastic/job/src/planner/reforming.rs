//! Whether the group may be formed again without a person's word (LG-3): only
//! when every node is known to see one and the same checkpoint folder, for that
//! is where two halves that both try find out about each other.

use crate::{command::Command, planner::View, reforming::Reforming, state::JobState};

pub(super) fn decide(state: &JobState, view: &View) -> Vec<Command> {
    wanted(state, view).map(Command::SetReforming).into_iter().collect()
}

fn wanted(state: &JobState, view: &View) -> Option<Reforming> {
    if !state.spec.checkpoints {
        return Some(Reforming::off("no checkpoints are saved (checkpoint.enable = false)"));
    }
    let mut known = state.live_nodes().next().is_some();
    for (name, node) in state.live_nodes() {
        let heard = view.heard.get(name).filter(|heard| heard.report.boot == node.boot);
        match heard.and_then(|heard| heard.report.shared) {
            Some(true) => {}
            Some(false) => {
                return Some(Reforming::off(format!(
                    "node {name} does not see in its checkpoint folder what the leading node \
                     writes there: mount the same one on all nodes (checkpoint.folder)"
                )));
            }
            None => known = false,
        }
    }
    // Whoever has just come changes nothing until it could look.
    known.then(Reforming::on)
}
