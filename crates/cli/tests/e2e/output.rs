//! Format of results, and ways to tell the program its pool.

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
fn a_list_fits_a_terminal_of_80_columns() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a-name-of-some-length", "--size", "1M"]);
    let Some(mut script) = crate::harness::client("script", "bsdutils") else { return };
    let program = lab.command(&[]).get_program().to_str().unwrap().to_string();
    let line = format!("stty cols 80; exec {program} list {POOL}");
    let shown = crate::harness::succeed(script.args(["-qec", &line, "/dev/null"]).current_dir(lab.path("")));
    let lines: Vec<&str> = shown.lines().collect();
    assert!(lines.iter().all(|line| line.trim_end().len() <= 80), "{shown}");
    assert!(lines[0].starts_with("NAME") && lines[0].contains("REFERENCED"), "{shown}");
    assert!(lab.ok(&["list", POOL]).contains("GATHER"), "what is no terminal has all columns");
}

#[test]
fn manual_pages_say_what_a_page_has_to() {
    let lab = Lab::empty();
    let made = lab.command(&["man", "man1"]).env("SOURCE_DATE_EPOCH", "951782400").status_within(LIMIT).unwrap();
    assert!(made.success());
    let pages: Vec<_> = fs::read_dir(lab.path("man1")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(pages.len() > 30, "{pages:?}");
    for path in pages {
        let page = fs::read_to_string(&path).unwrap();
        let headings = ["NAME", "SYNOPSIS", "OPTIONS", "EXIT STATUS", "ENVIRONMENT", "FILES", "SEE ALSO"];
        for heading in headings {
            let named = [format!(".SH {heading}\n"), format!(".SH \"{heading}\"\n")];
            assert!(named.iter().any(|named| page.contains(named)), "{}: {heading}", path.display());
        }
        assert!(page.contains("2000-02-29"), "{}: no date", path.display());
        let is_of_verb = path.file_name().unwrap() != "forkdisk.1";
        assert_eq!(page.contains(".SH EXAMPLES\n"), is_of_verb, "{}", path.display());
    }
    let help = lab.ok(&["list", "--help"]);
    assert!(help.contains("Options of every verb:") && help.contains("Examples:\n  forkdisk list"), "{help}");
    assert!(!lab.ok(&["completions", "bash"]).contains("on-mount"));
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
