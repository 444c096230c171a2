//! P1 through a mount: data that was fsynced when the server is killed is there when it is mounted again.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rustix::fs::getxattr;

use crate::harness::{LIMIT, Lab, LimitedWait, POOL, Run, Server, client, missing, noise, succeed, wait_until};
use crate::kill_loop::number_from_env;
use crate::mount::Mounted;

/// Known durable files of a worker: names and contents.
type Files = BTreeMap<String, Vec<u8>>;

/// Creates, writes, clones, renames and removes files in its own folder; a step is known to be
/// durable once a later fsync has succeeded. Returns when the mount is gone.
struct Worker {
    folder: String,
    durable: Files,
    /// State that the step in progress may leave instead.
    pending: Option<Files>,
    names: u32,
    /// The last step that was started.
    last: String,
}

impl Worker {
    fn new(number: u32) -> Worker {
        Worker { folder: format!("w{number}"), durable: Files::new(), pending: None, names: 0, last: String::new() }
    }

    fn work(&mut self, dir: &Path, rng: &mut SmallRng) {
        while self.step(dir, rng).is_ok() {
            self.durable = self.pending.take().unwrap();
        }
    }

    fn step(&mut self, dir: &Path, rng: &mut SmallRng) -> io::Result<()> {
        let dir = dir.join(&self.folder);
        let mut next = self.durable.clone();
        let names: Vec<String> = next.keys().cloned().collect();
        let some = (!names.is_empty()).then(|| names[rng.random_range(0..names.len())].clone());
        self.names += 1;
        let fresh = format!("f{}", self.names);
        let choice = if names.len() < 3 { 0 } else { rng.random_range(0..10) };
        let (old, new) = (dir.join(some.as_deref().unwrap_or("none")), dir.join(&fresh));
        self.last = format!("{choice} of {some:?}, {fresh}");
        // Recorded before the step: from here on either state may be found.
        match (choice, some) {
            (1..=4, Some(name)) => {
                let (at, bytes) = (rng.random_range(0..200_000), noise(rng.random(), rng.random_range(1..100_000)));
                let contents = next.get_mut(&name).unwrap();
                contents.resize(contents.len().max(at + bytes.len()), 0);
                contents[at..at + bytes.len()].copy_from_slice(&bytes);
                self.pending = Some(next);
                let file = File::options().write(true).open(&old)?;
                file.write_all_at(&bytes, at as u64)?;
                file.sync_all()
            }
            (5 | 6, Some(name)) => {
                next.insert(fresh, next[&name].clone());
                self.pending = Some(next);
                fs::copy(&old, &new)?;
                File::open(&new)?.sync_all()
            }
            (7, Some(name)) => {
                let contents = next.remove(&name).unwrap();
                let target = if names.len() > 6 { names.iter().find(|n| **n != name).unwrap().clone() } else { fresh };
                next.insert(target.clone(), contents);
                self.pending = Some(next);
                fs::rename(&old, dir.join(target))?;
                File::open(&dir)?.sync_all()
            }
            (8 | 9, Some(name)) => {
                next.remove(&name);
                self.pending = Some(next);
                fs::remove_file(&old)?;
                File::open(&dir)?.sync_all()
            }
            _ => {
                let bytes = noise(rng.random(), rng.random_range(0..300_000));
                next.insert(fresh, bytes.clone());
                self.pending = Some(next);
                fs::create_dir_all(&dir)?;
                fs::write(&new, &bytes)?;
                File::open(&new)?.sync_all()
            }
        }
    }

    /// Checks that every file that the last step did not touch is unchanged, and that the others
    /// can be read. Takes the found state as durable.
    fn verify(&mut self, dir: &Path) {
        let dir = dir.join(&self.folder);
        let pending = self.pending.take().unwrap_or_else(|| self.durable.clone());
        let mut found = Files::new();
        for entry in fs::read_dir(&dir).into_iter().flatten() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            found.insert(name.clone(), fs::read(dir.join(&name)).unwrap());
        }
        for (name, contents) in &self.durable {
            if pending.get(name) == Some(contents) {
                let now = found
                    .get(name)
                    .unwrap_or_else(|| panic!("{}/{name} was fsynced and is gone; last: {}", self.folder, self.last));
                let differs = now.iter().zip(contents).position(|(a, b)| a != b);
                assert!(
                    now == contents,
                    "{}/{name} was fsynced with {} bytes and has {}, different from {differs:?} on; last: {}",
                    self.folder,
                    contents.len(),
                    now.len(),
                    self.last
                );
            }
        }
        for name in found.keys() {
            let known = self.durable.contains_key(name) || pending.contains_key(name);
            assert!(known, "{}/{name} was never made or its removal was fsynced", self.folder);
        }
        self.durable = found;
    }
}

