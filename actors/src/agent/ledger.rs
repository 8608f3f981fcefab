//! Whose folder it is, and which era is the newest (LG-1, LG-3). Blocking; each
//! function can be repeated after a crash at any point.

use dcp::{
    Folder,
    folder::{Commit, Error as FolderError, Genesis, Record},
};
use job::{Era, JobId};

/// What a founder finds or makes in the folder (LG-1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Claim {
    /// The folder was empty: this job is its owner now.
    New,
    /// The folder belongs to a job of the same configuration whose control
    /// group is gone: it goes on in a new era.
    Resumes {
        /// That job.
        job: JobId,
        /// The new era.
        era: Era,
        /// Its checkpoints.
        checkpoints: Vec<Commit>,
    },
    /// The folder belongs to such a job, and another founder was faster.
    Begun(Begun),
    /// The folder belongs to another configuration.
    Foreign(Genesis),
    /// The folder belongs to a job of the same configuration that may be running.
    Owned(Genesis),
}

/// Claims the folder for a job: record 0 keeps two founders from founding twice,
/// a `Reform` record keeps two from resuming twice.
pub(super) fn claim(
    folder: &Folder,
    genesis: &Genesis,
    founder: &Founder,
    reforms: bool,
) -> Result<Claim, String> {
    let text = |error: FolderError| error.to_string();
    loop {
        let records = folder.records().map_err(text)?;
        if records.is_empty() {
            match folder.append(0, &Record::Genesis(genesis.clone())) {
                Ok(()) => return Ok(Claim::New),
                Err(FolderError::Taken { .. }) => continue,
                Err(error) => return Err(text(error)),
            }
        }
        let Some((_, Record::Genesis(owner))) = records.first() else {
            return Err(format!(
                "ledger of {} does not begin with a genesis",
                folder.root().display()
            ));
        };
        if owner.config_digest != genesis.config_digest {
            return Ok(Claim::Foreign(owner.clone()));
        }
        if !reforms {
            return Ok(Claim::Owned(owner.clone()));
        }
        let job = owner
            .job
            .parse()
            .map(JobId)
            .map_err(|_| format!("ledger of {} names no valid job", folder.root().display()))?;
        let era = Era(newest_era(&records).unwrap_or(0) + 1);
        return Ok(match reform(folder, era, founder)? {
            Contest::Won { checkpoints } => Claim::Resumes { job, era, checkpoints },
            Contest::Lost(begun) => Claim::Begun(begun),
        });
    }
}

/// Who begins an era.
#[derive(Clone, Debug)]
pub(super) struct Founder {
    /// The nodes that begin it.
    pub(super) nodes: Vec<String>,
    /// Where it lets others in.
    pub(super) address: String,
    /// Digest of its authority.
    pub(super) ca_pin: String,
}

/// How an attempt to begin an era ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Contest {
    /// It is begun, with these checkpoints.
    Won {
        /// The committed ones.
        checkpoints: Vec<Commit>,
    },
    /// Somebody else began it, or a later one.
    Lost(Begun),
}

/// Begins `era`, which follows the newest that is known: of any number that try,
/// from whatever place of the ledger, one wins (LG-3).
pub(super) fn reform(folder: &Folder, era: Era, founder: &Founder) -> Result<Contest, String> {
    let text = |error: FolderError| error.to_string();
    loop {
        let records = folder.records().map_err(text)?;
        if let Some(begun) = begun(&records).filter(|begun| begun.era >= era) {
            return Ok(Contest::Lost(begun));
        }
        let Some((last, _)) = records.last() else {
            return Err(format!("ledger of {} is empty", folder.root().display()));
        };
        let record = Record::Reform {
            era: era.0,
            parent: folder.record_digest(*last).map_err(text)?,
            founders: founder.nodes.clone(),
            address: founder.address.clone(),
            ca_pin: founder.ca_pin.clone(),
        };
        match folder.append(last + 1, &record) {
            Ok(()) => {
                folder.recover().map_err(text)?;
                return Ok(Contest::Won { checkpoints: committed(&records) });
            }
            Err(FolderError::Taken { .. }) => {}
            Err(error) => return Err(text(error)),
        }
    }
}

fn committed(records: &[(u64, Record)]) -> Vec<Commit> {
    let mut commits: Vec<Commit> = Vec::new();
    for (_, record) in records {
        match record {
            Record::Commit(commit) => commits.push(commit.clone()),
            Record::Retire { step } => commits.retain(|commit| commit.step != *step),
            _ => {}
        }
    }
    commits
}

