//! GEN-2, LIVE-1: a network that is cut never forks a run. One side goes on, the
//! other stops within its lease and comes back when the cut is healed.

use std::{
    collections::BTreeSet,
    path::Path,
    thread::sleep,
    time::{Duration, Instant},
};

use chaos_tests::{
    harness::{Place, Run, Setup, wall_clock},
    proxy::{BOTH, Condition, Network, Plane, Way, Wires},
};

use crate::{LIMIT, fake, quiet};

const NODES: usize = 4;

/// How long a cut lasts after one side went on.
const CUT: Duration = Duration::from_millis(1500);

/// Until a cut is noticed: a lease, a suspicion, an election, a broken collective
/// twice over, and as much for a busy machine.
const NOTICE: Duration = Duration::from_secs(30);

/// A lease of 700 ms, a step of 160 ms that began in it, and twice that for a busy
/// machine.
const STOPS: Duration = Duration::from_millis(2600);

/// Who is cut off from the others.
#[derive(Clone, Copy, Debug)]
enum Who {
    /// The leader, alone.
    Leader,
    /// A node that does not lead, alone.
    Follower,
    /// The leader and a voter: with three voters, a majority.
    Majority,
    /// The leader and the node that does not vote: a minority.
    Minority,
}

impl Who {
    fn of(self, run: &Run) -> Option<Vec<usize>> {
        let status = run.status()?;
        let leader = index(status["status"]["leader"].as_str()?)?;
        let voters = status["status"]["voters"].as_array()?;
        let voters: Vec<usize> = voters.iter().filter_map(|name| index(name.as_str()?)).collect();
        let voter = voters.iter().copied().find(|node| *node != leader)?;
        let other = (0..NODES).find(|node| !voters.contains(node))?;
        Some(match self {
            Self::Leader => vec![leader],
            Self::Follower => vec![voter],
            Self::Majority => vec![leader, voter],
            Self::Minority => vec![leader, other],
        })
    }

    /// Whether the group goes on on this side.
    fn goes_on(self) -> bool {
        matches!(self, Self::Majority)
    }
}

fn index(name: &str) -> Option<usize> {
    name.strip_prefix('n')?.parse::<usize>().ok()?.checked_sub(1)
}

fn names(nodes: impl Iterator<Item = usize>) -> Vec<String> {
    nodes.map(|node| format!("n{}", node + 1)).collect()
}

/// What is between the nodes, and how it is cut.
enum Medium {
    Proxy(Network, &'static [Plane], Way),
    Wires(Wires),
}

impl Medium {
    fn places(&self) -> Vec<Place> {
        match self {
            Self::Proxy(network, ..) => network.places(),
            Self::Wires(wires) => wires.places(),
        }
    }

    fn cut(&self, nodes: &[usize]) {
        match self {
            Self::Proxy(network, planes, way) => {
                network.between(planes, nodes, *way, Condition::CUT);
            }
            Self::Wires(wires) => wires.plug(nodes, false),
        }
    }

    fn heal(&self, nodes: &[usize]) {
        match self {
            Self::Proxy(network, ..) => network.heal(),
            Self::Wires(wires) => wires.plug(nodes, true),
        }
    }

