//! What the nodes of a group say on standard error, for one person: what several of
//! them say alike at about the same time, such as why they are refused, is said once.

use std::{
    collections::VecDeque,
    io::{self, BufRead, BufReader},
    process::ChildStderr,
    sync::{Arc, Mutex, PoisonError},
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// All of them.
#[derive(Clone, Debug, Default)]
pub(super) struct Voices(Arc<Mutex<VecDeque<(Instant, String)>>>);

/// Nodes on a busy machine meet the same fate this far apart.
const ALIKE: Duration = Duration::from_secs(10);
/// Lines that are remembered at most.
const REMEMBERED: usize = 64;

impl Voices {
    /// Passes a node's lines on until it ends.
    pub(super) fn listen(&self, node: ChildStderr) -> io::Result<JoinHandle<()>> {
        let voices = self.clone();
        std::thread::Builder::new().name("voice".into()).spawn(move || {
            for line in BufReader::new(node).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line);
                if voices.is_news(&line, Instant::now()) {
                    eprintln!("{line}");
                }
            }
        })
    }

    fn is_news(&self, line: &str, now: Instant) -> bool {
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        said.retain(|(at, _)| now.saturating_duration_since(*at) < ALIKE);
        if said.iter().any(|(_, known)| known == line) {
            return false;
        }
        said.push_back((now, line.to_owned()));
        if said.len() > REMEMBERED {
            said.pop_front();
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_all_say_is_said_once_and_again_when_it_comes_again() {
        let voices = Voices::default();
        let start = Instant::now();
        let news = |line: &str, seconds| voices.is_news(line, start + Duration::from_secs(seconds));
        assert!(news("no", 0) && news("yes", 1));
        assert!(!news("no", 2) && !news("no", 9));
        assert!(news("no", 10), "it is said again after a while");
        (0..REMEMBERED).for_each(|number| assert!(news(&number.to_string(), 11)));
        assert!(news("yes", 11), "memory is bounded");
    }
}
