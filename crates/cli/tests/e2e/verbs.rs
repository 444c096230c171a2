//! Effects of the verbs on an idle pool.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::Stdio;

use serde_json::json;

use crate::harness::{Lab, LimitedWait, POOL, Server, noise};
use crate::nbd::Client;

const MIB: usize = 1 << 20;

fn at(name: &str) -> String {
    format!("{POOL}/{name}")
}

#[test]
fn init_takes_an_empty_file_but_no_other() {
    let lab = Lab::empty();
    lab.write_file("empty.img", b"");
    lab.ok(&["init", "empty.img", "--size", "64M"]);
    let message = lab.run(&["init", "empty.img", "--size", "64M"]).refused();
    assert!(message.contains("not empty") && message.contains("--force"), "{message}");
    lab.ok(&["init", "empty.img", "--size", "128M", "--force"]);
    assert_eq!(lab.json(&["stats", "empty.img"])["size"], 128 << 20);
}

#[test]
fn an_idle_pool_is_not_read_only() {
    let lab = Lab::with_pool("64M");
    assert_eq!(lab.json(&["stats", POOL])["mode"], "rw");
}

#[test]
fn init_makes_a_sparse_file() {
    let lab = Lab::with_pool("20G");
    let meta = fs::metadata(lab.path(POOL)).unwrap();
    assert_eq!(meta.len(), 20 << 30);
    assert!(meta.blocks() * 512 < 256 << 20, "{} bytes taken", meta.blocks() * 512);
}

#[test]
fn a_volume_far_larger_than_the_pool_can_be_created() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", &at("huge"), "--size", "1P"]);
    assert_eq!(lab.json(&["list", POOL])[0]["size"], 1u64 << 50);
    lab.assert_clean();
}

#[test]
fn several_volumes_are_created_together_or_not_at_all() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", &at("a"), &at("dir/b"), "--size", "1M"]);
    assert_eq!(lab.names(), ["a", "dir/b"]);
    lab.run(&["create", &at("c"), &at("a"), "--size", "1M"]).refused();
    assert_eq!(lab.names(), ["a", "dir/b"], "c is not left behind");
}

#[test]
fn an_image_of_any_length_comes_back_to_the_byte() {
    let lab = Lab::with_pool("256M");
    for (name, len) in [("byte", 1), ("sector", 512), ("odd", 3 * MIB + 777), ("even", 2 * MIB)] {
        let image = noise(len as u64, len);
        lab.write_file("image.raw", &image);
        lab.ok(&["import", "image.raw", &at(name)]);
        assert_eq!(lab.contents(name), image, "{name} to a pipe");
        lab.ok(&["export", &at(name), "out.raw", "--force"]);
        assert_eq!(fs::read(lab.path("out.raw")).unwrap(), image, "{name} to a file");
    }
    lab.assert_clean();
}

#[test]
fn an_image_from_a_pipe_comes_back_to_the_byte() {
    let lab = Lab::with_pool("512M");
    for (name, len) in [("odd", 5 * MIB + 1), ("beyond-the-first-guess", 65 * MIB + 3)] {
        let image = noise(1 + len as u64, len);
        lab.import(name, &image);
        assert!(lab.contents(name) == image, "{name} differs");
    }
    lab.assert_clean();
}

#[test]
fn an_import_clears_away_what_a_killed_one_left() {
    let lab = Lab::with_pool("64M");
    let mut killed = lab.command(&["import", "-", &at("a")]).stdin(Stdio::piped()).spawn().unwrap();
    killed.stdin.as_mut().unwrap().write_all(&noise(1, 8 * MIB)).unwrap();
    killed.put_down().unwrap();
    assert!(lab.names().is_empty(), "what is not whole has no name");
    lab.import("a", b"whole");
    assert_eq!(lab.names(), ["a"]);
    assert_eq!(lab.contents("a"), b"whole");
    lab.ok(&["delete", &at("a")]);
    assert_eq!(lab.stat("used"), Lab::with_pool("64M").stat("used"));
    lab.assert_clean();
}

