//! Direct writes beside cached reads of the same file need notifications, for which the kernel waits: kills of the
//! daemon meanwhile, and of the process that makes them.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{Lab, POOL, Server, missing, noise, wait_until};

const PAGE: usize = 4096;
/// Pages of the file; few, so that writes and reads meet.
const PAGES: u64 = 64;
const WRITERS: u64 = 8;
const READERS: u64 = 3;
const KILLS: u64 = 20;
/// Fewer where each ends the mount, which takes long on an emulated kernel.
const ENDS_COUNT: u64 = 6;
/// Starts of a daemon that is upgraded.
const ROUNDS: u64 = 10;
const O_DIRECT: i32 = 0o40000;

/// Programs that write a file directly, and read it through the page cache.
struct Load {
    ends: Arc<AtomicBool>,
    writes: Arc<AtomicU64>,
    programs: Vec<JoinHandle<io::Result<()>>>,
}

impl Load {
    fn start(path: &Path) -> Load {
        let (ends, writes) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let mut programs = Vec::new();
        for n in 0..WRITERS {
            // Opened here: a program that is started while the mount waits for its daemon must not wait.
            let direct = File::options().write(true).custom_flags(O_DIRECT).open(path).unwrap();
            let (cached, ends, writes) = (File::open(path).unwrap(), ends.clone(), writes.clone());
            programs.push(thread::spawn(move || write_direct(&direct, &cached, n, (&ends, &writes))));
        }
        for n in 0..READERS {
            let (file, ends) = (File::open(path).unwrap(), ends.clone());
            programs.push(thread::spawn(move || read_cached(&file, n, &ends)));
        }
        Load { ends, writes, programs }
    }

    /// Waits until some more writes have ended.
    fn wait_for_writes(&self) {
        let before = self.writes.load(Ordering::Relaxed);
        wait_until("programs go on", || {
            self.programs.iter().any(JoinHandle::is_finished) || self.writes.load(Ordering::Relaxed) > before + WRITERS
        });
    }

    /// Ends the programs; returns their outcomes.
    fn stop(self) -> Vec<io::Result<()>> {
        self.ends.store(true, Ordering::Relaxed);
        wait_until("programs end", || self.programs.iter().all(JoinHandle::is_finished));
        self.programs.into_iter().map(|program| program.join().unwrap()).collect()
    }
}

