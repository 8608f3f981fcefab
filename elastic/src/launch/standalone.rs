//! `elastic run --standalone N`: N nodes on this machine. The launcher is not a
//! node: it starts the agents, starts those again that die, and sees all of them
//! to their end. Its end ends all.

use std::{
    fs,
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

use super::{STANDALONE, start_anew, voices::Voices};
use crate::{
    cli::RunArgs,
    command::{FOUNDER, JOIN_LINE, fail, uncreatable},
    config::Config,
    exit::Exit,
};

/// Interrupts seen: the handler only counts.
static INTERRUPTS: AtomicU32 = AtomicU32::new(0);

const POLL: Duration = Duration::from_millis(10);
/// A node that ended well waits this long for the others to do so too.
const OTHERS: Duration = Duration::from_secs(20);
/// A life shorter than this doubles the pause before the next one.
const SHORT_LIFE: Duration = Duration::from_secs(2);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

struct Node {
    name: String,
    child: Option<Child>,
    voice: Option<JoinHandle<()>>,
    starts: u32,
    born: Instant,
    pause: Duration,
    start_at: Instant,
    ended: Option<Exit>,
}

struct Group<'a> {
    args: &'a RunArgs,
    folder: PathBuf,
    token: String,
    voices: Voices,
    nodes: Vec<Node>,
}

/// Runs a group of nodes to its end.
pub(crate) fn standalone(args: &RunArgs, config: &Config, nodes: u32) -> Exit {
    let folder = PathBuf::from(&config.job.dump_folder);
    if let Err(error) = fs::create_dir_all(&folder) {
        return fail(Exit::Usage, &uncreatable(&folder, &error));
    }
    let _lock = match lock(&folder) {
        Ok(lock) => lock,
        Err(why) => return fail(Exit::Usage, &why),
    };
    if args.fresh
        && let Err(why) = start_anew(config)
    {
        return fail(Exit::Failed, &why);
    }
    let token = match token(args, &folder) {
        Ok(token) => token,
        Err(why) => return fail(Exit::Failed, &why),
    };
    if let Err(error) = count_interrupts() {
        return fail(Exit::Failed, &format!("cannot listen for signals: {error}"));
    }
    let now = Instant::now();
    let node = |number: u32| Node {
        name: format!("n{number}"),
        child: None,
        voice: None,
        starts: 0,
        born: now,
        pause: Duration::ZERO,
        start_at: now,
        ended: None,
    };
    let (voices, nodes) = (Voices::default(), (1..=nodes).map(node).collect());
    let mut group = Group { args, folder, token, voices, nodes };
    let exit = group.run();
    for node in &mut group.nodes {
        node.kill();
    }
    exit
}

