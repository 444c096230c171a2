//! Modules and crates name only what is below them or in their own layer.
//!
//! A table lists layers, lowest first, each with the modules in it (`pool`, `pool::gather`; the longest
//! prefix counts). To refine the layers, edit the table.

use std::collections::{BTreeMap, BTreeSet};

use crate::paths::{self, Path};
use crate::{Source, Violation};

/// The layers of the engine, lowest first.
pub const ENGINE: &[&[&str]] = &[
    &["error", "planted", "replace", "runtime", "types"],
    &["bits", "sync"],
    &["device", "format", "testing"],
    &["copier", "counters", "journal", "names", "space"],
    &["map"],
    &["ordered"],
    &["live"],
    &["catalog"],
    &["store"],
    &["origin"],
    &["volume"],
    &["upkeep"],
    &["options", "pool"],
];

/// The crates and those of the workspace that each may depend on.
pub const CRATES: &[(&str, &[&str])] = &[
    ("forkdisk", &[]),
    ("forkdisk-sim", &["forkdisk"]),
    ("forkdisk-uring", &["forkdisk"]),
    ("forkdisk-fuse", &["forkdisk", "forkdisk-uring"]),
    ("forkdisk-nbd", &["forkdisk", "forkdisk-uring"]),
    ("forkdisk-vhost-user", &["forkdisk", "forkdisk-uring"]),
    ("forkdisk-monitor", &["forkdisk", "forkdisk-nbd", "forkdisk-uring"]),
    ("forkdisk-control", &["forkdisk", "forkdisk-monitor", "forkdisk-uring"]),
    // Its clients and baselines are made of the libraries of the front ends.
    ("forkdisk-bench", &["forkdisk", "forkdisk-fuse", "forkdisk-nbd", "forkdisk-uring", "forkdisk-vhost-user"]),
    (
        "forkdisk-cli",
        &[
            "forkdisk",
            "forkdisk-bench",
            "forkdisk-control",
            "forkdisk-fuse",
            "forkdisk-monitor",
            "forkdisk-nbd",
            "forkdisk-uring",
            "forkdisk-vhost-user",
        ],
    ),
    ("forkdisk-tidy", &[]),
];

/// Crates whose top-level modules form no circles.
pub const WITHOUT_CIRCLES: &[&str] = &[
    "crates/cli/src/",
    "crates/control/src/",
    "crates/frontend/nbd/src/",
    "crates/frontend/vhost-user/src/",
    "crates/monitor/src/",
    "crates/sim/src/",
];

/// Paths in the modules below `src` that point to a higher layer of `table`.
pub fn check(sources: &[&Source], src: &str, table: &[&[&str]]) -> Vec<Violation> {
    let exports = exports_of(sources, src);
    let mut violations = Vec::new();
    for source in sources {
        let module = paths::module_of(&source.path, src);
        if module.is_empty() || source.is_test() {
            continue;
        }
        let Some(own) = layer_of(&module, table) else {
            let what = format!("module `{}` is in no layer: add it to the table", module.join("::"));
            violations.push(Violation::new(source, 0, what));
            continue;
        };
        for reference in paths::references(source, src) {
            let path = resolve(reference.path, &exports);
            if let Some(layer) = layer_of(&path, table)
                && layer > own
            {
                let what = format!(
                    "`{}` (layer {own}) names `{}` (layer {layer}): move one of them, or hand it in from above",
                    module.join("::"),
                    path.join("::"),
                );
                violations.push(Violation::new(source, reference.line, what));
            }
        }
    }
    violations
}

/// Circles among the top-level modules of a crate, each as one violation.
pub fn check_circles(sources: &[&Source], src: &str) -> Vec<Violation> {
    let exports = exports_of(sources, src);
    let mut edges: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut first = BTreeMap::new();
    for source in sources.iter().filter(|source| !source.is_test()) {
        let Some(module) = paths::module_of(&source.path, src).into_iter().next() else { continue };
        first.entry(module.clone()).or_insert(*source);
        for reference in paths::references(source, src) {
            if let Some(other) = resolve(reference.path, &exports).into_iter().next()
                && other != module
            {
                edges.entry(module.clone()).or_default().insert(other);
            }
        }
    }
    let mut violations = Vec::new();
    for (module, source) in first {
        let reached = reachable(&module, &edges);
        if reached.contains(&module) {
            let circle: Vec<_> =
                reached.iter().filter(|other| reachable(other, &edges).contains(&module)).cloned().collect();
            let what = format!("module `{module}` is in a circle of {}: cut it", circle.join(", "));
            violations.push(Violation::new(source, 0, what));
        }
    }
    violations
}

