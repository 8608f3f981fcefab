//! The pure vocabulary and the decisions of an elastic training job.
//!
//! Nothing here reads a clock, opens a socket or knows a runtime: time comes in
//! as an argument, effects go out as values. So the same code decides in a
//! running job and in a simulated one (`tests/world`).
//!
//! # Where to start
//!
//! A job is one replicated value, [`state::JobState`]. It changes only by
//! [`command::Command`]s, which the control group orders, and each change is told
//! as [`command::Event`]s. Nodes send a [`report::NodeReport`] with every beat;
//! the leader puts the newest ones into a [`planner::View`], and
//! [`planner::decide`] says which commands to propose and why:
//!
//! ```text
//!  reports ──► View ──► planner::decide ──► commands ──► JobState::apply ──► events
//!                            ▲                                │
//!                            └────────────── state ◄──────────┘
//! ```
//!
//! Read in this order:
//!
//! 1. [`ids`]: who is who, and the token that fences old generations (ID, GEN-1).
//! 2. [`plan`]: a generation is a `Plan` (who trains) and then a `Seal` (where they
//!    go on from). [`shares`] says which rank computes which micro-batch (DATA-2),
//!    [`mesh`] how ranks are arranged, [`pipeline`] what a pipeline computes when.
//! 3. [`report`]: what nodes and their workers say; positions of a rank (ST-1).
//! 4. [`state`]: the facts, and [`state::JobState::is_official`], the one rule that
//!    tells committed history from attempts (GN-5, HEAL-1).
//! 5. [`planner`]: the decisions: membership (LS-2), plans (GN-1), seals (GN-3,
//!    GN-4), checkpoints (LG-2), the end (ST-4).
//! 6. [`leader`]: what a leading node keeps between two decisions (LS-1).
//! 7. [`incident`]: where the wall time went (OBS-1).
//!
//! Beside these: [`message`] is what processes tell each other, [`codec`] its
//! bytes, [`admission`] who may join, [`replicated`] what a control group can
//! replicate, [`voters`] who votes in it, [`reforming`] who may go on without it,
//! [`timeouts`] every limit out of one budget, [`spec`] what is fixed at founding,
//! [`model`] the shapes of models, [`estimate`] what a mesh costs, and [`tokens`] the
//! dataset's files.
//!
//! # Example
//!
//! A node's first beat makes it a member:
//!
//! ```
//! use std::{collections::BTreeMap, time::Duration};
//! use job::{
//!     Era, JobId, NodeId, Step, StoreId,
//!     plan::Timestamp,
//!     planner::{self, Heard, Limits, View},
//!     report::NodeReport,
//!     spec::{JobSpec, Sharding},
//!     state::JobState,
//! };
//!
//! let spec = JobSpec {
//!     job: JobId(uuid::Uuid::nil()),
//!     config: String::new(),
//!     config_digest: [0; 32],
//!     min_nodes: 1,
//!     max_nodes: 8,
//!     micro_batches: Some(8),
//!     total_steps: Step(1000),
//!     sharding: Sharding::Replicated,
//!     parallel: Default::default(),
//!     max_failures: 10,
//!     max_preemptions: 1_000,
//!     exact: true,
//!     checkpoints: true,
//!     keep_latest_k: 2,
//!     authority: String::new(),
//!     join_secret: String::new(),
//! };
//! let mut state = JobState::found(spec, Era(1), Timestamp(0));
//!
//! let node = NodeId::new("n1")?;
//! let report = NodeReport {
//!     node: node.clone(),
//!     store: StoreId(uuid::Uuid::nil()),
//!     boot: 1,
//!     incarnation: None,
//!     address: ([127, 0, 0, 1], 4000).into(),
//!     slots: 1,
//!     leaving: false,
//!     stop_job: false,
//!     recorded: Step(0),
//!     shared: None,
//!     dead_peers: Vec::new(),
//!     workers: Vec::new(),
//! };
//! let now = Duration::from_secs(1);
//! let view = View {
//!     me: node.clone(),
//!     heard: BTreeMap::from([(node.clone(), Heard { report, at: now })]),
//!     leader_since: now,
//!     planned_since: now,
//!     quiet_since: now,
//!     evicted_at: now,
//!     accused_since: None,
//!     trust: BTreeMap::new(),
//!     last_step: Timestamp(0),
//!     verified: BTreeMap::new(),
//!     late: false,
//!     now,
//!     clock: Timestamp(1_000_000),
//! };
//! let limits = Limits {
//!     suspect: Duration::from_millis(800),
//!     lease: Duration::from_millis(700),
//!     seal: Duration::from_millis(2400),
//!     step: Duration::from_secs(60),
//!     accusation: Duration::from_millis(300),
//!     settle: Duration::from_millis(100),
//!     settle_max: Duration::from_millis(2400),
//! };
//!
//! let decision = planner::decide(&state, &view, &limits, [0; 32]);
//! for command in decision.commands {
//!     state.apply(command);
//! }
//! assert!(state.nodes[&node].is_live());
//! assert_eq!(decision.waiting.as_deref(), Some("waiting for nodes: 0 of at least 1 are ready"));
//! # Ok::<(), job::ids::InvalidNodeId>(())
//! ```

pub mod admission;
pub mod codec;
pub mod command;
pub mod estimate;
pub mod ids;
pub mod incident;
pub mod leader;
pub mod links;
pub mod mesh;
pub mod message;
pub mod model;
pub mod pipeline;
pub mod plan;
pub mod planner;
pub mod reforming;
pub mod replicated;
pub mod report;
pub mod shares;
pub mod spec;
pub mod state;
pub mod timeouts;
pub mod tokens;
pub mod trust;
pub mod voters;

pub use ids::{Era, Generation, Incarnation, JobId, NodeId, Rank, Step, StoreId, Token, WorkerId};
