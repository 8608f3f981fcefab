//! PyTorch, in processes of its own that live through all rounds.

use std::io::{BufRead, BufReader, Lines, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::{Value, json};

use super::ours::{COLUMNS, State, TENSORS};

/// What they run.
const SCRIPT: &str = include_str!("pytorch.py");

/// The processes of a mesh of some size.
pub(super) struct Python {
    ranks: Vec<Rank>,
}

struct Rank {
    child: Child,
    /// Gone when it is to end.
    commands: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
    log: PathBuf,
}

impl Python {
    /// Starts them, each with its part of a state of the same shape.
    pub(super) fn start(
        python: &Path,
        folder: &Path,
        world: u32,
        state: &State,
    ) -> Result<Self, String> {
        // A file torch.py would be what it imports as torch.
        let script = folder.join("pytorch.py");
        std::fs::write(&script, SCRIPT)
            .map_err(|error| format!("cannot write {}: {error}", script.display()))?;
        let store = folder.join(format!("store-{}", uuid::Uuid::new_v4().simple()));
        let mut ranks = Vec::new();
        for rank in 0..world {
            let log = folder.join(format!("python-{rank}.log"));
            let stderr = std::fs::File::create(&log)
                .map_err(|error| format!("cannot write {}: {error}", log.display()))?;
            let sizes = [TENSORS as u64, state.rows(), COLUMNS].map(|size| size.to_string());
            let mut child = Command::new(python)
                .arg(&script)
                .args([rank.to_string(), world.to_string()])
                .arg(&store)
                .args(sizes)
                // A libtorch for this process is not PyTorch's own.
                .env_remove("LD_LIBRARY_PATH")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(stderr)
                .spawn()
                .map_err(|error| format!("cannot run {}: {error}", python.display()))?;
            let commands = child.stdin.take();
            let answers = child.stdout.take().ok_or("a child without a standard output")?;
            ranks.push(Rank { child, commands, answers: BufReader::new(answers).lines(), log });
        }
        let mut group = Self { ranks };
        group.ranks.iter_mut().try_for_each(|rank| rank.answer().map(|_| ()))?;
        Ok(group)
    }

    /// Seconds of `dcp.save`.
    pub(super) fn save(&mut self, path: &Path, threads: u32) -> Result<f64, String> {
        self.run(&json!({"do": "save", "path": path, "threads": threads}))
    }

    /// Seconds of `dcp.load`.
    pub(super) fn load(&mut self, path: &Path) -> Result<f64, String> {
        self.run(&json!({"do": "load", "path": path}))
    }

    /// Seconds that `dcp.async_save` blocks.
    pub(super) fn save_async(&mut self, path: &Path) -> Result<f64, String> {
        self.run(&json!({"do": "async", "path": path}))
    }

    /// Gives all of them a command; the time of the slowest.
    fn run(&mut self, command: &Value) -> Result<f64, String> {
        for rank in &mut self.ranks {
            let told = rank.commands.as_mut().map(|commands| writeln!(commands, "{command}"));
            told.transpose().map_err(|error| rank.ended(&error.to_string()))?;
        }
        let mut slowest = 0f64;
        for rank in &mut self.ranks {
            let answer = rank.answer()?;
            let seconds = answer.get("seconds").and_then(Value::as_f64);
            slowest = slowest.max(seconds.ok_or_else(|| rank.ended(&answer.to_string()))?);
        }
        Ok(slowest)
    }
}

impl Rank {
    fn answer(&mut self) -> Result<Value, String> {
        let line = self.answers.next().ok_or_else(|| self.ended("it ended"))?;
        let line = line.map_err(|error| self.ended(&error.to_string()))?;
        serde_json::from_str(&line).map_err(|_| self.ended(&line))
    }

    /// What its last line on standard error was explains it best.
    fn ended(&self, what: &str) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let last = log.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
        format!("Python with torch failed ({what}): {last}")
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        self.commands = None;
        // It ends by itself; one that hangs in a collective does not.
        for _ in 0..50 {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
