//! `elastic run`: this node's agent, or with `--standalone` a whole group of
//! them on this machine.

mod metrics;
mod progress;
mod signals;
mod summary;

use std::{
    net::{SocketAddr, ToSocketAddrs, UdpSocket},
    path::{Path, PathBuf},
};

use actors::agent::{Error as AgentError, Options, Outcome, Proposal, Script};
use job::{NodeId, Step};

pub(crate) use progress::{JOIN_LINE, timeline};

use super::{fail, worker};
use crate::{
    cli::RunArgs,
    config::{
        Config, Resolved,
        schema::{Reduction, Scope, TensorTransport},
    },
    exit::Exit,
    launch::{self, STANDALONE},
};

/// Runs this node, or a group of nodes.
pub(super) fn run(args: RunArgs) -> Exit {
    let resolved = match args.resolve() {
        Ok(resolved) => resolved,
        Err(error) => return fail(Exit::Usage, &error),
    };
    if std::env::var_os(STANDALONE).is_none() {
        resolved.notes.iter().for_each(|note| eprintln!("elastic: note: {note}"));
    }
    match args.standalone {
        Some(nodes) => launch::standalone(&args, &resolved.config, nodes),
        None => node(&args, &resolved),
    }
}

fn node(args: &RunArgs, resolved: &Resolved) -> Exit {
    let config = &resolved.config;
    if args.fresh
        && let Err(why) = launch::start_anew(config)
    {
        return fail(Exit::Failed, &why);
    }
    let options = match options(args, config) {
        Ok(options) => options,
        Err(why) => return fail(Exit::Usage, &why),
    };
    if let Err(why) = log_to_file(&options) {
        return fail(Exit::Usage, &why);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("agent")
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return fail(Exit::Failed, &format!("cannot start the runtime: {error}")),
    };
    let exit = runtime.block_on(serve(args, config, options));
    runtime.shutdown_background();
    exit
}

/// Lines for a person that may wait; further ones are dropped.
const NOTICES: usize = 1024;

async fn serve(args: &RunArgs, config: &Config, options: Options) -> Exit {
    let (notices, lines) = tokio::sync::mpsc::channel(NOTICES);
    let wishes = match signals::wishes() {
        Ok(wishes) => wishes,
        Err(error) => return fail(Exit::Failed, &format!("cannot listen for signals: {error}")),
    };
    let folder = node_folder(config, &options.node);
    let started = std::time::Instant::now();
    let printer = tokio::spawn(progress::print(
        lines,
        config.metrics.log_freq,
        config.training.steps,
        progress::Door { folder: folder.clone(), command: command_line(args) },
    ));
    let node = options.node.clone();
    let scraped = match scraped(config) {
        Ok(listener) => {
            listener.map(|listener| tokio::spawn(metrics::serve(listener, folder.clone())))
        }
        Err(why) => return fail(Exit::Usage, &why),
    };
    let ended = match actors::agent::run(options, wishes, notices).await {
        Ok(ended) => ended,
        // Nothing was started, and nothing but another command line will help.
        Err(error) => {
            return fail(Exit::Usage, &explain(&error, &folder));
        }
    };
    if let Some(scraped) = scraped {
        scraped.abort();
    }
    let _ = printer.await;
    if let Some(path) = &args.summary
        && let Err(why) = summary::write(path, &node, &ended, config, started.elapsed())
    {
        return fail(Exit::Failed, &why);
    }
    // The launcher of a group speaks for its nodes.
    let alone = std::env::var_os(STANDALONE).is_none();
    if ended.speaks {
        progress::farewell(&ended, config);
    }
    match &ended.outcome {
        Outcome::Finished => Exit::Finished,
        Outcome::Stopped | Outcome::Interrupted => Exit::Interrupted,
        Outcome::Left => Exit::Left,
        Outcome::Fenced(_) if !alone => Exit::Fenced,
        Outcome::Fenced(why) => {
            fail(Exit::Fenced, &format!("node {node} was fenced: {why}; start it again to rejoin"))
        }
        Outcome::Refused(why) => {
            fail(Exit::DoNotRequeue, &format!("node {node} was refused by the job: {why}"))
        }
        Outcome::Failed(why, final_) => {
            let exit = if *final_ { Exit::DoNotRequeue } else { Exit::Failed };
            match ended.speaks || alone {
                true => fail(exit, why),
                false => exit,
            }
        }
    }
}

