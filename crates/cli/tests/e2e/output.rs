//! How results are written, and how the program is told where its pool is.

use std::fs;

use crate::harness::{LIMIT, Lab, Limited, LimitedWait, POOL};

#[test]
fn the_pool_can_come_from_the_environment_or_an_option() {
    let lab = Lab::with_pool("64M");
    let pool = lab.path(POOL);
    let create =
        lab.command(&["create", "a", "--size", "1M"]).env("FORKDISK_POOL", &pool).status_within(LIMIT).unwrap();
    assert!(create.success());
    lab.ok(&["--pool", POOL, "snapshot", "a@x"]);
    let list = lab.command(&["list", "-H"]).env("FORKDISK_POOL", &pool).output_within(LIMIT).unwrap();
    assert!(String::from_utf8(list.stdout).unwrap().starts_with("a\tvolume\t1M\t"));
}

#[test]
fn scripts_get_tabs_exact_bytes_and_no_header() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let text = lab.ok(&["list", "-H", "-p", POOL]);
    let cells: Vec<&str> = text.trim_end().split('\t').collect();
    assert_eq!(cells[..6], ["a", "volume", "1048576", "0", "65536", "-"]);
    assert!(cells[6].parse::<u64>().unwrap() > 1_700_000_000, "seconds since 1970");
    assert_eq!(text.lines().count(), 1);
}

#[test]
fn json_can_be_asked_for_in_two_ways() {
    let lab = Lab::with_pool("64M");
    assert_eq!(lab.ok(&["list", POOL, "--json"]), lab.ok(&["--output=json", "list", POOL]));
    assert_eq!(lab.ok(&["list", POOL, "--json"]).trim(), "[]");
}

#[test]
fn failures_are_json_where_results_are() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let told = |args: &[&str], status: i32| {
        let run = lab.run(args);
        assert_eq!((run.status.code(), run.stdout.as_str()), (Some(status), ""), "{args:?}");
        let said: serde_json::Value = serde_json::from_str(&run.stderr).expect(&run.stderr);
        assert!(!said["error"].as_str().unwrap().is_empty(), "{said}");
        said["kind"].as_str().unwrap().to_string()
    };
    assert_eq!(told(&["--json", "create", "pool.img/a", "--size", "1M"], 1), "exists");
    assert_eq!(told(&["list", "pool.img/none", "--json"], 1), "not_found");
    assert_eq!(told(&["--output", "json", "create", "pool.img/b", "--size", "-1"], 2), "usage");
    assert_eq!(told(&["no-such-verb", "--output=json"], 2), "usage");
    let server = crate::harness::Server::start(&lab);
    assert_eq!(told(&["--json", "snapshot", "pool.img/none@x"], 1), "not_found");
    server.stop();
    assert!(lab.run(&["list", "pool.img/none"]).refused().starts_with("forkdisk: "));
}

#[test]
fn people_get_a_header_and_short_sizes() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1536K"]);
    let text = lab.ok(&["list", POOL]);
    let mut lines = text.lines();
    assert!(lines.next().unwrap().starts_with("NAME"), "{text}");
    assert!(lines.next().unwrap().contains("1.50M"), "{text}");
}

#[test]
fn no_progress_is_drawn_where_there_is_no_terminal() {
    let lab = Lab::with_pool("256M");
    let run = lab.run_with_input(&["import", "-", "pool.img/a"], &vec![1; 64 << 20]);
    assert_eq!(run.stderr, "");
    assert_eq!(run.ok(), "");
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    let lab = Lab::with_pool("64M");
    let mut child = lab.command(&["--help"]).stdout(std::process::Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert!(child.wait_within(LIMIT).unwrap().success());
}

#[test]
fn manual_pages_and_completions_are_made() {
    let lab = Lab::empty();
    lab.ok(&["man", "man1"]);
    let page = fs::read_to_string(lab.path("man1/forkdisk-snapshot.1")).unwrap();
    assert!(page.contains("snapshot"), "{page}");
    for shell in ["bash", "zsh", "fish"] {
        assert!(lab.ok(&["completions", shell]).contains("snapshot"), "{shell}");
    }
}

#[test]
fn every_verb_explains_itself() {
    let lab = Lab::empty();
    let help = lab.ok(&["--help"]);
    for verb in [
        "init", "create", "import", "export", "snapshot", "clone", "rollback", "list", "du", "diff", "map", "rename",
        "resize", "set", "delete", "grow", "check", "stats", "serve", "stop", "config", "stop", "config",
    ] {
        assert!(help.contains(&format!("\n  {verb} ")), "{verb} is missing in {help}");
        assert!(lab.ok(&[verb, "--help"]).contains("--json"), "{verb}");
    }
}
