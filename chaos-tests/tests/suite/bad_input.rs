//! Bad input: one clear line, the right exit code, nothing lost (CKPT-1, TRAJ-1).

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use chaos_tests::harness::{Random, Run, Setup, dataset, elastic};
use nix::{
    sys::signal::{Signal::SIGTERM, kill},
    unistd::Pid,
};

use crate::{LIMIT, fake, quiet, quiet_real, real};

const FINISHED: i32 = 0;
const FAILED: i32 = 1;
const REFUSED: i32 = 2;
const DO_NOT_REQUEUE: i32 = 3;

/// A command that finds no bad input would train on: it is ended.
const PATIENCE: Duration = Duration::from_secs(60);

/// A folder of this test process, emptied.
fn folder(name: &str) -> PathBuf {
    let process = format!("elastic-chaos-{}", std::process::id());
    let folder = std::env::temp_dir().join(process).join("bad-input").join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("a folder for the case");
    folder
}

/// `elastic run` as [`Run`] gives it, in another folder.
fn command(setup: &Setup, folder: &Path, data: &Path, further: &[&str]) -> Vec<String> {
    let mut arguments = vec![
        "run".into(),
        format!("--job.dump_folder={}", folder.display()),
        format!("--training.dataset_path={}", data.display()),
        format!("--training.seed={}", setup.seed),
        format!("--checkpoint.interval={}", setup.checkpoint_interval),
    ];
    if let Some((program, _)) = &setup.fake {
        arguments.push(format!("--elastic.worker_bin={}", program.display()));
    }
    // What a case says itself must not be said twice.
    let said = |key: &str| further.iter().any(|argument| argument.starts_with(key));
    let defaults = [
        ("--training.local_batch_size", "1".to_owned()),
        ("--training.global_batch_size", setup.micro_batches.to_string()),
        ("--training.seq_len", "64".into()),
        ("--training.steps", setup.steps.to_string()),
        ("--model.flavor", "byte-1M".into()),
    ];
    let defaults = defaults.into_iter().filter(|(key, _)| !said(key));
    arguments.extend(defaults.map(|(key, value)| format!("{key}={value}")));
    arguments.extend(further.iter().map(|&argument| argument.to_owned()));
    arguments
}

/// Runs a program to its end and gives what it printed.
#[track_caller]
fn output(command: &mut Command) -> Output {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = child.spawn().expect("the command starts");
    let until = Instant::now() + PATIENCE;
    while child.try_wait().expect("it is a child").is_none() {
        if Instant::now() > until {
            child.kill().expect("it is a child");
            let output = child.wait_with_output().expect("its output");
            panic!("{command:?} does not end:\n{}", String::from_utf8_lossy(&output.stderr));
        }
        sleep(Duration::from_millis(5));
    }
    child.wait_with_output().expect("its output")
}

/// The command ends with `exit` and says all of `words`, in few words.
#[track_caller]
fn check(what: &str, arguments: &[String], exit: i32, words: &[&str]) -> Duration {
    let started = Instant::now();
    let output = output(Command::new(elastic()).args(arguments));
    let took = started.elapsed();
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.trim_end();
    eprintln!("{what}: exit {:?}, {} ms: {said}", output.status.code(), took.as_millis());
    assert_eq!(output.status.code(), Some(exit), "{what}: {arguments:?}");
    for word in words {
        assert!(said.contains(word), "{what}: no {word:?} in what it said");
    }
    // One line, and below it what to paste.
    assert!(said.starts_with("elastic: ") && said.lines().count() <= 2, "{what}: {said}");
    took
}

