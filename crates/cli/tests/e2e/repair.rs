//! Damaged counts and superblocks: what maps reach can be read, and `repair` restores the pool.

use std::fs;
use std::ops::Range;
use std::process::Command;

use serde_json::Value;

use crate::harness::{Lab, POOL, Server, client, noise, succeed};
use crate::mount::Mounted;
use crate::nbd::Client;

const PAGE: usize = 4096;
/// Pages of the log of counts, before the second superblock, and of the count pages of the first region.
const LOG: Range<usize> = 1..128;
const COUNTS: Range<usize> = 256..512;
const MIB: usize = 1 << 20;

/// Creates volumes `a` and `b`; `b` is a clone with one exclusive page; the pool is closed cleanly.
fn lab() -> (Lab, Vec<u8>, Vec<u8>) {
    let lab = Lab::with_pool("64M");
    let (a, mut b) = (noise(1, 8 * MIB), noise(1, 8 * MIB));
    lab.import("a", &a);
    lab.ok(&["snapshot", &format!("{POOL}/a@s")]);
    lab.ok(&["clone", &format!("{POOL}/a@s"), &format!("{POOL}/b")]);
    let server = Server::start(&lab);
    let mut client = Client::connect(server.socket(), "b").unwrap();
    let page = noise(2, PAGE);
    client.write(3 * MIB as u64, &page, true).unwrap();
    client.vanish();
    server.stop();
    b[3 * MIB..3 * MIB + PAGE].copy_from_slice(&page);
    (lab, a, b)
}

/// Flips a bit in each of these pages that is not empty; returns their number.
fn damage(lab: &Lab, pages: impl IntoIterator<Item = usize>) -> usize {
    let path = lab.path(POOL);
    let mut bytes = fs::read(&path).unwrap();
    let mut damaged = 0;
    for page in pages {
        let page = &mut bytes[page * PAGE..(page + 1) * PAGE];
        if page.iter().any(|&byte| byte != 0) {
            page[200] ^= 1;
            damaged += 1;
        }
    }
    fs::write(path, bytes).unwrap();
    damaged
}

/// Damages all counts, and their log.
fn damage_counts(lab: &Lab) {
    assert!(damage(lab, COUNTS) > 2);
    assert!(damage(lab, LOG) > 0);
}

#[test]
fn damaged_counts_keep_nothing_from_being_read() {
    for pages in [LOG, COUNTS] {
        let (lab, a, b) = lab();
        assert!(damage(&lab, pages.clone()) > 0);
        let before = fs::read(lab.path(POOL)).unwrap();
        assert!(lab.contents("a") == a && lab.contents("b") == b && lab.contents("a@s") == a, "export, {pages:?}");
        if let Some(mounted) = Mounted::with(&lab, &["-o", "ro"]) {
            assert!(fs::read(mounted.path("b")).unwrap() == b, "mount -o ro, {pages:?}");
            mounted.unmount(&lab);
        }
        let server = Server::start_with(&lab, POOL, &["--read-only"]);
        let exports = server.announced()["exports"].as_array().unwrap().clone();
        assert!(exports.iter().all(|export| export["read_only"] == Value::Bool(true)), "{exports:?}");
        if let Some(mut nbdcopy) = client("nbdcopy", "libnbd-bin") {
            let copy = lab.path("copy.raw");
            succeed(nbdcopy.arg(server.uri("b")).arg(&copy));
            assert!(fs::read(&copy).unwrap() == b, "serve --read-only, {pages:?}");
        }
        let error = lab.run(&["create", &format!("{POOL}/new"), "--size", "1M"]).refused();
        assert!(error.contains("reading only"), "{error}");
        server.stop();
        assert!(fs::read(lab.path(POOL)).unwrap() == before, "nothing was written, {pages:?}");
    }
}

#[test]
fn a_writer_meets_damaged_counts_and_names_the_way() {
    let (lab, ..) = lab();
    damage_counts(&lab);
    let error = lab.run(&["create", &format!("{POOL}/new"), "--size", "1M"]).refused();
    assert!(error.contains("forkdisk repair") && error.contains("forkdisk export"), "{error}");
}

