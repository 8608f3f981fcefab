//! A system clock that one node's processes see jump, and nobody else.

use std::{
    fs, io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

/// Environment variable with the file of the jump.
const JUMP: &str = "ELASTIC_JUMP";

/// The clock of the processes that were started with [`Clock::environment`].
#[derive(Debug)]
pub struct Clock {
    file: fs::File,
    path: PathBuf,
    library: PathBuf,
}

impl Clock {
    /// A clock that is right so far, with its files in `folder`.
    ///
    /// # Errors
    /// Files, or the compiler's message.
    pub fn new(folder: &Path) -> io::Result<Self> {
        let (path, library) = (folder.join("jump"), folder.join("jump.so"));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/clock/jump.c");
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
        let built = Command::new(compiler)
            .args(["-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o"])
            .args([&library, &source])
            .arg("-ldl")
            .output()?;
        if !built.status.success() {
            return Err(io::Error::other(String::from_utf8_lossy(&built.stderr).into_owned()));
        }
        let file = fs::File::create(&path)?;
        let clock = Self { file, path, library };
        clock.set(0)?;
        Ok(clock)
    }

    /// What a process is started with to see this clock.
    #[must_use]
    pub fn environment(&self) -> [(&'static str, String); 2] {
        let text = |path: &Path| path.display().to_string();
        [("LD_PRELOAD", text(&self.library)), (JUMP, text(&self.path))]
    }

    /// Jumps ahead of the right time.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn ahead(&self, by: Duration) -> io::Result<()> {
        self.set(by.as_secs().cast_signed())
    }

    /// Jumps behind the right time.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn behind(&self, by: Duration) -> io::Result<()> {
        self.set(-by.as_secs().cast_signed())
    }

    fn set(&self, seconds: i64) -> io::Result<()> {
        self.file.write_all_at(&seconds.to_ne_bytes(), 0)
    }
}
