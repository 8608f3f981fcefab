//! The programs under test and a dataset for them.

use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

/// The folder of the release programs.
#[must_use]
pub fn release() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target"), PathBuf::from);
    target.join("release")
}

/// The `elastic` program.
///
/// # Panics
/// When it is not built.
#[must_use]
pub fn elastic() -> PathBuf {
    let program = release().join("elastic");
    assert!(
        program.exists() && release().join("elastic-worker").exists(),
        "{} or elastic-worker beside it is missing: run cargo build --release first",
        program.display()
    );
    program
}

/// A small dataset, prepared once per process: 300 KiB of text that repeats
/// nowhere and is the same on every machine.
///
/// # Panics
/// When `elastic data prepare` fails.
#[must_use]
pub fn dataset() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = std::env::temp_dir().join(format!("elastic-chaos-{}", std::process::id()));
        let (text, data) = (folder.join("text.txt"), folder.join("data"));
        fs::create_dir_all(&folder).expect("a folder for the dataset");
        fs::write(&text, sentences()).expect("the text is written");
        let output = Command::new(elastic())
            .args(["data", "prepare"])
            .arg(&text)
            .arg("--out")
            .arg(&data)
            .output()
            .expect("elastic data prepare starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        data
    })
}

fn sentences() -> String {
    const WHO: [&str; 6] = ["the leader", "a rank", "one node", "the group", "a worker", "nobody"];
    const DOES: [&str; 6] = ["votes for", "kills", "restores", "waits for", "counts", "forgets"];
    let mut text = String::new();
    for line in 0_u64.. {
        let mixed = line.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(17);
        let (who, does) = (WHO[(mixed % 6) as usize], DOES[(mixed / 6 % 6) as usize]);
        let _ = writeln!(text, "At step {line} {who} {does} {:x}.", mixed >> 24);
        if text.len() > 300 << 10 {
            break;
        }
    }
    text
}