#[test]
fn holes_and_zeroes_of_an_image_take_no_space() {
    let lab = Lab::with_pool("256M");
    let file = File::create(lab.path("sparse.raw")).unwrap();
    file.set_len(10 << 30).unwrap();
    file.write_all_at(&noise(1, 8192), 5 << 30).unwrap();
    file.write_all_at(&vec![0; 8 * MIB], 1 << 30).unwrap();
    lab.ok(&["import", "sparse.raw", &at("a")]);
    assert_eq!(lab.json(&["list", &at("a")])[0]["referenced"], 8192);
    lab.import("b", &vec![0; 16 * MIB]);
    assert_eq!(lab.json(&["list", &at("b")])[0]["referenced"], 0);
}

#[test]
fn an_exported_file_is_as_sparse_as_the_volume() {
    let lab = Lab::with_pool("256M");
    let mut image = vec![0; 64 * MIB];
    image[40 * MIB..41 * MIB].copy_from_slice(&noise(2, MIB));
    lab.import("a", &image);
    lab.ok(&["export", &at("a"), "out.raw"]);
    let meta = fs::metadata(lab.path("out.raw")).unwrap();
    assert_eq!(meta.len(), 64 << 20);
    assert!(meta.blocks() * 512 <= 2 << 20, "{} bytes taken", meta.blocks() * 512);
    assert!(fs::read(lab.path("out.raw")).unwrap() == image);
}

#[test]
fn export_spares_a_file_that_is_not_empty() {
    let lab = Lab::with_pool("64M");
    lab.import("a", b"new");
    lab.write_file("out.raw", b"precious");
    let message = lab.run(&["export", &at("a"), "out.raw"]).refused();
    assert!(message.contains("--force"), "{message}");
    assert_eq!(fs::read(lab.path("out.raw")).unwrap(), b"precious");
}

#[test]
fn a_clone_shares_everything_and_depends_on_nothing() {
    let lab = Lab::with_pool("256M");
    let image = noise(3, 8 * MIB);
    lab.import("base", &image);
    lab.ok(&["snapshot", &at("base@clean")]);
    let used = lab.stat("used");
    lab.ok(&["clone", &at("base@clean"), &at("vm1"), &at("vm2")]);
    assert!(lab.stat("used") < used + MIB as u64, "clones take next to nothing");
    assert_eq!(lab.json(&["list", &at("vm1")])[0]["origin"], "base@clean");
    lab.ok(&["delete", "-r", &at("base")]);
    assert!(lab.contents("vm1") == image && lab.contents("vm2") == image);
    lab.assert_clean();
}

#[test]
fn a_group_snapshot_is_taken_of_all_or_none() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", &at("a"), &at("b"), "--size", "1M"]);
    lab.ok(&["snapshot", &at("a@x"), &at("b@x")]);
    assert_eq!(lab.names(), ["a", "a@x", "b", "b@x"]);
    lab.run(&["snapshot", &at("a@y"), &at("b@x")]).refused();
    lab.run(&["snapshot", &at("a@y"), &at("none@y")]).refused();
    assert_eq!(lab.names(), ["a", "a@x", "b", "b@x"]);
}

#[test]
fn rollback_brings_the_old_contents_back_and_keeps_newer_snapshots() {
    let lab = Lab::with_pool("256M");
    lab.import("a", &noise(4, 2 * MIB));
    lab.ok(&["snapshot", &at("a@old")]);
    lab.ok(&["resize", &at("a"), "--size", "1M", "--allow-shrink"]);
    lab.ok(&["snapshot", &at("a@new")]);
    lab.ok(&["rollback", &at("a@old")]);
    assert!(lab.contents("a") == noise(4, 2 * MIB));
    assert!(lab.contents("a@new") == noise(4, 2 * MIB)[..MIB]);
    lab.assert_clean();
}

#[test]
fn deleting_everything_in_any_order_gives_all_space_back() {
    let lab = Lab::with_pool("256M");
    let before = lab.stat("used");
    for order in [["a", "b", "c"], ["c", "b", "a"], ["b", "a", "c"]] {
        lab.import("a", &noise(5, 4 * MIB));
        lab.ok(&["clone", &at("a"), &at("b")]);
        lab.ok(&["clone", &at("b"), &at("c")]);
        order.iter().for_each(|name| drop(lab.ok(&["delete", &at(name)])));
        assert_eq!(lab.stat("volumes"), 0);
        assert_eq!(lab.stat("used"), before, "after {order:?}");
    }
    lab.assert_clean();
}