impl Group<'_> {
    fn run(&mut self) -> Exit {
        let mut first_end: Option<Instant> = None;
        let mut interrupts = 0;
        loop {
            for index in 0..self.nodes.len() {
                if let Err(why) = self.tend(index) {
                    return fail(Exit::Failed, &why);
                }
            }
            // It refuses the command line, which is everybody's.
            if self.nodes.iter().any(Node::is_refused) {
                return Exit::Usage;
            }
            let ends: Vec<Exit> = self.nodes.iter().filter_map(|node| node.ended).collect();
            if ends.len() == self.nodes.len() {
                return worst(&ends);
            }
            // A node that was drained is no reason to hurry the others.
            if ends.iter().any(|end| *end != Exit::Left) {
                let since = *first_end.get_or_insert_with(Instant::now);
                if since.elapsed() > OTHERS {
                    return worst(&ends);
                }
            }
            let seen = INTERRUPTS.load(Ordering::Relaxed);
            if seen > interrupts {
                interrupts = seen;
                match seen {
                    1 => self.stop_job(),
                    _ => return Exit::Interrupted,
                }
            }
            std::thread::sleep(POLL);
        }
    }

    /// Starts a node that is due, and takes note of one that ended.
    fn tend(&mut self, index: usize) -> Result<(), String> {
        let others_wait_for_founder = index > 0 && self.address(0).is_none();
        let node = &mut self.nodes[index];
        if node.ended.is_some() {
            return Ok(());
        }
        match &mut node.child {
            None if Instant::now() >= node.start_at && !others_wait_for_founder => {
                let command = self.command(index);
                let node = &mut self.nodes[index];
                node.start(command, &self.voices)
            }
            None => Ok(()),
            Some(child) => {
                let status = child.try_wait();
                if let Ok(Some(status)) =
                    status.map_err(|error| format!("cannot wait for {}: {error}", node.name))
                {
                    node.exited(status);
                }
                Ok(())
            }
        }
    }

    fn command(&self, index: usize) -> Command {
        let args = self.args;
        // This very program, even if its file was replaced meanwhile.
        let mut command = Command::new("/proc/self/exe");
        command.arg0("elastic");
        command.arg("run").env(STANDALONE, "1");
        if let Some(config) = &args.config {
            command.arg(config);
        }
        let (min, max) = args.nodes.unzip();
        let flags = [
            ("--min-nodes", args.min_nodes.or(min)),
            ("--max-nodes", args.max_nodes.or(max)),
            ("--nproc-per-node", args.nproc_per_node),
            ("--max-failures", args.max_failures),
        ];
        for (flag, value) in flags {
            if let Some(value) = value {
                command.arg(flag).arg(value.to_string());
            }
        }
        let name = &self.nodes[index].name;
        command.args(["--node-id", name, "--listen", "127.0.0.1:0", "--token", &self.token]);
        let mut join: Vec<String> = Vec::new();
        if index == 0 {
            // Whatever runs of this job runs under this launcher.
            command.env(FOUNDER, "1").arg("--reform");
            join.push(self.address(0).unwrap_or_else(|| "127.0.0.1:0".into()));
        }
        join.extend(
            (0..self.nodes.len())
                .filter(|other| *other != index)
                .filter_map(|other| self.address(other)),
        );
        command.args(["--join", &join.join(",")]);
        if let Some(summary) = &args.summary {
            command.arg("--summary").arg(node_summary(summary, index, name));
        }
        command.args(&args.overrides);
        die_with_launcher(&mut command);
        command
    }

    /// Where a node listens, or did when it ran last.
    fn address(&self, index: usize) -> Option<String> {
        let name = &self.nodes[index].name;
        let path = self.folder.join("nodes").join(name).join("address");
        let text = fs::read_to_string(path).ok()?;
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    }

    /// Asks any agent to save and stop the job.
    fn stop_job(&self) {
        eprintln!("elastic: saving a checkpoint and stopping; once more to end now");
        for node in self.nodes.iter().filter(|node| node.child.is_some()) {
            let folder = self.folder.join("nodes").join(&node.name);
            if crate::command::ask(&folder, &actors::agent::Request::Stop).is_ok() {
                return;
            }
        }
    }
}

impl Node {
    fn start(&mut self, mut command: Command, voices: &Voices) -> Result<(), String> {
        self.born = Instant::now();
        self.starts += 1;
        let cannot = |error| format!("cannot start {}: {error}", self.name);
        let mut child = command.stderr(Stdio::piped()).spawn().map_err(cannot)?;
        self.voice =
            child.stderr.take().map(|node| voices.listen(node)).transpose().map_err(cannot)?;
        self.child = Some(child);
        Ok(())
    }

    /// Whether its very first start was refused.
    fn is_refused(&self) -> bool {
        self.starts == 1 && self.ended == Some(Exit::Usage)
    }

