//! CKPT-1 and LG-2 at every operation: a process that ends in the middle of a
//! save, an attempt to overwrite, a commit or a deletion, and a power loss that
//! takes what was not synced, leave the previous checkpoint or the new one,
//! whole.

use std::sync::Arc;

use dcp::folder::{Commit, Error, Record, stage_name};
use dcp::{Checkpoint, Dir, Dtype, FileDigest, Folder, ShardWriter, Value, write_index};

use crate::faulty::{Faulty, Unsynced};
use crate::support::{Tensor, cut, path};

/// Ranks of a save.
const RANKS: u32 = 2;

fn tensor(step: u64) -> Tensor {
    Tensor::new(&format!("weights of step {step}"), Dtype::F32, &[5, 3])
}

/// Saves a step as the ranks and the leader do. The key is the same in every
/// checkpoint: a mix of two would load, and be wrong.
fn save(folder: &Folder, generation: u64, step: u64) -> Result<(), Error> {
    let stage = stage_name(1, generation, step);
    let dir = folder.stage_dir(&stage);
    let tensor = tensor(step);
    let mut shards = Vec::new();
    for rank in 0..RANKS {
        let mut writer = ShardWriter::create_in(&dir, rank, 0)?;
        let region = cut(&tensor.shape, 0, rank.into(), RANKS.into());
        let bytes = tensor.region(&region);
        writer.tensor("w", &path("w"), tensor.dtype, &tensor.shape, &region, &bytes)?;
        if rank == 0 {
            writer.object("step", &path("step"), &Value::Int(step as i64))?;
        }
        shards.push(writer.finish()?);
    }
    let index = write_index(&dir, &shards)?;
    let mut files: Vec<FileDigest> = shards.into_iter().map(|shard| shard.file).collect();
    files.push(index);
    let commit = Commit { step, stage, era: 1, generation, files, micro_batches: None };
    folder.append(folder.records()?.len() as u64, &Record::Commit(commit.clone()))?;
    folder.publish(&commit)?;
    Ok(())
}

/// All that a leader does in a day. Returns the newest step that was promised.
fn day(folder: &Folder, promised: &mut u64) -> Result<(), Error> {
    save(folder, 1, 2)?;
    *promised = 2;
    // A stage is never used twice, and a checkpoint never replaced.
    assert!(save(folder, 1, 2).is_err());
    folder.retire(1)?;
    save(folder, 2, 3)?;
    *promised = 3;
    folder.retire(2)?;
    folder.retire(1)?;
    Ok(())
}

/// A storage with one committed checkpoint, of step 1.
fn prepared(renames: bool) -> Faulty {
    let storage = Faulty::new(renames);
    let folder = open(&storage).unwrap();
    save(&folder, 0, 1).unwrap();
    storage
}

fn open(storage: &Faulty) -> Result<Folder, Error> {
    Folder::found(Dir::new(Arc::new(storage.clone()), "checkpoint"))
}

/// The next process finds a whole checkpoint, at least the promised one, and
/// goes on from it.
#[track_caller]
fn check(storage: &Faulty, promised: u64, story: &str) {
    let folder = open(storage).unwrap();
    if let Err(error) = folder.recover() {
        panic!("{story}: {error}");
    }
    let newest = folder.newest().unwrap_or_else(|error| panic!("{story}: {error}"));
    assert!(newest.quarantined.is_empty(), "{story}: {:?}", newest.quarantined);
    let (step, _) = newest.checkpoint.unwrap_or_else(|| panic!("{story}: no checkpoint"));
    assert!(step >= promised, "{story}: step {promised} was promised, {step} is there");
    let records = folder.records().unwrap();
    let commit = dcp::folder::live(&records)[&step];
    let checkpoint = Checkpoint::open_in(folder.dir_of(commit)).unwrap();
    assert!(checkpoint.verify().unwrap().digests, "{story}");
    let tensor = tensor(step);
    let whole = dcp::Region::whole(&tensor.shape);
    assert_eq!(checkpoint.read_vec("w", &whole).unwrap(), tensor.bytes, "{story}");
    assert_eq!(checkpoint.object("step").unwrap(), Value::Int(step as i64), "{story}");
    // What the end left behind is in nobody's way.
    save(&folder, 9, 9).unwrap_or_else(|error| panic!("{story}: {error}"));
    folder.retire(1).unwrap();
    assert_eq!(folder.newest().unwrap().checkpoint.unwrap().0, 9, "{story}");
}

#[track_caller]
fn check_all(renames: bool) {
    let storage = prepared(renames);
    storage.end_after(u64::MAX, false);
    let folder = open(&storage).unwrap();
    day(&folder, &mut 0).unwrap();
    let operations = storage.operations();
    let mut runs = 0;
    for at in 1..=operations {
        for lands in [false, true] {
            let storage = prepared(renames);
            storage.end_after(at, lands);
            let mut promised = 1;
            // A retirement that cannot verify what stays does nothing, and is fine.
            let _ = open(&storage).and_then(|folder| day(&folder, &mut promised));
            assert!(storage.operations() >= at, "operation {at} of {operations}");
            let chances = (1..=4).map(|seed| Unsynced::Chance(seed * 0x9e37_79b9 + at));
            for unsynced in [Unsynced::Lost, Unsynced::Kept].into_iter().chain(chances) {
                let story = format!("ended at operation {at}, effect {lands}, {unsynced:?}");
                check(&storage.after_power_loss(unsynced), promised, &story);
                runs += 1;
            }
        }
    }
    println!("{operations} operations, {runs} ends, each left a whole checkpoint");
}

#[test]
fn a_power_loss_at_any_operation_on_a_disk_leaves_a_whole_checkpoint() {
    check_all(true);
}

#[test]
fn an_end_at_any_operation_on_an_object_store_leaves_a_whole_checkpoint() {
    check_all(false);
}

#[test]
fn a_retirement_that_fails_at_any_operation_says_so() {
    for renames in [true, false] {
        let retire = |at| {
            let storage = prepared(renames);
            save(&open(&storage).unwrap(), 1, 2).unwrap();
            let folder = open(&storage).unwrap();
            storage.end_after(at, false);
            (folder.retire(1), storage.operations())
        };
        let (retired, operations) = retire(u64::MAX);
        assert_eq!(retired.unwrap(), [1]);
        for at in 1..=operations {
            let told = retire(at).0.unwrap_err().to_string();
            assert!(told.contains("faulty:/checkpoint"), "operation {at} of {operations}: {told}");
            assert!(told.ends_with("the process has ended"), "operation {at}: {told}");
        }
    }
}