#[test]
fn check_names_each_damaged_place_once() {
    let (lab, ..) = lab();
    // One leaf of counts, for seven blocks.
    let leaves = COUNTS.filter(|&page| damage(&lab, [page]) > 0).take(1).count();
    assert_eq!(leaves, 1);
    let run = lab.run(&["check", POOL]);
    assert_eq!(run.status.code(), Some(2), "{run:?}");
    assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
    assert!(run.stderr.contains("count page") && run.stderr.contains("forkdisk repair"), "{}", run.stderr);
}

#[test]
fn check_counts_the_pages_in_use_whatever_is_damaged() {
    let (lab, ..) = lab();
    let pages = lab.json(&["check", POOL])["pages"].clone();
    assert!(pages.as_u64() > Some(2048), "{pages}");
    for place in [LOG, COUNTS] {
        assert!(damage(&lab, place.clone()) > 0);
        let run = lab.run(&["check", POOL, "--json"]);
        let found: Value = serde_json::from_str(&run.stdout).unwrap_or_else(|e| panic!("{e}: {run:?}"));
        assert_eq!((run.status.code(), &found["pages"]), (Some(2), &pages), "{place:?}: {run:?}");
    }
}

#[test]
fn repair_makes_the_counts_anew_and_can_be_taken_back() {
    let (lab, a, b) = lab();
    damage_counts(&lab);
    let damaged = fs::read(lab.path(POOL)).unwrap();
    let dry = lab.ok(&["repair", "-n", POOL]);
    assert!(dry.contains("3 volumes and snapshots") && dry.contains("would have to be written"), "{dry}");
    assert!(fs::read(lab.path(POOL)).unwrap() == damaged, "-n writes nothing");
    assert_eq!(lab.run(&["check", POOL]).status.code(), Some(2));

    let said = lab.ok(&["repair", POOL, "--undo-file", "kept.undo"]);
    assert!(said.contains("kept.undo") && said.contains("now it is clean"), "{said}");
    lab.assert_clean();
    assert!(lab.contents("a") == a && lab.contents("b") == b);

    lab.ok(&["repair", POOL, "--undo", "kept.undo"]);
    assert!(fs::read(lab.path(POOL)).unwrap() == damaged, "what it wrote over is back");
    // The file of the first repair is not overwritten.
    let error = lab.run(&["repair", POOL, "--undo-file", "kept.undo"]);
    assert!(error.stderr.contains("kept.undo exists already"), "{error:?}");
    assert!(fs::read(lab.path(POOL)).unwrap() == damaged);

    let done = lab.json(&["repair", POOL, "--undo-file", "second.undo"]);
    assert_eq!((&done["before"]["status"], &done["after"]["status"]), (&"corrupt".into(), &"clean".into()));
    assert_eq!(done["undo"], "second.undo");
    // The pool can be written again: free space is known.
    lab.import("c", &a);
    lab.ok(&["delete", &format!("{POOL}/b")]);
    lab.assert_clean();
    assert!(lab.contents("a@s") == a && lab.contents("c") == a);
    let error = lab.run(&["repair", POOL, "--undo", "second.undo"]).refused();
    assert!(error.contains("changed since"), "{error}");
    assert!(lab.ok(&["repair", POOL]).contains("nothing to repair"));
}

#[test]
fn repair_leaves_the_journal_and_the_volatile_log_for_the_next_open() {
    let (lab, a, _) = lab();
    let server = Server::start(&lab);
    let mut client = Client::connect(server.socket(), "a").unwrap();
    let (flushed, acknowledged) = (noise(5, PAGE), noise(6, PAGE));
    client.write(0, &flushed, false).unwrap();
    client.flush().unwrap();
    client.write(MIB as u64, &acknowledged, false).unwrap();
    server.kill();
    damage(&lab, LOG);
    lab.run(&["repair", POOL, "--undo-file", "kept.undo"]);
    lab.assert_clean();
    let mut expected = a;
    expected[..PAGE].copy_from_slice(&flushed);
    expected[MIB..MIB + PAGE].copy_from_slice(&acknowledged);
    assert!(lab.contents("a") == expected);
    let server = Server::start(&lab);
    server.stop();
    assert!(lab.contents("a") == expected);
    lab.assert_clean();
}

