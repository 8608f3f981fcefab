//! The command line. A new command is one variant of [`Command`] and one arm in
//! [`crate::command::dispatch`].

mod ckpt;
mod collectives;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use job::NodeId;

use crate::config::{ConfigError, Resolved, reference};
use crate::exit::EXIT_CODES;
pub use ckpt::{CkptCommand, ExportDtype, FromHfArgs, HfModel, ShowArgs, ToHfArgs};
pub use collectives::CollectivesArgs;

/// Fault-tolerant, elastic pretraining.
#[derive(Debug, Parser)]
#[command(
    name = "elastic",
    version,
    long_about = "Fault-tolerant, elastic pretraining.\n\n\
        The same command runs on every node. When a node dies, hangs, is preempted or joins, \
        the others go on with the same global batch, and the result is bit for bit the one of \
        an undisturbed run.",
    after_help = "Start here:\n  \
        elastic data prepare shakespeare.txt --out outputs/shakespeare/data\n  \
        elastic run --standalone 4 examples/shakespeare.toml\n  \
        elastic status --watch --dump-folder outputs/shakespeare",
    after_long_help = EXIT_CODES,
    subcommand_required = true,
    arg_required_else_help = true,
    max_term_width = 100
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train: run this node, or a whole group of them on this machine.
    Run(Box<RunArgs>),
    /// Show members, generation, step and lost time of a running job.
    Status(StatusArgs),
    /// Show what happened: failures, generations, checkpoints.
    Events(EventsArgs),
    /// Let a node leave at the next step boundary; nothing is lost.
    Drain(DrainArgs),
    /// Save a checkpoint and end the job.
    Stop(StopArgs),
    /// Show what a mesh of so many nodes costs: memory, traffic, bubble, goodput.
    Plan(PlanArgs),
    /// Make, list and revoke the tokens that let nodes join.
    #[command(subcommand)]
    Token(TokenCommand),
    /// Inspect and convert checkpoints.
    #[command(subcommand)]
    Ckpt(CkptCommand),
    /// Prepare datasets.
    #[command(subcommand)]
    Data(DataCommand),
    /// Continue a text with a trained model (runs elastic-worker).
    Generate(WorkerArgs),
    /// Measure recovery and steps.
    #[command(subcommand)]
    Bench(BenchCommand),
}

/// Arguments of `elastic plan`.
#[derive(Clone, Debug, Args)]
pub struct PlanArgs {
    /// TOML file; without one, every key has its default.
    #[arg(value_name = "CONFIG")]
    pub config: Option<PathBuf>,
    /// Nodes.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    pub nodes: u32,
    /// Devices of a node.
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub gpus_per_node: u32,
    /// Keys of the configuration, as arguments.
    #[arg(skip)]
    pub overrides: Vec<String>,
    /// Time of a step; with it, the goodput is estimated.
    #[arg(long, value_name = "SECONDS")]
    pub step_seconds: Option<f64>,
    /// Failures of a node in an hour.
    #[arg(long, value_name = "RATE", default_value_t = 0.001)]
    pub failures_per_node_hour: f64,
    /// Time from a failure to the next step; by default elastic.failure_budget_ms.
    #[arg(long, value_name = "SECONDS")]
    pub recovery_seconds: Option<f64>,
    /// Time for which training waits when a checkpoint is saved.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    pub save_seconds: f64,
    /// Draw the pipeline's schedule as SVG instead.
    #[arg(long)]
    pub svg: bool,
}

/// Arguments of `elastic run`.
#[derive(Clone, Debug, Default, Args)]
#[command(
    after_help = "Any key of the configuration is an argument too: --training.steps 100, \
        --optimizer.lr=3e-3, --checkpoint.no_enable. `elastic run --help` lists them.",
    after_long_help = run_help(),
)]
pub struct RunArgs {
    /// TOML file; without one, every key has its default.
    #[arg(value_name = "CONFIG")]
    pub config: Option<PathBuf>,

    /// Fewest nodes that train; below it the job waits (elastic.min_nodes).
    #[arg(long, value_name = "N", help_heading = "Membership")]
    pub min_nodes: Option<u32>,

