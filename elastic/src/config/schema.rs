//! The one table of all keys. Types, defaults, ranges, help, parsing, printing,
//! the command line and the identity of a job follow from it: a new key is one
//! row here and the code that honours it.

use super::value::{Allowed, Field, Kind, Value, choices};
use Allowed::{Above, Anything, AutoOr, Below, Integers, NonEmpty, Reals};

/// Whose decision a key is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Part of the trajectory (TRAJ-1): fixed when the job is founded.
    Identity,
    /// One value for the whole job, the founder's, that changes no result.
    Job,
    /// Each node's own.
    Node,
}

/// One row of the schema.
pub struct Key {
    /// The table in the file.
    pub section: &'static str,
    /// The name within the table.
    pub name: &'static str,
    /// Whose decision it is.
    pub scope: Scope,
    /// Jobs were founded before the key existed: with its default it says nothing.
    pub came_later: bool,
    /// What is written.
    pub kind: Kind,
    /// Whether it may be left without a value.
    pub optional: bool,
    /// The only values, if they are few.
    pub choices: &'static [&'static str],
    /// The range.
    pub allowed: Allowed,
    pub(super) help: &'static [&'static str],
    pub(super) get: fn(&Config) -> Value,
    /// `false` when the value is of another kind.
    pub(super) set: fn(&mut Config, &Value) -> bool,
}

/// Behind a scope: [`Key::came_later`].
macro_rules! later {
    () => {
        true
    };
}

