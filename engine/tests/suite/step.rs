//! One step, and what an engine refuses (ST-1 to ST-3, GEN-1).

use engine::{Config, Engine, Error};
use job::{Step, shares::Shares};
use transport::collective::Solo;

use crate::support::{config, dataset, deadline, enter, step, token};

#[test]
fn a_step_is_whole_or_not_at_all() {
    // ST-1, ST-3
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let config = config(folder.path());
    let mut comm = Solo::new(token(1));
    let mut engine = enter(&config, &comm);

    let fresh = engine.prepare(&mut comm, &|| false, deadline());
    assert!(matches!(fresh, Err(Error::Fresh)), "HEAL-1: {fresh:?}");
    engine.initialize();
    let early = engine.tally(&[]).unwrap_err().to_string();
    assert_eq!(early, "tally needs the rank to be prepared at step 0");

    let polls = std::cell::Cell::new(0);
    let abort = || {
        polls.set(polls.get() + 1);
        polls.get() > 9
    };
    let aborted = engine.prepare(&mut comm, &abort, deadline()).unwrap_err();
    assert!(aborted.is_abort() && aborted.peer().is_none());
    assert_eq!((engine.position(), engine.is_prepared()), (Some(Step(0)), false));

    let first = engine.prepare(&mut comm, &|| false, deadline()).unwrap();
    let twice = engine.prepare(&mut comm, &|| false, deadline()).unwrap_err().to_string();
    assert_eq!(twice, "prepare needs the rank to be open at step 0");
    let verdict = engine.tally(std::slice::from_ref(&first)).unwrap();
    engine.discard();
    assert!(engine.apply(&verdict).is_err(), "nothing is prepared");
    let again = engine.prepare(&mut comm, &|| false, deadline()).unwrap();
    assert_eq!(again, first, "an attempt repeats its ballot (GN-5)");
    assert!(engine.tally(&[first.clone(), first]).is_err(), "a rank votes twice");
    assert!(engine.tally(&[vec![0; 7]]).is_err(), "not a ballot");
    assert!(engine.apply(&verdict[1..]).is_err() && engine.is_prepared());
    let report = engine.apply(&verdict).unwrap();
    assert_eq!((report.step, report.tokens, report.update_skipped), (Step(1), 320, false));
    engine.prepare(&mut comm, &|| false, deadline()).unwrap();
    let late = engine.apply(&verdict).unwrap_err().to_string();
    assert_eq!(late, "the verdict is on step 0, the prepared gradient is for step 1");
}

#[test]
fn a_rank_keeps_to_the_mesh_that_it_entered() {
    // GEN-1, DATA-2
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let config = config(folder.path());
    let mut engine = enter(&config, &Solo::new(token(2)));
    engine.initialize();
    let old = engine.prepare(&mut Solo::new(token(1)), &|| false, deadline());
    assert!(matches!(old, Err(Error::OtherMesh { .. })), "{old:?}");
    let other = engine.enter(token(3), 0, 1, &Shares::even(4, 1)).unwrap_err().to_string();
    assert!(other.contains("5 micro-batches"), "{other}");
    assert!(engine.enter(token(3), 2, 1, &Shares::even(5, 2)).is_err());
}

/// Why an engine does not come to train.
#[track_caller]
fn check_refused(change: impl FnOnce(&mut Config), expected: &str) {
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let mut config = config(folder.path());
    change(&mut config);
    let refused = match Engine::new(config) {
        Ok(mut engine) => engine.enter(token(1), 0, 1, &Shares::even(5, 1)),
        Err(error) => Err(error),
    };
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains(expected), "{refused}");
}

#[test]
fn what_cannot_be_trained_is_refused_before_it_starts() {
    let huge = engine::model::registry::find("llama3", "405B").unwrap();
    check_refused(|config| config.model = huge, "needs at least 9289");
    check_refused(|config| config.model.vocab_size = 200, "a vocabulary of 256 tokens");
    check_refused(|config| config.training.seq_len = 30_000, "too few");
    check_refused(|config| config.dataset.push("nowhere"), "nowhere/train.tok");
    check_refused(|config| config.training.global_batch_size = 9, "global_batch_size = 9");
}

#[test]
fn what_is_not_finite_updates_nothing() {
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let mut config = config(folder.path());
    config.optimizer.lr = 1e30;
    config.training.max_norm = f64::INFINITY;
    let mut comm = Solo::new(token(1));
    let mut engine = enter(&config, &comm);
    engine.initialize();
    let reports: Vec<_> = (0..4).map(|_| step(&mut engine, &mut comm)).collect();
    let skipped: Vec<_> = reports.iter().map(|report| report.update_skipped).collect();
    assert_eq!(skipped, [false, true, true, true], "{reports:?}");
    let progress = engine.progress().unwrap();
    assert_eq!((progress.step, progress.updates, progress.tokens), (Step(4), 1, 4 * 320));
}

#[test]
fn generation_repeats_with_its_seed() {
    let folder = tempfile::tempdir().unwrap();
    dataset(folder.path(), 20_000);
    let config = config(folder.path());
    let mut engine = enter(&config, &Solo::new(token(1)));
    engine.initialize();
    let text = |seed| engine.generate(b"the king ", 40, 1.0, seed).unwrap();
    assert_eq!((text(1).len(), text(1)), (40, text(1)));
    assert_ne!(text(1), text(2));
    assert_eq!(engine.generate(b"", 3, 0.0, 1).unwrap(), engine.generate(b"", 3, 0.0, 2).unwrap());
}
