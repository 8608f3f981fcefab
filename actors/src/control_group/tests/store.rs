//! The store against other processes and bad disks.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, PermissionsExt};

use job::JobId;
use job::replicated::StateMachine;
use tokio::sync::mpsc;

use super::cluster::{Cluster, Journal, until};
use crate::control_group::{ControlGroup, Error, Founding, Options, Store, disk::LINGER};

#[test]
fn one_process_has_a_store_and_its_identity_stays() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = Store::open(dir.path()).expect("new");
    let id = store.id();
    let second = Store::open(dir.path()).expect_err("locked").to_string();
    assert!(second.contains(&format!("in use by pid {}", std::process::id())), "{second}");
    let mode = dir.path().join("raft.redb").metadata().expect("exists").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    drop(store);
    assert_eq!(Store::open(dir.path()).expect("free again").id(), id);
}

#[tokio::test]
async fn a_store_belongs_to_one_job_and_needs_a_founding() {
    let dir = tempfile::tempdir().expect("a directory");
    let start = |founding| {
        let store = Store::open(dir.path()).expect("opens");
        ControlGroup::start::<Journal>(Options::default(), store, founding, mpsc::channel(1).0)
    };
    let founding = |job, founder| Founding {
        job: JobId(uuid::Uuid::from_u128(job)),
        founder,
        state: Journal(vec![]).snapshot(),
    };
    assert!(matches!(start(None), Err(Error::NotFounded(_))));
    let (handle, _) = start(Some(founding(1, 5))).expect("founds");
    // The last handle takes the member with it.
    let mut status = handle.status();
    drop(handle);
    while status.changed().await.is_ok() {}
    assert!(matches!(start(Some(founding(2, 5))), Err(Error::WrongJob { .. })));
    let (handle, _) = start(None).expect("is founded");
    assert_eq!(handle.founding(), &founding(1, 5));
    handle.stop().await;
}

/// What a killed process leaves: its file as it was, with nothing written at the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fact_is_known_after_all_were_killed() {
    let mut cluster = Cluster::new();
    let (id, _) = cluster.add().await;
    let leader = cluster.leader().await;
    let last = leader.propose(7).await.expect("commits").index;
    tokio::time::sleep(LINGER * 4).await;
    let copy = tempfile::tempdir().expect("a directory");
    let file = |dir: &std::path::Path| dir.join("raft.redb");
    std::fs::copy(file(&cluster.dir(id)), file(copy.path())).expect("copies");
    let left = Store::open(copy.path()).and_then(|store| store.load()).expect("it is sound");
    assert_eq!(left.hard_state.commit, last);
}

/// Whatever a bad disk did to the file: an error that names it, or the member
/// runs with a committed state. Never a panic, never another state.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_store_is_named() {
    let mut cluster = Cluster::new();
    let (id, _) = cluster.add().await;
    let leader = cluster.leader().await;
    for command in 0..40 {
        leader.propose(command).await.expect("commits");
    }
    cluster.kill(id).await;
    let path = cluster.dir(id).join("raft.redb");
    let whole = std::fs::read(&path).expect("reads");

    #[track_caller]
    fn check(dir: &std::path::Path, what: &str) -> bool {
        let result = Store::open(dir).and_then(|s| s.load().map(|l| l.entries.len()));
        match result {
            Ok(entries) => {
                assert!(entries >= 40, "{what}: opened with {entries} entries");
                false
            }
            Err(error) => {
                let error = error.to_string();
                assert!(error.contains("raft.redb"), "{what}: {error}");
                true
            }
        }
    }
    for at in [100, 4096, whole.len() / 2, whole.len() - 4096] {
        std::fs::write(&path, &whole[..at]).expect("writes");
        assert!(check(&cluster.dir(id), &format!("cut at {at}")));
    }
    std::fs::write(&path, vec![0x5a; whole.len()]).expect("writes");
    assert!(check(&cluster.dir(id), "noise"));
    let mut found = 0;
    for page in 0..whole.len() / 4096 {
        std::fs::write(&path, &whole).expect("writes");
        let file = OpenOptions::new().write(true).open(&path).expect("opens");
        let at = page * 4096 + 64;
        file.write_all_at(&[!whole[at], !whole[at + 1]], at as u64).expect("writes");
        found += usize::from(check(&cluster.dir(id), &format!("flipped at {at}")));
    }
    assert!(found > 0, "no flipped page was noticed");
    std::fs::write(&path, &whole).expect("writes");
    assert!(!check(&cluster.dir(id), "as it was"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_log_stays_short_on_disk_and_replays() {
    let mut cluster = Cluster::new();
    cluster.options.snapshot_every = 16;
    cluster.options.keep_entries = 4;
    let (id, _) = cluster.add().await;
    let all: Vec<u64> = (0..100).collect();
    for &command in &all {
        cluster.handle(id).propose(command).await.unwrap_or_else(|e| panic!("{command}: {e}"));
    }
    cluster.kill(id).await;
    {
        let loaded = Store::open(cluster.dir(id)).expect("opens").load().expect("loads");
        assert!(loaded.entries.len() <= 20, "{} entries", loaded.entries.len());
    }
    cluster.restart(id);
    cluster.settle(id, &all).await;
}

/// What a SIGKILL would leave: the file while the member runs, never closed and
/// with a commit index that lags. All that was acknowledged is there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_loses_nothing_that_was_acknowledged() {
    let mut cluster = Cluster::new();
    cluster.options.snapshot_every = 16;
    let (id, _) = cluster.add().await;
    let leader = cluster.leader().await;
    let crashed = tempfile::tempdir().expect("a directory");
    for command in 0..60 {
        leader.propose(command).await.unwrap_or_else(|e| panic!("{command}: {e}"));
        if command % 7 != 0 {
            continue;
        }
        let dir = crashed.path().join(command.to_string());
        std::fs::create_dir(&dir).expect("a directory");
        std::fs::copy(cluster.dir(id).join("raft.redb"), dir.join("raft.redb")).expect("copies");
        let store = Store::open(dir).expect("opens");
        assert_eq!(store.id().raft_id(), id);
        let (again, _) =
            ControlGroup::start::<Journal>(Options::default(), store, None, mpsc::channel(1).0)
                .expect("starts");
        let all: Vec<u64> = (0..=command).collect();
        until(|| (again.state().borrow().state.0 == all).then_some(())).await;
        again.stop().await;
    }
}
