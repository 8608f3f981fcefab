//! SEC-1: ten thousand connections of strangers at every port slow nothing down,
//! are not remembered, and are counted by kind.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::SocketAddr,
    process::{Command, Stdio},
    sync::Arc,
    thread::sleep,
    time::{Duration, SystemTime},
};

use chaos_tests::{
    harness::{Line, Random, Run, Setup, dataset, elastic, wall_clock},
    hostile::{Door, Kind, Stranger, knock, record},
};
use tokio::{sync::Semaphore, task::JoinSet};

use crate::{LIMIT, fake};

const CONNECTIONS: usize = 10_000;
/// Quiet times and crowded ones take turns, so that whatever else this machine
/// does meets both.
const ROUNDS: usize = 8;
const QUIET: Duration = Duration::from_secs(3);
/// Strangers at a time.
const AT_ONCE: usize = 200;
const NODES: u32 = 4;

/// Every port of every node.
fn doors(run: &Run) -> Option<Vec<Door>> {
    let status = run.status()?;
    let job = &status["status"]["job"];
    let address = |at: &serde_json::Value| at["address"].as_str()?.parse::<SocketAddr>().ok();
    let nodes = job["nodes"].as_object()?.values();
    let control = nodes.map(|node| address(node).map(Door::Control));
    let members = job["plan"]["members"].as_array()?.iter();
    let doors: Vec<_> = control
        .chain(members.map(|member| address(member).map(Door::Tensors)))
        .collect::<Option<_>>()?;
    (doors.len() == 2 * NODES as usize).then_some(doors)
}

/// The bytes with which a real newcomer asks to join: it has the token without the
/// authority's fingerprint, and somebody else's address.
async fn recorded_join(run: &Run) -> Vec<u8> {
    let token = fs::read_to_string(run.folder().join("token")).expect("the launcher's token");
    let other = run.folder().join("newcomer");
    let mut newcomer = None;
    let ask = |address: SocketAddr| {
        let command = Command::new(elastic())
            .args(["run", "--node-id=n9", "--listen=127.0.0.1:0", "--token", token.trim()])
            .args(["--join", &address.to_string()])
            .arg(format!("--job.dump_folder={}", other.display()))
            .arg(format!("--training.dataset_path={}", dataset().display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        newcomer = Some(command.expect("elastic starts"));
    };
    let bytes = record(ask, Duration::from_secs(20)).await;
    if let Some(mut newcomer) = newcomer {
        let _ = newcomer.kill();
        let _ = newcomer.wait();
    }
    bytes
}

/// Knocks so often, each kind as often as the others.
async fn crowd(stranger: &Arc<Stranger>, doors: &[Door], count: usize, random: &mut Random) {
    let (mut tasks, limit) = (JoinSet::new(), Arc::new(Semaphore::new(AT_ONCE)));
    for number in 0..count {
        let kind = Kind::ALL[number % Kind::ALL.len()];
        let fits = |door: &&Door| {
            !kind.is_quic() && kind != Kind::Datagrams || matches!(door, Door::Control(_))
        };
        let fitting: Vec<Door> = doors.iter().filter(fits).copied().collect();
        let door = *random.pick(&fitting).expect("a door");
        let permit = Arc::clone(&limit).acquire_owned().await.expect("it stays open");
        let (stranger, mut random) = (Arc::clone(stranger), Random::from(number as u64));
        tasks.spawn(async move {
            knock(kind, door, &stranger, &mut random).await.expect("this machine can send");
            drop(permit);
        });
    }
    tasks.join_all().await;
}

/// The counts that each node last recorded, summed over the nodes.
fn counted(run: &Run) -> BTreeMap<(String, String), u64> {
    let mut last = BTreeMap::new();
    for line in run.history().of("turned_away") {
        let place = (line["node"].to_string(), line["port"].to_string());
        last.insert(place, line.clone());
    }
    let mut sums = BTreeMap::new();
    for line in last.values() {
        let port = line["port"].as_str().unwrap_or_default();
        for (kind, count) in line.as_object().into_iter().flatten() {
            if let Some(count) = count.as_u64().filter(|_| kind != "seen") {
                *sums.entry((port.to_owned(), kind.clone())).or_default() += count;
            }
        }
    }
    sums
}

fn memory(run: &Run) -> u64 {
    let nodes = (1..=NODES).filter_map(|node| run.agent(&format!("n{node}"))?.resources());
    nodes.map(|resources| resources.kib).sum()
}

/// The median time of the steps that were applied within these times.
fn pace(lines: &[Line], times: &[(SystemTime, SystemTime)]) -> (Duration, usize) {
    let micros =
        |at: &SystemTime| at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_micros();
    let within = |line: &&Line| {
        let (seen, began) = (u128::from(line.seen), u128::from(line.seen - line.micros));
        times.iter().any(|(from, to)| began > micros(from) && seen < micros(to))
    };
    let mut found: Vec<u64> = lines.iter().filter(within).map(|line| line.micros).collect();
    found.sort_unstable();
    (Duration::from_micros(found.get(found.len() / 2).copied().unwrap_or_default()), found.len())
}

#[test]
fn sec_1_ten_thousand_strangers_do_not_show() {
    let mut random = Random::seeded();
    let mut run = Run::start(Setup { steps: 1_000_000, ..fake("strangers", NODES, 60) });
    run.settle();
    let doors = run.wait("every port", LIMIT, doors);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let stranger = runtime.block_on(async { Arc::new(Stranger::new(recorded_join(&run).await)) });
    // What the first strangers make a node allocate once is no growth.
    runtime.block_on(crowd(&stranger, &doors, 2 * AT_ONCE, &mut random));
    let (before, plans) = (memory(&run), run.history().of("planned").count());
    let (mut quiet, mut crowded) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let began = wall_clock();
        sleep(QUIET);
        let middle = wall_clock();
        runtime.block_on(crowd(&stranger, &doors, CONNECTIONS / ROUNDS, &mut random));
        quiet.push((began, middle));
        crowded.push((middle, wall_clock()));
    }
    sleep(Duration::from_secs(2));
    let (after, history) = (memory(&run), run.history());
    let counts = counted(&run);
    let ((calm, calm_steps), (busy, busy_steps)) =
        (pace(&history.steps, &quiet), pace(&history.steps, &crowded));
    eprintln!(
        "strangers: a step takes {:.1} ms quiet ({calm_steps}), {:.1} ms with {CONNECTIONS} \
         strangers ({busy_steps}), agents {before} -> {after} KiB, {:.1} s\n  {counts:?}",
        calm.as_secs_f64() * 1e3,
        busy.as_secs_f64() * 1e3,
        run.age(),
    );
    assert_eq!(history.of("planned").count(), plans, "nobody was lost to them\n{}", run.report());
    let kinds: BTreeSet<_> =
        counts.iter().filter(|(_, count)| **count > 0).map(|(k, _)| k).collect();
    for (port, kind) in [
        ("control", "handshakes"),
        ("control", "certificates"),
        ("control", "slow"),
        ("control", "tokens"),
        ("control", "requests"),
        ("control", "crowded"),
        ("control", "watchers"),
        ("tensors", "strangers"),
        ("tensors", "late"),
    ] {
        assert!(kinds.contains(&(port.to_owned(), kind.to_owned())), "no {kind} at {port}");
    }
    assert!(after < before + NODES as u64 * (8 << 10), "memory grew");
    assert!(busy <= calm.mul_f64(1.05), "strangers slow training down");
}
