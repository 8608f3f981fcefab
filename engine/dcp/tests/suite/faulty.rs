//! A storage in memory that stops in the middle of everything, and knows what
//! would be left after the power is gone: bytes that were finished, names of
//! folders that were synced, and of the rest as much as chance says. It is a
//! [`Storage`] like any other: the production writer, folder and reader run on
//! it as they are (CKPT-1).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use dcp::storage::{Object, Storage, Upload};

/// What survives of what was not synced.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Unsynced {
    Lost,
    Kept,
    /// Each name and each end of a file by itself.
    Chance(u64),
}

/// The storage of one process, up to its end.
#[derive(Clone)]
pub(crate) struct Faulty(Arc<Mutex<State>>);

struct State {
    root: Folder,
    /// Whether folders can be renamed, as on a disk, or names are keys.
    renames: bool,
    /// Operations until the end; none for a storage that does not fail.
    left: Option<u64>,
    done: u64,
    /// Whether the operation at which it ends takes effect.
    lands: bool,
}

#[derive(Clone, Default)]
struct Folder {
    /// What the running system sees, and what is on the disk.
    seen: BTreeMap<String, Node>,
    kept: BTreeMap<String, Node>,
    /// Both names of whatever moved since the last sync: a disk's journal loses
    /// a move or keeps it, and never half of it.
    moved: BTreeSet<String>,
}

#[derive(Clone)]
enum Node {
    File(Arc<Mutex<File>>),
    Folder(Arc<Mutex<Folder>>),
}

#[derive(Clone, Default)]
struct File {
    bytes: Vec<u8>,
    /// Bytes that are on the disk.
    kept: usize,
    /// An upload to an object store is invisible until it is finished.
    hidden: bool,
}

impl Faulty {
    pub(crate) fn new(renames: bool) -> Self {
        let root = Folder::default();
        Self(Arc::new(Mutex::new(State { root, renames, left: None, done: 0, lands: false })))
    }

    /// Ends after so many more operations, the last of which takes effect or
    /// does not.
    pub(crate) fn end_after(&self, operations: u64, lands: bool) {
        let mut state = self.state();
        (state.left, state.done, state.lands) = (Some(operations), 0, lands);
    }

    /// Operations since [`end_after`](Self::end_after).
    pub(crate) fn operations(&self) -> u64 {
        self.state().done
    }

    /// What a new process finds after the power came back.
    pub(crate) fn after_power_loss(&self, unsynced: Unsynced) -> Self {
        let state = self.state();
        let mut chance = Chance::new(unsynced);
        let new = Self::new(state.renames);
        new.state().root = survivor(&state.root, &mut chance, state.renames);
        new
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Runs an operation, unless the end has come.
    fn run<T>(&self, operation: impl FnOnce(&mut State) -> io::Result<T>) -> io::Result<T> {
        let mut state = self.state();
        state.done += 1;
        match state.left.as_mut() {
            None => operation(&mut state),
            Some(0) => Err(ended()),
            Some(left) => {
                *left -= 1;
                if *left > 0 {
                    return operation(&mut state);
                }
                if state.lands {
                    operation(&mut state)?;
                }
                Err(ended())
            }
        }
    }
}

fn ended() -> io::Error {
    io::Error::other("the process has ended")
}

struct Chance(Option<u64>, bool);

impl Chance {
    fn new(unsynced: Unsynced) -> Self {
        match unsynced {
            Unsynced::Lost => Self(None, false),
            Unsynced::Kept => Self(None, true),
            Unsynced::Chance(seed) => Self(Some(seed | 1), false),
        }
    }

    fn flip(&mut self) -> bool {
        let Some(state) = &mut self.0 else { return self.1 };
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        *state & 64 != 0
    }
}

fn survivor(folder: &Folder, chance: &mut Chance, renames: bool) -> Folder {
    let mut names: Vec<&String> = folder.seen.keys().chain(folder.kept.keys()).collect();
    names.sort_unstable();
    names.dedup();
    let mut new = Folder::default();
    let moves = chance.flip();
    for name in names {
        let (seen, kept) = (folder.seen.get(name), folder.kept.get(name));
        let survives = if folder.moved.contains(name) { moves } else { chance.flip() };
        // Where names are keys, a finished object is there for good.
        let node = if !renames || survives { seen } else { kept };
        let node = match node {
            None => continue,
            Some(Node::File(file)) => {
                let mut file = file.lock().unwrap().clone();
                if file.hidden {
                    continue;
                }
                if !chance.flip() {
                    file.bytes.truncate(file.kept);
                } else if chance.flip() {
                    // Blocks that were allocated and never written.
                    let kept = file.kept;
                    file.bytes[kept..].fill(0);
                }
                file.kept = file.bytes.len();
                Node::File(Arc::new(Mutex::new(file)))
            }
            Some(Node::Folder(folder)) => {
                let folder = survivor(&folder.lock().unwrap(), chance, renames);
                Node::Folder(Arc::new(Mutex::new(folder)))
            }
        };
        new.seen.insert(name.clone(), node.clone());
        new.kept.insert(name.clone(), node);
    }
    new
}

impl State {
    /// Runs `work` on the folder of a key, created when it has to be.
    fn folder<T>(&mut self, key: &str, work: impl FnOnce(&mut Folder) -> T) -> io::Result<T> {
        let mut names = key.split('/').filter(|name| !name.is_empty());
        let Some(first) = names.next() else { return Ok(work(&mut self.root)) };
        let create = !self.renames;
        let mut at = child(&mut self.root, first, create)?;
        for name in names {
            let next = child(&mut at.lock().unwrap(), name, create)?;
            at = next;
        }
        let mut folder = at.lock().unwrap();
        Ok(work(&mut folder))
    }