    /// Most nodes that train; further ones stand by (elastic.max_nodes).
    #[arg(long, value_name = "N", help_heading = "Membership")]
    pub max_nodes: Option<u32>,

    /// Both at once; one number sets both.
    #[arg(
        long,
        value_name = "MIN:MAX",
        value_parser = nodes,
        conflicts_with_all = ["min_nodes", "max_nodes"],
        help_heading = "Membership"
    )]
    pub nodes: Option<(u32, u32)>,

    /// Workers of this node (elastic.nproc_per_node).
    #[arg(long, value_name = "K", help_heading = "Membership")]
    pub nproc_per_node: Option<u32>,

    /// Failures without a committed step between them after which the job gives
    /// up (elastic.max_failures).
    #[arg(long, value_name = "N", help_heading = "Membership")]
    pub max_failures: Option<u32>,

    /// Nodes that leave without a committed step between them after which the job
    /// gives up (elastic.max_preemptions).
    #[arg(long, value_name = "N", help_heading = "Membership")]
    pub max_preemptions: Option<u32>,

    /// Run N nodes on this machine, and restart those that die.
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=256),
        conflicts_with_all = ["join", "listen", "advertise", "node_id"],
        help_heading = "Network"
    )]
    pub standalone: Option<u32>,

    /// Nodes that are already there; without one, this node founds the job.
    #[arg(
        long,
        value_name = "HOST:PORT,…",
        value_delimiter = ',',
        env = "ELASTIC_JOIN",
        help_heading = "Network"
    )]
    pub join: Vec<String>,

    /// A program that prints the nodes, a line each: HOST, HOST:SLOTS or HOST:PORT.
    /// As with --join the first founds; it is asked again while nobody is reached.
    #[arg(
        long,
        value_name = "PATH",
        conflicts_with_all = ["join", "standalone"],
        env = "ELASTIC_HOST_DISCOVERY_SCRIPT",
        help_heading = "Network"
    )]
    pub host_discovery_script: Option<PathBuf>,

    /// What a joiner has to know; the founder prints one if none is given.
    #[arg(
        long,
        value_name = "TOKEN",
        env = "ELASTIC_TOKEN",
        hide_env_values = true,
        help_heading = "Network"
    )]
    pub token: Option<String>,

    /// Where to accept connections.
    #[arg(long, value_name = "ADDR:PORT", help_heading = "Network")]
    pub listen: Option<String>,

    /// Where others reach this node, if not where it listens.
    #[arg(long, value_name = "HOST:PORT", help_heading = "Network")]
    pub advertise: Option<String>,

    /// Where the first worker accepts tensor connections, the others on the ports
    /// after it; any free one if not given.
    #[arg(long, value_name = "PORT", conflicts_with = "standalone", help_heading = "Network")]
    pub tensor_port: Option<u16>,

    /// Name of this node, stable over restarts; the host name if not given.
    #[arg(
        long,
        value_name = "ID",
        value_parser = |name: &str| NodeId::new(name),
        env = "ELASTIC_NODE_ID",
        help_heading = "Network"
    )]
    pub node_id: Option<NodeId>,

    /// Write a JSON summary here when the run ends.
    #[arg(long, value_name = "FILE")]
    pub summary: Option<PathBuf>,

    /// Found a new job even if there are checkpoints of one.
    #[arg(long)]
    pub fresh: bool,

    /// Go on from the newest checkpoint when all nodes of its job are gone for good.
    #[arg(long, conflicts_with = "fresh")]
    pub reform: bool,

    /// Print every key with value, range, default and origin, and end.
    #[arg(long)]
    pub print_config: bool,

    /// Arguments `--section.key value`, taken out before the others are parsed.
    #[arg(skip)]
    pub overrides: Vec<String>,
}

