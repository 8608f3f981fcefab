//! STEP-1, CKPT-1: a death in each phase of a step, of a recovery and of a
//! checkpoint. Every phase is counted as hit, and the bits are those of a quiet run.

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use chaos_tests::{
    fake::{Point, TRAPS},
    harness::{Run, Setup, send},
};
use nix::sys::signal::Signal::SIGKILL;

use crate::{LIMIT, fake, quiet};

/// From a trap's setting to the death in it, and from that to further steps.
const SOON: Duration = Duration::from_secs(30);

struct Traps(PathBuf);

impl Traps {
    /// Whoever comes to the point next dies there.
    fn set(&self, point: Point) {
        fs::write(self.0.join(point.name()), "").expect("a trap");
    }

    fn is_hit(&self, point: Point) -> bool {
        self.0.join(point.hit()).exists()
    }

    fn wait(&self, run: &mut Run, point: Point) {
        run.wait(&format!("death in {}", point.name()), SOON, |_| self.is_hit(point).then_some(()));
    }
}

fn start(name: &'static str) -> (Run, Traps) {
    let folder = std::env::temp_dir()
        .join(format!("elastic-chaos-{}", std::process::id()))
        .join(format!("traps-{name}"));
    fs::create_dir_all(&folder).expect("a folder for traps");
    let setup = Setup {
        environment: vec![
            (TRAPS, folder.display().to_string()),
            (chaos_tests::fake::SAVE_MICROS, "20000".into()),
        ],
        arguments: vec!["--checkpoint.keep_latest_k=2".into()],
        ..fake(name, 4, 15)
    };
    (Run::start(setup), Traps(folder))
}

#[test]
fn step_1_a_worker_dies_in_every_phase() {
    let expected = quiet();
    let (mut run, traps) = start("phases");
    for point in [Point::Open, Point::Prepared, Point::Applying, Point::Saving] {
        run.settle_mesh(4);
        traps.set(point);
        traps.wait(&mut run, point);
        let at = run.step();
        run.wait_step(at + 3, SOON);
    }
    // These come when another one died, or came back.
    for point in [Point::Sealing, Point::Giving, Point::Growing] {
        run.settle_mesh(4);
        traps.set(point);
        assert!(send(run.worker("n2"), SIGKILL), "n2 has a worker");
        traps.wait(&mut run, point);
        let at = run.step();
        run.wait_step(at + 3, SOON);
    }
    run.settle_mesh(4);
    // Without a checkpoint there is nothing to load.
    run.wait("checkpoint", SOON, |run| run.history().checkpoints().last().copied());
    run.kill_all();
    traps.set(Point::Loading);
    run.launch();
    traps.wait(&mut run, Point::Loading);
    let at = run.step();
    let digests = run.finish(LIMIT);
    let hits: BTreeMap<String, bool> =
        Point::ALL.iter().map(|point| (point.name(), traps.is_hit(*point))).collect();
    let history = run.history();
    eprintln!(
        "phases: {hits:?}, the last at step {at}, tiers {:?}, {} steps redone, {:.1} s",
        history.tiers_counted(),
        history.redone(),
        run.age()
    );
    assert!(hits.values().all(|hit| *hit), "{hits:?}");
    assert_eq!(&digests, expected);
}

/// What the checkpoint folder looks like while a leader works on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Work {
    /// The index is written, the checkpoint has no name.
    Committing,
    /// A retired checkpoint is still there under some name.
    Retiring,
}

impl Work {
    fn is_going_on(self, run: &Run) -> bool {
        let folder = run.folder().join("checkpoint");
        let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
        let names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        match self {
            Self::Committing => names.iter().any(|name| {
                name.starts_with(".stage-") && folder.join(name).join(".metadata").exists()
            }),
            Self::Retiring => {
                let retired = names.iter().any(|name| name.starts_with(".retired-"));
                // The limit is two: a third with a name is on its way out, or in.
                retired || names.iter().filter(|name| name.starts_with("step-")).count() > 2
            }
        }
    }
}

#[test]
fn ckpt_1_a_leader_dies_while_it_commits_and_while_it_retires() {
    const TIMES: usize = 3;
    let expected = quiet();
    let (mut run, _) = start("committing");
    let mut hits = BTreeMap::new();
    for work in [Work::Committing, Work::Retiring].repeat(TIMES) {
        run.settle_voters();
        run.settle_mesh(3);
        let leader = run.wait("leader", SOON, Run::leader);
        let agent = run.agent(&leader).expect("it runs");
        let until = Instant::now() + SOON;
        while !work.is_going_on(&run) {
            assert!(Instant::now() < until, "no {work:?}: {}", run.report());
            std::thread::sleep(Duration::from_micros(200));
        }
        let hit = agent.signal(SIGKILL);
        // The kernel may take a moment; what is left undone then stays so.
        let caught = hit && work.is_going_on(&run);
        *hits.entry(work).or_insert(0) += usize::from(caught);
        let at = run.step();
        run.wait_step(at + 3, SOON);
    }
    let digests = run.finish(LIMIT);
    let history = run.history();
    eprintln!(
        "committing: hits {hits:?} of {TIMES} each, checkpoints {:?}, {} steps redone, {:.1} s",
        history.checkpoints(),
        history.redone(),
        run.age()
    );
    assert!(hits.values().all(|hits| *hits > 0), "{hits:?}");
    // Nothing half done is left, and what is left is whole.
    let folder = run.folder().join("checkpoint");
    let names = fs::read_dir(&folder).expect("checkpoints").flatten();
    let names: Vec<_> =
        names.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    assert!(names.iter().all(|name| !name.starts_with(".retired-")), "{names:?}");
    crate::bad_input::verify(&run, &[run.setup.steps]);
    assert_eq!(&digests, expected);
}