#[test]
fn bad_arguments_are_one_line() {
    let dump = folder("arguments");
    let setup = fake("arguments", 1, 0);
    let refused = |what, further: &[&str], words: &[&str]| {
        let further = [&["--node-id", "n1", "--listen", "127.0.0.1:0"], further].concat();
        check(what, &command(&setup, &dump, dataset(), &further), REFUSED, words);
    };
    refused(
        "unknown key",
        &["--training.step=4"],
        &["command line (--training.step=4)", "did you mean training.steps?"],
    );
    refused("wrong type", &["--training.steps=many"], &["training.steps = \"many\"", "an integer"]);
    refused("min above max", &["--nodes=3:2"], &["elastic.min_nodes = 3", "elastic.max_nodes = 2"]);
    refused(
        "batch that does not divide",
        &["--training.local_batch_size=3", "--training.global_batch_size=8"],
        &["training.global_batch_size = 8", "training.local_batch_size = 3", "the nearest is 9"],
    );
    refused(
        "checkpoint folder not writable",
        &["--checkpoint.folder=/proc/nope"],
        &["checkpoint folder /proc/nope cannot be written"],
    );
    let file = dump.join("job.toml");
    fs::write(&file, "[training]\nsteps = 4\n\n[model]\nflavour = \"byte-1M\"\n").expect("a file");
    let place = format!("{}:5", file.display());
    let file = file.display().to_string();
    check("unknown key in a file", &["run".into(), file], REFUSED, &[&place, "model.flavor?"]);
}

#[test]
fn a_taken_port_is_named() {
    let setup = fake("port", 1, 0);
    let tcp = TcpListener::bind("127.0.0.1:0").expect("a port");
    let udp = UdpSocket::bind("127.0.0.1:0").expect("a port");
    for taken in [tcp.local_addr(), udp.local_addr()] {
        let taken = taken.expect("an address");
        let (listen, port) = (format!("--listen={taken}"), format!("port {}", taken.port()));
        let arguments = command(&setup, &folder("port"), dataset(), &["--node-id=n1", &listen]);
        check("port taken", &arguments, REFUSED, &[&port, "--listen"]);
    }
}

#[test]
fn bad_texts_and_tokens_are_named() {
    let dump = folder("texts");
    let (empty, missing) = (dump.join("empty.txt"), dump.join("missing.txt"));
    fs::write(&empty, "").expect("an empty text");
    for (text, words) in [(empty, "is empty"), (missing, "No such file")] {
        let text = text.display().to_string();
        let out = dump.join("out").display().to_string();
        let arguments = ["data", "prepare", &text, "--out", &out].map(str::to_owned);
        check("text", &arguments, REFUSED, &[&text, words]);
        assert!(!dump.join("out").exists(), "nothing is written");
    }
    let nowhere = dump.join("nowhere");
    for standalone in [&["--standalone=2"][..], &["--node-id=n1", "--listen=127.0.0.1:0"]] {
        let arguments = command(&real("missing", 1), &folder("missing"), &nowhere, standalone);
        let words = [&nowhere.display().to_string(), "elastic data prepare"];
        check("no dataset", &arguments, DO_NOT_REQUEUE, &words);
    }
    let job = dump.join("job.toml");
    let text = format!("[training]\ndataset_path = \"{}\"\n", nowhere.display());
    fs::write(&job, text).expect("a file");
    let arguments = ["bench", "step", &job.display().to_string()].map(str::to_owned);
    check("no dataset to measure on", &arguments, REFUSED, &["elastic data prepare"]);

    let cut = dump.join("cut");
    fs::create_dir(&cut).expect("a folder");
    for entry in fs::read_dir(dataset()).expect("the dataset").flatten() {
        fs::copy(entry.path(), cut.join(entry.file_name())).expect("a copy");
    }
    let tokens = fs::OpenOptions::new().write(true).open(cut.join("train.tok")).expect("tokens");
    let length = tokens.metadata().expect("metadata").len();
    tokens.set_len(length - 1000).expect("cut tokens");
    let arguments = command(&real("cut", 1), &dump, &cut, &["--standalone=1"]);
    let (expected, actual) = (length.to_string(), (length - 1000).to_string());
    check("cut token file", &arguments, DO_NOT_REQUEUE, &["train.tok", &expected, &actual]);
}