#[test]
fn a_volume_with_snapshots_is_deleted_only_recursively() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", &at("a"), "--size", "1M"]);
    lab.ok(&["snapshot", &at("a@x")]);
    let message = lab.run(&["delete", &at("a")]).refused();
    assert!(message.contains("a@x") && message.contains("-r"), "{message}");
    assert_eq!(lab.names(), ["a", "a@x"]);
    lab.ok(&["delete", &at("a"), &at("a@x")]);
    assert!(lab.names().is_empty());
}

#[test]
fn a_dry_run_lists_every_object_and_deletes_none() {
    let lab = Lab::with_pool("256M");
    lab.import("a", &noise(6, 2 * MIB));
    lab.ok(&["snapshot", &at("a@x")]);
    lab.ok(&["create", &at("a2"), "--size", "1M"]);
    let text = lab.ok(&["delete", "-r", "-n", "-v", &at("a")]);
    assert!(text.contains("would delete a\n") && text.contains("would delete a@x\n"), "{text}");
    assert!(!text.contains("a2"), "{text}");
    let report = lab.json(&["delete", "-r", "-n", &at("a")]);
    assert_eq!(report["deleted"], json!(["a", "a@x"]));
    let frees = report["frees"].as_u64().unwrap();
    assert!(frees >= 2 << 20, "{frees}");
    assert_eq!(lab.names(), ["a", "a2", "a@x"]);
    let used = lab.stat("used");
    lab.ok(&["delete", "-r", &at("a")]);
    assert_eq!(used - lab.stat("used"), frees, "what the dry run promised");
}

#[test]
fn a_folder_is_deleted_recursively() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", &at("dir/a"), &at("dir/sub/b"), &at("directory"), "--size", "1M"]);
    let message = lab.run(&["delete", &at("dir")]).refused();
    assert!(message.contains("folder"), "{message}");
    lab.ok(&["delete", "-r", &at("dir")]);
    assert_eq!(lab.names(), ["directory"]);
}

#[test]
fn rename_takes_the_snapshots_along() {
    let lab = Lab::with_pool("64M");
    lab.import("a", b"contents");
    lab.ok(&["snapshot", &at("a@x")]);
    lab.ok(&["rename", &at("a"), &at("dir/b")]);
    lab.ok(&["rename", &at("dir/b@x"), &at("dir/b@y")]);
    assert_eq!(lab.names(), ["dir/b", "dir/b@y"]);
    assert_eq!(lab.contents("dir/b@y"), b"contents");
}

#[test]
fn resize_grows_with_zeroes_and_shrinks_only_when_told() {
    let lab = Lab::with_pool("64M");
    lab.import("a", &noise(7, 10_000));
    let message = lab.run(&["resize", &at("a"), "--size", "5000"]).refused();
    assert!(message.contains("--allow-shrink"), "{message}");
    assert_eq!(lab.contents("a"), noise(7, 10_000));
    lab.ok(&["resize", &at("a"), "--size", "5000", "--allow-shrink"]);
    lab.ok(&["resize", &at("a"), "--size", "20000"]);
    let mut expected = noise(7, 10_000)[..5000].to_vec();
    expected.resize(20_000, 0);
    assert_eq!(lab.contents("a"), expected, "nothing comes back from beyond the old end");
}

