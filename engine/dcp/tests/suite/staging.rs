//! Asynchronous saves: no buffer is overwritten while it is written out, the
//! next save waits or is skipped, errors are told and end nothing.

use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

use dcp::staging::{Error, Event, Options, Policy, Stager};
use dcp::storage::{Local, Object, Storage, Upload};
use dcp::{Checkpoint, Dir, Dtype, Region, write_index};

use crate::support::path;

const SHAPE: [u64; 2] = [64, 1024];
const BYTES: usize = 64 * 1024;

fn start(options: Options) -> (Stager, Receiver<Event>) {
    let (events, told) = channel();
    (Stager::start(options, move |event| drop(events.send(event))).unwrap(), told)
}

/// Stages a state of one value and hands it over; false when it is skipped.
fn save(stager: &Stager, stage: &Dir, value: u8) -> bool {
    let Some(mut snapshot) = stager.begin() else { return false };
    let whole = Region::whole(&SHAPE);
    snapshot.tensor("w", &path("w"), Dtype::U8, &SHAPE, &whole, &[value; BYTES]).unwrap();
    stager.save(snapshot, stage, 0);
    true
}

/// A disk that stands still until it is told to go on.
#[derive(Debug)]
struct Slow {
    inner: Local,
    gate: Arc<Mutex<()>>,
}

struct Gated(Box<dyn Upload>, Arc<Mutex<()>>);

impl Upload for Gated {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        drop(self.1.lock().unwrap());
        self.0.write(bytes)
    }

    fn finish(self: Box<Self>) -> io::Result<()> {
        self.0.finish()
    }
}

impl Storage for Slow {
    fn path(&self, key: &str) -> PathBuf {
        self.inner.path(key)
    }
    fn open(&self, key: &str) -> io::Result<Box<dyn Object>> {
        self.inner.open(key)
    }
    fn list(&self, folder: &str) -> io::Result<Vec<String>> {
        self.inner.list(folder)
    }
    fn exists(&self, key: &str) -> io::Result<bool> {
        self.inner.exists(key)
    }
    fn make_folder(&self, folder: &str) -> io::Result<()> {
        self.inner.make_folder(folder)
    }
    fn create(&self, key: &str) -> io::Result<Box<dyn Upload>> {
        Ok(Box::new(Gated(self.inner.create(key)?, Arc::clone(&self.gate))))
    }
    fn claim(&self, key: &str, bytes: &[u8]) -> io::Result<()> {
        self.inner.claim(key, bytes)
    }
    fn replace(&self, key: &str, bytes: &[u8]) -> io::Result<()> {
        self.inner.replace(key, bytes)
    }
    fn sync(&self, folder: &str) -> io::Result<()> {
        self.inner.sync(folder)
    }
    fn renames(&self) -> bool {
        true
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.inner.rename(from, to)
    }
    fn remove(&self, key: &str) -> io::Result<()> {
        self.inner.remove(key)
    }
}

#[test]
fn a_snapshot_stays_what_it_was_while_others_are_taken() {
    let scratch = tempfile::tempdir().unwrap();
    let gate = Arc::new(Mutex::new(()));
    let storage = Arc::new(Slow { inner: Local::new(scratch.path()), gate: Arc::clone(&gate) });
    let stage = |n: u8| Dir::new(Arc::clone(&storage) as Arc<dyn Storage>, &format!("stage-{n}"));
    let (stager, told) = start(Options { policy: Policy::Skip, ..Options::new(BYTES) });

    let closed = gate.lock().unwrap();
    assert!(save(&stager, &stage(1), 1));
    assert!(save(&stager, &stage(2), 2));
    // Both buffers are taken: the third save is skipped, nothing is overwritten.
    assert!(!save(&stager, &stage(3), 3));
    drop(closed);
    stager.drain();
    assert!(save(&stager, &stage(4), 4));
    drop(stager);

    let mut saved = Vec::new();
    for event in told {
        match event {
            Event::Saved { save, shards, .. } => {
                let n = [1, 2, 4][save as usize];
                write_index(&stage(n), &shards).unwrap();
                let checkpoint = Checkpoint::open_in(stage(n)).unwrap();
                let bytes = checkpoint.read_vec("w", &Region::whole(&SHAPE)).unwrap();
                assert!(bytes.iter().all(|&byte| byte == n), "save {n}");
                saved.push(n);
            }
            Event::Progress { written, total, .. } => {
                assert_eq!((written, total), (65_536, 65_536))
            }
            Event::Failed { error, .. } => panic!("{error}"),
        }
    }
    assert_eq!(saved, [1, 2, 4]);
}

#[test]
fn a_save_that_waits_gets_the_buffer_that_was_written_out() {
    let scratch = tempfile::tempdir().unwrap();
    let (stager, told) = start(Options { buffers: 1, threads: 2, ..Options::new(BYTES) });
    for n in 0..5 {
        let stage = Dir::at(&scratch.path().join(n.to_string())).unwrap();
        assert!(save(&stager, &stage, n));
    }
    drop(stager);
    let saved = told.iter().filter(|event| matches!(event, Event::Saved { .. })).count();
    assert_eq!(saved, 5);
}

#[test]
fn an_error_is_told_and_the_next_save_is_tried() {
    let scratch = tempfile::tempdir().unwrap();
    let stage = Dir::at(scratch.path()).unwrap();
    let (stager, told) = start(Options::new(BYTES));
    // The same stage twice is refused (LG-2).
    assert!(save(&stager, &stage, 1) && save(&stager, &stage, 2));
    assert!(save(&stager, &Dir::at(&scratch.path().join("other")).unwrap(), 3));
    drop(stager);
    let ends: Vec<String> = told
        .iter()
        .filter_map(|event| match event {
            Event::Progress { .. } => None,
            Event::Saved { save, .. } => Some(format!("{save} saved")),
            Event::Failed { save, error } => {
                assert!(error.to_string().contains("__0_0.distcp: File exists"), "{error}");
                Some(format!("{save} failed"))
            }
        })
        .collect();
    assert_eq!(ends, ["0 saved", "1 failed", "2 saved"]);
}

#[test]
fn what_does_not_fit_is_named() {
    let (stager, _told) = start(Options { lock: true, ..Options::new(100) });
    let mut snapshot = stager.begin().unwrap();
    let whole = Region::whole(&[10]);
    let mut tensor =
        |bytes: &[u8]| snapshot.tensor("w", &path("w"), Dtype::F32, &[10], &whole, bytes);
    let told = tensor(&[0; 39]).unwrap_err();
    assert_eq!(told.to_string(), "w: its region has 40 bytes, 39 were given");
    tensor(&[0; 40]).unwrap();
    let told = tensor(&[0; 40]).unwrap_err();
    assert!(matches!(told, Error::Full { bytes: 40, left: 36, .. }), "{told}");
}