#[test]
fn a_pool_in_use_is_neither_repaired_nor_taken_back() {
    let (lab, ..) = lab();
    damage_counts(&lab);
    lab.ok(&["repair", POOL, "--undo-file", "kept.undo"]);
    let server = Server::start(&lab);
    assert!(lab.ok(&["repair", POOL]).contains("nothing to repair"));
    let error = lab.run(&["repair", POOL, "--undo", "kept.undo"]).refused();
    assert!(error.contains("in use by forkdisk serve"), "{error}");
    server.stop();
    lab.assert_clean();
}

#[test]
fn a_damaged_superblock_is_told_and_written_anew_by_the_next_writer() {
    for page in [0, 128] {
        let (lab, a, _) = lab();
        assert_eq!(damage(&lab, [page]), 1);
        let run = lab.run(&["check", POOL]);
        assert_eq!(run.status.code(), Some(2), "{run:?}");
        assert!(run.stderr.contains("superblock") && run.stderr.lines().count() == 1, "{}", run.stderr);
        assert!(lab.contents("a") == a);
        assert_eq!(lab.run(&["check", POOL]).status.code(), Some(2), "reading mends nothing");
        lab.ok(&["create", &format!("{POOL}/new"), "--size", "1M"]);
        lab.assert_clean();
        // The other superblock may be damaged now.
        assert_eq!(damage(&lab, [128 - page]), 1);
        assert!(lab.contents("a") == a);
    }
}

#[test]
fn a_repair_of_damaged_maps_is_refused_and_says_where() {
    let (lab, a, _) = lab();
    damage_counts(&lab);
    // Tables lie after the journal; every page there that is not data is damaged.
    let bytes = fs::read(lab.path(POOL)).unwrap();
    let is_data = |page: usize| {
        let page = &bytes[page * PAGE..(page + 1) * PAGE];
        page.iter().all(|&byte| byte == 0) || a.chunks(PAGE).any(|data| data == page)
    };
    let others: Vec<usize> = (768..bytes.len() / PAGE).filter(|&page| !is_data(page)).collect();
    damage(&lab, others);
    let run = lab.run(&["repair", POOL]);
    assert!(!run.status.success() && run.stderr.contains("is damaged"), "{run:?}");
}

#[test]
fn without_a_whole_undo_file_nothing_is_written() {
    let (lab, ..) = lab();
    damage_counts(&lab);
    let before = fs::read(lab.path(POOL)).unwrap();
    let error = lab.run(&["repair", POOL, "--undo-file", "none/kept.undo"]);
    assert!(!error.status.success() && error.stderr.contains("none/kept.undo"), "{error:?}");
    let small = Command::new("bash")
        .args(["-c", "ulimit -f 8; trap '' XFSZ; exec \"$@\"", "-", env!("CARGO_BIN_EXE_forkdisk")])
        .args(["repair", POOL, "--undo-file", "kept.undo"])
        .current_dir(lab.path("."))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&small.stderr);
    assert!(!small.status.success() && said.contains("the pool was not written"), "{said}");
    assert!(!lab.path("kept.undo").exists(), "nothing half stays");
    assert!(fs::read(lab.path(POOL)).unwrap() == before);
}

#[test]
fn a_second_daemon_for_reading_is_refused_and_told_who_serves() {
    let (lab, ..) = lab();
    let server = Server::start_with(&lab, POOL, &["--read-only"]);
    let error = lab.run(&["serve", POOL, "--read-only"]).refused();
    assert!(error.contains("in use by forkdisk serve") && error.contains(&server.pid().to_string()), "{error}");
    server.stop();
}