#[test]
fn what_was_fsynced_survives_every_kill_of_the_mount() {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = number_from_env("FORKDISK_TEST_SEED", clock);
    let kills = number_from_env("FORKDISK_TEST_KILLS", 6);
    println!("replay with FORKDISK_TEST_SEED={seed} FORKDISK_TEST_KILLS={kills}");
    let mut rng = SmallRng::seed_from_u64(seed);
    let lab = Lab::with_pool("512M");
    let mut workers: Vec<Worker> = (0..3).map(Worker::new).collect();
    let mut steps = 0;
    for _ in 0..kills {
        let Some(mut mount) = Mounted::new(&lab) else { return };
        workers.iter_mut().for_each(|w| w.verify(mount.dir()));
        let dir = mount.dir().to_path_buf();
        std::thread::scope(|scope| {
            for worker in &mut workers {
                let (dir, mut rng) = (&dir, SmallRng::seed_from_u64(rng.random()));
                scope.spawn(move || worker.work(dir, &mut rng));
            }
            std::thread::sleep(Duration::from_millis(rng.random_range(50..1200)));
            mount.kill();
        });
        drop(mount);
        steps += workers.iter().map(|w| w.names).sum::<u32>();
        lab.assert_clean();
    }
    assert!(steps > 0, "no worker got anything done");
    let Some(mount) = Mounted::new(&lab) else { return };
    workers.iter_mut().for_each(|w| w.verify(mount.dir()));
    mount.unmount(&lab);
    lab.assert_clean();
}

#[test]
fn a_database_is_whole_after_every_kill() {
    if client("sqlite3", "sqlite3").is_none() {
        return;
    }
    let lab = Lab::with_pool("256M");
    let sqlite = |mount: &Mounted, sql: &str| {
        let mut sqlite = client("sqlite3", "sqlite3").unwrap();
        sqlite.args(["-bail", "-cmd", ".timeout 5000"]).arg(mount.path("db")).arg(sql);
        sqlite
    };
    let mut committed = 0;
    for mode in ["delete", "wal", "wal"] {
        let Some(mut mount) = Mounted::new(&lab) else { return };
        let text = succeed(&mut sqlite(
            &mount,
            &format!(
                "pragma journal_mode={mode}; create table if not exists t(n integer primary key, x blob); pragma \
                 integrity_check; select count(*) from t"
            ),
        ));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[lines.len() - 2], "ok", "{text}");
        let count: u64 = lines[lines.len() - 1].parse().unwrap();
        assert!(count >= committed, "{count} rows are left of {committed}");
        // `full` does not wait for the removal of the journal, which is the commit in the mode `delete`.
        let insert = "pragma synchronous=extra; insert into t(x) select randomblob(3000) from (select 1 union select \
            2); select count(*) from t;";
        let mut script = client("sqlite3", "sqlite3").unwrap();
        script.arg("-batch").arg(mount.path("db"));
        script
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::null());
        let mut child = script.spawn().unwrap();
        let (mut stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let feeder = std::thread::spawn(move || {
            use std::io::Write;
            while stdin.write_all(insert.as_bytes()).is_ok() && stdin.write_all(b"\n").is_ok() {}
        });
        let reader = std::thread::spawn(move || {
            use std::io::{BufRead, BufReader};
            let counts = BufReader::new(stdout).lines().map_while(Result::ok);
            counts.filter_map(|line| line.parse::<u64>().ok()).last().unwrap_or(0)
        });
        std::thread::sleep(Duration::from_millis(700));
        mount.kill();
        let _ = child.kill();
        child.wait_within(LIMIT).unwrap();
        feeder.join().unwrap();
        drop(mount);
        committed = committed.max(reader.join().unwrap());
        assert!(committed > 0, "nothing was committed");
        lab.assert_clean();
    }
}

/// Writes to a file and takes snapshots of it until the mount is gone: returns how many were taken,
/// and the final error.
fn take_snapshots(dir: &Path, round: u64) -> io::Result<(u64, io::Error)> {
    let file = File::options().write(true).open(dir.join("v"))?;
    let mut n = 0;
    loop {
        // Dirty data for each snapshot.
        let done = file.write_all_at(&noise(n, 256 << 10), (n % 16) << 18).and_then(|()| {
            let name = |n: u64| dir.join(format!(".snapshots/v/r{round}-{n}"));
            fs::create_dir(name(n))?;
            n.checked_sub(4).map_or(Ok(()), |old| fs::remove_dir(name(old)))
        });
        if let Err(error) = done {
            return Ok((n, error));
        }
        n += 1;
    }
}

#[test]
fn a_server_that_is_killed_while_it_takes_snapshots_is_gone() {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = number_from_env("FORKDISK_TEST_SEED", clock);
    let kills = number_from_env("FORKDISK_TEST_KILLS", 10);
    println!("replay with FORKDISK_TEST_SEED={seed} FORKDISK_TEST_KILLS={kills}");
    let lab = Lab::with_pool("512M");
    lab.import("v", &noise(0, 4 << 20));
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut taken = 0;
    for round in 0..kills {
        let Some(mut mount) = Mounted::new(&lab) else { return };
        let dir = mount.dir().to_path_buf();
        // Not in a scoped thread: a mount that hangs must not hang the test.
        let program = std::thread::spawn(move || take_snapshots(&dir, round));
        std::thread::sleep(Duration::from_millis(rng.random_range(30..400)));
        assert!(!program.is_finished(), "it ended before the server: {:?}", program.join().unwrap());
        let start = Instant::now();
        mount.kill();
        assert!(start.elapsed() < Duration::from_secs(10), "it took {:?} to be gone", start.elapsed());
        wait_until("the programs that waited for it are released", || program.is_finished());
        taken += program.join().unwrap().map_or(0, |(n, _)| n);
        mount.release();
        lab.assert_clean();
    }
    assert!(taken > 0, "no snapshot was taken");
}

