//! The keeper: mounts, and loop devices on them, go on when their daemon is killed and another one starts.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::attach::{Attaching, device_text, shell};
use crate::harness::{LIMIT, Lab, LimitedWait, POOL, Server, client, noise, succeed, wait_at_most, wait_until};

const MIB: usize = 1 << 20;
const KILLS: u64 = 20;

/// Kills the server and starts another one after `pause`.
fn restart(lab: &Lab, server: Server, options: &[&str], pause: u64) -> Server {
    server.kill();
    thread::sleep(Duration::from_millis(pause));
    Server::start_with(lab, POOL, options)
}

/// Lets the kernel learn that closing a file on the mount needs no request. Otherwise a start of a program, which
/// closes the files of this process in its copy, would wait for the daemon that it is to start.
pub fn close_a_file_on(dir: &Path) {
    drop(File::create(dir.join("closed")).unwrap());
    fs::remove_file(dir.join("closed")).unwrap();
}

/// Returns the number of keepers of the pool.
fn keepers(lab: &Lab) -> usize {
    let uuid = lab.json(&["stats", POOL])["uuid"].as_str().unwrap().to_string();
    let all = fs::read_dir("/proc").unwrap().flatten();
    let lines = all.filter_map(|process| fs::read(process.path().join("cmdline")).ok());
    let lines = lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " "));
    lines.filter(|line| line.contains(" keeper ") && line.contains(&uuid)).count()
}

/// Exchanges two names.
fn exchange(a: &Path, b: &Path) -> rustix::io::Result<()> {
    rustix::fs::renameat_with(rustix::fs::CWD, a, rustix::fs::CWD, b, rustix::fs::RenameFlags::EXCHANGE)
}

/// Creates, writes, reads, exchanges, renames and removes files in `dir` until `ends` is set; returns the number of
/// rounds.
fn work(dir: &Path, n: u64, ends: &AtomicBool) -> u64 {
    let (file, other, folder) = (dir.join(format!("f{n}")), dir.join(format!("g{n}")), dir.join(format!("d{n}")));
    let mut round = 0;
    while !ends.load(Ordering::Relaxed) {
        let data = noise(n * 1_000_000 + round, 200_000);
        let opened = File::options().write(true).create_new(true).open(&file);
        let opened = opened.unwrap_or_else(|e| panic!("{n}, round {round}: creating: {e}"));
        opened.write_all_at(&data, 0).unwrap();
        if round % 3 == 0 {
            opened.sync_all().unwrap();
        }
        let (mark, beside) = (format!("{n}, round {round}"), dir.join(format!("h{n}")));
        fs::write(&beside, &mark).unwrap();
        exchange(&file, &beside).unwrap_or_else(|e| panic!("{mark}: exchanging: {e}"));
        assert!(fs::read(&beside).unwrap() == data && fs::read(&file).unwrap() == mark.as_bytes(), "{mark}");
        fs::rename(&beside, &other).unwrap_or_else(|e| panic!("{mark}: renaming: {e}"));
        fs::remove_file(&file).unwrap_or_else(|e| panic!("{mark}: removing: {e}"));
        assert!(fs::read(&other).unwrap() == data, "{n}, round {round}");
        fs::create_dir(&folder).unwrap_or_else(|e| panic!("{n}, round {round}: a folder: {e}"));
        fs::rename(&other, folder.join("x")).unwrap();
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        assert!(fs::read(folder.join("x")).unwrap() == data, "{n}, round {round}");
        fs::remove_file(folder.join("x")).unwrap_or_else(|e| panic!("{n}, round {round}: removing: {e}"));
        assert_eq!(opened.metadata().unwrap().len(), data.len() as u64, "it is open");
        fs::remove_dir(&folder).unwrap_or_else(|e| panic!("{n}, round {round}: removing a folder: {e}"));
        round += 1;
    }
    round
}

