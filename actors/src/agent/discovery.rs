//! Asking a script where the nodes are, as Horovod's `--host-discovery-script`
//! does: it prints a host a line, as `HOST`, `HOST:SLOTS` or `HOST:PORT`. Blocking.

use std::{
    io::{self, Read},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::clock;

/// How long the script may take.
const LIMIT: Duration = Duration::from_secs(10);
/// Between two looks at whether it has ended.
const POLL: Duration = Duration::from_millis(10);
/// Bytes of its answer.
const MOST: u64 = 1 << 20;
/// Below, a number behind a host counts slots; from here on it is a port.
const FIRST_PORT: u16 = 1024;

/// Between two askings, while nobody is reached.
pub(super) const PAUSE: Duration = Duration::from_secs(5);

/// A script that knows where nodes are.
#[derive(Clone, Debug)]
pub struct Script {
    /// The program.
    pub path: PathBuf,
    /// Where nodes listen of which it names no port.
    pub port: u16,
}

impl Script {
    /// The nodes that the script names, HOST:PORT each, in its order.
    ///
    /// # Errors
    /// One line, when the script cannot be run, fails, takes too long or prints
    /// something else.
    pub fn ask(&self) -> Result<Vec<String>, String> {
        let said = run(&self.path).map_err(|why| self.failed(&why))?;
        said.lines()
            .map(str::trim)
            .filter(|line| !line.is_empty())
            .map(|line| {
                host(line, self.port).ok_or_else(|| {
                    self.failed(&format!(
                        "printed {line:?}: a line is HOST, HOST:SLOTS or HOST:PORT"
                    ))
                })
            })
            .collect()
    }

    fn failed(&self, why: &str) -> String {
        format!("--host-discovery-script {}: {why}", self.path.display())
    }
}

fn host(line: &str, port: u16) -> Option<String> {
    let (host, number) = match line.rsplit_once(':') {
        Some((host, number)) => (host, number.parse().ok()?),
        None => (line, 0),
    };
    let named = !host.is_empty() && !host.contains(char::is_whitespace);
    let port = if number < FIRST_PORT { port } else { number };
    named.then(|| format!("{host}:{port}"))
}

fn run(path: &Path) -> Result<String, String> {
    let mut child = Command::new(path)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(|error| format!("cannot be run: {error}"))?;
    let stdout = child.stdout.take();
    let reader = thread::spawn(move || -> io::Result<String> {
        let mut said = String::new();
        if let Some(stdout) = stdout {
            stdout.take(MOST).read_to_string(&mut said)?;
        }
        Ok(said)
    });
    let until = clock::now() + LIMIT;
    let cannot = |error: io::Error| format!("cannot be waited for: {error}");
    let mut ended = None;
    // Whoever inherited its output holds that open.
    while (ended.is_none() || !reader.is_finished()) && clock::now() < until {
        thread::sleep(POLL);
        ended = child.try_wait().map_err(cannot)?;
    }
    let late = ended.is_none() || !reader.is_finished();
    if late && let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    let status = child.wait().map_err(cannot)?;
    if late {
        return Err(format!("no answer within {} s", LIMIT.as_secs()));
    }
    if !status.success() {
        return Err(format!("failed with {status}"));
    }
    match reader.join() {
        Ok(said) => said.map_err(|error| format!("its answer cannot be read: {error}")),
        Err(_) => Err("its answer cannot be read".into()),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    #[track_caller]
    fn check(line: &str, expected: Option<&str>) {
        assert_eq!(host(line, 29400).as_deref(), expected, "{line:?}");
    }

    #[test]
    fn a_line_names_a_host() {
        check("a", Some("a:29400"));
        check("a:8", Some("a:29400"));
        check("a:1023", Some("a:29400"));
        check("a:1024", Some("a:1024"));
        check("10.0.0.1:29500", Some("10.0.0.1:29500"));
        check(":29500", None);
        check("a b", None);
        check("a:b", None);
        check("a:70000", None);
    }

    /// What a script of this text makes of the answer.
    #[track_caller]
    fn answer(name: &str, text: &str) -> Result<Vec<String>, String> {
        let path = std::env::temp_dir().join(format!("elastic-{name}-{}", std::process::id()));
        fs::write(&path, text).expect("a script");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("its mode");
        let said = Script { path: path.clone(), port: 29400 }.ask();
        let _ = fs::remove_file(path);
        said
    }

    #[test]
    fn a_script_answers_or_says_why_not() {
        let said = answer("hosts", "#!/bin/sh\nprintf 'a\\n\\nb:4\\nc:29500'\n");
        assert_eq!(said, Ok(vec!["a:29400".into(), "b:29400".into(), "c:29500".into()]));
        let said = answer("fails", "#!/bin/sh\nexit 3\n").expect_err("it fails");
        assert!(said.ends_with("failed with exit status: 3"), "{said}");
        let said = answer("garbage", "#!/bin/sh\necho 'no hosts'\n").expect_err("no host");
        assert!(said.contains("\"no hosts\"") && said.contains("HOST:PORT"), "{said}");
        let missing = Script { path: "/nowhere/hosts".into(), port: 1 }.ask().expect_err("none");
        assert!(missing.starts_with("--host-discovery-script /nowhere/hosts: cannot be run"));
    }
}
