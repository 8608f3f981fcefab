//! The world of the tests: members, their directories, and the links between.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use job::JobId;
use job::replicated::StateMachine;
use job::voters::Change;
use tempfile::TempDir;
use tokio::sync::mpsc;

use crate::control_group::{
    AppliedReceiver, ChangeError, ControlGroup, Founding, Handle, Options, Outbound, Role, Status,
    Store,
};

/// A state that shows every lost, doubled and reordered command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::control_group) struct Journal(pub(in crate::control_group) Vec<u64>);

impl StateMachine for Journal {
    type Command = u64;
    type Event = u64;
    fn apply(&mut self, command: u64) -> Vec<u64> {
        self.0.push(command);
        vec![command]
    }
    fn snapshot(&self) -> Vec<u8> {
        job::codec::encode(&self.0)
    }
    fn restore(bytes: &[u8]) -> Result<Self, String> {
        job::codec::decode(bytes).map(Self).map_err(|e| e.to_string())
    }
}

pub(super) type Events = AppliedReceiver<Journal>;

#[derive(Default)]
struct Net {
    handles: BTreeMap<u64, Handle<Journal>>,
    /// Ordered pairs (from, to) that lose everything.
    cut: BTreeSet<(u64, u64)>,
}

pub(super) struct Cluster {
    net: Arc<Mutex<Net>>,
    dirs: BTreeMap<u64, PathBuf>,
    root: TempDir,
    pub(super) options: Options,
    pub(super) founding: Option<Founding>,
    made: usize,
}

impl Cluster {
    pub(super) fn new() -> Self {
        Self {
            net: Arc::default(),
            dirs: BTreeMap::new(),
            root: TempDir::new().expect("a directory"),
            options: Options::default(),
            founding: None,
            made: 0,
        }
    }

    /// A founder and `n - 1` members that joined it, all voters.
    pub(super) async fn of(n: usize) -> (Self, Vec<u64>) {
        Self::new().grown(n).await
    }

    /// This empty cluster with `n` voters.
    pub(super) async fn grown(mut self, n: usize) -> (Self, Vec<u64>) {
        let (founder, _) = self.add().await;
        let mut ids = vec![founder];
        for _ in 1..n {
            let (id, _) = self.add().await;
            self.change(Change::AddLearner(id)).await;
            ids.push(id);
        }
        for &id in &ids[1..] {
            self.change(Change::Promote(id)).await;
        }
        (self, ids)
    }

    /// A new member on a new store; the first one founds the group.
    pub(super) async fn add(&mut self) -> (u64, Events) {
        self.made += 1;
        let dir = self.root.path().join(format!("node-{}", self.made));
        let store = Store::open(&dir).expect("a new store");
        let id = store.id().raft_id();
        let founding = self.founding.get_or_insert_with(|| Founding {
            job: JobId(uuid::Uuid::nil()),
            founder: id,
            state: Journal(vec![]).snapshot(),
        });
        let founding = Some(founding.clone());
        self.dirs.insert(id, dir);
        let events = self.start(store, founding);
        (id, events)
    }

    fn start(&self, store: Store, founding: Option<Founding>) -> Events {
        let (outbound, mut messages) = mpsc::channel::<Outbound>(1024);
        let (handle, events) =
            ControlGroup::start::<Journal>(self.options.clone(), store, founding, outbound)
                .expect("the member starts");
        let (from, net) = (handle.id(), Arc::clone(&self.net));
        lock(&net).handles.insert(from, handle);
        tokio::spawn(async move {
            while let Some(Outbound { to, bytes, snapshot }) = messages.recv().await {
                let net = lock(&net);
                let open = !net.cut.contains(&(from, to));
                let sent = match net.handles.get(&to) {
                    Some(handle) if open => handle.step(&bytes).is_ok(),
                    _ => false,
                };
                if let (true, Some(own)) = (snapshot, net.handles.get(&from)) {
                    own.snapshot_sent(to, sent);
                }
            }
        });
        events
    }

    pub(super) fn handle(&self, id: u64) -> Handle<Journal> {
        lock(&self.net).handles[&id].clone()
    }

    pub(super) fn dir(&self, id: u64) -> PathBuf {
        self.dirs[&id].clone()
    }

    /// The process of a member dies: no farewell to anybody.
    pub(super) async fn kill(&self, id: u64) {
        let handle = lock(&self.net).handles.remove(&id).expect("it runs");
        handle.stop().await;
    }

    /// Starts a killed member on its store.
    pub(super) fn restart(&self, id: u64) -> Events {
        let store = Store::open(&self.dirs[&id]).expect("its store");
        assert_eq!(store.id().raft_id(), id, "a store keeps its identity");
        self.start(store, None)
    }

    /// Loses everything between the two sides.
    pub(super) fn part(&self, one: &[u64], other: &[u64]) {
        let mut net = lock(&self.net);
        for (&a, &b) in one.iter().flat_map(|a| other.iter().map(move |b| (a, b))) {
            net.cut.extend([(a, b), (b, a)]);
        }
    }

    pub(super) fn heal(&self) {
        lock(&self.net).cut.clear();
    }

    /// Waits for a leader that some majority follows.
    pub(super) async fn leader(&self) -> Handle<Journal> {
        let found = until(|| {
            let net = lock(&self.net);
            let statuses: Vec<Status> =
                net.handles.values().map(|h| h.status().borrow().clone()).collect();
            let leader = statuses.iter().filter(|s| s.role == Role::Leader);
            let leader = leader.max_by_key(|s| s.term)?;
            let followers = statuses.iter().filter(|s| {
                s.leader == Some(leader.id)
                    && s.term == leader.term
                    && leader.voters.contains(&s.id)
            });
            (followers.count() > leader.voters.len() / 2).then(|| net.handles[&leader.id].clone())
        });
        found.await
    }

    /// Makes a change through whoever leads, trying again where told to.
    pub(super) async fn change(&self, change: Change) {
        let begun = Instant::now();
        loop {
            match self.leader().await.change(change).await {
                Ok(()) => return,
                Err(ChangeError::Refused { .. }) => panic!("{change:?} is refused"),
                Err(e) if begun.elapsed() > PATIENCE => panic!("{change:?}: {e}"),
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    }

    /// Waits until a member's state is `expected`.
    pub(super) async fn settle(&self, id: u64, expected: &[u64]) {
        let handle = self.handle(id);
        until(|| (handle.state().borrow().state.0 == expected).then_some(())).await;
    }
}

const PATIENCE: Duration = Duration::from_secs(20);

/// Polls until there is something.
pub(super) async fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < PATIENCE, "waited too long");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn lock(net: &Mutex<Net>) -> std::sync::MutexGuard<'_, Net> {
    net.lock().unwrap_or_else(PoisonError::into_inner)
}