/// Where this node is to be scraped. Nodes of one launcher share their configuration,
/// and so the address: the one that founds has it.
fn scraped(config: &Config) -> Result<Option<tokio::net::TcpListener>, String> {
    let silent = std::env::var_os(STANDALONE).is_some() && std::env::var_os(FOUNDER).is_none();
    let Some(listen) = config.metrics.prometheus_listen.as_deref().filter(|_| !silent) else {
        return Ok(None);
    };
    let address = address(listen, "metrics.prometheus_listen")?;
    let cannot =
        |error| format!("metrics.prometheus_listen = {listen}: {error}: choose another port");
    let listener = std::net::TcpListener::bind(address).map_err(cannot)?;
    listener.set_nonblocking(true).map_err(cannot)?;
    tokio::net::TcpListener::from_std(listener).map_err(cannot).map(Some)
}

/// What another node gives, up to where it joins: the same configuration.
fn command_line(args: &RunArgs) -> String {
    let config = args.config.as_ref().map(|path| path.display().to_string());
    let words = ["elastic", "run"].into_iter();
    let words = words.chain(config.as_deref()).chain(args.overrides.iter().map(String::as_str));
    // Fails only for a zero byte, which no argument has.
    shlex::try_join(words).unwrap_or_else(|_| "elastic run".into())
}

/// A store in use is a running job: say how to join it.
fn explain(error: &AgentError, folder: &Path) -> String {
    let line = std::fs::read_to_string(folder.join(progress::JOIN_LINE));
    match (error, line) {
        (AgentError::Group(_), Ok(line)) if error.to_string().contains("in use") => {
            format!("{error}; the job is running, to add a node:\n  {}", line.trim())
        }
        _ => error.to_string(),
    }
}

pub(super) fn node_folder(config: &Config, node: &NodeId) -> PathBuf {
    Path::new(&config.job.dump_folder).join("nodes").join(node.as_str())
}

fn options(args: &RunArgs, config: &Config) -> Result<Options, String> {
    let node = match &args.node_id {
        Some(node) => node.clone(),
        None => host_name()?,
    };
    let listen = match &args.listen {
        Some(text) => address(text, "--listen")?,
        None => SocketAddr::from(([0, 0, 0, 0], DEFAULT_PORT)),
    };
    let advertise =
        args.advertise.as_deref().map(|text| address(text, "--advertise")).transpose()?;
    args.join.iter().try_for_each(|text| named(text, "--join"))?;
    let discovery = args.host_discovery_script.clone();
    let discovery = discovery.map(|path| Script { path, port: DEFAULT_PORT });
    let join = match &discovery {
        Some(script) => script.ask()?,
        None => args.join.clone(),
    };
    if join.is_empty() && discovery.is_some() {
        return Err("--host-discovery-script named no node: the first one founds the job".into());
    }
    // A name that nobody knows yet is not this node's.
    let founds = join.first().is_none_or(|first| {
        let found = first.to_socket_addrs().into_iter().flatten();
        found.into_iter().any(|first| is_this_node(first, listen, advertise))
    });
    let worker = match &config.elastic.worker_bin {
        Some(path) => PathBuf::from(path),
        None => worker::beside().map_err(|error| format!("cannot find this program: {error}"))?,
    };
    if !worker.exists() {
        return Err(format!(
            "worker program {} does not exist: build it with `make build`, or set elastic.worker_bin",
            worker.display()
        ));
    }
    let timeouts = config.timeouts().map_err(|error| error.to_string())?;
    Ok(Options {
        node,
        dump_folder: absolute(Path::new(&config.job.dump_folder))?,
        checkpoint_folder: absolute(&config.checkpoint_folder())?,
        listen,
        advertise,
        tensor_port: args.tensor_port.unwrap_or(0),
        shares_memory: config.elastic.tensor_transport == TensorTransport::Auto,
        join,
        discovery,
        token: args.token.clone(),
        founds,
        reforms: args.reform,
        slots: config.elastic.nproc_per_node,
        proposal: proposal(config)?,
        worker,
        worker_environment: worker_environment(),
        timeouts,
        difference,
        adopt,
    })
}

/// torchrun's default port has a neighbour.
const DEFAULT_PORT: u16 = 29400;

/// Several ranks on one machine: more threads than cores make each step slower.
fn worker_environment() -> Vec<(String, String)> {
    [("OMP_NUM_THREADS", "1"), ("OMP_WAIT_POLICY", "PASSIVE"), ("MKL_CBWR", "AUTO")]
        .into_iter()
        .filter(|(key, _)| std::env::var_os(key).is_none())
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}

