//! A volume goes back to a snapshot under its clients: no request after the answer sees the old contents.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::attach::{Attaching, shell};
use crate::harness::{Lab, POOL, Server, noise, succeed};
use crate::mount_served::Both;
use crate::nbd::Client;

const PAGE: usize = 4096;
const PAGES: usize = 256;

/// A pool with the volume `v` of 256 pages, its snapshot `v@clean`, and the contents of both.
fn lab() -> (Lab, Vec<u8>) {
    let (lab, clean) = (Lab::with_pool("256M"), noise(5, PAGES * PAGE));
    lab.import("v", &clean);
    lab.ok(&["snapshot", &at("v@clean")]);
    (lab, clean)
}

fn at(object: &str) -> String {
    format!("{POOL}/{object}")
}

#[test]
fn nbd_clients_go_on_and_see_the_snapshot_while_others_write_parts_of_pages() {
    let (lab, clean) = lab();
    let server = Server::start(&lab);
    let mut own = Client::connect(server.socket(), "v").unwrap();
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Pages of the second half: either as in the snapshot, or with one sector written.
        let writer = scope.spawn(|| {
            let mut client = Client::connect(server.socket(), "v").unwrap();
            let mut count = 0_usize;
            while !ends.load(Ordering::Relaxed) {
                let page = PAGES / 2 + count % (PAGES / 2);
                client.write((page * PAGE + 512) as u64, &[0xAB; 512], false).unwrap();
                let found = client.read((page * PAGE) as u64, PAGE).unwrap();
                let mut written = clean[page * PAGE..][..PAGE].to_vec();
                assert!(found[..512] == written[..512] && found[1024..] == written[1024..], "page {page}");
                written[512..1024].fill(0xAB);
                assert!(found == written || found == clean[page * PAGE..][..PAGE], "page {page}");
                count += 1;
            }
            count
        });
        for round in 0..60_u8 {
            for page in (0..PAGES / 2).step_by(7) {
                own.write((page * PAGE) as u64, &[round; PAGE], false).unwrap();
            }
            let verb: &[&str] = match round % 2 {
                0 => &["rollback", "--live", &at("v@clean")],
                _ => &["rollback", "--live", &at("v"), "--to", &at("v@clean")],
            };
            lab.ok(verb);
            let half = PAGES / 2 * PAGE;
            assert!(own.read(0, half).unwrap() == clean[..half], "round {round}");
        }
        ends.store(true, Ordering::Relaxed);
        assert!(writer.join().unwrap() > 60);
    });
    drop(own);
    server.kill();
    let half = PAGES / 2 * PAGE;
    assert!(lab.contents("v")[..half] == clean[..half], "a rollback is durable when it is answered");
    lab.assert_clean();
}

#[test]
fn open_and_mapped_files_of_a_mount_show_the_snapshot_and_lose_what_was_dirty() {
    let (lab, clean) = lab();
    let Some(both) = Both::start(&lab) else { return };
    let script = format!(
        "
import mmap, os, subprocess, threading
pages, size = {PAGES}, {PAGES} * {PAGE}
fd = os.open({file:?}, os.O_RDWR)
clean = os.pread(fd, size, 0)
memory = mmap.mmap(fd, size)
ends = False

def dirty():
    # The kernel writes whole pages: these have old bytes, too.
    while not ends:
        for page in (0, 16, 48, 49, 50):
            memory[page * 4096 + 100] = clean[page * 4096 + 100] ^ 255

def is_clean(found):
    found = bytearray(found)
    for page in (0, 16, 48, 49, 50):
        found[page * 4096 + 100] = clean[page * 4096 + 100]
    return found == clean

thread = threading.Thread(target=dirty)
thread.start()
try:
  for round in range(40):
    memory[5:8] = b'new'
    memory[65536:65540] = b'more'
    os.pwrite(fd, b'written' * 1000, 200000)
    assert memory[5:8] == b'new'
    subprocess.check_call([{program:?}, 'rollback', '--live', {snapshot:?}], cwd={dir:?})
    assert is_clean(memory[:]), f'mapped, round {{round}}'
    assert is_clean(os.pread(fd, size, 0)), f'read, round {{round}}'
    if round % 8 == 0:
        os.fsync(fd)
        memory.flush()
        assert is_clean(os.pread(fd, size, 0)), f'after fsync, round {{round}}'
finally:
  ends = True
  thread.join()
subprocess.check_call([{program:?}, 'rollback', '--live', {snapshot:?}], cwd={dir:?})
assert memory[:] == clean
",
        file = both.path("v").to_str().unwrap(),
        program = lab.command(&[]).get_program().to_str().unwrap(),
        snapshot = at("v@clean"),
        dir = lab.path("").to_str().unwrap(),
    );
    succeed(Command::new("python3").args(["-c", &script]));
    both.stop();
    assert!(lab.contents("v") == clean);
    lab.assert_clean();
}

