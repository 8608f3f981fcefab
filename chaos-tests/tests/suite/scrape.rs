//! `metrics.prometheus_listen`: what a scraper reads is what the job does (OBS-1).

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    time::Duration,
};

use chaos_tests::harness::{Run, Setup, send};
use nix::sys::signal::Signal::SIGKILL;

use crate::{LIMIT, fake, quiet};

/// Status line and body of an answer.
fn get(address: SocketAddr, path: &str) -> Option<(String, String)> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(2)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: test\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    Some((head.lines().next()?.to_owned(), body.to_owned()))
}

/// Every sample, name and labels as written.
fn samples(body: &str) -> BTreeMap<String, f64> {
    let lines = body.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| line.rsplit_once(' '))
        .map(|(name, value)| {
            (name.to_owned(), value.parse().unwrap_or_else(|_| panic!("{name} {value}")))
        })
        .collect()
}

#[test]
fn obs_1_a_scrape_is_what_the_job_does() {
    let expected = quiet();
    let address = TcpListener::bind("127.0.0.1:0").and_then(|door| door.local_addr());
    let address = address.expect("a port that was free");
    let arguments = vec![format!("--metrics.prometheus_listen={address}")];
    let mut run = Run::start(Setup { arguments, ..fake("scrape", 3, 10) });
    run.wait("checkpoint", LIMIT, |run| run.history().checkpoints().last().copied());
    assert!(send(run.worker("n2"), SIGKILL), "a worker runs");
    run.wait("plan after the loss", LIMIT, |run| {
        run.history().of("planned").any(|line| line["failure"] == true).then_some(())
    });
    run.settle();
    let before = run.step();
    run.wait_step(before + 3, LIMIT);
    let (status, body) = get(address, "/metrics").expect("an answer");
    let after = run.step();
    eprintln!("{status}\n{body}");
    assert_eq!(status, "HTTP/1.1 200 OK");
    assert!(body.ends_with("# EOF\n"), "the whole of it");
    let samples = samples(&body);
    let value = |name: &str| *samples.get(name).unwrap_or_else(|| panic!("no {name}"));
    let step = value("elastic_step");
    assert!(before as f64 <= step && step <= after as f64, "{before} <= {step} <= {after}");
    let loss = run.history().steps.iter().find(|line| line.step as f64 == step).map(|l| l.loss);
    assert_eq!(loss.map(|loss| loss as f32), Some(value("elastic_loss") as f32));
    assert!(value("elastic_tokens_per_second") > 0.0);
    let generations = run.history().of("planned").count() as f64;
    assert_eq!(value("elastic_generation"), generations);
    assert_eq!(value("elastic_ranks"), 3.0);
    assert_eq!(value("elastic_nodes{state=\"active\"}"), 3.0);
    assert_eq!(value("elastic_incidents_total{kind=\"failure\"}"), 1.0);
    let saved = run.history().checkpoints();
    assert!(saved.iter().any(|saved| *saved as f64 == value("elastic_checkpoint_step")));
    let seconds: f64 = samples
        .iter()
        .filter(|(name, _)| name.starts_with("elastic_wall_seconds"))
        .map(|(_, s)| s)
        .sum();
    // All of the time since the founding is accounted for, up to the scrape.
    assert!(seconds > 0.5 * run.age() && seconds < run.age(), "{seconds} of {}", run.age());
    assert!(get(address, "/").expect("an answer").0.contains("404"));
    assert_eq!(&run.finish(LIMIT), expected);
}