/// Writes through the server, since no image is as long as this volume.
#[test]
fn a_volume_of_1_pib_is_written_at_its_ends_copied_compared_and_cut_down() {
    const END: u64 = 1 << 50;
    let lab = Lab::with_pool("64M");
    let empty = lab.stat("used");
    lab.ok(&["create", &at("a"), "--size", "1P"]);
    let put = |name: &str, writes: &[(u64, usize)]| {
        let server = Server::start(&lab);
        let mut client = Client::connect(server.socket(), name).unwrap();
        for &(offset, len) in writes {
            client.write(offset, &noise(offset, len), false).unwrap();
            assert!(client.read(offset, len).unwrap() == noise(offset, len));
        }
        drop(client);
        server.stop();
    };
    put("a", &[(0, 100), (END / 2 - 100, 200), (END - 5000, 5000)]);
    lab.ok(&["snapshot", &at("a@x")]);
    lab.ok(&["clone", &at("a@x"), &at("b")]);
    put("b", &[(END - 1, 1), (END / 4, 4096)]);
    let data = |offset: u64, length: u64| json!({"offset": offset, "length": length, "exists": true});
    let diff = lab.json(&["diff", &at("a@x"), &at("b")]);
    assert_eq!(diff, json!([data(END / 4, 4096), data(END - 4096, 4096)]));
    let map = lab.json(&["map", &at("b")]);
    let present = map.as_array().unwrap().iter().filter(|run| run["present"] == true);
    assert_eq!(present.map(|run| run["length"].as_u64().unwrap()).sum::<u64>(), 6 * 4096);
    lab.ok(&["resize", &at("b"), "--size", "1K", "--allow-shrink"]);
    lab.ok(&["resize", &at("b"), "--size", "1P"]);
    assert_eq!(lab.json(&["list", &at("b")])[0]["referenced"], 4096);
    lab.assert_clean();
    lab.ok(&["delete", "-r", &at("a"), &at("b")]);
    assert_eq!(lab.stat("used"), empty);
}

#[test]
fn the_pool_grows_and_never_shrinks() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["grow", POOL, "--size", "256M"]);
    assert_eq!(lab.stat("size"), 256 << 20);
    assert_eq!(fs::metadata(lab.path(POOL)).unwrap().len(), 256 << 20);
    lab.run(&["grow", POOL, "--size", "64M"]).refused();
    lab.import("a", &noise(8, 100 * MIB));
    lab.assert_clean();
}

#[test]
fn the_chunk_can_be_changed() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", &at("a"), "--size", "1M", "--chunk", "128K"]);
    assert_eq!(lab.json(&["list", &at("a")])[0]["chunk"], 128 << 10);
    lab.ok(&["set", "chunk=4K", &at("a")]);
    assert_eq!(lab.json(&["list", &at("a")])[0]["chunk"], 4096);
    lab.run(&["set", "chunk=5000", &at("a")]).refused();
}

#[test]
fn du_tells_what_is_held_alone_and_what_deleting_frees() {
    let lab = Lab::with_pool("256M");
    lab.ok(&["create", &at("c"), "--size", "1M"]);
    lab.import("a", &noise(9, 4 * MIB));
    lab.ok(&["clone", &at("a"), &at("b")]);
    let both = lab.json(&["du", &at("a"), &at("b")]);
    assert_eq!(both["volumes"][0]["referenced"], 4 << 20);
    assert!(both["volumes"][0]["exclusive"].as_u64().unwrap() < 64 << 10, "shared with b: {both}");
    let frees = both["frees"].as_u64().unwrap();
    let used = lab.stat("used");
    lab.ok(&["delete", &at("a"), &at("b")]);
    assert_eq!(used - lab.stat("used"), frees);
}

#[test]
fn diff_of_what_is_shared_is_empty() {
    let lab = Lab::with_pool("64M");
    lab.import("a", &noise(10, MIB));
    lab.ok(&["snapshot", &at("a@x")]);
    assert_eq!(lab.json(&["diff", &at("a@x"), &at("a")]), json!([]));
    lab.ok(&["create", &at("empty"), "--size", "1M"]);
    assert_eq!(lab.json(&["diff", &at("empty"), &at("a")]), json!([{ "offset": 0, "length": MIB, "exists": true }]));
    assert_eq!(lab.json(&["diff", &at("a"), &at("empty")]), json!([{ "offset": 0, "length": MIB, "exists": false }]));
}