#[test]
fn a_folder_goes_back_at_one_instant_under_an_nbd_client_and_a_mount() {
    let lab = Lab::with_pool("256M");
    let names = ["vm/disk", "vm/state/memory"];
    names.iter().for_each(|name| lab.import(name, &noise(5, PAGES * PAGE)));
    lab.ok(&["snapshot", "-r", &at("vm@clean")]);
    let Some(mut both) = Both::start(&lab) else { return };
    let (clean, mut disk) = (noise(5, PAGES * PAGE), both.nbd(names[0]));
    let memory = File::options().read(true).write(true).open(both.path(names[1])).unwrap();
    for round in 1..40_u8 {
        for page in (0..PAGES).step_by(9) {
            disk.write((page * PAGE) as u64, &[round; PAGE], false).unwrap();
            memory.write_all_at(&[round; PAGE], (page * PAGE) as u64).unwrap();
        }
        lab.ok(&["rollback", "-r", "--live", &at("vm@clean")]);
        assert!(disk.read(0, PAGES * PAGE).unwrap() == clean, "round {round}");
        let mut found = vec![0; PAGES * PAGE];
        memory.read_exact_at(&mut found, 0).unwrap();
        assert!(found == clean, "round {round}");
    }
    // Two at once, and one with clients that write: all end, and what is acknowledged afterwards is kept.
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| (0..10).for_each(|_| drop(lab.run(&["rollback", "-r", "--live", &at("vm@clean")]))));
        }
        (0..200_u8).for_each(|i| disk.write(u64::from(i) * PAGE as u64, &[i; PAGE], false).unwrap());
    });
    disk.write(0, &[7; PAGE], true).unwrap();
    drop((disk, memory));
    both.kill();
    assert!(lab.contents(names[0])[..PAGE] == [7; PAGE] && lab.contents(names[1]) == clean);
    lab.assert_clean();
}

#[test]
fn an_attached_device_drops_its_cache_and_a_mounted_one_is_refused() {
    let Some(it) = Attaching::with_pool("256M") else { return };
    it.lab.ok(&["create", "--size", "64M", &at("v")]);
    let device = it.attach("v");
    succeed(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&device));
    it.mount(&device, "rw");
    std::fs::write(it.below.join("kept"), noise(1, 100_000)).unwrap();
    it.umount();
    it.lab.ok(&["snapshot", &at("v@clean")]);
    for round in 0..5 {
        it.mount(&device, "rw");
        std::fs::write(it.below.join("lost"), noise(round, 100_000)).unwrap();
        let refused = it.lab.run(&["rollback", "--live", &at("v@clean")]).refused();
        assert!(
            refused.contains(&format!("which is mounted or in use: `umount {}` first", device.display())),
            "{refused}"
        );
        it.umount();
        shell(&format!("dd if={} of=/dev/null bs=1M status=none", device.display()));
        it.lab.ok(&["rollback", "--live", &at("v@clean")]);
        it.mount(&device, "ro");
        assert!(!it.below.join("lost").exists(), "round {round}");
        assert!(std::fs::read(it.below.join("kept")).unwrap() == noise(1, 100_000));
        it.umount();
    }
}

#[test]
fn a_disk_in_use_does_not_get_smaller_and_an_origin_has_no_live_rollback() {
    let (lab, clean) = lab();
    lab.ok(&["create", "--size", "64K", &at("small")]);
    lab.ok(&["create", "--size", "4M", &at("large")]);
    let server = Server::start(&lab);
    let mut client = Client::connect(server.socket(), "v").unwrap();
    let refused = lab.run(&["rollback", "--live", &at("v"), "--to", &at("small")]).refused();
    assert!(refused.contains("a disk in use does not get smaller"), "{refused}");
    assert!(client.read(0, clean.len()).unwrap() == clean);
    lab.ok(&["rollback", "--live", &at("v"), "--to", &at("large")]);
    assert!(client.read(0, clean.len()).unwrap() == vec![0; clean.len()]);
    let refused = lab.run(&["rollback", &at("v@clean")]).refused();
    assert!(refused.contains("--live goes back under them"), "{refused}");
    drop(client);
    server.stop();
    lab.assert_clean();
}