/// Writes the clone's first 8 bytes of every third page, removes the file it was cloned from, and syncs.
fn scatter_and_remove(mount: &Mounted, from: &str, clone: &str) {
    succeed(client("cp", "coreutils").unwrap().arg(mount.path(from)).arg(mount.path(clone)));
    let file = File::options().write(true).open(mount.path(clone)).unwrap();
    (0..16 << 20).step_by(3 * 4096).for_each(|at| file.write_all_at(b"DEADBEEF", at).unwrap());
    file.sync_all().unwrap();
    fs::remove_file(mount.path(from)).unwrap();
}

#[test]
fn what_a_kill_left_scattered_and_what_is_scattered_since_goes_home() {
    let lab = Lab::with_pool("256M");
    let contents = noise(7, 16 << 20);
    lab.import("a", &contents);
    let Some(mut mount) = Mounted::new(&lab) else { return };
    scatter_and_remove(&mount, "a", "b");
    File::open(mount.dir()).unwrap().sync_all().unwrap();
    mount.kill();
    drop(mount);
    lab.assert_clean();
    let Some(mount) = Mounted::new(&lab) else { return };
    let scattered = |name: &str| {
        let mut value = [0; 64];
        let n = getxattr(mount.path(name), "user.forkdisk.scattered", &mut value).unwrap();
        String::from_utf8_lossy(&value[..n]).parse::<u64>().unwrap()
    };
    assert!(scattered("b") > 16 << 18, "one page of three lies elsewhere");
    wait_until("b is in one piece", || scattered("b") == 0);
    scatter_and_remove(&mount, "b", "c");
    wait_until("c is in one piece", || scattered("c") == 0);
    let mut expected = contents;
    (0..16 << 20).step_by(3 * 4096).for_each(|at| expected[at..at + 8].copy_from_slice(b"DEADBEEF"));
    assert!(fs::read(mount.path("c")).unwrap() == expected);
    mount.unmount(&lab);
    lab.assert_clean();
}

/// Returns the outcome of `umount` when the server is killed while it writes back.
fn umount_of_a_server_that_is_killed(lab: &Lab) -> Option<Run> {
    let mut mount = Mounted::new(lab)?;
    fs::write(mount.path("a"), noise(3, 8 << 20)).unwrap();
    // Caches the folder, so that the server is not queried for it.
    fs::metadata(mount.dir()).unwrap();
    mount.pause();
    let umount = lab.command(&["umount", "mnt"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    mount.kill();
    Some(umount.wait_with_output().unwrap().into())
}

#[test]
fn umount_does_not_claim_what_a_server_that_was_killed_has_not_written() {
    // On a busy machine `umount` may find the server dead already, which is another case: then again.
    for attempt in 1.. {
        let lab = Lab::with_pool("64M");
        let Some(run) = umount_of_a_server_that_is_killed(&lab) else { return };
        if !run.status.success() {
            let said = run.refused();
            assert!(said.contains("was not closed cleanly") && said.contains("the next open recovers it"), "{said}");
            return lab.assert_clean();
        }
        assert!(attempt < 5, "it claims that everything is written");
    }
}

#[test]
fn the_dead_mount_of_a_killed_daemon_makes_way_for_the_next_one_of_its_pool() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["init", "other.img", "--size", "64M"]);
    let dir = lab.path("mnt");
    if !Path::new("/dev/fuse").exists() {
        return missing("/dev/fuse does not exist: load the kernel module fuse");
    }
    fs::create_dir(&dir).unwrap();
    for round in 0..3 {
        let server = Server::start_with(&lab, POOL, &["--mount", "mnt"]);
        fs::write(dir.join("a"), noise(round, 10_000)).unwrap();
        File::open(dir.join("a")).unwrap().sync_all().unwrap();
        server.kill();
        let why = lab.run(&["mount", "other.img", "mnt"]).refused();
        assert!(why.contains("umount") && why.contains(POOL), "{why}");
    }
    lab.ok(&["mount", POOL, "mnt", "--daemon"]);
    assert!(fs::read(dir.join("a")).unwrap() == noise(2, 10_000));
    assert_eq!(mounts_at(&dir), 1, "none below");
    lab.ok(&["umount", "mnt"]);
    lab.assert_clean();
}

/// Returns the number of pools mounted on a folder.
fn mounts_at(dir: &Path) -> usize {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    table.lines().filter(|line| line.split(' ').nth(4) == dir.to_str() && line.contains(" fuse.forkdisk ")).count()
}
