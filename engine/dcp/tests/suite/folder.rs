//! The checkpoint folder (CKPT-1, LG-1, LG-2).

use std::fs;
use std::path::Path;

use dcp::Folder;
use dcp::folder::{Commit, Error, Genesis, Record, stage_name};

use crate::support::save;

fn folder(root: &Path) -> Folder {
    let folder = Folder::open(root).unwrap();
    let (job, config_digest) = ("job".to_owned(), "abc".to_owned());
    let (ca_pin, config) = (String::new(), serde_json::Value::Null);
    let genesis = Genesis { job, config_digest, seed: 1, ca_pin, config };
    folder.append(0, &Record::Genesis(genesis)).unwrap();
    folder
}

/// Writes a stage; its commit is not in the ledger yet.
pub(crate) fn stage(folder: &Folder, step: u64) -> Commit {
    let stage = stage_name(0, 1, step);
    let (_, files) = save(&folder.stage(&stage), step as i64);
    Commit { step, stage, era: 0, generation: 1, files, micro_batches: None }
}

pub(crate) fn append(folder: &Folder, record: Record) {
    let next = folder.records().unwrap().len() as u64;
    folder.append(next, &record).unwrap();
}

pub(crate) fn commit(folder: &Folder, step: u64) {
    let commit = stage(folder, step);
    append(folder, Record::Commit(commit.clone()));
    folder.publish(&commit).unwrap();
}

fn newest(folder: &Folder) -> Option<u64> {
    folder.newest().unwrap().checkpoint.map(|(step, path)| {
        assert_eq!(path, folder.step(step));
        step
    })
}

#[test]
fn a_folder_that_cannot_be_written_is_told_at_once() {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("file");
    fs::write(&file, b"").unwrap();
    let error = Folder::open(&file.join("checkpoint")).unwrap_err();
    assert!(matches!(error, Error::NotWritable { .. }));
    assert!(error.to_string().contains("file/checkpoint cannot be written"), "{error}");
}

#[test]
fn records_come_back_and_each_number_is_given_once() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = folder(scratch.path());
    let commit = stage(&folder, 5);
    let parent = folder.record_digest(0).unwrap();
    let more = [
        Record::Commit(commit),
        Record::Retire { step: 5 },
        Record::Reform {
            era: 1,
            parent,
            founders: vec!["a".into(), "b".into()],
            address: "a:1".into(),
            ca_pin: String::new(),
        },
        Record::Finish { step: 9 },
    ];
    more.iter().for_each(|record| append(&folder, record.clone()));
    let records = folder.records().unwrap();
    assert_eq!(records.iter().map(|(seq, _)| *seq).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    assert_eq!(records[1..].iter().map(|(_, r)| r.clone()).collect::<Vec<_>>(), more);
    assert!(matches!(folder.append(4, &more[3]), Err(Error::Taken { seq: 4 })));
    assert!(matches!(folder.append(6, &more[3]), Err(Error::Hole { .. })));
    fs::remove_file(scratch.path().join("ledger/00000002.json")).unwrap();
    assert!(matches!(folder.records(), Err(Error::Hole { .. })));
}

#[test]
fn of_many_writers_one_wins_each_number() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = folder(scratch.path());
    std::thread::scope(|scope| {
        for writer in 0..4 {
            let folder = &folder;
            scope.spawn(move || {
                let mut won = 0;
                while won < 10 {
                    let next = folder.records().unwrap().len() as u64;
                    match folder.append(next, &Record::Retire { step: writer * 100 + won }) {
                        Ok(()) => won += 1,
                        Err(Error::Taken { .. }) => {}
                        Err(other) => panic!("{other}"),
                    }
                }
            });
        }
    });
    let records = folder.records().unwrap();
    let mut steps: Vec<u64> = records[1..]
        .iter()
        .map(|(_, record)| if let Record::Retire { step } = record { *step } else { panic!() })
        .collect();
    steps.sort_unstable();
    assert_eq!(steps, (0..4).flat_map(|w| (0..10).map(move |n| w * 100 + n)).collect::<Vec<_>>());
}

/// A save of step 20 that stops at each point; step 10 is committed before it.
#[track_caller]
fn check_crash(stop: impl FnOnce(&Folder), survives: u64) {
    let scratch = tempfile::tempdir().unwrap();
    let first = folder(scratch.path());
    commit(&first, 10);
    stop(&first);
    // The next process finds the newest checkpoint with and without a repair.
    let folder = Folder::open(scratch.path()).unwrap();
    let before = newest(&folder).unwrap();
    folder.recover().unwrap();
    let folder = Folder::open(scratch.path()).unwrap();
    assert_eq!(newest(&folder), Some(survives));
    assert!(before == survives || before == 10);
    assert_eq!(folder.recover().unwrap(), dcp::folder::Recovery::default());
    // A later save makes the remains useless, and they go.
    commit(&folder, 30);
    folder.recover().unwrap();
    let left = fs::read_dir(scratch.path()).unwrap().map(|e| e.unwrap().file_name());
    assert!(left.into_iter().all(|name| !name.to_string_lossy().starts_with(".stage")));
    assert_eq!(newest(&folder), Some(30));
}

