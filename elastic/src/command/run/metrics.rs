//! `metrics.prometheus_listen`: this node's view of the job for Prometheus, in the
//! OpenMetrics text format at `/metrics`. Nothing is kept for it: every scrape asks
//! the agent how things are, as `elastic status` does.

use std::{convert::Infallible, path::PathBuf, sync::Arc, sync::atomic::AtomicU64, time::Duration};

use actors::{
    agent::{Request as Ask, Response as Answer, Status},
    clock,
};
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header::CONTENT_TYPE,
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use job::state::Standing;
use prometheus_client::{
    encoding::text::encode,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};
use tokio::{net::TcpListener, sync::Semaphore, time::timeout};

/// Scrapes at a time; further ones are hung up on.
const CONNECTIONS: usize = 8;
/// Longest time for one.
const PATIENCE: Duration = Duration::from_secs(5);
const FORMAT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Answers scrapes about the agent of the node whose folder this is, until dropped.
pub(super) async fn serve(listener: TcpListener, folder: PathBuf) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, say: others need a moment to give some back.
                tracing::warn!(%error, "a scrape cannot be accepted");
                tokio::time::sleep(Duration::from_secs(1)).await;
                continue;
            }
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
        let folder = folder.clone();
        tokio::spawn(async move {
            let service = service_fn(|request| respond(&folder, request));
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(PATIENCE)
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            let _ = timeout(PATIENCE, connection).await;
            drop(place);
        });
    }
}

async fn respond(
    folder: &std::path::Path,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (status, text) = match (request.method(), request.uri().path()) {
        (&Method::GET, "/metrics") => match actors::agent::request(folder, &Ask::Status).await {
            Ok(Answer::Status(status)) => (StatusCode::OK, text(&status)),
            _ => (StatusCode::SERVICE_UNAVAILABLE, "the agent does not answer\n".into()),
        },
        (&Method::GET, _) => (StatusCode::NOT_FOUND, "it is /metrics\n".into()),
        _ => (StatusCode::METHOD_NOT_ALLOWED, "only GET\n".into()),
    };
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    if status == StatusCode::OK {
        let format = hyper::header::HeaderValue::from_static(FORMAT);
        response.headers_mut().insert(CONTENT_TYPE, format);
    }
    Ok(response)
}

type Real = Gauge<f64, AtomicU64>;
type Labels = Vec<(&'static str, String)>;

/// The whole answer.
fn text(status: &Status) -> String {
    let mut registry = Registry::with_prefix("elastic");
    job(&mut registry, status);
    let mut text = String::new();
    // A string takes everything.
    let _ = encode(&mut text, &registry);
    text
}

fn job(registry: &mut Registry, status: &Status) {
    let job = &status.job;
    let names = vec![("job", job.spec.job.to_string()), ("node", status.node.to_string())];
    let info = Family::<Labels, Gauge>::default();
    info.get_or_create(&names).set(1);
    registry.register("job", "The job, and the node that answers", info);

    let first = status.workers.iter().filter(|worker| worker.step.is_some()).max_by_key(|w| w.step);
    let step = first.and_then(|worker| worker.step).unwrap_or_default().max(job.committed.0);
    let mut count = |name, help, value: u64| {
        let gauge = Gauge::<i64>::default();
        gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        registry.register(name, help, gauge);
    };
    count("step", "Steps applied", step);
    count("steps_planned", "Steps after which the job is finished", job.spec.total_steps.0);
    count("era", "The era", job.era.0.into());
    count("generation", "The newest generation", job.generation().0);
    let ranks = job.plan.as_ref().map_or(0, |plan| plan.members.len());
    count("ranks", "Ranks of the newest generation", ranks as u64);
    if let Some(saved) = job.checkpoints.keys().next_back() {
        count("checkpoint_step", "Step of the newest committed checkpoint", saved.0);
    }
    let mut measure = |name, help, value: Option<f64>| {
        if let Some(value) = value {
            let gauge = Real::default();
            gauge.set(value);
            registry.register(name, help, gauge);
        }
    };
    measure("loss", "Loss of this node's newest step", first.and_then(|w| w.loss).map(f64::from));
    measure(
        "tokens_per_second",
        "Tokens of the newest step of all ranks over its wall time",
        first.and_then(|worker| worker.tokens_per_s),
    );

    let nodes = Family::<Labels, Gauge>::default();
    for state in ["active", "leaving", "gone"] {
        let of = |node: &&job::state::Node| standing(&node.standing) == state;
        let count = job.nodes.values().filter(of).count();
        nodes.get_or_create(&label("state", state)).set(i64::try_from(count).unwrap_or(i64::MAX));
    }
    registry.register("nodes", "Nodes by where they stand", nodes);

    let incidents = Family::<Labels, Counter>::default();
    for (kind, failure) in [("failure", true), ("change", false)] {
        let count = job.incidents().iter().filter(|incident| incident.failure == failure).count();
        incidents.get_or_create(&label("kind", kind)).inc_by(count as u64);
    }
    registry.register("incidents", "Interruptions of training that are remembered", incidents);

    // No counters: steps that are computed again leave one kind for another.
    let seconds = Family::<Labels, Real>::default();
    for (kind, micros) in job.incidents.accounting_at(clock::timestamp()).kinds() {
        seconds.get_or_create(&label("kind", kind)).set(micros as f64 / 1e6);
    }
    registry.register("wall_seconds", "Wall time of the job by kind (OBS-1)", seconds);
}

fn label(key: &'static str, value: &str) -> Labels {
    vec![(key, value.to_owned())]
}

fn standing(standing: &Standing) -> &'static str {
    match standing {
        Standing::Active => "active",
        Standing::Leaving => "leaving",
        Standing::Gone(_) => "gone",
    }
}