/// Appends a record of an era unless it is there.
pub(super) fn append_once(
    folder: &Folder,
    era: Era,
    record: &Record,
    same: impl Fn(&Record) -> bool,
) -> Result<(), String> {
    loop {
        let records = folder.records().map_err(|error| error.to_string())?;
        if records.iter().any(|(_, known)| same(known)) {
            return Ok(());
        }
        // LG-1: what is appended next to a newer era is appended by nobody.
        if let Some(newer) = newest_era(&records).filter(|newer| *newer > era.0) {
            return Err(overtaken(newer));
        }
        match folder.append(records.len() as u64, record) {
            Ok(()) => return Ok(()),
            Err(FolderError::Taken { .. }) => {}
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// An era above this group's own in the ledger.
pub(super) fn newer_era(folder: &Folder, own: Era) -> Result<Option<u32>, String> {
    let records = folder.records().map_err(|error| error.to_string())?;
    Ok(newest_era(&records).filter(|era| *era > own.0))
}

fn newest_era(records: &[(u64, Record)]) -> Option<u32> {
    let eras = records.iter().filter_map(|(_, record)| match record {
        Record::Reform { era, .. } => Some(*era),
        _ => None,
    });
    eras.max()
}

/// An era that somebody began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Begun {
    pub(super) era: Era,
    /// Where its first founder lets others in; empty in older records.
    pub(super) address: String,
    /// Digest of its authority; empty in older records.
    pub(super) ca_pin: String,
}

/// The newest era in records, if they have one.
pub(super) fn begun(records: &[(u64, Record)]) -> Option<Begun> {
    let eras = records.iter().filter_map(|(_, record)| match record {
        Record::Reform { era, address, ca_pin, .. } => {
            Some(Begun { era: Era(*era), address: address.clone(), ca_pin: ca_pin.clone() })
        }
        _ => None,
    });
    eras.max_by_key(|begun| begun.era)
}

pub(super) fn overtaken(era: u32) -> String {
    format!(
        "era {era} of this job was begun elsewhere from the same checkpoint folder (LG-3): this \
         group stops"
    )
}

#[cfg(test)]
mod tests {
    use std::{path::PathBuf, sync::Barrier, thread};

    use dcp::folder::stage_name;

    use super::*;

    fn founder(name: &str) -> Founder {
        let (address, ca_pin) = (format!("{name}:29400"), String::new());
        Founder { nodes: vec![name.into()], address, ca_pin }
    }

    fn genesis() -> Genesis {
        Genesis {
            job: uuid::Uuid::nil().to_string(),
            config_digest: "c".into(),
            seed: 1,
            ca_pin: String::new(),
            config: serde_json::Value::Null,
        }
    }

    fn commit(step: u64, era: u32) -> Record {
        let (stage, files) = (stage_name(era, 1, step), Vec::new());
        Record::Commit(Commit { step, stage, era, generation: 1, files, micro_batches: None })
    }

    /// A folder of its own, removed with the test.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("elastic-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&path);
            Self(path)
        }

        fn open(&self) -> Folder {
            Folder::open(&self.0).expect("a folder")
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn lg_3_of_halves_that_all_try_exactly_one_begins_the_era() {
        let scratch = Scratch::new("halves");
        let folder = scratch.open();
        folder.append(0, &Record::Genesis(genesis())).expect("the first record");
        for era in (1..=50).map(Era) {
            // Each half has the folder open for itself, and checkpoints go on being
            // committed by the era before.
            let (start, names) = (Barrier::new(4), ["a", "b", "c"]);
            let outcomes: Vec<Contest> = thread::scope(|scope| {
                let halves = names.map(|name| {
                    let (start, folder) = (&start, scratch.open());
                    scope.spawn(move || {
                        start.wait();
                        reform(&folder, era, &founder(name)).expect("the folder works")
                    })
                });
                let old = {
                    let (start, folder) = (&start, scratch.open());
                    scope.spawn(move || {
                        start.wait();
                        let record = commit(u64::from(era.0), era.0 - 1);
                        append_once(&folder, Era(era.0 - 1), &record, |known| *known == record)
                    })
                };
                // Before the new era it counts, after it it is refused.
                let _ = old.join().expect("no panic");
                halves.into_iter().map(|half| half.join().expect("no panic")).collect()
            });
            let winners: Vec<usize> =
                (0..3).filter(|half| matches!(outcomes[*half], Contest::Won { .. })).collect();
            assert_eq!(winners.len(), 1, "era {era}: {outcomes:?}");
            let address = founder(names[winners[0]]).address;
            for lost in outcomes.iter().filter(|outcome| !matches!(outcome, Contest::Won { .. })) {
                let Contest::Lost(begun) = lost else { continue };
                assert_eq!((begun.era, &begun.address), (era, &address), "all follow the winner");
            }
        }
        let records = folder.records().expect("the ledger is sound");
        let mut newest = 0;
        for (_, record) in &records {
            match record {
                Record::Reform { era, .. } => {
                    assert_eq!(*era, newest + 1, "one record an era");
                    newest = *era;
                }
                Record::Commit(commit) => {
                    assert_eq!(commit.era, newest, "LG-1: {commit:?} stands beside era {newest}");
                }
                _ => {}
            }
        }
        assert_eq!(newest, 50);
    }

    #[test]
    fn lg_1_an_era_that_is_over_appends_nothing() {
        let scratch = Scratch::new("over");
        let folder = scratch.open();
        let claimed = claim(&folder, &genesis(), &founder("a"), false);
        assert_eq!(claimed, Ok(Claim::New));
        append_once(&folder, Era(0), &commit(5, 0), |_| false).expect("it is the newest era");
        let won = reform(&folder, Era(1), &founder("b")).expect("the folder works");
        assert!(matches!(&won, Contest::Won { checkpoints } if checkpoints.len() == 1), "{won:?}");
        let late = append_once(&folder, Era(0), &commit(9, 0), |_| false);
        assert!(late.as_ref().is_err_and(|why| why.contains("era 1")), "{late:?}");
        assert_eq!(newer_era(&folder, Era(0)), Ok(Some(1)));
        assert_eq!(newer_era(&folder, Era(1)), Ok(None));
        append_once(&folder, Era(1), &commit(9, 1), |_| false).expect("it is the newest era");
    }
}
