//! Bad input: each gives a clear message, an exit status other than 0, and no change.

use std::fs::{self, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{LIMIT, Lab, Limited, LimitedWait, POOL, Run, Server, fingerprint, noise, succeed, wait_until};

const MIB: usize = 1 << 20;

/// A pool with one volume `a`, which has a snapshot `a@x`.
fn lab_with_a_volume() -> Lab {
    let lab = Lab::with_pool("64M");
    lab.import("a", &noise(1, MIB));
    lab.ok(&["snapshot", "pool.img/a@x"]);
    lab
}

/// Runs every kind of verb on a file that is not an intact pool: all are refused, and the file
/// stays unchanged. Returns the first message.
#[track_caller]
fn assert_nothing_opens(lab: &Lab, pool: &str) -> String {
    let before = fingerprint(&lab.path(pool));
    let volume = format!("{pool}/a");
    let first = lab.run(&["list", pool]).refused();
    for args in [
        &["create", &volume, "--size", "1M"] as &[&str],
        &["delete", &volume],
        &["export", &volume, "-"],
        &["grow", pool, "--size", "1G"],
        &["stats", pool],
        &["serve", pool],
    ] {
        lab.run(args).refused();
    }
    assert_eq!(fingerprint(&lab.path(pool)), before, "the file was changed");
    first
}

#[test]
fn a_foreign_file_is_no_pool() {
    let lab = Lab::empty();
    lab.write_file("foreign.img", &noise(2, 4 * MIB));
    let message = assert_nothing_opens(&lab, "foreign.img");
    assert!(message.contains("foreign.img") && message.contains("not a forkdisk pool"), "{message}");
}

#[test]
fn an_empty_file_is_no_pool() {
    let lab = Lab::empty();
    lab.write_file("empty.img", b"");
    let message = assert_nothing_opens(&lab, "empty.img");
    assert!(message.contains("not a forkdisk pool"), "{message}");
}

#[test]
fn a_pool_whose_metadata_is_overwritten_is_refused() {
    let lab = lab_with_a_volume();
    let file = OpenOptions::new().write(true).open(lab.path(POOL)).unwrap();
    for page in 0..64 * MIB as u64 / 4096 {
        file.write_all_at(&noise(page, 64), page * 4096 + 16).unwrap();
    }
    drop(file);
    let message = assert_nothing_opens(&lab, POOL);
    assert!(message.contains(POOL), "{message}");
}

#[test]
fn check_of_an_overwritten_pool_says_corrupt() {
    let lab = lab_with_a_volume();
    let file = OpenOptions::new().write(true).open(lab.path(POOL)).unwrap();
    // Everything after the first MiB, which contains the superblock and nothing else of value.
    for page in MIB as u64 / 4096..64 * MIB as u64 / 4096 {
        file.write_all_at(&noise(page, 64), page * 4096 + 16).unwrap();
    }
    drop(file);
    let run = lab.run(&["check", POOL]);
    assert_eq!(run.status.code(), Some(2), "{run:?}");
    assert!(run.stderr.starts_with("forkdisk: "), "{run:?}");
}

#[test]
fn a_truncated_pool_is_refused() {
    let lab = lab_with_a_volume();
    OpenOptions::new().write(true).open(lab.path(POOL)).unwrap().set_len(40 << 20).unwrap();
    let message = assert_nothing_opens(&lab, POOL);
    assert!(message.contains(POOL), "{message}");
}

#[test]
fn a_pool_that_does_not_exist_is_named() {
    let lab = Lab::empty();
    let message = lab.run(&["list", "none.img"]).refused();
    assert!(message.contains("none.img"), "{message}");
    let message = lab.run(&["create", "none.img/a", "--size", "1M"]).refused();
    assert!(message.contains("forkdisk init"), "{message}");
    assert!(!lab.path("none.img").exists());
}

#[test]
fn a_folder_is_no_pool() {
    let lab = Lab::empty();
    let message = lab.run(&["list", "."]).refused();
    assert!(message.contains("directory"), "{message}");
}

#[test]
fn a_pool_in_use_says_who_has_it() {
    let lab = lab_with_a_volume();
    let server = Server::start(&lab);
    for args in [&["serve", POOL] as &[&str], &["init", POOL, "--size", "64M", "--force"]] {
        let message = lab.run(args).refused();
        assert!(message.contains(&format!("in use by forkdisk serve (pid {})", server.pid())), "{message}");
    }
    server.stop();
    let start = || lab.command(&["import", "-", "pool.img/b"]).stdin(Stdio::piped()).spawn().unwrap();
    let mut import = start();
    wait_until("the import has the pool", || {
        // A concurrent read of the pool may keep the import out.
        if import.try_wait().unwrap().is_some() {
            import = start();
        }
        !lab.run(&["list", POOL, "--wait", "0"]).status.success()
    });
    let holder = format!("in use by forkdisk import (pid {})", import.id());
    for args in [&["list", POOL] as &[&str], &["create", "pool.img/c", "--size", "1M"], &["serve", POOL]] {
        let message = lab.run(&[args, &["--wait", "0"]].concat()).refused();
        assert!(message.contains(&holder) && !message.contains("kill"), "{message}");
    }
    let start = std::time::Instant::now();
    let message = lab.run(&["list", POOL, "--wait", "300ms"]).refused();
    assert!(message.contains(&holder) && message.contains("waited for 0.3 s"), "{message}");
    assert!(start.elapsed() >= std::time::Duration::from_millis(300));
    import.put_down().unwrap();
    lab.ok(&["create", "pool.img/none", "--size", "1M"]);
    lab.ok(&["delete", "pool.img/none"]);
    assert_eq!(lab.names(), ["a", "a@x"]);
}

#[test]
fn a_name_in_use_is_refused() {
    let lab = lab_with_a_volume();
    lab.write_file("image.raw", b"image");
    for args in [
        &["create", "pool.img/a", "--size", "1M"] as &[&str],
        &["import", "image.raw", "pool.img/a"],
        &["clone", "pool.img/a@x", "pool.img/a"],
        &["snapshot", "pool.img/a@x"],
        &["create", "pool.img/a/b", "--size", "1M"],
        &["import", "image.raw", "pool.img/a/b"],
    ] {
        let message = lab.run(args).refused();
        assert!(message.contains("exist") || message.contains("folder"), "{args:?}: {message}");
        assert_eq!(lab.names(), ["a", "a@x"]);
    }
    assert!(lab.contents("a") == noise(1, MIB));
}

#[test]
fn a_bad_name_is_refused() {
    let lab = lab_with_a_volume();
    let long = "n".repeat(256);
    for name in [
        "a\tb",
        " a",
        "\u{200b}x",
        "x//y",
        "../x",
        ".",
        "..",
        ".snapshots",
        "x/.snapshots/y",
        "x@",
        "@x",
        "x@y@z",
        &long,
    ] {
        let message = lab.run(&["create", &format!("{POOL}/{name}"), "--size", "1M"]).refused();
        assert!(message.contains("name") || message.contains("snapshot"), "{name}: {message}");
    }
    assert_eq!(lab.names(), ["a", "a@x"]);
}

#[test]
fn an_unknown_volume_is_named() {
    let lab = lab_with_a_volume();
    lab.write_file("out.raw", b"");
    for args in [
        &["export", "pool.img/none", "out.raw"] as &[&str],
        &["snapshot", "pool.img/none@x"],
        &["clone", "pool.img/a@none", "pool.img/b"],
        &["rollback", "pool.img/a@none"],
        &["rename", "pool.img/none", "pool.img/b"],
        &["resize", "pool.img/none", "--size", "1M"],
        &["delete", "pool.img/none"],
        &["delete", "pool.img/a@x", "pool.img/none"],
        &["map", "pool.img/none"],
        &["diff", "pool.img/a", "pool.img/none"],
        &["du", "pool.img/none"],
        &["list", "pool.img/none"],
    ] {
        let message = lab.run(args).refused();
        assert!(message.contains("none"), "{args:?}: {message}");
    }
    assert_eq!(lab.names(), ["a", "a@x"]);
}

#[test]
fn a_bad_size_is_wrong_usage() {
    let lab = lab_with_a_volume();
    for size in ["12Q", "", "-1", "1.5", "99999999999999999999", "1G G"] {
        let run = lab.run(&["create", "pool.img/b", &format!("--size={size}")]);
        assert_eq!(run.status.code(), Some(2), "{size}: {run:?}");
        assert!(run.stderr.starts_with("forkdisk: "), "{run:?}");
    }
    assert_eq!(lab.names(), ["a", "a@x"]);
}

#[test]
fn a_size_out_of_range_is_refused() {
    let lab = lab_with_a_volume();
    lab.run(&["create", "pool.img/b", "--size", "2P"]).refused();
    lab.run(&["resize", "pool.img/a", "--size", "2P"]).refused();
    lab.run(&["create", "pool.img/b", "--size", "1M", "--chunk", "128M"]).refused();
    lab.run(&["init", "tiny.img", "--size", "4K"]).refused();
    assert!(!lab.path("tiny.img").exists(), "half a pool is not left behind");
    assert_eq!(lab.names(), ["a", "a@x"]);
}

/// Runs the program with a file size limit of 100 MiB.
fn run_with_short_files(lab: &Lab, args: &[&str]) -> Run {
    let program = lab.command(args);
    let mut shell = Command::new("bash");
    shell.args(["-c", "trap '' XFSZ; ulimit -f 102400; exec \"$0\" \"$@\""]).current_dir(lab.path("."));
    shell.arg(program.get_program()).args(program.get_args()).env_remove("FORKDISK_POOL");
    shell.stdin(Stdio::null()).output_within(LIMIT).expect("bash").into()
}

#[test]
fn a_pool_survives_an_init_that_cannot_succeed() {
    let lab = lab_with_a_volume();
    let uuid = lab.json(&["stats", POOL])["uuid"].as_str().unwrap().to_string();
    let before = fingerprint(&lab.path(POOL));
    for size in ["1M", "5P"] {
        lab.run(&["init", POOL, "--destroy", &uuid, "--size", size]).refused();
    }
    run_with_short_files(&lab, &["init", POOL, "--destroy", &uuid, "--size", "512M"]).refused();
    lab.run(&["init", POOL, "--destroy", &uuid, "--size", "64M", "--journal", "64M"]).refused();
    lab.run(&["init", POOL, "--destroy", &uuid, "--size", "64M", "--journal", "0"]).refused();
    assert_eq!(fingerprint(&lab.path(POOL)), before, "the pool was changed");
    assert_eq!(lab.names(), ["a", "a@x"]);
}

#[test]
fn export_never_overwrites_a_pool_in_use() {
    let lab = lab_with_a_volume();
    lab.ok(&["init", "other.img", "--size", "8M"]);
    let socket = lab.path("s");
    let before = fingerprint(&lab.path(POOL));
    let message = lab.run(&["export", "pool.img/a", POOL, "--force"]).refused();
    assert!(message.contains("in use"), "{message}");
    assert_eq!(fingerprint(&lab.path(POOL)), before, "the pool was changed");
    let mut command = lab.command(&["serve", "other.img", "--socket", socket.to_str().unwrap()]);
    let mut other = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_until("it is served", || socket.exists());
    let message = lab.run(&["export", "pool.img/a", "other.img", "--force"]).refused();
    assert!(message.contains("in use"), "{message}");
    kill_process(Pid::from_child(&other), Signal::TERM).unwrap();
    assert!(other.wait_within(LIMIT).unwrap().success());
    lab.ok(&["list", "other.img"]);
}

#[test]
fn an_export_longer_than_a_file_can_be_leaves_nothing_behind() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "200M"]);
    let message = run_with_short_files(&lab, &["export", "pool.img/a", "out.raw"]).refused();
    assert!(message.contains("out.raw"), "{message}");
    assert!(!lab.path("out.raw").exists());
}