    fn cuts_control(&self) -> bool {
        match self {
            Self::Proxy(_, planes, _) => planes.contains(&Plane::Control),
            Self::Wires(_) => true,
        }
    }
}

#[track_caller]
fn check(name: &'static str, planes: &'static [Plane], who: Who, way: Way) {
    let proxy = |folder: &Path| {
        let network = Network::start(NODES, folder).expect("loopback addresses");
        Medium::Proxy(network, planes, way)
    };
    check_medium(name, who, proxy);
}

/// Cuts, watches who goes on and who stops, heals, and compares the bits.
#[track_caller]
fn check_medium(name: &'static str, who: Who, medium: impl FnOnce(&Path) -> Medium) {
    let expected = quiet();
    let mut network = None;
    // A collective that hangs is given up after this time. Memory that the nodes of
    // one machine share cannot be cut.
    let arguments = ["--elastic.step_timeout_s=3", "--elastic.tensor_transport=tcp"];
    let arguments = arguments.map(str::to_owned).to_vec();
    let setup = Setup { arguments, ..fake(name, NODES as u32, 20) };
    let mut run = Run::start_each(setup, |folder| {
        let medium = medium(folder);
        let places = medium.places();
        network = Some(medium);
        places
    });
    let network = network.expect("it was started");
    run.settle();
    run.wait("a step of all nodes together", NOTICE, |run| {
        let history = run.history();
        let generation = history.generation();
        let steps = history.steps.iter().filter(|line| line.generation == generation);
        (steps.map(|line| &line.node).collect::<BTreeSet<_>>().len() == NODES).then_some(())
    });
    let cut = run.wait("leader and voters", NOTICE, |run| who.of(run));
    let rest = (0..NODES).filter(|node| !cut.contains(node));
    let (inner, outer) = (names(cut.iter().copied()), names(rest));
    let (going, stopping) = if who.goes_on() { (inner, outer) } else { (outer, inner) };

    let (at, began, clock) = (run.step(), Instant::now(), wall_clock());
    network.cut(&cut);
    let control = network.cuts_control();
    // Without the tensors' plane alone nobody is certain who is to blame.
    let alive = if control { going.clone() } else { names(0..NODES) };
    let generation = run.history().generation();
    run.wait("a step of those who go on", NOTICE, |run| {
        let history = run.history();
        let newer = history.steps_of(&alive, clock).any(|line| line.generation > generation);
        newer.then_some(())
    });
    let went_on = began.elapsed();
    sleep(CUT);
    let late = clock + STOPS;
    let healed = wall_clock();
    let history = run.history();
    let forked: Vec<_> = history.steps_of(&stopping, late).collect();
    if control {
        assert!(forked.is_empty(), "GEN-2: {stopping:?} went on: {forked:?}\n{}", run.report());
    }
    network.heal(&cut);
    run.settle();
    let back = healed.elapsed().unwrap_or_default();
    let digests = run.finish(LIMIT);
    let history = run.history();
    eprintln!(
        "{name}: {cut:?} cut off at step {at}, others went on after {:.0} ms, all back {:.0} ms \
         after the cut was healed, tiers {:?}, {} steps redone",
        went_on.as_secs_f64() * 1e3,
        back.as_secs_f64() * 1e3,
        history.tiers_counted(),
        history.redone()
    );
    let failures = history.of("planned").filter(|line| line["failure"] == true).count();
    assert!(failures > 0, "nobody noticed the cut");
    assert_eq!(&digests, expected, "{name}");
}

#[test]
fn gen_2_three_go_on_without_one() {
    check("cut-leader", &BOTH, Who::Leader, Way::Each);
    check("cut-control", &[Plane::Control], Who::Follower, Way::Each);
    check("cut-tensors", &[Plane::Tensors], Who::Follower, Way::Each);
}

#[test]
fn gen_2_of_two_and_two_the_majority_of_voters_goes_on() {
    check("halves", &BOTH, Who::Minority, Way::Each);
    check("halves-control", &[Plane::Control], Who::Majority, Way::Each);
    check("halves-tensors", &[Plane::Tensors], Who::Majority, Way::Each);
}

#[test]
fn gen_2_a_cut_in_one_direction_is_a_cut() {
    check("mute-leader", &[Plane::Control], Who::Leader, Way::Outward);
    check("deaf-follower", &[Plane::Control], Who::Follower, Way::Inward);
    check("mute-tensors", &[Plane::Tensors], Who::Follower, Way::Outward);
    check("mute-halves", &BOTH, Who::Minority, Way::Outward);
}

#[test]
fn gen_2_unplugged_nodes_come_back() {
    for (name, who) in [("unplug-leader", Who::Leader), ("unplug-minority", Who::Minority)] {
        let Some(wires) = Wires::start(NODES) else {
            eprintln!("{name}: only root may have network namespaces; the proxy stands in");
            return;
        };
        check_medium(name, who, |_| Medium::Wires(wires));
    }
}
