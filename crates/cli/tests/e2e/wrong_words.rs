//! Wrong input on the command line, in variables and in the file: each message names the error and its place.

use std::fs;

use crate::harness::{Lab, Limited, POOL, Run, noise};

/// A pool with a volume `v` and its snapshot `v@s`.
fn lab_with_a_snapshot() -> Lab {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/v", "--size", "1M"]);
    lab.ok(&["snapshot", "pool.img/v@s"]);
    lab
}

#[track_caller]
fn assert_usage(lab: &Lab, args: &[&str]) -> String {
    let run = lab.run(args);
    assert_eq!(run.status.code(), Some(2), "{args:?}: {run:?}");
    run.stderr
}

#[test]
fn a_disk_of_no_bytes_is_refused() {
    let lab = lab_with_a_snapshot();
    for args in [
        &["create", "pool.img/w", "--size", "0"] as &[&str],
        &["resize", "pool.img/v", "--size", "0", "--allow-shrink"],
        &["init", "new.img", "--size", "0"],
    ] {
        let message = lab.run(args).refused();
        assert!(message.contains("above 0"), "{args:?}: {message}");
    }
    assert_eq!(lab.names(), ["v", "v@s"]);
}

#[test]
fn a_negative_number_is_told_as_one() {
    let lab = lab_with_a_snapshot();
    for args in [
        &["create", "pool.img/w", "--size", "-5G"] as &[&str],
        &["create", "pool.img/w", "--size=-5G"],
        &["create", "pool.img/w", "--size", "1M", "--quota", "-1"],
        &["init", "new.img", "--size", "-5G"],
        &["grow", POOL, "--size", "-5G"],
        &["serve", POOL, "--cache", "-1M"],
    ] {
        let message = assert_usage(&lab, args);
        assert!(message.contains("a size is positive"), "{args:?}: {message}");
    }
    let message = assert_usage(&lab, &["list", POOL, "--wait", "-1s"]);
    assert!(message.contains("a time is positive"), "{message}");
}

#[test]
fn words_of_other_programs_are_verbs_or_name_the_way() {
    let lab = lab_with_a_snapshot();
    assert_eq!(lab.ok(&["ls", "-H", POOL]), lab.ok(&["list", "-H", POOL]));
    lab.ok(&["snap", "pool.img/v@t"]);
    lab.ok(&["rm", "pool.img/v@t"]);
    lab.ok(&["snap", "pool.img/v@t"]);
    lab.ok(&["destroy", "pool.img/v@t"]);
    assert_eq!(lab.ok(&["info", POOL]), lab.ok(&["stats", POOL]));
    assert_eq!(lab.ok(&["df", POOL]), lab.ok(&["stats", POOL]));
    for (word, way) in [("send", "`export`"), ("prune", "`delete`"), ("backup", "`export`"), ("cp", "`clone`")] {
        let message = assert_usage(&lab, &[word, POOL]);
        assert!(message.contains(&format!("there is no verb `{word}`")) && message.contains(way), "{message}");
    }
}

#[test]
fn a_verb_on_pools_says_that_it_takes_one() {
    let lab = lab_with_a_snapshot();
    for args in [
        &["check", "pool.img/v"] as &[&str],
        &["stats", "pool.img/v"],
        &["repair", "pool.img/v"],
        &["top", "pool.img/v"],
        &["copier", "pool.img/v"],
        &["stop", "pool.img/v"],
        &["serve", "pool.img/v"],
        &["grow", "pool.img/v", "--size", "1G"],
        &["init", "pool.img/v", "--size", "64M"],
        &["mount", "pool.img/v", "."],
    ] {
        let message = lab.run(args).stderr;
        let expected = format!("{} takes a pool: pool.img/v names v in pool.img", args[0]);
        assert!(message.contains(&expected), "{args:?}: {message}");
    }
}

#[test]
fn a_folder_that_does_not_exist_is_named() {
    let lab = lab_with_a_snapshot();
    let message = lab.run(&["init", "none/new.img", "--size", "64M"]).refused();
    assert!(message.contains("the folder none does not exist"), "{message}");
}

#[test]
fn a_server_makes_no_folder_that_was_named_for_a_file_of_its() {
    let lab = lab_with_a_snapshot();
    for flag in ["--socket", "--control", "--pid-file", "--log-file"] {
        for daemon in [&[] as &[&str], &["--daemon"]] {
            let place = lab.path("none/x");
            let args = [&["serve", POOL, flag, place.to_str().unwrap()], daemon].concat();
            let message = lab.run(&args).refused();
            assert!(message.contains("none"), "{flag}: {message}");
            assert!(!lab.path("none").exists(), "{flag} made a folder");
        }
    }
    lab.assert_clean();
}

