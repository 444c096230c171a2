//! Manifests of the crates: what a registry shows of a published crate, and why the others are not published.

use crate::{Source, Violation};

/// Keys that the manifest of a published crate has, besides those that Cargo demands.
const KEYS: [&str; 9] = [
    "description",
    "version.workspace",
    "rust-version.workspace",
    "license.workspace",
    "repository.workspace",
    "readme",
    "keywords",
    "categories",
    "include",
];

/// Files that the package of a published crate has.
const FILES: [&str; 2] = ["/README.md", "/LICENSE-*"];

/// Returns whether the crate is published.
pub fn is_published(manifest: &Source) -> bool {
    !package(manifest).any(|(_, line)| line == "publish = false")
}

/// Keys and files that a published crate lacks; a crate that is not published without a comment that says why.
pub fn check(manifest: &Source) -> Vec<Violation> {
    if !is_published(manifest) {
        return reason(manifest).into_iter().collect();
    }
    let has = |key: &str| package(manifest).any(|(_, line)| line.split(" = ").next() == Some(key));
    let mut violations = Vec::new();
    for key in KEYS.iter().filter(|key| !has(key)) {
        violations.push(Violation::new(manifest, 0, format!("a published crate has `{key}`, or `publish = false`")));
    }
    let include = package(manifest).find(|(_, line)| line.starts_with("include = "));
    for file in FILES.iter().filter(|file| include.is_some_and(|(_, line)| !line.contains(*file))) {
        let line = include.map_or(0, |(number, _)| number);
        violations.push(Violation::new(manifest, line, format!("the package has no `{file}`: add it to `include`")));
    }
    violations
}

fn reason(manifest: &Source) -> Option<Violation> {
    let mut before = "";
    for (number, line) in package(manifest) {
        if line == "publish = false" && !before.starts_with("# ") {
            return Some(Violation::new(manifest, number, "say in a comment above why it is not published"));
        }
        before = line;
    }
    None
}

/// The lines of the section `[package]`, with their numbers from 1.
fn package(manifest: &Source) -> impl Iterator<Item = (usize, &str)> {
    let lines = manifest.text.lines().enumerate().map(|(index, line)| (index + 1, line));
    lines.skip_while(|(_, line)| *line != "[package]").skip(1).take_while(|(_, line)| !line.starts_with('['))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<usize> {
        check(&Source::new("Cargo.toml", text)).iter().map(|violation| violation.line).collect()
    }

    #[test]
    fn a_published_crate_without_a_key_or_a_file_is_found() {
        let keys: String = KEYS.iter().map(|key| format!("{key} = [\"/README.md\", \"/LICENSE-*\"]\n")).collect();
        assert_eq!(found(&format!("[package]\n{keys}")), [0; 0]);
        assert_eq!(found(&format!("[package]\n{}", keys.replacen("keywords", "words", 1))), [0]);
        assert_eq!(found(&format!("[package]\n{}", keys.replace("/LICENSE-*", "src"))), [10]);
        assert_eq!(found(&format!("[package]\n[lints]\n{keys}")).len(), KEYS.len());
    }

    #[test]
    fn a_crate_that_is_not_published_without_a_reason_is_found() {
        assert_eq!(found("[package]\n# It reads this repository.\npublish = false\n"), [0; 0]);
        assert_eq!(found("[package]\nedition = \"2024\"\npublish = false\n"), [3]);
    }
}