    fn exited(&mut self, status: ExitStatus) {
        self.child = None;
        // Its last words come before what is said about its end.
        if let Some(voice) = self.voice.take() {
            let _ = voice.join();
        }
        let final_ = match status.code() {
            Some(0) => Some(Exit::Finished),
            Some(1) => Some(Exit::Failed),
            Some(2) => Some(Exit::Usage),
            Some(3) => Some(Exit::DoNotRequeue),
            Some(75) => Some(Exit::Left),
            Some(130) => Some(Exit::Interrupted),
            _ => None,
        };
        if final_.is_some() {
            self.ended = final_;
            return;
        }
        let short = self.born.elapsed() < SHORT_LIFE;
        self.pause = match (short, self.pause) {
            (false, _) => Duration::ZERO,
            (true, Duration::ZERO) => Duration::from_millis(100),
            (true, pause) => (pause * 2).min(LONGEST_PAUSE),
        };
        self.start_at = Instant::now() + self.pause;
        let how = match (status.signal(), status.code()) {
            (Some(signal), _) => format!("was ended by signal {signal}"),
            (None, Some(code)) => format!("ended with code {code}"),
            (None, None) => "ended".into(),
        };
        eprintln!("elastic: agent of {} {how}; it is started again", self.name);
    }

    fn kill(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The first node writes the summary under the given name, the others beside it.
fn node_summary(path: &Path, index: usize, name: &str) -> PathBuf {
    if index == 0 {
        return path.to_owned();
    }
    let stem = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    path.with_file_name(format!("{stem}.{name}.json"))
}

fn worst(ends: &[Exit]) -> Exit {
    let order = [Exit::DoNotRequeue, Exit::Usage, Exit::Failed, Exit::Interrupted, Exit::Finished];
    order.into_iter().find(|exit| ends.contains(exit)).unwrap_or(Exit::Left)
}

/// One launcher a folder: the lock goes with the process.
fn lock(folder: &Path) -> Result<nix::fcntl::Flock<fs::File>, String> {
    let path = folder.join("launcher.lock");
    let file = fs::File::create(&path)
        .map_err(|error| format!("cannot create {}: {error}", path.display()))?;
    nix::fcntl::Flock::lock(file, nix::fcntl::FlockArg::LockExclusiveNonblock).map_err(|_| {
        let line = fs::read_to_string(folder.join("nodes/n1").join(JOIN_LINE)).unwrap_or_default();
        format!("a job is running in {}; to add a node to it:\n  {}", folder.display(), line.trim())
    })
}

/// The group's join secret, the same over restarts of the launcher.
fn token(args: &RunArgs, folder: &Path) -> Result<String, String> {
    use std::{io::Write, os::unix::fs::OpenOptionsExt};
    if let Some(token) = &args.token {
        return Ok(token.clone());
    }
    let path = folder.join("token");
    if let Ok(token) = fs::read_to_string(&path) {
        return Ok(token.trim().to_owned());
    }
    let token = format!("E1.{}", uuid::Uuid::new_v4().simple());
    fs::OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(&path)
        .and_then(|mut file| file.write_all(token.as_bytes()))
        .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    Ok(token)
}

extern "C" fn interrupted(_: i32) {
    INTERRUPTS.fetch_add(1, Ordering::Relaxed);
}

fn count_interrupts() -> nix::Result<()> {
    let action =
        SigAction::new(SigHandler::Handler(interrupted), SaFlags::SA_RESTART, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        // SAFETY: the handler only adds to an atomic.
        unsafe { sigaction(signal, &action)? };
    }
    Ok(())
}

/// The kernel ends the child when this thread, the launcher's main one, ends. A
/// process group of its own keeps Ctrl-C for the launcher to pass on.
pub(crate) fn die_with_launcher(command: &mut Command) {
    let parent = nix::unistd::getpid();
    // SAFETY: only async-signal-safe system calls on plain values.
    unsafe {
        command.pre_exec(move || {
            nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
            nix::unistd::setpgid(nix::unistd::Pid::from_raw(0), nix::unistd::Pid::from_raw(0))?;
            if nix::unistd::getppid() != parent {
                return Err(std::io::Error::from_raw_os_error(nix::libc::ESRCH));
            }
            Ok(())
        });
    }
}