    /// The same with the folder above a key, and the key's last name.
    fn above<T>(&mut self, key: &str, work: impl FnOnce(&mut Folder, &str) -> T) -> io::Result<T> {
        let (above, name) = key.rsplit_once('/').unwrap_or(("", key));
        self.folder(above, |folder| work(folder, name))
    }

    fn node(&mut self, key: &str) -> io::Result<Node> {
        let found = self.above(key, |folder, name| folder.seen.get(name).cloned())?;
        found.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// A new file that is durable, but for its name.
    fn put(&mut self, key: &str, bytes: &[u8]) -> io::Result<()> {
        let file = File { bytes: bytes.to_vec(), kept: bytes.len(), hidden: false };
        self.above(key, |folder, name| {
            folder.seen.insert(name.to_owned(), Node::File(Arc::new(Mutex::new(file))));
        })
    }
}

fn child(folder: &mut Folder, name: &str, create: bool) -> io::Result<Arc<Mutex<Folder>>> {
    if create && !folder.seen.contains_key(name) {
        let new = Node::Folder(Arc::default());
        folder.seen.insert(name.to_owned(), new);
    }
    match folder.seen.get(name) {
        Some(Node::Folder(folder)) => Ok(Arc::clone(folder)),
        Some(Node::File(_)) => Err(io::ErrorKind::NotADirectory.into()),
        None => Err(io::ErrorKind::NotFound.into()),
    }
}

fn visible(node: &Node) -> bool {
    match node {
        Node::File(file) => !file.lock().unwrap().hidden,
        // A prefix without objects is nothing.
        Node::Folder(_) => true,
    }
}

impl fmt::Debug for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

impl Storage for Faulty {
    fn path(&self, key: &str) -> PathBuf {
        PathBuf::from("faulty:").join(key)
    }

    fn open(&self, key: &str) -> io::Result<Box<dyn Object>> {
        self.run(|state| match state.node(key)? {
            Node::File(file) if !file.lock().unwrap().hidden => {
                Ok(Box::new(Opened(file.lock().unwrap().bytes.clone())) as Box<dyn Object>)
            }
            _ => Err(io::ErrorKind::NotFound.into()),
        })
    }

    fn list(&self, folder: &str) -> io::Result<Vec<String>> {
        self.run(|state| {
            let names = state.folder(folder, |folder| {
                folder.seen.iter().filter(|(_, node)| visible(node)).map(|n| n.0.clone()).collect()
            });
            Ok(names.unwrap_or_default())
        })
    }

    fn exists(&self, key: &str) -> io::Result<bool> {
        self.run(|state| Ok(state.node(key).is_ok_and(|node| visible(&node))))
    }

    fn make_folder(&self, folder: &str) -> io::Result<()> {
        self.run(|state| {
            let mut key = String::new();
            for name in folder.split('/') {
                state.folder(&key, |folder| child(folder, name, true))??;
                key = format!("{key}/{name}");
            }
            Ok(())
        })
    }

    fn create(&self, key: &str) -> io::Result<Box<dyn Upload>> {
        self.run(|state| {
            let hidden = !state.renames;
            let file = Arc::new(Mutex::new(File { hidden, ..File::default() }));
            state.above(key, |folder, name| match folder.seen.get(name) {
                Some(_) => Err(io::Error::from(io::ErrorKind::AlreadyExists)),
                None => {
                    folder.seen.insert(name.to_owned(), Node::File(Arc::clone(&file)));
                    Ok(())
                }
            })??;
            Ok(Box::new(Written { file, storage: self.clone() }) as Box<dyn Upload>)
        })
    }

    fn claim(&self, key: &str, bytes: &[u8]) -> io::Result<()> {
        self.run(|state| match state.node(key) {
            Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
            Err(_) => state.put(key, bytes),
        })
    }

    fn replace(&self, key: &str, bytes: &[u8]) -> io::Result<()> {
        self.run(|state| state.put(key, bytes))
    }

    fn sync(&self, folder: &str) -> io::Result<()> {
        self.run(|state| {
            state.folder(folder, |folder| {
                folder.kept = folder.seen.clone();
                folder.moved.clear();
            })
        })
    }

    fn renames(&self) -> bool {
        self.state().renames
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.run(|state| {
            let node = state.node(from)?;
            if state.node(to).is_ok() {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            state.above(from, |folder, name| {
                folder.seen.remove(name);
                folder.moved.insert(name.to_owned());
            })?;
            state.above(to, |folder, name| {
                folder.seen.insert(name.to_owned(), node);
                folder.moved.insert(name.to_owned());
            })
        })
    }

    fn remove(&self, key: &str) -> io::Result<()> {
        // In two steps, as promised: the index first.
        let _ = self.run(|state| {
            state.folder(key, |folder| folder.seen.remove(".metadata"))?;
            Ok(())
        });
        self.run(|state| {
            let _ = state.above(key, |folder, name| folder.seen.remove(name));
            Ok(())
        })
    }
}

struct Opened(Vec<u8>);

impl Object for Opened {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let bytes = self.0.get(at as usize..).and_then(|bytes| bytes.get(..into.len()));
        into.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

struct Written {
    file: Arc<Mutex<File>>,
    storage: Faulty,
}

impl Upload for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let file = Arc::clone(&self.file);
        self.storage.run(|_| {
            file.lock().unwrap().bytes.extend(bytes);
            Ok(())
        })
    }

    fn finish(self: Box<Self>) -> io::Result<()> {
        self.storage.run(|_| {
            let mut file = self.file.lock().unwrap();
            (file.kept, file.hidden) = (file.bytes.len(), false);
            Ok(())
        })
    }
}
