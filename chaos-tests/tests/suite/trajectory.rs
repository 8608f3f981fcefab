//! TRAJ-1: the digests are those of a quiet run, whatever happened on the way.

use chaos_tests::harness::{Fault, Random, Run, Setup};

use crate::{LIMIT, STEPS, fake, quiet, quiet_real, quietly, real};

#[test]
fn traj_1_the_number_of_nodes_does_not_show() {
    for (name, nodes) in [("quiet-3", 3), ("quiet-4", 4)] {
        assert_eq!(&quietly(fake(name, nodes, 0)), quiet(), "{nodes} nodes");
    }
}

#[test]
fn traj_1_another_seed_shows() {
    let other = quietly(Setup { seed: 43, ..fake("seed-43", 2, 0) });
    assert_ne!(other.weights, quiet().weights);
    assert_ne!(other.losses, quiet().losses);
}

#[test]
fn traj_1_kills_at_random_moments_do_not_show() {
    use Fault::{Agent, Both, Fresh, Leader, Pair, Worker};
    let mut faults = [
        Worker, Worker, Worker, Agent, Agent, Agent, Both, Both, Leader, Leader, Fresh, Fresh,
        Fresh, Pair,
    ];
    let mut random = Random::seeded();
    random.shuffle(&mut faults);
    let expected = quiet();
    // Whoever comes first waits for a second: no step has one rank alone.
    let mut run = Run::start(Setup { min_nodes: 2, ..fake("kills", 4, 20) });
    run.wait_step(3, LIMIT);
    for fault in faults {
        std::thread::sleep(random.pause(0, 500));
        if fault == Fresh {
            // Two lost disks within one change of voters are a lost majority.
            run.settle();
        }
        run.inject(fault, &mut random);
    }
    let at = run.step();
    let digests = run.finish(LIMIT);
    let history = run.history();
    history.check_shared();
    eprintln!(
        "kills: {} faults until step {at} of {STEPS}, {:.1} s, tiers {:?}, {} steps computed again",
        faults.len(),
        run.age(),
        history.tiers_counted(),
        history.redone()
    );
    assert_eq!(&digests, expected);
}

#[test]
fn traj_1_neither_nodes_nor_sharding_show_in_the_engine() {
    let zero1 = || vec!["--parallelism.sharding=zero1".to_owned()];
    let with = |name, keys: &[&str]| {
        let arguments = keys.iter().map(|key| format!("--parallelism.{key}")).collect();
        Setup { arguments, ..real(name, 4) }
    };
    let setups = [
        real("real-4", 4),
        Setup { arguments: zero1(), ..real("real-zero1-4", 4) },
        with("real-full-shard-4", &["sharding=FULL_SHARD"]),
        with("real-hybrid-4", &["sharding=HYBRID_SHARD", "data_parallel_shard_degree=2"]),
        with(
            "real-pipeline-4",
            &[
                "sharding=SHARD_GRAD_OP",
                "pipeline_parallel_degree=2",
                "pipeline_parallel_schedule=Interleaved1F1B",
            ],
        ),
    ];
    for setup in setups {
        let name = setup.name;
        assert_eq!(&quietly(setup), quiet_real(), "{name}");
    }
}

#[test]
fn traj_1_a_lost_replica_of_a_shard_or_stage_is_made_good_live() {
    let expected = quiet_real();
    let cases: [(&str, &[&str]); 2] = [
        (
            "real-hybrid-kill",
            &["--parallelism.sharding=HYBRID_SHARD", "--parallelism.data_parallel_shard_degree=2"],
        ),
        ("real-pipeline-kill", &["--parallelism.pipeline_parallel_degree=2"]),
    ];
    for (name, keys) in cases {
        let arguments = keys.iter().map(|key| (*key).to_owned()).collect();
        let mut run = Run::start(Setup { arguments, ..real(name, 4) });
        run.wait_step(5, LIMIT);
        run.inject(Fault::Worker, &mut Random::seeded());
        let digests = run.finish(LIMIT);
        let history = run.history();
        eprintln!("{name}: tiers {:?}, {} steps redone", history.tiers(), history.redone());
        assert!(!history.tiers().contains(&"checkpoint"), "the other replica has it: {name}");
        assert_eq!(&digests, expected, "{name}");
    }
}

#[test]
fn traj_1_a_lost_shard_does_not_show_in_the_engine() {
    let expected = quiet_real();
    let arguments = vec!["--parallelism.sharding=zero1".to_owned()];
    let mut run = Run::start(Setup { arguments, ..real("real-zero1-kill", 3) });
    let saved = run.wait("checkpoint", LIMIT, |run| run.history().checkpoints().last().copied());
    run.wait_step(saved + 1, LIMIT);
    run.inject(Fault::Worker, &mut Random::seeded());
    let digests = run.finish(LIMIT);
    let history = run.history();
    eprintln!("zero1: tiers {:?}, {} steps redone", history.tiers(), history.redone());
    assert!(history.tiers().contains(&"checkpoint"), "a third of the moments was lost");
    assert_eq!(&digests, expected);
}
