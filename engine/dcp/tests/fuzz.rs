//! The fuzz targets over their kept corpus and over random changes of it, on
//! stable Rust and without libFuzzer: whatever the bytes are, the reader returns
//! in bounded memory (SEC-1). `ELASTIC_FUZZ_SECONDS` is how long; `make fuzz`
//! searches for longer, and with feedback.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::time::{Duration, Instant};

use dcp::fuzzing;
use peak_alloc::PeakAlloc;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Memory that an input may take: a window of zstd and buffers, and so many
/// times its own size, which is what a pickle of many short values unfolds to.
const BASE: usize = 16 << 20;
const TIMES: usize = 1024;
/// On a busy machine.
const LONGEST: Duration = Duration::from_secs(10);

type Target = (&'static str, fn(&[u8]));
const TARGETS: [Target; 4] = [
    ("pickle", fuzzing::pickle),
    ("zip", fuzzing::zip),
    ("index", fuzzing::index),
    ("safetensors", fuzzing::safetensors),
];

/// Runs one input.
#[track_caller]
fn check((name, target): Target, bytes: &[u8], story: &str) {
    MEMORY.reset_peak_usage();
    let (before, start) = (MEMORY.current_usage(), Instant::now());
    target(bytes);
    let took = MEMORY.peak_usage().saturating_sub(before);
    let most = BASE + TIMES * bytes.len();
    assert!(took <= most, "{name}, {story}: {took} bytes of memory for {} of input", bytes.len());
    assert!(start.elapsed() < LONGEST, "{name}, {story}: {:?}", start.elapsed());
}

/// A generator of numbers; the seed makes a failure happen again.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % end.max(1)
    }

    /// Numbers on which arithmetic breaks.
    fn number(&mut self) -> [u8; 8] {
        let edges = [0, 1, 0x7f, 0x80, 0xff, 0xffff, 0x7fff_ffff, 0xffff_ffff, 1 << 40];
        let edge: u64 = edges[self.below(edges.len())];
        [edge, edge.wrapping_neg(), u64::MAX >> 1][self.below(3)].to_le_bytes()
    }

    /// Changes a few places: bytes, numbers, cuts, and parts of another input.
    fn mutate(&mut self, bytes: &mut Vec<u8>, other: &[u8]) {
        for _ in 0..=self.below(6) {
            let at = self.below(bytes.len() + 1);
            let end = (at + self.below(64)).min(bytes.len());
            match self.below(7) {
                0 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
                1 if at < bytes.len() => bytes[at] = self.below(256) as u8,
                2 => {
                    let width = [1, 2, 4, 8][self.below(4)].min(bytes.len() - at);
                    let number = self.number();
                    bytes[at..at + width].copy_from_slice(&number[..width]);
                }
                3 => drop(bytes.drain(at..end)),
                4 => {
                    let copied = bytes[at..end].to_vec();
                    let to = self.below(bytes.len() + 1);
                    drop(bytes.splice(to..to, copied));
                }
                5 => {
                    let from = self.below(other.len() + 1);
                    let part = &other[from..(from + self.below(200)).min(other.len())];
                    drop(bytes.splice(at..end, part.iter().copied()));
                }
                _ => bytes.truncate(at.max(bytes.len() / 2)),
            }
        }
    }
}

/// A text of protocol 2.
fn text(text: &str) -> Vec<u8> {
    [&b"X"[..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
}

/// An object of PyTorch's with these fields.
fn object(class: &str, fields: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let fields = fields.iter().flat_map(|(name, value)| [text(name), value.clone()].concat());
    let class = format!("ctorch.distributed.checkpoint.{class}\n").into_bytes();
    [class, b")\x81}(".to_vec(), fields.collect(), b"ub".to_vec()].concat()
}

/// Indices that tell something long once and refer to it thousands of times.
fn bombs() -> [(&'static str, Vec<u8>); 2] {
    let index = |planner: Vec<u8>, storage: Vec<u8>| {
        let empty = b"}".to_vec();
        let fields =
            [("state_dict_metadata", empty), ("planner_data", planner), ("storage_data", storage)];
        [b"\x80\x02".to_vec(), object("metadata\nMetadata", &fields), b".".to_vec()].concat()
    };
    let long = [text(&"x".repeat(60_000)), b"q\0\x85".to_vec()].concat();
    let path = |n: usize| if n == 0 { long.clone() } else { b"h\0\x85".to_vec() };
    let paths = (0..8000).flat_map(|n| [text(&n.to_string()), path(n)].concat());
    let paths = [b"}(".to_vec(), paths.collect(), b"u".to_vec()].concat();

    let wide = [b"(".to_vec(), b"K\0".repeat(100_000), b"tq\0".to_vec()].concat();
    let offset = |n: usize| if n == 0 { wide.clone() } else { b"h\0".to_vec() };
    let zero = || b"K\0".to_vec();
    let info = [("relative_path", text("f")), ("offset", zero()), ("length", zero())];
    let info = object("filesystem\n_StorageInfo", &info);
    let places = (0..2000).flat_map(|n| {
        let fields = [("fqn", text(&n.to_string())), ("index", zero()), ("offset", offset(n))];
        [object("metadata\nMetadataIndex", &fields), info.clone()].concat()
    });
    let places = [b"}(".to_vec(), places.collect(), b"u".to_vec()].concat();
    let empty = || b"}".to_vec();
    [
        ("one long key in many paths", index(paths, empty())),
        ("one long offset of many shards", index(empty(), places)),
    ]
}

/// One test for all, as the memory is counted over the whole process.
#[test]
fn no_input_panics_or_fills_the_memory() {
    let seconds = std::env::var("ELASTIC_FUZZ_SECONDS").ok();
    let seconds: u64 = seconds.map_or(4, |text| text.parse().unwrap());
    let each = Duration::from_secs(seconds) / TARGETS.len() as u32;
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    for target in TARGETS {
        let mut corpus = Vec::new();
        for entry in std::fs::read_dir(root.join(target.0)).unwrap() {
            let path = entry.unwrap().path();
            corpus.push((path.display().to_string(), std::fs::read(path).unwrap()));
        }
        corpus.sort_unstable();
        if target.0 == "index" {
            corpus.extend(bombs().map(|(story, bytes)| (story.to_owned(), bytes)));
        }
        assert!(!corpus.is_empty(), "{} has no corpus", target.0);
        corpus.iter().for_each(|(name, bytes)| check(target, bytes, name));
        let (start, mut seed) = (Instant::now(), 0u64);
        while start.elapsed() < each {
            seed += 1;
            let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let (name, base) = &corpus[random.below(corpus.len())];
            let other = &corpus[random.below(corpus.len())].1;
            let mut bytes = base.clone();
            random.mutate(&mut bytes, other);
            check(target, &bytes, &format!("{name} changed by seed {seed}"));
        }
        println!("{}: {} inputs kept, {seed} made", target.0, corpus.len());
    }
}