/// Arguments of `elastic status`.
#[derive(Clone, Debug, Args)]
pub struct StatusArgs {
    /// The job.
    #[command(flatten)]
    pub target: Target,
    /// Show it again whenever it changes.
    #[arg(long)]
    pub watch: bool,
    /// One JSON object (one per line with --watch).
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `elastic events`.
#[derive(Clone, Debug, Args)]
pub struct EventsArgs {
    /// The job.
    #[command(flatten)]
    pub target: Target,
    /// One JSON object per line.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `elastic drain`.
#[derive(Clone, Debug, Args)]
pub struct DrainArgs {
    /// The node that is to leave.
    #[arg(value_parser = |name: &str| NodeId::new(name))]
    pub node: NodeId,
    /// The job.
    #[command(flatten)]
    pub target: Target,
}

/// Arguments of `elastic stop`.
#[derive(Clone, Debug, Args)]
pub struct StopArgs {
    /// The job.
    #[command(flatten)]
    pub target: Target,
}

/// Which job a command means.
#[derive(Clone, Debug, Args)]
pub struct Target {
    /// job.dump_folder of a node of the job on this machine.
    #[arg(long, value_name = "DIR", default_value = "./outputs", env = "ELASTIC_DUMP_FOLDER")]
    pub dump_folder: PathBuf,
}

/// Join tokens.
#[derive(Debug, Subcommand)]
pub enum TokenCommand {
    /// Make one more and print it.
    Create {
        /// How long it lets nodes in, such as 30m or 12h; for ever if not given.
        #[arg(long, value_name = "TIME", value_parser = seconds)]
        ttl: Option<u64>,
        /// The job.
        #[command(flatten)]
        target: Target,
    },
    /// List them, without their secrets.
    List {
        /// The job.
        #[command(flatten)]
        target: Target,
    },
    /// Let nobody in with one any more; nodes that came in with it stay.
    Revoke {
        /// Its id, as `elastic token list` shows it.
        id: String,
        /// The job.
        #[command(flatten)]
        target: Target,
    },
}

/// Datasets.
#[derive(Debug, Subcommand)]
pub enum DataCommand {
    /// Turn text files into token files for training and validation.
    #[command(after_help = "Example:\n  elastic data prepare books/*.txt --out data\n\n\
            The end of each text becomes validation data. The same texts in the same order give \
            the same files.")]
    Prepare(PrepareArgs),
}

/// Arguments of `elastic data prepare`.
#[derive(Clone, Debug, Args)]
pub struct PrepareArgs {
    /// Text files, read in this order, byte for byte.
    #[arg(value_name = "TEXT", required = true)]
    pub texts: Vec<PathBuf>,
    /// Folder for train.tok, validation.tok and dataset.json.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Share of each text that is held out, from 0 to below 1.
    #[arg(long, value_name = "SHARE", default_value_t = 0.05, value_parser = share)]
    pub validation_fraction: f64,
    /// byte: one token per byte, vocabulary 256.
    #[arg(long, value_name = "NAME", default_value = "byte", value_parser = ["byte"])]
    pub tokenizer: String,
}

/// Benchmarks.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Kill workers and nodes of a group on this machine, and time how it goes on.
    #[command(after_help = "Example:\n  elastic bench recovery --dataset data --rounds 5\n\n\
            Any key of the configuration is an argument too, as with `elastic run`.")]
    Recovery(RecoveryArgs),
    /// A training step on one rank (runs elastic-worker).
    Step(WorkerArgs),
    /// Save, load and reshard a checkpoint beside PyTorch and the disk's own speed.
    #[command(
        after_help = "Example:\n  elastic bench checkpoint --python .venv/bin/python --dir /dev/shm\n\n\
            Every figure is the median of the rounds; PyTorch, elastic and the raw copies take turns."
    )]
    Checkpoint(CheckpointArgs),
    /// Sums and moves tensors between processes of this machine, in the columns of
    /// nccl-tests, beside the limits of its memory and sockets.
    #[command(after_help = "Example:\n  elastic bench collectives -b 8 -e 128M -n 2,4 \
            --python .venv/bin/python --json rows.json")]
    Collectives(CollectivesArgs),
}