/// What all nodes of a group meet is said once.
#[test]
fn a_refusal_of_a_group_is_one_line() {
    let setup = fake("refusal", 4, 0);
    let refused = |what, dump: &Path, further: &[&str], words: &[&str]| {
        let further = [&["--standalone=4"], further].concat();
        check(what, &command(&setup, dump, dataset(), &further), REFUSED, words);
    };
    let unwritable = ["--checkpoint.folder=/proc/nope"];
    refused("unwritable", &folder("unwritable"), &unwritable, &["/proc/nope cannot be written"]);
    let nowhere = Path::new("/proc/nope");
    refused("no dump folder", nowhere, &[], &["cannot create /proc/nope", "job.dump_folder"]);
    let node = ["--node-id=n1", "--listen=127.0.0.1:0"];
    let one = command(&setup, nowhere, dataset(), &node);
    check("no dump folder", &one, REFUSED, &["cannot create /proc/nope", "job.dump_folder"]);
}

/// Whoever waits for a node that does not answer is told so, and for how long.
#[test]
fn a_join_to_nobody_says_that_it_waits() {
    let nobody = TcpListener::bind("127.0.0.1:0").and_then(|door| door.local_addr());
    let nobody = nobody.expect("a port that was free").to_string();
    let (setup, dump) = (fake("nobody", 1, 0), folder("nobody"));
    let join = ["--node-id=n2", "--listen=127.0.0.1:0", "--token", STRANGE, "--join", &nobody];
    let arguments = command(&setup, &dump, dataset(), &join);
    let mut child = Command::new(elastic());
    let child = child.args(arguments).stdin(Stdio::null()).stdout(Stdio::null());
    let started = Instant::now();
    let mut child = Killed(child.stderr(Stdio::piped()).spawn().expect("the command starts"));
    let mut line = String::new();
    let said = child.0.stderr.take().map(BufReader::new).expect("a pipe").read_line(&mut line);
    let after = started.elapsed();
    drop(child);
    eprintln!("join to nobody: after {} ms: {line}", after.as_millis());
    said.expect("it says something");
    let again = line.split_once("asks again for ").expect("until when").1;
    assert!(again.starts_with(|c: char| c.is_ascii_digit()) && line.contains(&nobody), "{line}");
    assert!(after < Duration::from_secs(2), "after {after:?}");
}

/// Another job's token.
const STRANGE: &str = "E1.0123456789abcdef0123456789abcdef";

/// The address of a node and what it printed for joiners.
fn door(run: &Run) -> Option<(String, String)> {
    let node = run.folder().join("nodes/n1");
    let address = fs::read_to_string(node.join("address")).ok()?.trim().to_owned();
    let line = fs::read_to_string(node.join("join-line")).ok()?;
    Some((address, line.split_whitespace().last()?.to_owned()))
}

