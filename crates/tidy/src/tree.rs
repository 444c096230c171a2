//! Reads the text files of the repository.

use std::fs;
use std::path::{Path, PathBuf};

use crate::Source;

/// Folders of others' files, of build results and of recorded data.
const SKIPPED: [&str; 6] = ["target", ".git", "corpus", "seeds", "artifacts", "proptest-regressions"];

/// Endings of the names of files that the rules read, besides the files of `Makefile` and `scripts/`.
const ENDINGS: [&str; 5] = ["rs", "md", "toml", "sh", "py"];

/// The root of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns all text files of the repository, sorted by path.
pub fn read() -> Vec<Source> {
    let root = root();
    let mut sources = Vec::new();
    read_folder(&root, "", &mut sources);
    sources.sort_by(|a, b| a.path.cmp(&b.path));
    sources
}

/// Returns the files whose path begins with `prefix`.
pub fn under<'a>(sources: &'a [Source], prefix: &'a str) -> impl Iterator<Item = &'a Source> {
    sources.iter().filter(move |source| source.path.starts_with(prefix))
}

fn read_folder(folder: &Path, prefix: &str, sources: &mut Vec<Source>) {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = format!("{prefix}{name}");
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() {
            if !SKIPPED.contains(&name.as_str()) {
                read_folder(&entry.path(), &format!("{path}/"), sources);
            }
        } else if kind.is_file()
            && is_read(&path, &name)
            && let Ok(text) = fs::read_to_string(entry.path())
        {
            sources.push(Source { path, text });
        }
    }
}

/// A script has no ending or `.sh`, `.py`; licences are the texts of others.
fn is_read(path: &str, name: &str) -> bool {
    match name.rsplit_once('.') {
        Some((_, ending)) => ENDINGS.contains(&ending),
        None => name == "Makefile" || ["scripts/", "lab/", ".ci/"].iter().any(|folder| path.starts_with(folder)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_scripts_and_documents_are_read_and_licences_are_not() {
        let sources = read();
        let has = |path: &str| sources.iter().any(|source| source.path == path);
        for path in ["Makefile", "README.md", "scripts/test", ".ci/run", "crates/tidy/src/tree.rs", "Cargo.toml"] {
            assert!(has(path), "{path}");
        }
        assert!(!has("LICENSE-MIT") && !has("Cargo.lock"));
        assert!(under(&sources, "crates/forkdisk/src/").count() > 50);
    }
}