/// A mount and what is open on it go on over twenty kills.
fn kill_below_programs(lab: &Lab) {
    fs::create_dir(lab.path("m")).unwrap();
    let options = ["--mount", "m", "--keeper", "--keeper-limit", "30"];
    let mut server = Server::start_with(lab, POOL, &options);
    let dir = lab.path("m");
    close_a_file_on(&dir);
    fs::create_dir(dir.join("d")).unwrap();
    let removed = File::options().read(true).write(true).create(true).truncate(true).open(dir.join("d/x")).unwrap();
    removed.write_all_at(&noise(1, MIB), 0).unwrap();
    fs::remove_file(dir.join("d/x")).unwrap();
    let folder = File::open(dir.join("d")).unwrap();
    let ends = Arc::new(AtomicBool::new(false));
    let writers: Vec<_> = (0..4)
        .map(|n| {
            let (ends, dir) = (ends.clone(), dir.join("d"));
            thread::spawn(move || work(&dir, n, &ends))
        })
        .collect();
    for kill in 0..KILLS {
        thread::sleep(Duration::from_millis(30 + kill * 7 % 50));
        server = restart(lab, server, &options, kill % 4 * 40);
        let mut found = vec![0; MIB];
        removed.read_exact_at(&mut found, 0).unwrap();
        assert!(found == noise(1, MIB), "kill {kill}");
        removed.write_all_at(&noise(1, 4096), 0).unwrap();
        assert!(folder.metadata().unwrap().is_dir());
    }
    ends.store(true, Ordering::Relaxed);
    let rounds: Vec<u64> = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
    assert!(rounds.iter().all(|&count| count > KILLS / 4), "{rounds:?}");
    drop((removed, folder));
    server.stop();
    assert_eq!(lab.names(), Vec::<String>::new(), "the removed file has gone");
    lab.assert_clean();
}

#[test]
fn a_mount_and_what_is_open_on_it_go_on_over_twenty_kills() {
    kill_below_programs(&Lab::with_pool("256M"));
}

#[test]
fn a_mount_with_a_request_log_goes_on_over_twenty_kills() {
    let lab = Lab::with_pool("256M");
    lab.log_requests();
    kill_below_programs(&lab);
}

/// Starting a program closes this process's files in its copy, which is no request of the mount (Linux 5.16).
#[test]
fn a_program_with_open_files_of_the_mount_can_start_the_daemon() {
    let lab = Lab::with_pool("64M");
    fs::create_dir(lab.path("m")).unwrap();
    let options = ["--mount", "m", "--keeper", "--keeper-limit", "30"];
    let server = Server::start_with(&lab, POOL, &options);
    let file = File::options().read(true).write(true).create_new(true).open(lab.path("m/a")).unwrap();
    let other = File::open(lab.path("m/a")).unwrap();
    file.write_all_at(&noise(1, MIB), 0).unwrap();
    let server = restart(&lab, server, &options, 10);
    let mut found = vec![0; MIB];
    other.read_exact_at(&mut found, 0).unwrap();
    assert!(found == noise(1, MIB));
    drop((file, other));
    server.stop();
    lab.assert_clean();
}

#[test]
fn a_file_system_on_a_loop_device_goes_on_over_twenty_kills() {
    if let Some(attaching) = Attaching::with_pool("512M") {
        kill_below_a_loop_device(&attaching);
    }
}

#[test]
fn a_loop_device_on_a_mount_with_a_request_log_goes_on_over_twenty_kills() {
    if let Some(attaching) = Attaching::with_pool("512M") {
        attaching.lab.log_requests();
        kill_below_a_loop_device(&attaching);
    }
}

/// A file system on a loop device goes on over twenty kills.
fn kill_below_a_loop_device(attaching: &Attaching) {
    let Some(mut fio) = client("fio", "fio") else { return };
    let lab = &attaching.lab;
    lab.ok(&["create", &format!("{POOL}/a"), "--size", "128M"]);
    let options = ["--keeper", "--keeper-limit", "30"];
    let mut server = Server::start_with(lab, POOL, &options);
    let device = attaching.attach("a");
    shell(&format!("mkfs.ext4 -q {}", device_text(&device)));
    attaching.mount(&device, "rw");
    let file = attaching.below.join("data");
    fio.args(["--name=kills", "--size=64M", "--bs=4k", "--rw=randwrite", "--verify=crc32c", "--verify_fatal=1"])
        .args(["--ioengine=libaio", "--iodepth=16", "--direct=1", "--loops=3", "--fsync=64", "--verify_backlog=256"])
        .arg("--verify_state_save=0")
        .arg(format!("--filename={}", file.display()));
    let mut load = fio.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    for kill in 0..KILLS {
        thread::sleep(Duration::from_millis(40 + kill * 11 % 60));
        server = restart(lab, server, &options, kill % 3 * 60);
    }
    let status = load.wait_within(LIMIT).unwrap();
    let said = std::io::read_to_string(load.stderr.take().unwrap()).unwrap();
    assert!(status.success(), "{status}: {said}");
    attaching.umount();
    succeed(Command::new("e2fsck").args(["-fn", device_text(&device)]));
    lab.ok(&["detach", &format!("{POOL}/a")]);
    server.stop();
    lab.assert_clean();
}