#[test]
fn traj_1_a_refused_node_does_not_show() {
    let expected = quiet();
    let setup = fake("refused", 2, 5);
    let mut run = Run::start(setup.clone());
    run.wait_step(5, LIMIT);
    let (address, token) = door(&run).expect("a founder");
    let own = run.folder().to_owned();
    let other = folder("refused");
    let command = |dump: &Path, further: &[&str]| command(&setup, dump, dataset(), further);
    let join = |node: &str, token: &str, key: &str| {
        let further = ["--listen=127.0.0.1:0", "--join", &address, "--token", token];
        command(&other, &[&further[..], &["--node-id", node, key]].concat())
    };

    let case = join("other", STRANGE, "--max-failures=9");
    check("another job's token", &case, REFUSED, &[&address, "refused the join token"]);
    let case = join("other", &token, "--optimizer.lr=0.5");
    check("another configuration", &case, REFUSED, &["optimizer.lr is 0.5 here and 0.0008 there"]);
    let second = run.history().of("node_admitted").find_map(|line| {
        (line["node"] == "n2").then(|| fs::read_to_string(own.join("nodes/n2/address")))
    });
    let second = second.expect("n2 was admitted").expect("n2 listens");
    let case = join("n2", &token, "--max-failures=9");
    let took = check("a node id in use", &case, REFUSED, &["node id n2", second.trim()]);
    assert!(took < Duration::from_secs(8), "it takes {took:?} to refuse a node");
    let case = command(&own, &["--standalone=2"]);
    check("a running group", &case, REFUSED, &["a job is running in", &address, &token]);
    let node = ["--listen=127.0.0.1:0", "--node-id=n1"];
    let case = command(&own, &node);
    check("a running node", &case, REFUSED, &["in use by pid", &address, &token]);

    run.wait("checkpoint", LIMIT, |run| run.history().checkpoints().last().copied());
    let failures = run.history().of("planned").filter(|line| line["failure"] == true).count();
    assert_eq!(failures, 0, "none of it reached the group");
    run.kill_all();
    for (key, words) in [
        ("--optimizer.lr=0.5", "optimizer.lr is 0.5 here and 0.0008 there"),
        ("--model.flavor=debugmodel", "model.flavor is \"debugmodel\" here and \"byte-1M\" there"),
    ] {
        let case = command(&own, &[&node[..], &[key]].concat());
        check("another configuration in its folder", &case, REFUSED, &[words]);
    }
    let checkpoints = format!("--checkpoint.folder={}", own.join("checkpoint").display());
    let case = command(&other, &[&node[..], &[&checkpoints]].concat());
    check("another job's checkpoints", &case, REFUSED, &["--reform", "--join", "--token"]);
    let keys = ["--optimizer.lr=0.5", "--optimizer.beta2=0.9"];
    let case = command(&other, &[&node[..], &[&checkpoints], &keys[..]].concat());
    let words = [
        "optimizer.lr is 0.5 here and 0.0008 there",
        "optimizer.beta2 is 0.9 here and 0.95 there",
        "--fresh",
    ];
    check("another configuration in another job's checkpoints", &case, REFUSED, &words);

    run.launch();
    assert_eq!(&run.finish(LIMIT), expected);
}

/// A command that is refused prints a line: pasted into a shell, it adds a node.
#[test]
fn a_line_to_paste_can_be_pasted() {
    let setup = Setup { steps: 1_000_000, ..fake("paste", 2, 10) };
    let mut run = Run::start(setup.clone());
    run.wait_step(3, LIMIT);
    let refused = command(&setup, run.folder(), dataset(), &["--standalone=2"]);
    let said = output(Command::new(elastic()).args(refused)).stderr;
    let said = String::from_utf8_lossy(&said);
    let line = said.lines().last().expect("a line to paste");
    let places = std::env::join_paths(
        elastic()
            .parent()
            .map(Path::to_owned)
            .into_iter()
            .chain(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())),
    );
    let mut shell = Command::new("sh");
    // Its own name and port: the founder of this test is on the same machine.
    shell.args(["-c", &format!("exec {line} --node-id=pasted --listen=127.0.0.1:0")]);
    shell.env("PATH", places.expect("a search path")).stdin(Stdio::null()).stdout(Stdio::null());
    let mut joiner = Killed(shell.spawn().expect("a shell"));
    run.wait("plan with the node that was pasted in", LIMIT, |run| {
        let last = run.history().of("planned").last()?["mesh"].clone();
        last.as_array()?.iter().any(|node| node == "pasted").then_some(())
    });
    kill(Pid::from_raw(joiner.0.id().cast_signed()), SIGTERM).expect("it runs");
    joiner.0.wait().expect("it is a child");
}

/// A process that does not outlive its test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Every address of a running group.
fn doors(run: &Run) -> Option<Vec<SocketAddr>> {
    let status = run.status()?;
    let job = &status["status"]["job"];
    let nodes = job["nodes"].as_object()?.values();
    let members = job["plan"]["members"].as_array()?.iter();
    nodes.chain(members).map(|place| place["address"].as_str()?.parse().ok()).collect()
}

