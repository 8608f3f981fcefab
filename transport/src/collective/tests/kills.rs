//! One rank is a process and is killed, or stopped, at any time in any
//! operation; the others are threads of the test and see it.
//!
//! `ELASTIC_KILLS=1000` runs as many rounds as a release does; the seed is
//! printed, and `ELASTIC_CHAOS_SEED` repeats it.

use std::{
    io::{BufRead, BufReader, Read, Write},
    process::{Child, ChildStdout, Command, Stdio},
    sync::Barrier,
};

use rustix::process::{Pid, Signal, kill_process};

use super::*;

const GENERATION: &str = "ELASTIC_TEST_GENERATION";
const WORK: &str = "ELASTIC_TEST_WORK";
const TCP: &str = "ELASTIC_TEST_TCP";
const RANKS: usize = 3;
const VICTIM: usize = RANKS - 1;

/// An operation, and the size of what it is done with.
#[derive(Clone, Copy, Debug)]
struct Work {
    kind: usize,
    elements: usize,
}

impl Work {
    const KINDS: usize = 9;

    /// Once, and whether the result is right.
    fn once(self, mesh: &mut dyn Communicator, limit: Instant) -> Result<bool, Error> {
        let (rank, size, elements) = (mesh.rank(), mesh.size(), self.elements);
        let mut buffer = vec![(rank + 1) as f32; elements];
        let sum = (size * (size + 1) / 2) as f32;
        let all = |values: &[f32], value: f32| values.iter().all(|at| *at == value);
        let splits = mesh.even_splits(elements);
        Ok(match self.kind {
            0 => {
                mesh.all_reduce(Reduce::Sum, ViewMut::of(&mut buffer), limit)?;
                all(&buffer, sum)
            }
            1 => {
                let mut part = vec![0.0; splits[rank].len()];
                let out = ViewMut::of(&mut part);
                mesh.reduce_scatter(Reduce::Sum, View::of(&buffer), &splits, out, limit)?;
                all(&part, sum)
            }
            2 => {
                mesh.all_gather(ViewMut::of(&mut buffer), &splits, limit)?;
                splits.into_iter().enumerate().all(|(of, at)| all(&buffer[at], (of + 1) as f32))
            }
            3 => {
                mesh.broadcast(1, ViewMut::of(&mut buffer), limit)?;
                all(&buffer, 2.0)
            }
            4 => {
                mesh.send((rank + 1) % size, View::of(&buffer), limit)?;
                let before = (rank + size - 1) % size;
                mesh.receive(before, ViewMut::of(&mut buffer), limit)?;
                all(&buffer, (before + 1) as f32)
            }
            5 => {
                let shares = Shares::even(size as u32, size as u32);
                let mut out = vec![0.0; elements];
                let own = [View::of(&buffer)];
                mesh.all_reduce_tree(&shares, &own, ViewMut::of(&mut out), limit)?;
                all(&out, sum)
            }
            6 => mesh.all_gather_bytes(&[rank as u8; 64], 64, limit)?[VICTIM] == [VICTIM as u8; 64],
            7 => mesh.barrier(limit).map(|()| true)?,
            _ => {
                // Allocated and reduced where it lies.
                let mut shared = mesh.allocate(Dtype::F32, elements, limit)?;
                shared.typed_mut::<f32>()?.fill((rank + 1) as f32);
                mesh.all_reduce(Reduce::Sum, shared.view_mut(), limit)?;
                all(shared.typed()?, sum)
            }
        })
    }

    /// Until it fails; a wrong result is a panic.
    fn until_error(self, mesh: &mut dyn Communicator, limit: Duration) -> Error {
        loop {
            match self.once(mesh, Instant::now() + limit) {
                Ok(right) => assert!(right, "a wrong result of {self:?}"),
                Err(error) => return error,
            }
        }
    }
}

/// The whole life of the victim.
#[test]
fn a_victim_of_the_tests_below() {
    let number = |name| std::env::var(name).ok()?.parse::<usize>().ok();
    let (Some(generation), Some(work)) = (number(GENERATION), number(WORK)) else { return };
    let own = if number(TCP) == Some(1) { listener().over_tcp_only() } else { listener() };
    println!("\naddress {}", own.local_addr());
    let lines = std::io::stdin().lines().take(RANKS);
    let addresses = lines.map(|line| line.unwrap().parse().unwrap()).collect();
    let key = [generation as u8; 32];
    let spec = MeshSpec { token: token(generation as u64), key, rank: VICTIM, addresses };
    let mut mesh = own.connect(spec, soon(), &AbortHandle::new().unwrap()).unwrap();
    println!("ready");
    let work = Work { kind: work % Work::KINDS, elements: work / Work::KINDS };
    let error = work.until_error(&mut mesh, Duration::from_secs(20));
    println!("end {error}");
}

struct Victim(Child, BufReader<ChildStdout>);

impl Victim {
    fn spawn(generation: u64, work: Work, tcp: bool) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "collective::tests::kills::a_victim_of_the_tests_below"])
            .arg("--nocapture")
            .env(GENERATION, generation.to_string())
            .env(WORK, (work.elements * Work::KINDS + work.kind).to_string())
            .env(TCP, u8::from(tcp).to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self(child, lines)
    }

    fn line(&mut self, word: &str) -> String {
        let mut lines = self.1.by_ref().lines().map(Result::unwrap);
        lines.find_map(|line| Some(line.strip_prefix(word)?.to_owned())).unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the kernel keeps for this process: descriptors, mappings of memory
/// files, threads.
fn held() -> [usize; 3] {
    let count = |folder: &str| std::fs::read_dir(folder).unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mapped = maps.lines().filter(|line| line.contains("memfd:elastic")).count();
    [count("/proc/self/fd"), mapped, count("/proc/self/task")]
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        ((self.0 >> 33) as usize) % limit
    }
}