/// Dependencies on crates of the workspace that `table` does not have.
pub fn check_crate(manifest: &Source, table: &[(&str, &[&str])]) -> Vec<Violation> {
    let name = manifest.text.lines().find_map(|line| line.strip_prefix("name = ")).unwrap_or_default();
    let name = name.trim_matches('"');
    let Some((_, allowed)) = table.iter().find(|(member, _)| *member == name) else {
        return vec![Violation::new(manifest, 0, format!("crate `{name}` is in no layer: add it to the table"))];
    };
    let mut violations = Vec::new();
    let mut is_dependency = false;
    for (index, line) in manifest.text.lines().enumerate() {
        if line.starts_with('[') {
            is_dependency = line.ends_with("dependencies]");
        }
        let dependency = line.split(['.', ' ', '=']).next().unwrap_or_default();
        // A crate's tests may turn on a feature of their own crate.
        let is_other = dependency.starts_with("forkdisk") && dependency != name;
        if is_dependency && is_other && !allowed.contains(&dependency) {
            let what = format!("`{name}` depends on `{dependency}`, which is not below it");
            violations.push(Violation::new(manifest, index + 1, what));
        }
    }
    violations
}

fn exports_of(sources: &[&Source], src: &str) -> BTreeMap<String, Path> {
    let root = sources.iter().find(|source| source.path == format!("{src}lib.rs"));
    root.map(|root| paths::exports(root).into_iter().collect()).unwrap_or_default()
}

/// Replaces a name that the root re-exports by where it comes from.
fn resolve(path: Path, exports: &BTreeMap<String, Path>) -> Path {
    match path.first().and_then(|name| exports.get(name)) {
        Some(from) => from.iter().chain(&path).cloned().collect(),
        None => path,
    }
}

/// Index of the layer with the longest prefix of `path`.
fn layer_of(path: &Path, table: &[&[&str]]) -> Option<usize> {
    (1..=path.len()).rev().find_map(|length| {
        let prefix = path[..length].join("::");
        table.iter().position(|modules| modules.contains(&prefix.as_str()))
    })
}

fn reachable(from: &str, edges: &BTreeMap<String, BTreeSet<String>>) -> BTreeSet<String> {
    let mut reached = BTreeSet::new();
    let mut open = vec![from.to_string()];
    while let Some(module) = open.pop() {
        for next in edges.get(&module).into_iter().flatten() {
            if reached.insert(next.clone()) {
                open.push(next.clone());
            }
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[&[&str]] = &[&["types"], &["map"], &["pool", "volume"], &["pool::gather"]];

    fn found(path: &str, text: &str) -> Vec<usize> {
        let root = Source::new("src/lib.rs", "mod pool;\npub use pool::Pool;\n");
        let source = Source::new(path, text);
        check(&[&root, &source], "src/", TABLE).iter().map(|violation| violation.line).collect()
    }

    #[test]
    fn a_path_upward_is_found() {
        assert_eq!(found("src/map/edit.rs", "use crate::types::Page;\nuse super::x;\n"), [0; 0]);
        assert_eq!(found("src/map/edit.rs", "use crate::{types, pool::Meta};\n"), [1]);
        assert_eq!(found("src/map/edit.rs", "\nfn f() { assert!(super::super::volume::is()) }\n"), [2]);
        assert_eq!(found("src/volume/edit.rs", "use crate::pool::Meta;\n"), [0; 0]);
    }

    #[test]
    fn re_exports_and_longer_prefixes_are_followed() {
        assert_eq!(found("src/map/edit.rs", "use crate::Pool;\n"), [1]);
        assert_eq!(found("src/pool/open.rs", "use super::gather::Row;\n"), [1]);
        assert_eq!(found("src/pool/gather/row.rs", "use super::super::open::Open;\n"), [0; 0]);
    }

    #[test]
    fn a_module_in_no_layer_is_found() {
        assert_eq!(found("src/new.rs", ""), [0]);
    }

    #[test]
    fn a_circle_is_found() {
        let a = Source::new("src/a.rs", "use crate::b::B;");
        let b = Source::new("src/b/mod.rs", "use crate::c::C;");
        let c = Source::new("src/c.rs", "use crate::a::A;");
        let d = Source::new("src/d.rs", "use crate::a::A;");
        assert_eq!(check_circles(&[&a, &b, &d], "src/"), []);
        assert_eq!(check_circles(&[&a, &b, &c, &d], "src/").len(), 3);
    }

    #[test]
    fn a_dependency_on_a_higher_crate_is_found() {
        let text = "[package]\nname = \"forkdisk-uring\"\n[dependencies]\nforkdisk.workspace = true\n\
            [dev-dependencies]\nforkdisk-cli = { workspace = true }\n";
        let manifest = Source::new("crates/uring/Cargo.toml", text);
        let found = check_crate(&manifest, &[("forkdisk-uring", &["forkdisk"])]);
        assert_eq!(found.iter().map(|violation| violation.line).collect::<Vec<_>>(), [6]);
        assert_eq!(check_crate(&manifest, &[]).len(), 1);
    }
}