#[test]
fn what_is_missing_is_named_and_nothing_else() {
    let lab = lab_with_a_snapshot();
    lab.write_file("image.raw", &noise(1, 4096));
    for args in [
        &["clone", "pool.img/v@none", "pool.img/c"] as &[&str],
        &["rollback", "pool.img/v@none"],
        &["export", "pool.img/v@none", "out.raw"],
        &["diff", "pool.img/v@none", "pool.img/v"],
        &["diff", "pool.img/v", "pool.img/v@none"],
        &["rename", "pool.img/v@none", "pool.img/v@other"],
        &["delete", "pool.img/v@none"],
        &["map", "pool.img/v@none"],
    ] {
        let message = lab.run(args).refused();
        let message = message.trim_start_matches("forkdisk: ");
        let begins = ["v@none: ", "there is no volume or snapshot \"v@none\""].iter().any(|s| message.starts_with(s));
        assert!(begins, "{args:?}: {message}");
    }
    for args in [&["snapshot", "pool.img/v@s"] as &[&str], &["snapshot", "pool.img/v@t", "pool.img/v@s"]] {
        let message = lab.run(args).refused();
        assert!(message.contains("\"v@s\" exists already"), "{args:?}: {message}");
    }
    lab.ok(&["snapshot", "pool.img/v@t"]);
    let message = lab.run(&["rename", "pool.img/v@t", "pool.img/v@s"]).refused();
    assert!(message.contains("\"v@s\" exists already"), "{message}");
}

#[test]
fn a_pool_cannot_be_protected_by_itself() {
    let lab = lab_with_a_snapshot();
    let message = lab.run(&["protect", "pool.img/o", POOL]).refused();
    assert!(message.contains("is a forkdisk pool itself"), "{message}");
    assert_eq!(lab.names(), ["v", "v@s"]);
}

#[test]
fn a_path_of_a_pool_counts_before_the_default_pool() {
    let lab = lab_with_a_snapshot();
    lab.ok(&["init", "other.img", "--size", "64M"]);
    lab.ok(&["create", "other.img/w", "--size", "1M"]);
    fs::write(lab.path("c.toml"), format!("pool = {:?}\n", lab.path("other.img"))).unwrap();
    let with_file = |args: &[&str]| lab.run(&[&["--config", "c.toml"], args].concat());
    assert!(with_file(&["list", "-H", "w"]).ok().starts_with("w\t"));
    assert!(with_file(&["list", "-H", "pool.img/v"]).ok().starts_with("v\t"));
    assert!(with_file(&["list", "-H", POOL]).ok().starts_with("v\t"));
    // A name without the path of a pool is not taken for a pool, even if a file has that name.
    lab.write_file("w", b"no pool");
    assert!(with_file(&["list", "-H", "w"]).ok().starts_with("w\t"));
    let other = lab.path("other.img");
    for args in [&["list", "none"] as &[&str], &["map", "none/v"], &["export", "none", "-"]] {
        let message = with_file(args).refused();
        assert!(message.contains(&format!("in the pool {} (c.toml:1)", other.display())), "{args:?}: {message}");
    }
    fs::remove_file(&other).unwrap();
    let message = with_file(&["list"]).refused();
    assert!(message.contains("(c.toml:1)"), "{message}");
}

#[test]
fn a_bad_value_names_the_variable_or_the_line_it_stands_in() {
    let lab = lab_with_a_snapshot();
    for (variable, verb) in [
        ("FORKDISK_WAIT", "list"),
        ("FORKDISK_LOG", "stats"),
        ("FORKDISK_CACHE", "serve"),
        ("FORKDISK_LOW_WATER", "serve"),
        ("FORKDISK_MAX_REQUESTS", "serve"),
        ("FORKDISK_TCP", "serve"),
    ] {
        let run: Run =
            lab.command(&[verb, POOL]).env(variable, "x").output_within(crate::harness::LIMIT).unwrap().into();
        assert_eq!(run.status.code(), Some(2), "{run:?}");
        assert!(run.stderr.starts_with(&format!("forkdisk: {variable}: 'x' is")), "{run:?}");
        let key = variable.trim_start_matches("FORKDISK_").to_lowercase();
        lab.write_file("bad.toml", format!("# ours\n{key} = \"x\"\n").as_bytes());
        let message = lab.run(&[verb, POOL, "--config", "bad.toml"]).refused();
        assert!(message.contains(&format!("bad.toml:2: {key}: ")), "{message}");
    }
    // Settings of serve only do not affect other verbs.
    let mut list = lab.command(&["list", "-H", POOL]);
    Run::from(list.env("FORKDISK_CACHE", "x").output_within(crate::harness::LIMIT).unwrap()).ok();
}