#[test]
fn a_failure_of_the_system_is_told_once() {
    let lab = lab_with_a_volume();
    let message = run_with_short_files(&lab, &["grow", POOL, "--size", "512M"]).refused();
    assert_eq!(message.matches("os error").count(), 1, "{message}");
}

#[test]
fn an_import_into_a_full_pool_leaves_nothing_behind() {
    let lab = lab_with_a_volume();
    let used = lab.stat("used");
    let message = lab.run_with_input(&["import", "-", "pool.img/big"], &noise(3, 80 * MIB)).refused();
    assert!(message.contains("space") || message.contains("full"), "{message}");
    assert_eq!(lab.names(), ["a", "a@x"]);
    assert_eq!(lab.stat("used"), used);
    assert!(lab.contents("a") == noise(1, MIB));
    lab.assert_clean();
}

/// Runs the program as an unprivileged user: as user 65534 if the tests run as root.
pub fn run_without_rights(lab: &Lab, args: &[&str]) -> Run {
    let program = lab.command(args);
    if !rustix::process::geteuid().is_root() {
        return lab.run(args);
    }
    let copy = lab.path("forkdisk");
    if !copy.exists() {
        // Copied by another process: a child of another test thread would inherit the file while it
        // is open for writing, and then it could not be executed.
        succeed(Command::new("cp").arg(program.get_program()).arg(&copy));
        fs::set_permissions(lab.path("."), Permissions::from_mode(0o755)).unwrap();
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]).arg(&copy).args(args);
    command.current_dir(lab.path(".")).env_remove("FORKDISK_POOL").output_within(LIMIT).unwrap().into()
}