macro_rules! schema {
    ($(
        $(#[doc = $about:literal])+
        $section:ident: $Section:ident {$(
            $(#[doc = $help:literal])+
            $key:ident: $type:ty = $default:expr, $allowed:expr, $scope:ident $($later:ident)?;
        )+}
    )+) => {
        $(
            $(#[doc = $about])+
            #[derive(Clone, Debug, PartialEq)]
            pub struct $Section {$(
                $(#[doc = $help])+
                pub $key: $type,
            )+}
        )+

        /// The configuration of a job. Its JSON form goes through the same
        /// checks as a file.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Config {$(
            $(#[doc = $about])+
            pub $section: $Section,
        )+}

        impl Default for Config {
            fn default() -> Self {
                Self {$($section: $Section {$($key: $default,)+},)+}
            }
        }

        /// The sections in the order in which they are printed, with their help.
        pub static SECTIONS: &[(&str, &[&str])] = &[$((stringify!($section), &[$($about),+]),)+];

        /// Every key, section by section.
        pub static KEYS: &[Key] = &[$($(Key {
            section: stringify!($section),
            name: stringify!($key),
            scope: Scope::$scope,
            came_later: false $(|| $later!())?,
            kind: <$type as Field>::KIND,
            optional: <$type as Field>::OPTIONAL,
            choices: <$type as Field>::CHOICES,
            allowed: $allowed,
            help: &[$($help),+],
            get: |config| config.$section.$key.to_value(),
            set: |config, value| match <$type as Field>::from_value(value) {
                Some(value) => {
                    config.$section.$key = value;
                    true
                }
                None => false,
            },
        },)+)+];
    };
}

const MAX: i64 = i64::MAX;

schema! {
    /// What the run is called and where it writes.
    job: Job {
        /// Folder for everything that the run writes.
        dump_folder: String = "./outputs".into(), NonEmpty, Node;
        /// A line for people, shown by `elastic status`.
        description: String = "default job".into(), Anything, Node;
    }
    /// The model.
    model: Model {
        /// The family of models.
        name: ModelName = ModelName::Llama3, Anything, Identity;
        /// The shape within the family.
        flavor: Flavor = Flavor::Byte1M, Anything, Identity;
    }
    /// The optimizer.
    optimizer: Optimizer {
        /// AdamW decays the weights, Adam adds the decay to the gradient.
        name: OptimizerName = OptimizerName::AdamW, Anything, Identity;
        /// Peak learning rate.
        lr: f64 = 8e-4, Reals(0.0, f64::MAX), Identity;
        /// Decay of the first moment.
        beta1: f64 = 0.9, Below(0.0, 1.0), Identity;
        /// Decay of the second moment.
        beta2: f64 = 0.95, Below(0.0, 1.0), Identity;
        /// Added to the denominator.
        eps: f64 = 1e-8, Above(0.0, f64::MAX), Identity;
        /// Weight decay.
        weight_decay: f64 = 0.1, Reals(0.0, f64::MAX), Identity;
    }
    /// Warm-up, stable, decay.
    lr_scheduler: LrScheduler {
        /// Steps from 0 up to the peak learning rate.
        warmup_steps: u64 = 200, Integers(0, MAX), Identity;
        /// Length of the schedule in steps; unset: training.steps.
        total_steps: Option<u64> = None, Integers(1, MAX), Identity;
        /// Share of the schedule that decays; unset: everything after the warm-up.
        decay_ratio: Option<f64> = None, Reals(0.0, 1.0), Identity;
        /// Shape of the decay.
        decay_type: DecayType = DecayType::Linear, Anything, Identity;
        /// Learning rate at the end, as a share of the peak.
        min_lr_factor: f64 = 0.0, Reals(0.0, 1.0), Identity;
    }
    /// Data, batches and length.
    training: Training {
        /// Folder that `elastic data prepare` made.
        dataset_path: String = "./data".into(), NonEmpty, Node;
        /// Sequences of one micro-batch, the unit that is never split (DATA-2).
        local_batch_size: u32 = 8, Integers(1, 1 << 20), Identity;
        /// Sequences of a step (DATA-2); -1: local × founding data-parallel degree.
        global_batch_size: i64 = -1, AutoOr(1, 1 << 31), Identity;
        /// Tokens of a sequence.
        seq_len: u32 = 2048, Integers(1, 1 << 24), Identity;
        /// Gradients are clipped to this norm.
        max_norm: f64 = 1.0, Above(0.0, f64::MAX), Identity;
        /// Optimizer steps after which the job is finished.
        steps: u64 = 10_000, Integers(1, MAX), Job;
        /// Type of master weights, moments and summed gradients.
        dtype: Precision = Precision::Float32, Anything, Identity;
        /// Type of forward and backward; gradients are summed in float32.
        mixed_precision_param: ComputePrecision = ComputePrecision::Float32, Anything, Identity later;
        /// Seed of initial weights and data order.
        seed: u64 = 42, Integers(0, MAX), Identity;
    }
    /// How the model is spread. The data-parallel degree follows the live nodes.
    parallelism: Parallelism {
        /// none; zero1 cuts the optimizer's state, zero2 gradients too, zero3 weights
        /// too; hybrid is zero3 within groups of ranks.
        sharding: ShardingMode = ShardingMode::None, Anything, Job;
        /// Groups that each hold the whole state (zero2, zero3); -1: from the other.
        data_parallel_replicate_degree: i64 = 1, AutoOr(1, 1 << 20), Job;
        /// Ranks over which state is cut; -1: all of a group.
        data_parallel_shard_degree: i64 = -1, AutoOr(1, 1 << 20), Job;
        /// Whether zero3 gives weights up between forward and backward; default:
        /// unless there is a pipeline.
        fsdp_reshard_after_forward: Reshard = Reshard::Default, Anything, Job;
        /// Ranks of a pipeline; fewer when not one can be formed.
        pipeline_parallel_degree: u32 = 1, Integers(1, 1 << 12), Job;
        /// The order of a pipeline's passes; no bit depends on it.
        pipeline_parallel_schedule: PipelineSchedule = PipelineSchedule::OneForwardOneBackward,
            Anything, Job;
        /// Blocks of each chunk of Interleaved1F1B; unset: two chunks for each rank.
        pipeline_parallel_layers_per_stage: Option<u32> = None, Integers(1, 1 << 16), Job;
        /// What the embedding weighs when blocks are dealt to stages, in blocks.
        pipeline_parallel_first_stage_less_layers: u32 = 1, Integers(0, 1 << 16), Job;
        /// What the head weighs.
        pipeline_parallel_last_stage_less_layers: u32 = 1, Integers(0, 1 << 16), Job;
    }
    /// Memory for time: the same bits, activations computed again.
    activation_checkpoint: ActivationCheckpoint {
        /// none keeps them; selective recomputes every n-th block, full every block.
        mode: RecomputeMode = RecomputeMode::None, Anything, Job;
        /// The n of selective.
        selective_ac_option: Every = Every(2), Integers(1, 1 << 16), Job;
    }
    /// Checkpoints in PyTorch's DCP format (CKPT-1).
    checkpoint: Checkpoint {
        /// Save and resume.
        enable: bool = true, Anything, Job;
        /// Folder below job.dump_folder, or absolute; the nodes share it. No URL.
        folder: String = "checkpoint".into(), NonEmpty, Node;
        /// Steps between checkpoints.
        interval: u64 = 500, Integers(1, MAX), Job;
        /// async: the step pays only for the copy to memory; disabled: it waits.
        async_mode: AsyncMode = AsyncMode::Async, Anything, Job;
        /// Checkpoints to keep; 0 keeps all.
        keep_latest_k: u32 = 10, Integers(0, 1 << 20), Job;
    }
    /// Loss on held-out data.
    validation: Validation {
        /// Validate during training.
        enable: bool = false, Anything, Job;
        /// Steps between validations; the last step always validates.
        freq: u64 = 10, Integers(1, MAX), Job;
        /// Batches of a validation; -1: the whole validation set.
        steps: i64 = -1, AutoOr(1, MAX), Job;
    }
    /// What is logged.
    metrics: Metrics {
        /// Steps between log lines; the first step always logs.
        log_freq: u64 = 10, Integers(1, MAX), Node;
        /// HOST:PORT where Prometheus scrapes /metrics; unset: nowhere. Of the nodes
        /// of --standalone, the first answers.
        prometheus_listen: Option<String> = None, NonEmpty, Node;
    }
    /// Membership, failures and time limits.
    elastic: Elastic {
        /// Fewest nodes that train; below it the job waits.
        min_nodes: u32 = 1, Integers(1, 1 << 16), Job;
        /// Most nodes that train; further ones stand by.
        max_nodes: u32 = 1024, Integers(1, 1 << 16), Job;
        /// Workers, and devices, of this node.
        nproc_per_node: u32 = 1, Integers(1, 1024), Node;
        /// Failures without a committed step between them after which the job gives up.
        max_failures: u32 = 10, Integers(1, 1 << 20), Job;
        /// Nodes that leave, preempted or drained, without a committed step between them
        /// after which the job gives up; counted apart from failures.
        max_preemptions: u32 = 1000, Integers(1, 1 << 20), Job;
        /// Time from a silent node to its replacement in ms; every other limit
        /// of the control group derives from it.
        failure_budget_ms: u64 = 1200, Integers(1, 3_600_000), Job;
        /// Time in which a step must finish; a rank that does not is hung.
        step_timeout_s: f64 = 60.0, Above(0.0, 86_400.0), Job;
        /// tree: the same bits on any mesh (TRAJ-1).
        reduction: Reduction = Reduction::Tree, Anything, Identity;
        /// How this node's tensors reach the ranks of the same machine: auto takes
        /// shared memory where there is some, tcp never.
        tensor_transport: TensorTransport = TensorTransport::Auto, Anything, Node;
        /// The worker program; unset: elastic-worker beside elastic.
        worker_bin: Option<String> = None, NonEmpty, Node;
    }
}

/// Families of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelName {
    /// Llama 3: RMSNorm, rotary positions, grouped queries, SwiGLU.
    Llama3,
}
choices!(ModelName { ModelName::Llama3 = "llama3" });

/// Shapes of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavor {
    /// One million parameters over bytes, for a laptop.
    Byte1M,
    /// torchtitan's six million parameters.
    Debug,
    /// Llama 3 8B.
    B8,
    /// Llama 3 70B.
    B70,
    /// Llama 3 405B.
    B405,
}
choices!(Flavor {
    Flavor::Byte1M = "byte-1M",
    Flavor::Debug = "debugmodel",
    Flavor::B8 = "8B",
    Flavor::B70 = "70B",
    Flavor::B405 = "405B",
});

/// Optimizers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptimizerName {
    /// Adam with decoupled weight decay.
    AdamW,
    /// Adam with weight decay as a part of the gradient.
    Adam,
}
choices!(OptimizerName { OptimizerName::AdamW = "AdamW", OptimizerName::Adam = "Adam" });