/// Runs the work on all ranks, lets `strike` hit the victim, and returns what
/// the survivors say and when.
fn round(
    listeners: &[Listener],
    generation: u64,
    work: Work,
    tcp: bool,
    limit: Duration,
    strike: impl FnOnce(&Victim) -> Instant + Send,
) -> (Victim, Vec<(Error, Duration)>) {
    let mut victim = Victim::spawn(generation, work, tcp);
    let mut addresses: Vec<_> = listeners.iter().map(Listener::local_addr).collect();
    addresses.push(victim.line("address ").parse().unwrap());
    let all: String = addresses.iter().map(|address| format!("{address}\n")).collect();
    victim.0.stdin.as_mut().unwrap().write_all(all.as_bytes()).unwrap();
    let ready = Barrier::new(VICTIM + 1);
    let ended = std::thread::scope(|scope| {
        let survivors: Vec<_> = listeners
            .iter()
            .enumerate()
            .map(|(rank, listener)| {
                let (ready, addresses) = (&ready, addresses.clone());
                scope.spawn(move || {
                    let key = [generation as u8; 32];
                    let spec = MeshSpec { token: token(generation), key, rank, addresses };
                    let abort = AbortHandle::new().unwrap();
                    let mut mesh = listener.connect(spec, soon(), &abort).unwrap();
                    ready.wait();
                    let error = work.until_error(&mut mesh, limit);
                    let at = Instant::now();
                    assert_eq!(mesh.barrier(soon()), Err(error.clone()), "it is over for good");
                    (error, at)
                })
            })
            .collect();
        ready.wait();
        victim.line("ready");
        let struck = strike(&victim);
        let ended = survivors.into_iter().map(|survivor| survivor.join().unwrap());
        ended.map(|(error, at)| (error, at.saturating_duration_since(struck))).collect()
    });
    (victim, ended)
}

fn listeners(tcp: bool) -> Vec<Listener> {
    let listener = || if tcp { listener().over_tcp_only() } else { listener() };
    (0..VICTIM).map(|_| listener()).collect()
}

#[test]
fn whoever_is_killed_whenever_is_named_and_nothing_leaks() {
    let setting = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let rounds = setting("ELASTIC_KILLS").unwrap_or(24_u64);
    let seed = setting("ELASTIC_CHAOS_SEED").unwrap_or(20_261_201);
    println!("seed={seed} rounds={rounds}");
    let mut random = Random(seed);
    let meshes = [listeners(false), listeners(true)];
    let mut times = Vec::new();
    let mut before = None;
    for generation in 1..=rounds {
        let tcp = generation % 4 == 0;
        let kind = random.below(Work::KINDS);
        // Shared buffers live as long as their mesh: few and small.
        let most = if kind == 8 { 4000 } else { 400_000 };
        let work = Work { kind, elements: random.below(most) };
        let delay = Duration::from_micros(random.below(8000) as u64);
        let limit = Duration::from_secs(20);
        let (victim, ended) =
            round(&meshes[usize::from(tcp)], generation, work, tcp, limit, |victim| {
                std::thread::sleep(delay);
                let at = Instant::now();
                victim.signal(Signal::KILL);
                at
            });
        drop(victim);
        for (error, took) in ended {
            assert_eq!(error.peer(), Some(VICTIM), "round {generation}, {work:?}: {error}");
            times.push(took);
        }
        if generation == 4 {
            std::thread::sleep(Duration::from_millis(700));
            before = Some(held());
        }
    }
    std::thread::sleep(Duration::from_millis(700));
    let after = held();
    // Other tests of this process come and go: they hold some of their own.
    let before = before.unwrap_or(after);
    println!("descriptors, mappings, threads: {before:?} and {after:?}");
    if rounds >= 100 {
        assert!(after.iter().zip(before).all(|(after, before)| *after <= before + 8), "a leak");
    }
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    println!("SIGKILL to error: median {:?}, p99 {:?}, worst {:?}", at(0.5), at(0.99), at(1.0));
    assert!(at(0.5) < Duration::from_millis(500), "{:?}", at(0.5));
}

#[test]
fn a_stopped_rank_is_named_and_does_no_harm_when_it_wakes() {
    for (number, kind) in [0, 2, 5, 8].into_iter().enumerate() {
        let meshes = listeners(false);
        let generation = 10 * (number as u64 + 1);
        let work = Work { kind, elements: if kind == 8 { 4000 } else { 300_000 } };
        let limit = Duration::from_millis(400);
        let (mut victim, ended) = round(&meshes, generation, work, false, limit, |victim| {
            std::thread::sleep(Duration::from_millis(5));
            victim.signal(Signal::STOP);
            Instant::now()
        });
        // One of them noticed, and the other may have heard it from that one.
        for (error, _) in ended {
            assert_eq!(error.peer(), Some(VICTIM), "{work:?}: {error}");
        }
        // The next generation goes on without it, while it wakes up (ME-1).
        let continued = Barrier::new(VICTIM);
        let victim_ = &victim;
        with_listeners(&meshes, generation + 1, |mut mesh, _| {
            for at in 0..40 {
                if at == 10 {
                    continued.wait();
                    if mesh.rank() == 0 {
                        victim_.signal(Signal::CONT);
                    }
                }
                let pair = Work { kind: 0, elements: 50_000 };
                assert!(pair.once(&mut mesh, soon()).unwrap(), "a wrong sum at {at}");
            }
        });
        let end = victim.line("end ");
        assert!(end.contains("rank") || end.contains("abort"), "{end}");
    }
}
