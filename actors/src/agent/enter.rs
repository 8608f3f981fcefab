//! How a process start gets into a control group: by its store, by founding, or
//! by joining.

use std::{
    collections::BTreeMap,
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use dcp::folder::{Commit, Genesis};
use job::{
    Era, Generation, JobId, Step, StoreId, codec,
    command::Event,
    message::Welcome,
    replicated::StateMachine,
    state::{CheckpointRecord, JobState},
};
use tokio::sync::{broadcast, mpsc};
use transport::control::{
    Authority, BindError, Control, Identity, JoinAsk, JoinError, JoinToken, Lane, LinkEvents,
    Options as ControlOptions,
};

use super::{
    Error, Notice, Options, discovery, home,
    knocking::Knocking,
    ledger::{self, Claim},
    meeting, pulse,
    tokens::Gatekeeper,
};
use crate::{
    clock,
    control_group::{
        Applied, ControlGroup, Founding, Handle as Group, Options as GroupOptions, Outbound, Store,
    },
};

/// A process start that is a member of a control group.
pub(super) struct Entered {
    pub(super) store: StoreId,
    pub(super) boot: u64,
    pub(super) address: SocketAddr,
    pub(super) control: Control,
    pub(super) links: LinkEvents,
    pub(super) group: Group<JobState>,
    pub(super) applied: broadcast::Receiver<Arc<Applied<Event>>>,
    pub(super) folder: PathBuf,
    pub(super) checkpoints: Arc<dcp::Folder>,
    /// Whom to dial before the group's own list is known.
    pub(super) seeds: Vec<String>,
    pub(super) gate: Gatekeeper,
}

const ADDRESS: &str = "address";

/// Where a node keeps what is its own.
pub(super) fn node_folder(options: &Options) -> PathBuf {
    options.dump_folder.join("nodes").join(options.node.as_str())
}

pub(super) async fn enter(
    options: &Options,
    notices: &mpsc::Sender<Notice>,
) -> Result<Entered, Error> {
    let folder = node_folder(options);
    fs::create_dir_all(&folder).map_err(file("cannot create", &folder))?;
    let checkpoints = dcp::Folder::open(&options.checkpoint_folder)
        .map(Arc::new)
        .map_err(|error| Error::Checkpoints(error.to_string()))?;
    let home = home::current(&folder);
    home::leave_older(&folder, &home);
    let store = Store::open(&home).map_err(|error| Error::Group(error.into()))?;
    let id = store.id();
    let identity_path = home.join(home::IDENTITY);
    let known = match identity_path.exists() && store.founding().is_some() {
        true => Some(Identity::load(&identity_path).map_err(control)?),
        false => None,
    };
    let is_member = known.is_some();
    let (endpoint, links) = bind(options, &folder, home != folder).await?;
    if let Some(identity) = known {
        endpoint.set_identity(identity).map_err(control)?;
    }
    let bound = endpoint.local_addr().map_err(|error| Error::Control(error.to_string()))?;
    fs::write(folder.join(ADDRESS), bound.to_string())
        .map_err(file("cannot write", &folder.join(ADDRESS)))?;
    let address = options.advertise.unwrap_or_else(|| reachable(bound));

    let mut seeds = options.join.clone();
    seeds.extend(home::founder(&home));
    let mut founded = false;
    let founding = if is_member {
        None
    } else {
        let entered = match patience(options, &checkpoints)? {
            Some(patience) => {
                let knocking = Knocking::new(options, patience, notices.clone());
                match join(options, id, &endpoint, &checkpoints, patience, &knocking).await {
                    Err(_) if options.founds => None,
                    joined => Some(joined?),
                }
            }
            None => None,
        };
        let (identity, founding) = match entered {
            Some(entered) => entered,
            None => {
                founded = true;
                nobody_leads(options, &checkpoints).await?;
                found(options, id, address, &checkpoints)?
            }
        };
        identity.save(&identity_path).map_err(control)?;
        endpoint.set_identity(identity).map_err(control)?;
        Some(founding)
    };

    let (outbound, outbox) = mpsc::channel(OUTBOUND);
    let timeouts = &options.timeouts;
    let group_options = GroupOptions {
        tick: timeouts.tick,
        election_ticks: timeouts.election_ticks.0 as usize,
        read_deadline: timeouts.lease,
        ..GroupOptions::default()
    };
    let (group, applied) = ControlGroup::start(group_options, store, founding, outbound)?;
    tokio::spawn(carry(outbox, endpoint.clone(), group.clone()));

    let state = group.state().borrow().clone();
    check_configuration(options, &state.state)?;
    meeting::leave(&checkpoints, &options.node, address).map_err(|error| {
        Error::Checkpoints(format!(
            "cannot write into the ledger of {}: {error}",
            checkpoints.root().display()
        ))
    })?;
    let authority = Authority::from_pem(&state.state.spec.authority).map_err(control)?;
    let token: JoinToken = state.state.spec.join_secret.parse().map_err(control)?;
    let pinned = token.pinned(authority.fingerprint()).to_string();
    let (asks, questions) = mpsc::channel(JOINERS);
    let gate = Gatekeeper::new(authority, asks);
    tokio::spawn(welcome(questions, group.clone()));

    let shared = Arc::new(state.state.clone());
    let _ = notices.try_send(match founded || options.join.is_empty() {
        true => Notice::Founded { address, token: pinned, state: shared },
        false => Notice::Joined { state: shared },
    });
    Ok(Entered {
        store: id,
        boot: endpoint.boot(),
        address,
        control: endpoint,
        links,
        group,
        applied,
        folder,
        checkpoints,
        seeds,
        gate,
    })
}

/// Opens the node's ports. In an era that is begun again, others know the address
/// of the one before, whose sockets may still be closing.
async fn bind(
    options: &Options,
    folder: &Path,
    again: bool,
) -> Result<(Control, LinkEvents), Error> {
    let until = clock::now() + CLOSING;
    loop {
        let listen = listen_address(options, folder);
        let waits = again && clock::now() < until;
        if !(waits && listen.port() == 0) {
            let control_options =
                ControlOptions { advertise: options.advertise, ..ControlOptions::default() };
            match Control::bind(listen, None, control_options) {
                Err(BindError::Taken(_)) if waits => {}
                bound => return bound.map_err(control),
            }
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Sockets of an endpoint that was closed are gone after this.
const CLOSING: Duration = Duration::from_secs(3);

/// Raft messages on their way to the links; beyond it Raft sends again.
const OUTBOUND: usize = 1024;
/// Joiners that may wait for an answer.
const JOINERS: usize = 16;

/// The port of the last start, if it is this node's own choice: the others know it.
fn listen_address(options: &Options, folder: &Path) -> SocketAddr {
    if options.listen.port() != 0 {
        return options.listen;
    }
    let last = fs::read_to_string(folder.join(ADDRESS)).ok();
    let last = last.and_then(|text| text.trim().parse::<SocketAddr>().ok());
    let free = |address: &SocketAddr| {
        std::net::UdpSocket::bind(address).is_ok() && std::net::TcpListener::bind(address).is_ok()
    };
    last.map(|last| SocketAddr::new(options.listen.ip(), last.port()))
        .filter(free)
        .unwrap_or(options.listen)
}

/// An address that others can dial, for a wildcard.
fn reachable(bound: SocketAddr) -> SocketAddr {
    if !bound.ip().is_unspecified() {
        return bound;
    }
    // No packet is sent: connecting a datagram socket asks for a route.
    let route = std::net::UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
        socket.connect("198.51.100.1:9")?;
        socket.local_addr()
    });
    let ip = route.map_or(std::net::Ipv4Addr::LOCALHOST.into(), |address| address.ip());
    SocketAddr::new(ip, bound.port())
}

/// How long to ask others before founding; none founds at once. The node that
/// founds may have lost its store while the job goes on elsewhere: where the
/// folder has a history, it asks for longer than any lease lasts.
fn patience(options: &Options, folder: &dcp::Folder) -> Result<Option<Duration>, Error> {
    if !options.founds {
        return Ok(Some(options.timeouts.join * 6));
    }
    if options.join.len() < 2 {
        return Ok(None);
    }
    let records = folder.records().map_err(|error| Error::Checkpoints(error.to_string()))?;
    Ok((!records.is_empty()).then(|| options.timeouts.reform * 4))
}

/// A person may be wrong about a job whose nodes are all gone: while somebody
/// with a quorum writes into the folder, it is not founded again (LG-3).
async fn nobody_leads(options: &Options, folder: &dcp::Folder) -> Result<(), Error> {
    let Some(first) = pulse::read(folder).filter(|_| options.reforms) else { return Ok(()) };
    let until = clock::now() + options.timeouts.reform;
    while clock::now() < until {
        tokio::time::sleep(options.timeouts.beat).await;
        if pulse::read(folder) != Some(first) {
            return Err(Error::Refused(format!(
                "checkpoint folder {} belongs to a job that is running: a leading node wrote into \
                 it just now; join it with --join and --token",
                folder.root().display()
            )));
        }
    }
    Ok(())
}

fn found(
    options: &Options,
    store: StoreId,
    address: SocketAddr,
    folder: &dcp::Folder,
) -> Result<(Identity, Founding), Error> {
    let fresh = JobId(uuid::Uuid::new_v4());
    let genesis = Genesis {
        job: fresh.to_string(),
        config_digest: options.proposal.config_digest.iter().map(|b| format!("{b:02x}")).collect(),
        seed: 0,
        ca_pin: String::new(),
        config: serde_json::from_str(&options.proposal.config).unwrap_or_default(),
    };
    let founder = ledger::Founder {
        nodes: vec![options.node.to_string()],
        address: address.to_string(),
        // Its certificates name the job, which the claim only tells.
        ca_pin: String::new(),
    };
    let claim =
        ledger::claim(folder, &genesis, &founder, options.reforms).map_err(Error::Checkpoints)?;
    let (job, era, commits) = match claim {
        Claim::New => (fresh, Era(0), Vec::new()),
        Claim::Resumes { job, era, checkpoints } => (job, era, checkpoints),
        Claim::Begun(begun) => {
            return Err(Error::Refused(format!(
                "era {} of the job in {} was begun by the node at {} meanwhile: join it",
                begun.era,
                folder.root().display(),
                begun.address
            )));
        }
        Claim::Owned(owner) => {
            return Err(Error::Refused(format!(
                "checkpoint folder {} belongs to job {}, and this node has no part in it: join it \
                 with --join and --token, go on from its newest checkpoint with --reform if all of \
                 its nodes are gone for good, or start anew with --fresh",
                folder.root().display(),
                owner.job
            )));
        }
        Claim::Foreign(owner) => {
            let theirs = owner.config.to_string();
            return Err(Error::Refused(format!(
                "checkpoint folder {} belongs to job {} with another configuration: {}; choose \
                 another folder, or start anew with --fresh",
                folder.root().display(),
                owner.job,
                (options.difference)(&options.proposal.config, &theirs)
            )));
        }
    };
    let authority = Authority::generate(job).map_err(control)?;
    let token = match &options.token {
        Some(token) => token.clone(),
        None => JoinToken::generate(None).map_err(control)?.to_string(),
    };
    let _: JoinToken = token.parse().map_err(control)?;
    let spec = options.proposal.spec(job, authority.to_pem(), token);
    let state = JobState::found(spec, era, clock::timestamp()).going_on(committed(commits));
    let identity = Identity::found(&authority, options.node.clone(), store).map_err(control)?;
    let founding =
        Founding { job, founder: store.raft_id(), state: StateMachine::snapshot(&state) };
    Ok((identity, founding))
}

/// What the ledger says to be committed, as the state has it.
pub(super) fn committed(commits: Vec<Commit>) -> BTreeMap<Step, CheckpointRecord> {
    let record = |commit: Commit| {
        let record = CheckpointRecord {
            era: Era(commit.era),
            generation: Generation(commit.generation),
            stage: commit.stage,
            files: codec::encode(&commit.files),
            micro_batches: commit.micro_batches,
        };
        (Step(commit.step), record)
    };
    commits.into_iter().map(record).collect()
}

/// The addresses of a HOST:PORT; none while its name is not known.
pub(super) async fn resolve(name: &str) -> Vec<SocketAddr> {
    match tokio::net::lookup_host(name).await {
        Ok(found) => found.collect(),
        Err(error) => {
            tracing::debug!(name, %error, "no address");
            Vec::new()
        }
    }
}

/// Asks the listed nodes in turn until one lets this node in.
async fn join(
    options: &Options,
    store: StoreId,
    endpoint: &Control,
    folder: &dcp::Folder,
    patience: Duration,
    knocking: &Knocking,
) -> Result<(Identity, Founding), Error> {
    let token = options.token.as_deref().ok_or_else(|| {
        Error::Refused(
            "joining needs the join token that the founder printed: --token or ELASTIC_TOKEN"
                .into(),
        )
    })?;
    let token: JoinToken = token.parse().map_err(control)?;
    let deadline = clock::now() + patience;
    let taken_until = clock::now() + options.timeouts.reform.min(patience);
    // The listed ones are its first answer, if there is a script.
    let mut ask_at = clock::now() + discovery::PAUSE;
    let mut discovered = Vec::new();
    loop {
        let own = endpoint.local_addr().ok();
        if let Some(script) = options.discovery.clone().filter(|_| clock::now() >= ask_at) {
            ask_at = clock::now() + discovery::PAUSE;
            match tokio::task::spawn_blocking(move || script.ask()).await {
                Ok(Ok(hosts)) => discovered = hosts,
                Ok(Err(why)) => knocking.not_yet(why),
                Err(error) => knocking.not_yet(error.to_string()),
            }
        }
        let mut addresses = Vec::new();
        for name in names(options, folder).into_iter().chain(discovered.iter().cloned()) {
            let found = resolve(&name).await;
            if found.is_empty() {
                knocking.not_yet(format!("{name} has no address now"));
            }
            addresses.extend(found.into_iter().filter(|address| Some(*address) != own));
        }
        for address in addresses {
            let tried = endpoint
                .join(
                    address,
                    &token,
                    options.node.clone(),
                    store,
                    Vec::new(),
                    options.timeouts.join.min(patience),
                )
                .await;
            match tried {
                Ok(joined) => {
                    let welcome: Welcome = codec::decode(&joined.welcome).map_err(control)?;
                    let founding: Founding = codec::decode(&welcome.founding).map_err(control)?;
                    let state = JobState::restore(&founding.state).map_err(Error::Control)?;
                    check_configuration(options, &state)?;
                    return Ok((joined.identity, founding));
                }
                // Nobody there yet, or not now: founders start in any order.
                Err(
                    error @ (JoinError::Unreachable { .. }
                    | JoinError::Busy { .. }
                    | JoinError::Timeout { .. }),
                ) => {
                    knocking.not_yet(error.to_string());
                }
                // The name may still be taken by an earlier start of this very node.
                Err(error @ JoinError::Refused { .. }) if clock::now() < taken_until => {
                    knocking.not_yet(error.to_string());
                }
                Err(error) => return Err(Error::Refused(error.to_string())),
            }
        }
        if clock::now() >= deadline {
            let why = knocking.answer();
            return Err(Error::Refused(format!("cannot join the job: {why}")));
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Whom to ask: the listed nodes, and who began the newest era of the folder, for
/// the listed ones may be of an era that is over.
fn names(options: &Options, folder: &dcp::Folder) -> Vec<String> {
    let mut names = options.join.clone();
    let begun = folder.records().ok().and_then(|records| ledger::begun(&records));
    names.extend(begun.map(|begun| begun.address).filter(|address| !address.is_empty()));
    names
}

/// Between two rounds of asking to join.
const RETRY: Duration = Duration::from_millis(200);

/// Answers joiners: any member can, the founding snapshot is the same everywhere.
async fn welcome(mut questions: mpsc::Receiver<JoinAsk>, group: Group<JobState>) {
    while let Some(ask) = questions.recv().await {
        let snapshot = group.state().borrow().clone();
        let job = &snapshot.state;
        let request = &ask.request;
        let taken = job
            .nodes
            .get(&request.node)
            .filter(|node| node.is_live() && node.store != request.store);
        let answer = match taken {
            Some(node) => Err(format!(
                "node id {} is in use by the node at {}: choose another with --node-id",
                request.node, node.address
            )),
            None => {
                let founding = codec::encode(group.founding());
                let peers = job.live_nodes().map(|(_, n)| (n.store, n.address)).collect();
                Ok(codec::encode(&Welcome { founding, peers }))
            }
        };
        let _ = ask.reply.send(answer);
    }
}

/// Carries Raft's messages to the links.
async fn carry(mut outbox: mpsc::Receiver<Outbound>, control: Control, group: Group<JobState>) {
    while let Some(message) = outbox.recv().await {
        let peer = control.peers().into_iter().find(|peer| peer.store.raft_id() == message.to);
        let lane = if message.snapshot { Lane::Bulk } else { Lane::Raft };
        let sent = peer.is_some_and(|peer| control.send(peer.store, lane, message.bytes).is_ok());
        if message.snapshot {
            group.snapshot_sent(message.to, sent);
        } else if !sent {
            group.peer_unreachable(message.to);
        }
    }
}

/// One job, one configuration.
fn check_configuration(options: &Options, state: &JobState) -> Result<(), Error> {
    if state.spec.config_digest == options.proposal.config_digest {
        return Ok(());
    }
    Err(Error::Refused(format!(
        "the job of this folder or address has another configuration: {}; use the same one, another \
         job.dump_folder, or --fresh",
        (options.difference)(&options.proposal.config, &state.spec.config)
    )))
}

fn control(error: impl std::fmt::Display) -> Error {
    Error::Control(error.to_string())
}

fn file<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> Error + 'a {
    move |error| Error::File { what, path: path.display().to_string(), error }
}
