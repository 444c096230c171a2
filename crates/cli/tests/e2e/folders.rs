//! Folders as a whole: `fork`, `snapshot -r`, `clone -r`, `rollback -r`, `.snapshots/FOLDER/NAME`.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::harness::{Lab, POOL, Server, client, noise, succeed};
use crate::mount::{Mounted, sh};
use crate::mount_served::Both;
use crate::nbd::Client;

fn at(name: &str) -> String {
    format!("{POOL}/{name}")
}

/// A pool with the volumes `vm/disk` and `vm/run/memory`.
fn lab() -> Lab {
    let lab = Lab::with_pool("1G");
    lab.import("vm/disk", &noise(1, 300_000));
    lab.import("vm/run/memory", &noise(2, 100_000));
    lab
}

#[test]
fn fork_makes_all_children_at_one_instant_or_none() {
    let lab = lab();
    let made = lab.json(&["fork", &at("vm"), &at("kids/{08..11}"), "--set", "quota=2M", "--set", "gather=off"]);
    let made = made.as_array().unwrap();
    let names: Vec<&str> = made.iter().map(|v| v["name"].as_str().unwrap()).collect();
    assert_eq!(names[..3], ["kids/08/disk", "kids/08/run/memory", "kids/09/disk"]);
    assert!(
        names.len() == 8 && made.iter().all(|v| v["quota"] == 2 << 20 && v["gather"] == "off" && v["uri"].is_null())
    );
    assert!(lab.contents("kids/11/run/memory") == noise(2, 100_000));
    let before = lab.names();
    for (words, why) in [
        (vec!["fork", "vm", "a", "kids/08"], "\"kids/08\" is a folder"),
        (vec!["fork", "vm", "a", "a"], "named twice"),
        (vec!["fork", "none", "a"], "none"),
        (vec!["fork", "vm@none", "a"], "has a snapshot \"none\""),
        (vec!["fork", "vm", "a{1..", ""], "no '}'"),
        (vec!["clone", "vm", "a"], "vm is a folder: -r clones everything in it"),
        (vec!["snapshot", "vm@s"], "vm is a folder: -r takes a snapshot of everything in it"),
        (vec!["rollback", "vm@s"], "vm is a folder: -r rolls back everything in it"),
        (vec!["rollback", "-r", "vm@s"], "no volume in the folder \"vm\" has a snapshot \"s\""),
        (vec!["snapshot", "-r", "none@s"], "no volume or folder none"),
    ] {
        let full: Vec<String> = words
            .iter()
            .enumerate()
            .filter(|(_, word)| !word.is_empty())
            .map(|(i, word)| if i == 0 || word.starts_with('-') { word.to_string() } else { at(word) })
            .collect();
        let words: Vec<&str> = full.iter().map(String::as_str).collect();
        let message = lab.run(&words).refused();
        assert!(message.contains(why), "{words:?}: {message}");
    }
    for (set, why) in [("size=5G", "no property 'size'"), ("quota=x", "quota"), ("break=never", "never")] {
        let run = lab.run(&["fork", &at("vm"), &at("a"), "--set", set]);
        assert!(!run.status.success() && run.stderr.contains(why), "{run:?}");
    }
    assert_eq!(lab.names(), before);
    lab.assert_clean();
}

#[test]
fn a_folder_goes_back_to_its_snapshot_and_its_clones_stay() {
    let lab = lab();
    lab.ok(&["snapshot", "-r", &at("vm@s")]);
    lab.ok(&["clone", "-r", &at("vm@s"), &at("copy")]);
    let server = Server::start(&lab);
    let change = |name: &str| {
        let Some(mut io) = client("qemu-io", "qemu-utils") else { return false };
        succeed(io.args(["-f", "raw", "-c", "write -P 9 0 64k", &server.uri(name)]));
        true
    };
    if !change("vm/disk") || !change("vm/run/memory") || !change("copy/disk") {
        return;
    }
    lab.ok(&["create", &at("vm/later"), "--size", "1M"]);
    lab.ok(&["rollback", "-r", "--force", &at("vm@s")]);
    server.stop();
    assert!(lab.contents("vm/disk") == noise(1, 300_000) && lab.contents("vm/run/memory") == noise(2, 100_000));
    assert!(
        lab.contents("copy/disk")[..65536] == [9; 65536]
            && lab.contents("copy/disk")[65536..] == noise(1, 300_000)[65536..]
    );
    assert!(lab.names().contains(&"vm/later".to_string()));
    lab.assert_clean();
}