#[test]
fn an_upgraded_mount_survives_a_kill_too() {
    kill_after_an_upgrade(&Lab::with_pool("64M"));
}

#[test]
fn an_upgraded_mount_with_a_request_log_survives_a_kill_too() {
    let lab = Lab::with_pool("64M");
    lab.log_requests();
    kill_after_an_upgrade(&lab);
}

/// An upgraded mount survives a kill.
fn kill_after_an_upgrade(lab: &Lab) {
    fs::create_dir(lab.path("m")).unwrap();
    let options = ["--mount", "m", "--keeper", "--keeper-limit", "30"];
    let mut server = Server::start_with(lab, POOL, &options);
    close_a_file_on(&lab.path("m"));
    let file = File::options().read(true).write(true).create_new(true).open(lab.path("m/a")).unwrap();
    file.write_all_at(&noise(1, MIB), 0).unwrap();
    let upgraded = lab.json(&["upgrade", POOL])["pid"].as_u64().unwrap();
    // The keeper is a child of the first process, which ends with the one that serves.
    succeed(Command::new("kill").args(["-KILL", &upgraded.to_string()]));
    wait_at_most(server.child_mut(), Duration::from_secs(20));
    drop(server);
    let server = Server::start_with(lab, POOL, &options);
    let mut found = vec![0; MIB];
    file.read_exact_at(&mut found, 0).unwrap();
    assert!(found == noise(1, MIB));
    drop(file);
    server.stop();
    wait_until("the keeper has ended", || keepers(lab) == 0);
}

#[test]
fn mounts_that_no_daemon_continues_end_after_the_limit() {
    let lab = Lab::with_pool("64M");
    fs::create_dir(lab.path("m")).unwrap();
    let options = ["--mount", "m", "--keeper", "--keeper-limit", "1"];
    let server = Server::start_with(&lab, POOL, &options);
    close_a_file_on(&lab.path("m"));
    let file = File::options().read(true).write(true).create_new(true).open(lab.path("m/a")).unwrap();
    file.write_all_at(&noise(1, MIB), 0).unwrap();
    server.kill();
    let error = file.write_at(&noise(1, 4096), 0).unwrap_err();
    assert!(matches!(error.raw_os_error(), Some(107 | 103)), "{error}");
    drop(file);
    let server = Server::start_with(&lab, POOL, &options);
    assert!(fs::read(lab.path("m/a")).unwrap() == noise(1, MIB), "nothing acknowledged is lost");
    server.stop();
    wait_until("the keeper has ended", || keepers(&lab) == 0);
    lab.assert_clean();
}

#[test]
fn what_is_unmounted_while_no_daemon_runs_is_not_continued() {
    let lab = Lab::with_pool("64M");
    fs::create_dir(lab.path("m")).unwrap();
    let server = Server::start_with(&lab, POOL, &["--mount", "m", "--keeper", "--keeper-limit", "30"]);
    fs::write(lab.path("m/a"), noise(1, MIB)).unwrap();
    server.kill();
    succeed(Command::new("umount").arg("-l").arg(lab.path("m")));
    wait_until("the keeper has ended", || keepers(&lab) == 0);
    assert!(lab.contents("a") == noise(1, MIB));
    let server = Server::start_with(&lab, POOL, &["--mount", "m", "--keeper", "--keeper-limit", "30"]);
    assert!(fs::read(lab.path("m/a")).unwrap() == noise(1, MIB));
    server.stop();
}

#[test]
fn verbs_on_a_mount_that_waits_for_its_daemon_tell_what_to_do() {
    let lab = Lab::with_pool("64M");
    fs::create_dir(lab.path("m")).unwrap();
    let options = ["--mount", "m", "--keeper", "--keeper-limit", "60"];
    let server = Server::start_with(&lab, POOL, &options);
    fs::write(lab.path("m/a"), noise(1, MIB)).unwrap();
    server.kill();
    for verb in [vec!["mount", POOL, "m"], vec!["umount", "m"]] {
        let why = lab.run(&verb).refused();
        assert!(why.contains("does not answer") && why.contains("forkdisk serve"), "{verb:?}: {why}");
    }
    let server = Server::start_with(&lab, POOL, &options);
    assert!(fs::read(lab.path("m/a")).unwrap() == noise(1, MIB), "the mount is as it was");
    server.kill();
    lab.ok(&["umount", "--lazy", "m"]);
    wait_until("the keeper has ended", || keepers(&lab) == 0);
    assert!(lab.contents("a") == noise(1, MIB));
}