/// Writes each of its pages directly, and reads it through the page cache when the write has ended.
fn write_direct(direct: &File, cached: &File, n: u64, (ends, writes): (&AtomicBool, &AtomicU64)) -> io::Result<()> {
    let (mut memory, mut found) = (vec![0; 2 * PAGE], vec![0; PAGE]);
    let at = memory.as_ptr().align_offset(PAGE);
    let mut count = 0;
    while !ends.load(Ordering::Relaxed) {
        count += 1;
        let page = n + WRITERS * (count % (PAGES / WRITERS));
        let data = noise(page * 1_000_000 + count, PAGE);
        memory[at..at + PAGE].copy_from_slice(&data);
        direct.write_all_at(&memory[at..at + PAGE], page * PAGE as u64)?;
        cached.read_exact_at(&mut found, page * PAGE as u64)?;
        assert!(found == data, "page {page}: write {count} is not seen");
        writes.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// Reads random pages through the page cache.
fn read_cached(file: &File, seed: u64, ends: &AtomicBool) -> io::Result<()> {
    let (mut random, mut buf) = (SmallRng::seed_from_u64(seed), vec![0; 4 * PAGE]);
    while !ends.load(Ordering::Relaxed) {
        file.read_at(&mut buf, random.random_range(0..PAGES) * PAGE as u64)?;
    }
    Ok(())
}

/// Returns a lab with a file `m/v` once its pool is served; `None` (after saying why) without FUSE.
fn lab_with_a_file() -> Option<(Lab, PathBuf)> {
    if !Path::new("/dev/fuse").exists() {
        missing("/dev/fuse does not exist: load the kernel module fuse");
        return None;
    }
    let lab = Lab::with_pool("64M");
    lab.import("v", &noise(1, PAGES as usize * PAGE));
    fs::create_dir(lab.path("m")).unwrap();
    let path = lab.path("m/v");
    Some((lab, path))
}

/// Returns the processes that make notifications about mounts of the lab.
fn notifying(lab: &Lab) -> Vec<Pid> {
    let dir = lab.path("m").display().to_string();
    let pids = fs::read_dir("/proc").unwrap().flatten().filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    let is_one = |pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.ends_with(format!("notify\0{dir}\0").as_bytes())
    };
    pids.filter(is_one).filter_map(Pid::from_raw).collect()
}

/// Starts a daemon, and programs on its mount that have begun to write.
fn serve_under_load(lab: &Lab, path: &Path, options: &[&str]) -> (Server, Load) {
    let server = Server::start_with(lab, POOL, options);
    let load = Load::start(path);
    load.wait_for_writes();
    (server, load)
}

fn kill_the_daemon(lab: &Lab, path: &Path) {
    let options = ["--mount", "m", "--keeper", "--keeper-limit", "60"];
    let mut server = Server::start_with(lab, POOL, &options);
    let load = Load::start(path);
    for kill in 0..KILLS {
        load.wait_for_writes();
        thread::sleep(Duration::from_millis(kill * 7 % 30));
        server.kill();
        server = Server::start_with(lab, POOL, &options);
    }
    load.wait_for_writes();
    for outcome in load.stop() {
        outcome.unwrap();
    }
    server.stop();
    wait_until("no process makes notifications", || notifying(lab).is_empty());
    lab.assert_clean();
}

#[test]
fn direct_writes_beside_cached_reads_go_on_over_twenty_kills() {
    if let Some((lab, path)) = lab_with_a_file() {
        kill_the_daemon(&lab, &path);
    }
}

#[test]
fn direct_writes_beside_cached_reads_go_on_with_a_request_log() {
    if let Some((lab, path)) = lab_with_a_file() {
        lab.log_requests();
        kill_the_daemon(&lab, &path);
    }
}

#[test]
fn without_a_keeper_programs_get_errors_and_no_process_remains() {
    let Some((lab, path)) = lab_with_a_file() else { return };
    for round in 0..ENDS_COUNT {
        let (server, load) = serve_under_load(&lab, &path, &["--mount", "m"]);
        thread::sleep(Duration::from_millis(round * 7 % 30));
        server.kill();
        wait_until("programs get errors", || load.programs.iter().all(JoinHandle::is_finished));
        assert!(load.stop().iter().all(Result::is_err), "round {round}");
        wait_until("no process makes notifications", || notifying(&lab).is_empty());
    }
    let server = Server::start_with(&lab, POOL, &["--mount", "m"]);
    server.stop();
    lab.assert_clean();
}

/// The first process of a daemon in the foreground waits for the one that serves after an upgrade.
#[test]
fn the_first_process_ends_with_the_daemon_after_upgrades() {
    let Some((lab, path)) = lab_with_a_file() else { return };
    // A signal decides it, which may reach either of two threads.
    for _ in 0..ROUNDS {
        let (server, load) = serve_under_load(&lab, &path, &["--mount", "m"]);
        crate::upgrade::upgrade(&lab);
        load.wait_for_writes();
        for outcome in load.stop() {
            outcome.unwrap();
        }
        server.stop();
    }
    wait_until("no process makes notifications", || notifying(&lab).is_empty());
    lab.assert_clean();
}

#[test]
fn a_killed_process_for_notifications_is_replaced_and_has_no_file_of_the_pool() {
    let Some((lab, path)) = lab_with_a_file() else { return };
    let server = Server::start_with(&lab, POOL, &["--mount", "m"]);
    let load = Load::start(&path);
    for _ in 0..KILLS {
        load.wait_for_writes();
        let mut found = Vec::new();
        wait_until("a process makes notifications", || {
            found = notifying(&lab);
            !found.is_empty()
        });
        for pid in found {
            let files = fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero())).into_iter().flatten().flatten();
            let places: Vec<PathBuf> = files.filter_map(|file| fs::read_link(file.path()).ok()).collect();
            assert!(!places.iter().any(|place| place.ends_with(POOL)), "{places:?}");
            // It may have ended.
            let _ = kill_process(pid, Signal::KILL);
        }
    }
    load.wait_for_writes();
    for outcome in load.stop() {
        outcome.unwrap();
    }
    server.stop();
    wait_until("no process makes notifications", || notifying(&lab).is_empty());
    lab.assert_clean();
}
