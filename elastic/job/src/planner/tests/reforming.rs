//! LG-3: forming again without a person's word needs one folder for all.

use super::*;

#[test]
fn lg_3_automatic_only_when_every_node_sees_the_folder() {
    let mut world = World::training(2, |_| ());
    check(&mut world, &[]);
    world.report(1).shared = Some(true);
    // Of the other it is not known yet.
    check(&mut world, &[]);
    world.report(2).shared = Some(true);
    check(&mut world, &["re-forming on: all nodes share the checkpoint folder"]);
    // A newcomer changes nothing before it could look.
    world.start(3);
    check(&mut world, &["admit n3"]);
    world.report(3).shared = Some(false);
    let off = "re-forming off: node n3 does not see in its checkpoint folder what the leading node \
               writes there";
    check(&mut world, &[off]);
    world.report(3).shared = Some(true);
    check(&mut world, &["re-forming on: all nodes share the checkpoint folder"]);
}

#[test]
fn lg_3_without_checkpoints_there_is_nothing_to_go_on_from() {
    let mut world = World::empty(|spec| spec.checkpoints = false);
    world.join(1);
    let lines = lines(&world.act());
    assert!(
        lines.iter().any(|line| line.starts_with("re-forming off: no checkpoints")),
        "{lines:?}"
    );
}