/// Arguments of `elastic bench recovery`.
#[derive(Clone, Debug, Args)]
pub struct RecoveryArgs {
    /// TOML file; without one, a small model on short steps.
    #[arg(value_name = "CONFIG")]
    pub config: Option<PathBuf>,
    /// Kills of each kind: a worker, a node, the node that leads.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Nodes of the group.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(3..=64))]
    pub nodes: u32,
    /// Folder that `elastic data prepare` made (training.dataset_path).
    #[arg(long, value_name = "DIR")]
    pub dataset: Option<PathBuf>,
    /// Write the figures here, one row a kind.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Arguments `--section.key value`, taken out before the others are parsed.
    #[arg(skip)]
    pub overrides: Vec<String>,
}

/// Arguments of `elastic bench checkpoint`.
#[derive(Clone, Debug, Args)]
pub struct CheckpointArgs {
    /// Folders to write in; each is measured: a RAM disk, and a disk.
    #[arg(long, value_name = "DIR", default_values = ["/dev/shm", "."])]
    pub dir: Vec<PathBuf>,
    /// MiB of fp32 in the state.
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(16..=1 << 20))]
    pub size: u64,
    /// Rounds; the medians are shown.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// A Python with torch to compare with; without one, PyTorch is left out.
    #[arg(long, value_name = "FILE", env = "ELASTIC_TEST_PYTHON")]
    pub python: Option<PathBuf>,
    /// Write the figures here.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Arguments that go to elastic-worker as they are.
#[derive(Clone, Debug, Args)]
#[command(disable_help_flag = true)]
pub struct WorkerArgs {
    /// See `elastic-worker generate --help` and `elastic-worker bench --help`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    pub arguments: Vec<String>,
}

impl RunArgs {
    /// The configuration: file, then the flags of membership and the arguments
    /// `--section.key`.
    ///
    /// # Errors
    /// Everything that is wrong, each with its place.
    pub fn resolve(&self) -> Result<Resolved, ConfigError> {
        let (min, max) = self.nodes.unzip();
        let flags = [
            ("elastic.min_nodes", self.min_nodes.or(min)),
            ("elastic.max_nodes", self.max_nodes.or(max)),
            ("elastic.nproc_per_node", self.nproc_per_node),
            ("elastic.max_failures", self.max_failures),
            ("elastic.max_preemptions", self.max_preemptions),
        ];
        let mut arguments: Vec<_> = flags
            .iter()
            .filter_map(|(key, value)| value.map(|value| format!("--{key}={value}")))
            .collect();
        arguments.extend(self.overrides.iter().cloned());
        Resolved::load(self.config.as_deref(), &arguments)
    }
}

fn run_help() -> String {
    format!(
        "Examples:\n  \
        elastic run --standalone 4 examples/shakespeare.toml    four nodes on this machine\n  \
        elastic run job.toml --nodes 2:8                        found a job\n  \
        elastic run job.toml --join host1:29400 --token T       the same job on another node\n  \
        elastic run job.toml --training.steps 100 --print-config\n\n\
        Logs are in DUMP_FOLDER/nodes/NAME; ELASTIC_LOG=debug writes more, \
        ELASTIC_LOG_FORMAT=json writes JSON.\n\n{}\n{EXIT_CODES}",
        reference()
    )
}

fn nodes(text: &str) -> Result<(u32, u32), String> {
    let number = |text: &str| text.parse::<u32>().map_err(|_| format!("{text:?} is no number"));
    let (min, max) = text.split_once(':').unwrap_or((text, text));
    Ok((number(min)?, number(max)?))
}

fn seconds(text: &str) -> Result<u64, String> {
    let units = [("s", 1), ("m", 60), ("h", 3600), ("d", 86_400)];
    let unit = units.iter().find_map(|(unit, size)| Some((text.strip_suffix(unit)?, size)));
    let (number, size) = unit.unwrap_or((text, &1));
    match number.parse::<u64>().ok().and_then(|number| number.checked_mul(*size)) {
        Some(seconds) if seconds > 0 => Ok(seconds),
        _ => Err("must be a positive time in s, m, h or d, such as 12h".into()),
    }
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..1.0).contains(&share) => Ok(share),
        _ => Err("must be a number from 0 to below 1".into()),
    }
}
