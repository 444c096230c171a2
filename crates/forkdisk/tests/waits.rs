//! `docs/waits.md` lists every function of the engine that waits, and what it holds across the wait.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
const LIST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/waits.md");

/// A file below `src` and a function in it.
type Function = (String, String);

/// Returns the name of the function that a line begins.
fn function(line: &str) -> Option<&str> {
    let rest = ["pub(crate) ", "pub(super) ", "pub "].iter().find_map(|v| line.strip_prefix(v)).unwrap_or(line);
    let name = rest.strip_prefix("async ").unwrap_or(rest).strip_prefix("fn ")?;
    name.split(|c: char| !c.is_alphanumeric() && c != '_').next()
}

fn sources(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        match entry.is_dir() {
            true => sources(&entry, out),
            false => out.push(entry),
        }
    }
}

/// Returns the functions that wait, outside of tests and of the wrong code of planted bugs.
fn waiting() -> BTreeSet<Function> {
    let (mut files, mut out) = (Vec::new(), BTreeSet::new());
    sources(Path::new(SOURCE), &mut files);
    for file in files {
        let name = file.strip_prefix(SOURCE).unwrap().display().to_string();
        if name.contains("test") {
            continue;
        }
        let text = fs::read_to_string(&file).unwrap();
        let (mut within, mut is_planted, mut before) = (None, false, "");
        for line in text.lines().take_while(|line| *line != "#[cfg(test)]").map(str::trim_start) {
            if let Some(name) = function(line) {
                (within, is_planted) = (Some(name), before == "#[cfg(feature = \"planted\")]");
            }
            before = line;
            if line.contains(".await") && !line.starts_with("//") && !is_planted {
                out.insert((name.clone(), within.expect("a wait is in a function").to_string()));
            }
        }
    }
    out
}

/// Returns the functions of the list.
fn listed() -> BTreeSet<Function> {
    let text = fs::read_to_string(LIST).unwrap();
    let rows = text.lines().filter(|line| line.starts_with("| `")).map(|line| line.split('|').collect::<Vec<_>>());
    let reasons = ["none", "anew", "held", "own", "hint"];
    let mut out = BTreeSet::new();
    for row in rows {
        let [_, file, functions, reason, what, _] = row[..] else { panic!("{row:?}") };
        let reason = reason.trim();
        assert!(reasons.contains(&reason) && (reason == "none" || !what.trim().is_empty()), "{row:?}");
        let file = file.trim().trim_matches('`');
        for function in functions.trim().trim_matches('`').split(' ') {
            assert!(out.insert((file.to_string(), function.to_string())), "{file}: {function} is listed twice");
        }
    }
    out
}

#[test]
fn every_function_that_waits_is_listed() {
    let (waiting, listed) = (waiting(), listed());
    assert!(waiting.len() > 150, "{}", waiting.len());
    let missing: Vec<_> = waiting.difference(&listed).collect();
    assert!(missing.is_empty(), "docs/waits.md does not say what these hold across a wait: {missing:?}");
    let needless: Vec<_> = listed.difference(&waiting).collect();
    assert!(needless.is_empty(), "docs/waits.md lists what does not wait: {needless:?}");
}