#[test]
fn a_read_only_file_can_be_looked_at_but_not_changed() {
    let lab = lab_with_a_volume();
    fs::set_permissions(lab.path(POOL), Permissions::from_mode(0o444)).unwrap();
    let before = fingerprint(&lab.path(POOL));
    let message = run_without_rights(&lab, &["create", "pool.img/b", "--size", "1M"]).refused();
    assert!(message.contains("permission") && message.contains(POOL), "{message}");
    let list = run_without_rights(&lab, &["list", "-H", POOL]).ok();
    assert!(list.starts_with("a\t"), "{list}");
    let stats = run_without_rights(&lab, &["stats", "-H", POOL]).ok();
    assert!(stats.contains("mode\tro\n"), "{stats}");
    assert_eq!(fingerprint(&lab.path(POOL)), before);
}

#[test]
fn a_file_without_permission_is_refused() {
    let lab = lab_with_a_volume();
    fs::set_permissions(lab.path(POOL), Permissions::from_mode(0o000)).unwrap();
    for args in [&["list", POOL] as &[&str], &["create", "pool.img/b", "--size", "1M"]] {
        let message = run_without_rights(&lab, args).refused();
        assert!(message.contains("permission") && message.contains(POOL), "{message}");
    }
}

#[test]
fn an_image_that_cannot_be_read_is_named() {
    let lab = lab_with_a_volume();
    let message = lab.run(&["import", "none.raw", "pool.img/b"]).refused();
    assert!(message.contains("none.raw"), "{message}");
    let message = lab.run(&["import", ".", "pool.img/b"]).refused();
    assert!(message.contains("directory"), "{message}");
    assert_eq!(lab.names(), ["a", "a@x"]);
}

#[test]
fn addresses_of_the_wrong_kind_are_refused() {
    let lab = lab_with_a_volume();
    for args in [
        &["create", POOL, "--size", "1M"] as &[&str],
        &["create", "pool.img/b@x", "--size", "1M"],
        &["snapshot", "pool.img/a"],
        &["rollback", "pool.img/a"],
        &["resize", "pool.img/a@x", "--size", "1M"],
        &["rename", "pool.img/a", "pool.img/b@x"],
        &["rename", "pool.img/a@x", "pool.img/b@x"],
        &["delete", POOL],
    ] {
        lab.run(args).refused();
        assert_eq!(lab.names(), ["a", "a@x"], "{args:?}");
    }
}

#[test]
fn two_pools_in_one_command_are_refused() {
    let lab = lab_with_a_volume();
    lab.ok(&["init", "other.img", "--size", "64M"]);
    let message = lab.run(&["clone", "pool.img/a", "other.img/a"]).refused();
    assert!(message.contains("two pools"), "{message}");
}