#[test]
fn a_crash_anywhere_in_a_save_leaves_a_checkpoint() {
    let stage_dir = |folder: &Folder| folder.stage(&stage_name(0, 1, 20));
    check_crash(
        |folder| {
            fs::create_dir(stage_dir(folder)).unwrap();
            fs::write(stage_dir(folder).join("__0_0.distcp"), b"half a sh").unwrap();
        },
        10,
    );
    check_crash(
        |folder| {
            stage(folder, 20);
            fs::remove_file(stage_dir(folder).join(".metadata")).unwrap();
        },
        10,
    );
    check_crash(|folder| drop(stage(folder, 20)), 10);
    check_crash(
        |folder| {
            let commit = stage(folder, 20);
            append(folder, Record::Commit(commit));
        },
        20,
    );
    check_crash(
        |folder| {
            let commit = stage(folder, 20);
            append(folder, Record::Commit(commit.clone()));
            folder.publish(&commit).unwrap();
            folder.publish(&commit).unwrap();
        },
        20,
    );
}

#[test]
fn torchtitan_never_takes_a_stage_for_a_step() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = folder(scratch.path());
    commit(&folder, 10);
    stage(&folder, 20);
    fs::write(folder.step(10).join("__0_0.distcp"), b"torn").unwrap();
    assert_eq!(newest(&folder), None);
    for entry in fs::read_dir(scratch.path()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let looks_like_a_step = name
            .match_indices("step-")
            .any(|(at, found)| name[at + found.len()..].starts_with(|c: char| c.is_ascii_digit()));
        assert!(!looks_like_a_step, "{name}");
    }
}

#[test]
fn bad_checkpoints_are_quarantined_and_named_once() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = folder(scratch.path());
    [10, 20, 30].into_iter().for_each(|step| commit(&folder, step));
    let shard = folder.step(30).join("__1_0.distcp");
    let mut bytes = fs::read(&shard).unwrap();
    bytes[100] ^= 1;
    fs::write(&shard, bytes).unwrap();
    fs::remove_file(folder.step(20).join("__0_0.distcp")).unwrap();

    let found = folder.newest().unwrap();
    assert_eq!(found.checkpoint, Some((10, folder.step(10))));
    let named: Vec<(u64, String)> =
        found.quarantined.iter().map(|q| (q.step, q.reason.to_string())).collect();
    assert_eq!((named[0].0, named[1].0, named.len()), (30, 20, 2));
    assert!(named[0].1.contains("step-30/__1_0.distcp changed"), "{named:?}");
    assert!(named[1].1.contains("step-20/__0_0.distcp: No such file"), "{named:?}");
    assert!(found.quarantined.iter().all(|q| q.path.as_ref().unwrap().is_dir()));
    let again = folder.newest().unwrap();
    assert_eq!((again.checkpoint.unwrap().0, again.quarantined.len()), (10, 0));
    // The run comes by step 30 again.
    let commit = Commit { stage: stage_name(0, 2, 30), generation: 2, ..stage(&folder, 30) };
    fs::rename(folder.stage(&stage_name(0, 1, 30)), folder.stage(&commit.stage)).unwrap();
    append(&folder, Record::Commit(commit.clone()));
    folder.publish(&commit).unwrap();
    assert_eq!(newest(&folder), Some(30));
}

#[test]
fn what_stands_in_the_way_is_never_replaced() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = folder(scratch.path());
    let commit = stage(&folder, 10);
    fs::create_dir(folder.step(10)).unwrap();
    fs::write(folder.step(10).join("precious"), b"").unwrap();
    let error = folder.publish(&commit).unwrap_err();
    assert!(matches!(error, Error::Occupied { .. }), "{error}");
    assert!(folder.step(10).join("precious").exists());
    let vanished = Commit { step: 11, stage: stage_name(0, 1, 11), ..commit.clone() };
    assert!(matches!(folder.publish(&vanished), Err(Error::Vanished { step: 11, .. })));
    let escape = Commit { stage: "../x".into(), ..commit };
    assert!(matches!(folder.publish(&escape), Err(Error::StageName { .. })));
}

#[test]
fn retiring_keeps_the_newest_and_the_last_good_one() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = folder(scratch.path());
    (1..=4).for_each(|step| commit(&folder, step * 10));
    assert!(folder.retire(0).unwrap().is_empty());
    assert!(folder.retire(4).unwrap().is_empty());
    assert_eq!(folder.retire(2).unwrap(), [10, 20]);
    assert!(!folder.step(20).exists() && folder.step(30).exists());
    // The only one that would stay is bad: nothing goes.
    fs::write(folder.step(40).join("__0_0.distcp"), b"torn").unwrap();
    let fresh = Folder::open(scratch.path()).unwrap();
    assert!(fresh.retire(1).unwrap().is_empty());
    assert_eq!(newest(&fresh), Some(30));
    // Quarantined ones do not count.
    commit(&fresh, 50);
    assert!(fresh.retire(2).unwrap().is_empty());
    assert_eq!(fresh.retire(1).unwrap(), [30]);
    assert_eq!(newest(&fresh), Some(50));
}

#[test]
fn a_step_is_committed_once() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = folder(scratch.path());
    commit(&folder, 10);
    // The same stage again, complete or not, is refused and goes.
    let again = stage(&folder, 10);
    let refused = folder.append(2, &Record::Commit(again));
    assert!(matches!(refused, Err(Error::Occupied { .. })), "{refused:?}");
    assert_eq!(folder.recover().unwrap().orphans, [".stage-0-1-10"]);
    assert_eq!(newest(&folder), Some(10));
}

#[test]
fn an_interrupted_retirement_is_finished() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = folder(scratch.path());
    [10, 20].into_iter().for_each(|step| commit(&folder, step));
    append(&folder, Record::Retire { step: 10 });
    fs::create_dir(scratch.path().join(".retired-5")).unwrap();
    let done = folder.recover().unwrap();
    assert_eq!(done.retired, [".retired-5", "step-10"]);
    assert!(!folder.step(10).exists());
    assert_eq!(newest(&folder), Some(20));
}