/// What scanners, browsers and broken peers send.
fn garbage(random: &mut Random) -> Vec<Vec<u8>> {
    let mut noise = |length: usize| -> Vec<u8> {
        (0..length).map(|_| u8::try_from(random.below(256)).unwrap_or_default()).collect()
    };
    vec![
        noise(1),
        noise(64),
        noise(1200),
        noise(20_000),
        b"GET / HTTP/1.1\r\nHost: elastic\r\n\r\n".to_vec(),
        // A length of 4 GiB, and nothing behind it.
        vec![0xff; 4],
        vec![0; 1200],
        // A TLS handshake record and a QUIC long header.
        [&[0x16, 3, 1, 2, 0, 1][..], &noise(300)].concat(),
        [&[0xc3, 0, 0, 0, 1, 8][..], &noise(1194)].concat(),
    ]
}

#[test]
fn traj_1_garbage_at_every_port_does_not_show() {
    const NODES: u32 = 3;
    let expected = quiet();
    let mut random = Random::seeded();
    let mut run = Run::start(fake("garbage", NODES, 10));
    let doors = run.wait("the full group", LIMIT, |run| {
        doors(run).filter(|doors| doors.len() == 2 * NODES as usize)
    });
    run.wait_step(5, LIMIT);
    let udp = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let (mut held, mut sent) = (Vec::new(), 0);
    for _ in 0..5 {
        let thrown = garbage(&mut random);
        for (door, bytes) in doors.iter().flat_map(|door| thrown.iter().map(move |b| (door, b))) {
            let datagram = &bytes[..bytes.len().min(1400)];
            udp.send_to(datagram, door).expect("loopback takes a datagram");
            if let Ok(mut stream) = TcpStream::connect_timeout(door, Duration::from_secs(1)) {
                sent += usize::from(stream.write_all(bytes).is_ok());
                // Some hang up at once, some stay silent until the end.
                if random.below(2) == 0 {
                    held.push(stream);
                }
            }
        }
        sleep(Duration::from_millis(300));
    }
    let at = run.step();
    let digests = run.finish(LIMIT);
    let history = run.history();
    let failures = history.of("planned").filter(|line| line["failure"] == true).count();
    eprintln!("garbage: {sent} streams to {} ports by step {at}, {failures} failures", doors.len());
    assert!(sent > 0 && at < run.setup.steps, "it trained meanwhile");
    assert_eq!((failures, history.redone()), (0, 0), "{}", run.report());
    assert_eq!(&digests, expected);
}

/// `elastic ckpt verify` of a run's folder.
#[track_caller]
fn verify(run: &Run, steps: &[u64]) {
    for step in steps {
        let folder = run.folder().join(format!("checkpoint/step-{step}"));
        let output = output(Command::new(elastic()).args(["ckpt", "verify"]).arg(&folder));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(FINISHED), "{}: {said}", folder.display());
    }
}

/// Trains past two checkpoints, damages the newest one and goes on.
#[track_caller]
fn check_damage(name: &'static str, damage: fn(&mut Vec<u8>)) {
    let expected = quiet();
    let mut run = Run::start(fake(name, 2, 5));
    let newest = run.wait("two checkpoints", LIMIT, |run| {
        let saved = run.history().checkpoints();
        let newest = saved.last().filter(|_| saved.len() > 1)?;
        // A commit comes before the rename.
        let named = run.folder().join(format!("checkpoint/step-{newest}")).exists();
        named.then_some(*newest)
    });
    run.wait_step(newest + 5, LIMIT);
    run.kill_all();
    let saved = run.history().checkpoints();
    let [.., older, newest] = saved[..] else { panic!("two checkpoints: {saved:?}") };
    let checkpoints = run.folder().join("checkpoint");
    let shard = checkpoints.join(format!("step-{newest}/__0_0.distcp"));
    let mut bytes = fs::read(&shard).expect("a shard");
    damage(&mut bytes);
    fs::write(&shard, bytes).expect("a damaged shard");
    run.launch();
    let digests = run.finish(LIMIT);

    let history = run.history();
    let distrusted: Vec<_> = history.of("checkpoint_distrusted").collect();
    assert!(distrusted.iter().any(|line| line["step"] == newest), "{distrusted:?}");
    let restored = history.of("sealed").find(|line| line["tier"] == "checkpoint");
    assert_eq!(restored.expect("a restore")["restore"], older, "{restored:?}");
    let log = fs::read_to_string(run.folder().join("run.log")).expect("a log");
    let line = log.lines().find(|line| line.contains("quarantined")).expect("a line about it");
    eprintln!("{name}: {line}");
    assert!(line.contains(&newest.to_string()) && line.contains("__0_0.distcp"), "{line}");
    let prefix = format!("quarantine-{newest}-");
    let kept = fs::read_dir(checkpoints).expect("checkpoints").flatten();
    let mut kept = kept.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
    assert!(kept.next().is_some(), "the damaged checkpoint is kept");
    assert_eq!(&digests, expected, "{name}");
}