#[test]
fn map_covers_a_volume_from_end_to_end() {
    let lab = Lab::with_pool("64M");
    let mut image = vec![0; 3 * MIB];
    image[MIB..MIB + 8192].copy_from_slice(&noise(11, 8192));
    lab.import("a", &image);
    let hole = |start: usize, length: usize| {
        let (present, zero, data) = (false, true, false);
        json!({ "start": start, "length": length, "depth": 0, "present": present, "zero": zero, "data": data })
    };
    let data = json!({ "start": MIB, "length": 8192, "depth": 0, "present": true, "zero": false, "data": true });
    let expected = json!([hole(0, MIB), data, hole(MIB + 8192, 2 * MIB - 8192)]);
    assert_eq!(lab.json(&["map", &at("a")]), expected);
}

#[test]
fn how_chunks_are_broken_and_the_copier_are_set_and_last() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", &at("a"), "--size", "8M", "--chunk", "1M", "--break", "copy"]);
    lab.ok(&["create", &at("b"), "--size", "8M"]);
    assert_eq!(lab.json(&["list", POOL])[0]["break"], "copy");
    assert_eq!(lab.json(&["list", POOL])[1]["break"], "split");
    lab.ok(&["set", "break=copy", &at("b")]);
    lab.ok(&["set", "break=split", &at("a")]);
    assert_eq!(lab.json(&["list", POOL])[0]["break"], "split");
    assert_eq!(lab.json(&["list", POOL])[1]["break"], "copy");
    assert!(!lab.run(&["set", "break=never", &at("a")]).status.success());
    let set =
        lab.json(&["copier", POOL, "--set", "subjob_size=1M", "split_count=4", "throttle=50%", "throttle=100M/s"]);
    let again = lab.json(&["copier", POOL]);
    for shown in [&set, &again] {
        assert_eq!((&shown["subjob_size"], &shown["split_count"]), (&json!(1 << 20), &json!(4)));
        assert_eq!((&shown["percent"], &shown["bytes_per_second"]), (&json!(50), &json!(100 << 20)));
    }
    lab.ok(&["copier", POOL, "--volume", "b", "--set", "throttle=10M/s"]);
    assert_eq!(lab.json(&["copier", POOL, "--volume", "b"])["bytes_per_second"], 10 << 20);
    assert_eq!(lab.json(&["copier", POOL, "--volume", "b"])["break"], "copy");
    lab.ok(&["copier", POOL, "--set", "throttle=none"]);
    assert_eq!(lab.json(&["copier", POOL])["percent"], 100);
    let message = lab.run(&["copier", POOL, "--set", "buffers=1M"]).refused();
    assert!(message.contains("buffers") && message.contains("five sub-jobs"), "{message}");
    for setting in ["split_count=2", "offload=on"] {
        let message = lab.run(&["copier", POOL, "--volume", "b", "--set", setting]).refused();
        assert!(message.contains("whole pool"), "{message}");
    }
    assert_eq!(lab.json(&["copier", POOL])["offload"], false);
    assert!(
        lab.ok(&["copier", POOL, "--set", "offload=on"])
            .lines()
            .any(|line| line.starts_with("offload") && line.ends_with("on"))
    );
    assert_eq!(lab.json(&["copier", POOL])["offload"], true);
    assert!(lab.ok(&["copier", POOL]).contains("subjob_size"));
    lab.assert_clean();
}

#[test]
fn a_served_pool_copies_chunks_and_shows_what_it_copied() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", &at("a"), "--size", "8M", "--chunk", "1M", "--break", "copy"]);
    let server = Server::start(&lab);
    let image = noise(3, 8 * MIB);
    let mut client = Client::connect(server.socket(), "a").unwrap();
    client.write(0, &image, false).unwrap();
    lab.ok(&["snapshot", &at("a@s")]);
    client.write(MIB as u64 + 4096, &[7; 4096], false).unwrap();
    let shown = lab.json(&["copier", POOL, "--volume", "a"]);
    assert_eq!((&shown["jobs"], &shown["bytes_written"]), (&json!(1), &json!(MIB)));
    let mut expected = image;
    expected[MIB + 4096..MIB + 8192].fill(7);
    assert!(client.read(0, 8 * MIB).unwrap() == expected);
    server.stop();
}