#[test]
fn a_volume_goes_back_to_its_origin_and_to_any_other_one() {
    let lab = lab();
    lab.ok(&["snapshot", &at("vm/disk@s")]);
    lab.ok(&["clone", &at("vm/disk@s"), &at("a"), &at("b")]);
    lab.ok(&["clone", &at("vm/disk"), &at("c")]);
    let message = lab.run(&["rollback", &at("c"), "--to-origin"]).refused();
    assert!(message.contains("from the volume vm/disk, which may have changed since: --to vm/disk"), "{message}");
    let message = lab.run(&["rollback", &at("vm/run/memory"), "--to-origin"]).refused();
    assert!(message.contains("is no clone"), "{message}");
    let server = Server::start(&lab);
    let Some(mut io) = client("qemu-io", "qemu-utils") else { return };
    succeed(io.args(["-f", "raw", "-c", "write -P 9 0 64k", &server.uri("a")]));
    lab.ok(&["set", "quota=1M", &at("b")]);
    let record = lab.json(&["rollback", &at("b"), "--to", &at("a")]);
    assert_eq!(
        (&record["name"], &record["quota"], &record["origin"]),
        (&"b".into(), &(1 << 20).into(), &"vm/disk@s".into())
    );
    lab.ok(&["rollback", &at("c"), "--to", &at("vm/run/memory")]);
    let held = Client::connect(server.socket(), "a").unwrap();
    let message = lab.run(&["rollback", &at("a"), "--to-origin"]).refused();
    assert!(message.contains("--force disconnects"), "{message}");
    lab.ok(&["rollback", &at("a"), "--to-origin", "--force"]);
    drop(held);
    server.stop();
    assert!(lab.contents("a") == noise(1, 300_000) && lab.contents("c") == noise(2, 100_000));
    assert!(lab.contents("b")[..65536] == [9; 65536] && lab.contents("b")[65536..] == noise(1, 300_000)[65536..]);
    let run = lab.run(&["rollback", &at("a@s"), "--to", &at("b")]);
    assert!(!run.status.success() && run.stderr.contains("is a snapshot: name a volume"), "{run:?}");
    lab.assert_clean();
}

#[test]
fn a_branch_takes_the_place_of_its_parent_under_its_clients() {
    let lab = lab();
    lab.ok(&["fork", &at("vm"), &at("kids/1")]);
    let server = Server::start(&lab);
    let mut old = Client::connect(server.socket(), "vm/disk").unwrap();
    let mut branch = Client::connect(server.socket(), "kids/1/disk").unwrap();
    branch.write(0, &[9; 4096], false).unwrap();
    lab.ok(&["swap", &at("vm"), &at("kids/1")]);
    // Each client keeps its volume; new ones find it by its new name.
    old.write(4096, &[8; 4096], false).unwrap();
    branch.write(8192, &[7; 4096], false).unwrap();
    let mut new = Client::connect(server.socket(), "vm/disk").unwrap();
    assert_eq!((new.read(0, 1).unwrap(), new.read(8192, 1).unwrap()), (vec![9], vec![7]));
    assert!(new.read(4096, 4096).unwrap() == noise(1, 300_000)[4096..8192]);
    for (a, b, why) in [("vm", "vm/disk", "lies within the other"), ("vm", "none", "no volume or folder none")] {
        let message = lab.run(&["swap", &at(a), &at(b)]).refused();
        assert!(message.contains(why), "{message}");
    }
    drop((old, branch, new));
    server.stop();
    assert!(lab.contents("kids/1/disk")[4096..8192] == [8; 4096] && lab.contents("vm/disk")[..4096] == [9; 4096]);
    lab.assert_clean();
}