#[test]
fn ckpt_1_a_damaged_checkpoint_is_kept_aside() {
    check_damage("flipped-byte", |bytes| {
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x55;
    });
    check_damage("cut-shard", |bytes| bytes.truncate(bytes.len() - 1));
}

/// Folders of saves that are not published.
fn stages(run: &Run) -> Vec<String> {
    let entries = fs::read_dir(run.folder().join("checkpoint")).expect("checkpoints").flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with(".stage-")).collect()
}

#[test]
fn lg_2_a_save_that_fails_on_one_rank_leaves_nothing_behind() {
    const BAD: u64 = 20;
    let expected = quiet();
    let setup = fake("half-saved", 2, 20);
    let folder = folder("half-saved-checkpoints");
    // Rank 1 cannot write its shard; rank 0 can.
    for generation in 1..6 {
        let stage = folder.join(format!(".stage-0-{generation}-{BAD}"));
        fs::create_dir_all(stage.join("__1_0.distcp")).expect("something in the way");
    }
    let arguments = vec![format!("--checkpoint.folder={}", folder.display())];
    let mut run = Run::start(Setup { arguments, ..setup });
    run.wait("step after the failed save", LIMIT, |run| {
        let failed = fs::read_to_string(run.folder().join("run.log")).ok()?;
        failed.contains(&format!("checkpoint of step {BAD} was not saved")).then_some(())
    });
    let generation = run.history().of("planned").last().expect("a plan")["generation"].clone();
    let stage = folder.join(format!(".stage-0-{generation}-{BAD}"));
    run.wait("removal of the failed save", Duration::from_secs(5), |_| {
        (!stage.exists()).then_some(())
    });
    assert!(run.step() < 2 * BAD, "before the next save could clean up");
    let digests = run.finish(LIMIT);
    assert!(!run.history().checkpoints().contains(&BAD));
    assert_eq!(&digests, expected);
    let left = fs::read_dir(&folder).expect("checkpoints").flatten();
    let left: Vec<_> = left.map(|entry| entry.file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().starts_with(".stage-")), "{left:?}");
}

#[test]
fn ckpt_1_a_full_disk_loses_no_checkpoint() {
    let expected = quiet_real();
    let setup = real("full-disk", 1);
    let mut run = Run::start(setup.clone());
    run.wait("checkpoint", LIMIT, |run| run.history().checkpoints().last().copied());
    run.kill_all();
    let saved = run.history().checkpoints();

    // No file may become larger than 4 MiB: a shard of this model does.
    let limited = "trap '' XFSZ; ulimit -f 8192; exec \"$0\" \"$@\"";
    let further = ["--standalone=1", "--min-nodes=1"];
    let arguments = command(&setup, run.folder(), dataset(), &further);
    let limited = output(Command::new("sh").args(["-c", limited]).arg(elastic()).args(arguments));
    let said = String::from_utf8_lossy(&limited.stderr);
    eprintln!("full-disk: checkpoints {saved:?}, exit {:?}: {said}", limited.status.code());
    assert_eq!(limited.status.code(), Some(FAILED));
    assert!(said.contains("File too large") && said.contains("checkpoint"), "{said}");
    assert_eq!(stages(&run), [""; 0], "what was written of it is removed");
    assert_eq!(run.history().checkpoints(), saved, "none is committed that is not whole");
    verify(&run, &saved);

    run.launch();
    assert_eq!(&run.finish(LIMIT), expected);
}
