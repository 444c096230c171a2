//! One test per rule, each over the whole repository.

use std::sync::LazyLock;

use forkdisk_tidy::allow::{self, ALLOWED};
use forkdisk_tidy::glossary::{self, Glossary};
use forkdisk_tidy::{Source, Violation, functions, layers, lines, manifests, methods, planted, tree, units, words};

static SOURCES: LazyLock<Vec<Source>> = LazyLock::new(tree::read);

/// Fails with all violations that are not allowed.
fn expect_none(rule: &str, violations: Vec<Violation>) {
    let unused = allow::unused(ALLOWED, rule, &violations);
    assert!(unused.is_empty(), "{rule}: exceptions that nothing needs, remove them: {unused:#?}");
    let mut violations = allow::filter(ALLOWED, rule, violations);
    violations.sort();
    let list: Vec<String> = violations.iter().map(Violation::to_string).collect();
    assert!(list.is_empty(), "{rule}: {} violations\n{}\n", list.len(), list.join("\n"));
}

fn each(check: impl Fn(&Source) -> Vec<Violation>) -> Vec<Violation> {
    SOURCES.iter().flat_map(check).collect()
}

fn each_rust(check: impl Fn(&Source) -> Vec<Violation>) -> Vec<Violation> {
    SOURCES.iter().filter(|source| source.is_rust()).flat_map(check).collect()
}

#[test]
fn lines_are_short() {
    expect_none("lines", each(lines::check_lines));
}

#[test]
fn files_are_short() {
    expect_none("files", each(lines::check_file));
}

#[test]
fn functions_are_short() {
    expect_none("functions", each_rust(functions::check_length));
}

#[test]
fn types_of_the_engine_and_of_the_simulator_have_few_methods() {
    expect_none("methods", methods::check(tree::under(&SOURCES, "crates/forkdisk/src/")));
    expect_none("methods", methods::check(tree::under(&SOURCES, "crates/sim/src/")));
}

#[test]
fn names_of_tests_are_short() {
    expect_none("names of tests", each_rust(functions::check_names));
}

#[test]
fn comments_name_no_persons() {
    expect_none("words", each(words::check));
}

#[test]
fn numbers_have_units() {
    expect_none("units", SOURCES.iter().filter(|source| units::is_read(source)).flat_map(units::check).collect());
}

#[test]
fn modules_of_the_engine_use_what_is_below_them() {
    let src = "crates/forkdisk/src/";
    let sources: Vec<_> = tree::under(&SOURCES, src).collect();
    expect_none("layers", layers::check(&sources, src, layers::ENGINE));
}

#[test]
fn modules_form_no_circles() {
    let mut violations = Vec::new();
    for src in layers::WITHOUT_CIRCLES {
        let sources: Vec<_> = tree::under(&SOURCES, src).collect();
        assert!(!sources.is_empty(), "{src} is no folder");
        violations.extend(layers::check_circles(&sources, src));
    }
    expect_none("circles", violations);
}

#[test]
fn planted_bugs_have_one_form() {
    let sources = tree::under(&SOURCES, "crates/forkdisk/src/").filter(|source| source.is_rust() && !source.is_test());
    expect_none("planted", sources.flat_map(planted::check).collect());
}

#[test]
fn crates_depend_on_what_is_below_them() {
    let manifests = tree::under(&SOURCES, "crates/").filter(|source| source.path.ends_with("/Cargo.toml"));
    expect_none("crates", manifests.flat_map(|manifest| layers::check_crate(manifest, layers::CRATES)).collect());
}

#[test]
fn crates_have_what_a_registry_needs_or_are_not_published() {
    let crates = tree::under(&SOURCES, "crates/").filter(|source| source.path.ends_with("/Cargo.toml"));
    expect_none("manifests", crates.flat_map(manifests::check).collect());
}

#[test]
fn names_of_the_engine_are_words_of_the_glossary() {
    let src = "crates/forkdisk/src/";
    let sources = tree::under(&SOURCES, src).filter(|source| source.is_rust() && !source.is_test());
    let names: Vec<_> = sources.flat_map(|source| glossary::names(source, src)).collect();
    expect_none("glossary", glossary::check_names(&names, &Glossary::parse(the_glossary())));
}

#[test]
fn terms_of_the_glossary_are_used_and_defined_once() {
    let source = the_glossary();
    let others: Vec<_> = SOURCES.iter().filter(|other| other.path != source.path).collect();
    let mut violations = glossary::check_order(source);
    violations.extend(glossary::check_used(source, &others));
    expect_none("terms", violations);
}

#[test]
fn exceptions_are_few_and_have_reasons() {
    assert_eq!(allow::check(ALLOWED), [""; 0]);
}

fn the_glossary() -> &'static Source {
    SOURCES.iter().find(|source| source.path == "docs/glossary.md").expect("docs/glossary.md exists")
}

#[test]
fn only_the_simulator_plants_mistakes() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let manifest = |path: &str| std::fs::read_to_string(format!("{root}/{path}")).unwrap();
    // A plain `cargo build` builds the program alone: features of the simulator would be unified into it.
    assert!(manifest("Cargo.toml").contains("\ndefault-members = [\"crates/cli\"]\n"));
    for source in SOURCES.iter().filter(|source| source.path.ends_with("Cargo.toml")) {
        let plants = source.text.contains("\"planted\"");
        assert_eq!(plants, source.path == "crates/sim/Cargo.toml", "{}", source.path);
    }
}