fn proposal(config: &Config) -> Result<Proposal, String> {
    Ok(Proposal {
        config: serde_json::to_string(config).map_err(|error| error.to_string())?,
        config_digest: config.digest(),
        min_nodes: config.elastic.min_nodes,
        max_nodes: config.elastic.max_nodes,
        micro_batches: config.micro_batches(),
        total_steps: Step(config.training.steps),
        sharding: config.sharding(),
        parallel: config.parallel(),
        max_failures: config.elastic.max_failures,
        max_preemptions: config.elastic.max_preemptions,
        exact: matches!(config.elastic.reduction, Reduction::Tree),
        checkpoints: config.checkpoint.enable,
        keep_latest_k: config.checkpoint.keep_latest_k,
    })
}

/// The keys in which a job differs from this node's configuration.
fn difference(mine: &str, theirs: &str) -> String {
    let parsed = (serde_json::from_str::<Config>(mine), serde_json::from_str::<Config>(theirs));
    let (Ok(mine), Ok(theirs)) = parsed else {
        return "its configuration is of another version".into();
    };
    let differences = mine.difference(&theirs);
    let identity = differences.iter().filter(|difference| {
        crate::config::Key::find(&difference.key).is_some_and(|key| key.scope == Scope::Identity)
    });
    let lines: Vec<String> =
        identity.map(|d| format!("{} is {} here and {} there", d.key, d.mine, d.theirs)).collect();
    lines.join(", ")
}

/// This node's own keys under the job's.
fn adopt(mine: &str, job: &str) -> String {
    let text = job.to_owned();
    let parsed = (serde_json::from_str::<Config>(mine), serde_json::from_str::<Config>(job));
    let (Ok(mine), Ok(job)) = parsed else { return text };
    serde_json::to_string(&mine.adopt(&job)).unwrap_or(text)
}

fn address(text: &str, flag: &str) -> Result<SocketAddr, String> {
    let mut found = text
        .to_socket_addrs()
        .map_err(|error| format!("{flag} {text}: {error}; it is HOST:PORT, such as host1:29400"))?;
    found.next().ok_or_else(|| format!("{flag} {text}: the name has no address"))
}

/// Whether a text is HOST:PORT; the name may come to be known later.
fn named(text: &str, flag: &str) -> Result<(), String> {
    let port = text.rsplit_once(':').filter(|(host, _)| !host.is_empty());
    match port.map(|(_, port)| port.parse::<u16>()) {
        Some(Ok(_)) => Ok(()),
        _ => Err(format!("{flag} {text}: it is HOST:PORT, such as host1:29400")),
    }
}

/// Whether an address in `--join` is this node's own: then it founds.
fn is_this_node(address: SocketAddr, listen: SocketAddr, advertise: Option<SocketAddr>) -> bool {
    if advertise == Some(address) {
        return true;
    }
    // Several nodes of one machine may have the same port at different addresses.
    if !listen.ip().is_unspecified() && listen.port() != 0 {
        return address == listen;
    }
    let local = UdpSocket::bind(SocketAddr::new(address.ip(), 0)).is_ok();
    local
        && (address.port() == listen.port()
            || listen.port() == 0 && std::env::var_os(FOUNDER).is_some())
}

/// Set by the launcher for the node that founds.
pub(crate) const FOUNDER: &str = "ELASTIC_STANDALONE_FOUNDER";

fn host_name() -> Result<NodeId, String> {
    let system = rustix::system::uname();
    NodeId::new(system.nodename().to_string_lossy())
        .map_err(|error| format!("{error}: give this node a name with --node-id"))
}

fn absolute(path: &Path) -> Result<PathBuf, String> {
    std::path::absolute(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// A folder that the configuration names and nobody can have.
pub(crate) fn uncreatable(folder: &Path, error: &std::io::Error) -> String {
    format!("cannot create {}: {error}: choose another job.dump_folder", folder.display())
}

/// The agent's log lies beside its store.
fn log_to_file(options: &Options) -> Result<(), String> {
    let folder = options.dump_folder.join("nodes").join(options.node.as_str());
    let path = folder.join("agent.log");
    std::fs::create_dir_all(&folder).map_err(|error| uncreatable(&folder, &error))?;
    let file = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(&path)
        .map_err(|error| format!("cannot open {}: {error}", path.display()))?;
    crate::log::to(std::sync::Mutex::new(file));
    Ok(())
}