#[test]
fn mkdir_takes_snapshots_of_a_folder_with_what_the_kernel_holds_and_shows_them() {
    let lab = lab();
    let Some(mount) = Mounted::new(&lab) else { return };
    fs::set_permissions(mount.path("vm"), fs::Permissions::from_mode(0o750)).unwrap();
    fs::set_permissions(mount.path("vm/disk"), fs::Permissions::from_mode(0o640)).unwrap();
    sh(
        &mount,
        "chown 7:8 vm vm/disk
         echo one > vm/disk; echo one > vm/run/memory; mkdir .snapshots/vm/s
         echo two > vm/disk; echo two > vm/run/memory; echo new > vm/new
         [ $(cat .snapshots/vm/s/disk) = one ]; [ $(cat .snapshots/vm/s/run/memory) = one ]
         [ \"$(ls .snapshots/vm | tr '\\n' ' ')\" = 'disk new run s ' ]; [ $(ls .snapshots/vm/s | wc -l) = 2 ]
         [ $(cat .snapshots/vm/disk/s) = one ]; [ ! -e .snapshots/vm/s/new ]
         ! mkdir .snapshots/vm/s 2>/dev/null; ! mkdir .snapshots/vm/disk 2>/dev/null
         ! mkdir .snapshots/none/s 2>/dev/null
         ! touch .snapshots/vm/s/x 2>/dev/null; ! rm .snapshots/vm/s/disk 2>/dev/null
         ! rmdir .snapshots/vm/run 2>/dev/null
         [ \"$(stat -c %a:%u:%g .snapshots/vm)\" = 750:7:8 ]; [ \"$(stat -c %a:%u .snapshots/vm/s)\" = 550:7 ]
         [ \"$(stat -c %a:%u:%g .snapshots/vm/disk)\" = 750:7:8 ]
         [ \"$(stat -c %a:%u .snapshots/vm/run/memory)\" = 755:0 ]
         cp -r .snapshots/vm/s copy; [ $(cat copy/run/memory) = one ]
         mv vm moved; [ $(cat .snapshots/moved/s/disk) = one ]; mv moved vm
         rmdir .snapshots/vm/s; [ ! -e .snapshots/vm/s ]; [ -z \"$(ls .snapshots/vm/disk)\" ]
         mkdir .snapshots/all; [ $(cat .snapshots/all/vm/new) = new ]; rmdir .snapshots/all",
    );
    mount.unmount(&lab);
    assert_eq!(lab.names(), ["copy/disk", "copy/run/memory", "vm/disk", "vm/new", "vm/run/memory"]);
    lab.assert_clean();
}

#[test]
fn what_a_fork_made_is_found_at_the_address_and_the_file_that_it_names() {
    let lab = lab();
    let Some(both) = Both::start(&lab) else { return };
    let made = lab.json(&["fork", &at("vm"), &at("k"), "--owner", "7:8", "--mode", "0600"]);
    let (disk, size) = (&made[0], noise(1, 300_000).len() as u64);
    let path = disk["paths"][0].as_str().unwrap();
    assert_eq!(succeed(std::process::Command::new("stat").args(["-c", "%a:%u:%g", path])).trim(), "600:7:8");
    assert!(fs::read(path).unwrap()[..size as usize] == noise(1, 300_000)[..]);
    let uri = disk["uri"].as_str().unwrap();
    if let Some(mut info) = client("qemu-img", "qemu-utils") {
        let shown = succeed(info.args(["info", "--output=json", uri]));
        assert!(shown.contains("virtual-size"), "{shown}");
    }
    let told = lab.ok(&["fork", &at("vm/disk"), &at("one"), &at("two")]);
    assert_eq!(told.lines().count(), 2);
    assert!(told.lines().all(|line| line.starts_with("nbd+unix:///")), "{told}");
    drop(both);
}
