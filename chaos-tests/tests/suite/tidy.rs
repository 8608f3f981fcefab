//! The shape of the workspace: who may know whom, what links to libtorch, and
//! which words have no place.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use chaos_tests::harness::release;
use serde_json::Value;

/// Crate and what it may use of the workspace.
const ARROWS: [(&str, &[&str]); 8] = [
    ("job", &[]),
    ("dcp", &[]),
    ("transport", &["job"]),
    ("engine", &["job", "transport", "dcp"]),
    ("actors", &["job", "transport", "dcp"]),
    ("elastic", &["job", "transport", "dcp", "actors"]),
    ("worker", &["elastic", "actors", "engine", "transport", "job", "dcp"]),
    ("examples", &["elastic", "worker", "engine", "transport", "dcp", "job"]),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().expect("the workspace")
}

#[test]
fn arrows_between_crates() {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root())
        .output()
        .expect("cargo starts");
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo metadata is JSON");
    let allowed: BTreeMap<&str, BTreeSet<&str>> =
        ARROWS.iter().map(|(name, uses)| (*name, uses.iter().copied().collect())).collect();
    let packages = metadata["packages"].as_array().expect("packages");
    let names: BTreeSet<&str> = packages.iter().filter_map(|p| p["name"].as_str()).collect();
    let mut arrows = 0;
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        // It may use everything.
        let Some(allowed) = allowed.get(name) else {
            assert_eq!(name, "chaos-tests", "a crate without a place in the table");
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let used = dependency["name"].as_str().unwrap_or_default();
            arrows += usize::from(names.contains(used));
            let fits = !names.contains(used) || allowed.contains(used) || used == name;
            assert!(fits, "{name} may not use {used}");
            let torch = ["tch", "torch-sys"].contains(&used);
            assert!(!torch || ["engine", "worker"].contains(&name), "{name} may not use {used}");
        }
    }
    eprintln!("tidy: {} crates, {arrows} arrows", packages.len());
}

/// Libraries that the dynamic linker loads for a program.
fn needed(program: &str) -> Vec<String> {
    let output = Command::new("readelf")
        .arg("-d")
        .arg(release().join(program))
        .output()
        .expect("readelf (binutils) starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let names = text.lines().filter(|line| line.contains("(NEEDED)"));
    names
        .filter_map(|line| Some(line.split_once('[')?.1.trim_end_matches(']').to_owned()))
        .collect()
}

#[test]
fn only_the_worker_needs_libtorch() {
    let torch = |name: &String| name.contains("torch") || name.contains("c10");
    let (elastic, worker) = (needed("elastic"), needed("elastic-worker"));
    eprintln!("tidy: elastic needs {elastic:?}, elastic-worker {worker:?}");
    assert!(!elastic.is_empty() && !elastic.iter().any(torch), "{elastic:?}");
    assert!(worker.iter().any(torch), "{worker:?}");
}

/// Halves of words that would mean nothing to a reader of this repository, or
/// that promise work instead of doing it.
const WORDS: [(&str, &str); 7] = [
    ("/wo", "rk/"),
    ("/ro", "ot/"),
    ("FIX", "ME"),
    ("TO", "DO:"),
    ("todo", "!("),
    ("unimplemented", "!("),
    ("#[ign", "ore"),
];

#[test]
fn no_words_from_elsewhere() {
    let mut files = Vec::new();
    collect(&root(), &mut files);
    let mut found = Vec::new();
    for path in &files {
        let Ok(text) = fs::read_to_string(path) else { continue };
        for (number, line) in text.lines().enumerate() {
            let hits = WORDS.iter().map(|(a, b)| format!("{a}{b}")).filter(|w| line.contains(w));
            found.extend(hits.map(|word| format!("{}:{}: {word}", path.display(), number + 1)));
        }
    }
    eprintln!("tidy: {} files", files.len());
    assert!(found.is_empty(), "{}", found.join("\n"));
}

const TEXTS: [&str; 6] = ["rs", "toml", "md", "py", "sh", "yml"];

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    let built = ["target", "outputs"];
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if name.starts_with('.') || built.contains(&name.as_str()) || path.is_symlink() {
            continue;
        }
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|end| TEXTS.iter().any(|text| end == *text)) {
            files.push(path);
        }
    }
}