/// Shapes of the decay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecayType {
    /// A straight line.
    Linear,
    /// 1 − √t.
    Sqrt,
    /// Half a cosine.
    Cosine,
}
choices!(DecayType {
    DecayType::Linear = "linear",
    DecayType::Sqrt = "sqrt",
    DecayType::Cosine = "cosine",
});

/// Number formats of forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputePrecision {
    /// 32-bit floats.
    Float32,
    /// bfloat16, with 32-bit master weights.
    Bfloat16,
}
choices!(ComputePrecision {
    ComputePrecision::Float32 = "float32" | "fp32" | "32-true" | "no",
    ComputePrecision::Bfloat16 = "bfloat16" | "bf16" | "bf16-mixed",
});

/// Number formats of training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// 32-bit floats throughout.
    Float32,
}
choices!(Precision { Precision::Float32 = "float32" });

/// How training state is spread over data-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShardingMode {
    /// Not at all.
    None,
    /// The optimizer state.
    Zero1,
    /// And gradients.
    Zero2,
    /// And weights.
    Zero3,
    /// All three within groups, which are replicas of each other.
    Hybrid,
}
choices!(ShardingMode {
    ShardingMode::None = "none" | "NO_SHARD" | "replicated" | "ddp",
    ShardingMode::Zero1 = "zero1" | "zero-1" | "zero_1" | "distributed_optimizer",
    ShardingMode::Zero2 = "zero2" | "zero-2" | "zero_2" | "SHARD_GRAD_OP",
    ShardingMode::Zero3 = "zero3" | "zero-3" | "zero_3" | "FULL_SHARD" | "fsdp" | "fsdp2",
    ShardingMode::Hybrid = "hybrid" | "HYBRID_SHARD" | "hsdp",
});

/// When ZeRO-3 gives weights up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reshard {
    /// After the forward pass, unless there is a pipeline.
    Default,
    /// After the forward pass.
    Always,
    /// After the backward pass.
    Never,
}
choices!(Reshard {
    Reshard::Default = "default",
    Reshard::Always = "always",
    Reshard::Never = "never",
});

/// Orders of a pipeline's passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PipelineSchedule {
    /// All forward, then all backward.
    GPipe,
    /// One forward, one backward.
    OneForwardOneBackward,
    /// The same over several chunks of the model on each rank.
    Interleaved,
    /// The gradients of weights fill the bubble.
    ZeroBubble,
}
choices!(PipelineSchedule {
    PipelineSchedule::OneForwardOneBackward = "1F1B",
    PipelineSchedule::GPipe = "GPipe" | "afab",
    PipelineSchedule::Interleaved = "Interleaved1F1B",
    PipelineSchedule::ZeroBubble = "ZeroBubble" | "ZB-H1" | "ZBH1",
});

/// Which blocks recompute their activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecomputeMode {
    /// None.
    None,
    /// Every n-th.
    Selective,
    /// All.
    Full,
}
choices!(RecomputeMode {
    RecomputeMode::None = "none",
    RecomputeMode::Selective = "selective",
    RecomputeMode::Full = "full",
});

/// A count that torchtitan writes as text, `'2'`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Every(pub u32);

impl Field for Every {
    const KIND: Kind = Kind::Integer;
    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Text(text) => text.parse().ok().map(Self),
            value => u32::from_value(value).map(Self),
        }
    }
    fn to_value(&self) -> Value {
        self.0.to_value()
    }
}

/// When the training step waits for a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncMode {
    /// Until the state is copied to memory.
    Async,
    /// Until it is on disk.
    Disabled,
}
choices!(AsyncMode { AsyncMode::Async = "async", AsyncMode::Disabled = "disabled" });

/// Orders in which gradients are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// A fixed tree over micro-batches.
    Tree,
}
choices!(Reduction { Reduction::Tree = "tree" });

/// Ways of tensors between ranks of one machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorTransport {
    /// Through shared memory where there is some.
    Auto,
    /// Over TCP, as between machines.
    Tcp,
}
choices!(TensorTransport { TensorTransport::Auto = "auto", TensorTransport::Tcp = "tcp" });

impl Key {
    /// `section.name`.
    #[must_use]
    pub fn full_name(&self) -> String {
        format!("{}.{}", self.section, self.name)
    }

    /// The help in one line.
    #[must_use]
    pub fn help(&self) -> String {
        one_line(self.help)
    }

    /// The range or the choices, as text.
    #[must_use]
    pub fn range(&self) -> String {
        if !self.choices.is_empty() {
            self.choices.join(" | ")
        } else if self.kind == Kind::Bool {
            "true | false".into()
        } else {
            self.allowed.to_string()
        }
    }

    /// The key of that name.
    #[must_use]
    pub fn find(full_name: &str) -> Option<&'static Self> {
        let (section, name) = full_name.split_once('.')?;
        KEYS.iter().find(|key| key.section == section && key.name == name)
    }
}

/// Joins the lines of a doc comment.
pub(super) fn one_line(lines: &[&str]) -> String {
    lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
}
