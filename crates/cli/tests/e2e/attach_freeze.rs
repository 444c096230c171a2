//! Snapshots of attached volumes with mounted file systems: these are frozen meanwhile, and thawed
//! whichever process ends.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::attach::{Attaching, device_text, shell};
use crate::harness::{LimitedWait, PATIENCE, POOL, Run, Server, client, noise, succeed, wait_at_most, wait_until};

const MIB: usize = 1 << 20;

/// Formats an attached volume of the pool and mounts it.
fn mounted(it: &Attaching, name: &str, mkfs: &str) -> PathBuf {
    it.lab.ok(&["create", &format!("{POOL}/{name}"), "--size", "400M"]);
    let device = it.attach(name);
    shell(&format!("{mkfs} {}", device_text(&device)));
    it.mount(&device, "defaults");
    device
}

#[test]
fn a_snapshot_of_a_mounted_volume_holds_what_was_just_closed_and_mounts_read_only() {
    let Some(it) = Attaching::with_pool("3G") else { return };
    let lab = &it.lab;
    // A frozen XFS leaves a record in its log, for files that were removed while they were open.
    let kinds = [
        ("ext4", "mkfs.ext4 -q -F", "ro"),
        ("xfs", "mkfs.xfs -q -f", "ro,norecovery"),
        ("btrfs", "mkfs.btrfs -q -f", "ro"),
    ];
    for (kind, mkfs, options) in kinds {
        if client(mkfs.split(' ').next().unwrap(), "file system tools").is_none() {
            return;
        }
        let device = mounted(&it, kind, mkfs);
        // One freeze for two mount points; a bind mount of a folder is not a separate file system.
        let second = lab.path("second");
        fs::create_dir_all(&second).unwrap();
        succeed(Command::new("mount").arg("--bind").arg(&it.below).arg(&second));
        fs::write(it.below.join("closed"), noise(1, 3 * MIB)).unwrap();
        let taken = lab.run(&["snapshot", &format!("{POOL}/{kind}@now")]);
        // All frozen file systems are thawed.
        fs::write(second.join("later"), b"x").unwrap();
        shell(&format!("umount {}", second.display()));
        it.umount();
        assert_eq!(taken.stderr, "");
        taken.ok();
        lab.ok(&["detach", device_text(&device)]);
        let snapshot = it.attach(&format!("{kind}@now"));
        it.mount(&snapshot, options);
        assert!(fs::read(it.below.join("closed")).unwrap() == noise(1, 3 * MIB), "{kind}");
        assert!(!it.below.join("later").exists(), "{kind}");
        it.umount();
        lab.ok(&["detach", device_text(&snapshot)]);
    }
    lab.assert_clean();
}

#[test]
fn several_volumes_are_frozen_at_one_instant_and_without_it_none_is() {
    let Some(it) = Attaching::with_pool("2G") else { return };
    let lab = &it.lab;
    let first = mounted(&it, "a", "mkfs.ext4 -q -F");
    lab.ok(&["create", "pool.img/b", "--size", "100M"]);
    let second = it.attach("b");
    let dir = lab.path("b");
    fs::create_dir(&dir).unwrap();
    shell(&format!("mkfs.ext4 -q -F {0}; mount {0} {1}", device_text(&second), dir.display()));
    for (place, snapshot) in [("x", "now"), ("y", "crash")] {
        fs::write(it.below.join(place), noise(3, MIB)).unwrap();
        fs::write(dir.join(place), noise(4, MIB)).unwrap();
        let (a, b) = (format!("{POOL}/a@{snapshot}"), format!("{POOL}/b@{snapshot}"));
        let option = if snapshot == "crash" { "--no-freeze" } else { "--freeze-limit=30s" };
        assert_eq!(lab.run(&["snapshot", option, &a, &b]).ok(), "");
    }
    shell(&format!("umount {}", dir.display()));
    it.umount();
    for device in [&first, &second] {
        lab.ok(&["detach", device_text(device)]);
    }
    for (name, seed) in [("a", 3), ("b", 4)] {
        let device = it.attach(&format!("{name}@now"));
        it.mount(&device, "ro");
        assert!(fs::read(it.below.join("x")).unwrap() == noise(seed, MIB));
        it.umount();
        lab.ok(&["detach", device_text(&device)]);
        // As after a crash, the journal has to be replayed: impossible on a read-only device.
        let device = it.attach(&format!("{name}@crash"));
        let mut mount = Command::new("mount");
        let refused = mount.args(["-o", "ro"]).arg(&device).arg(&it.below).output().unwrap();
        assert!(!refused.status.success(), "nothing was frozen");
        lab.ok(&["detach", device_text(&device)]);
    }
    lab.assert_clean();
}

/// A file system frozen by hand is thawed by hand; one that is mounted read-only has nothing to freeze.
#[test]
fn what_is_frozen_by_hand_stays_so_and_what_is_read_only_is_left_alone() {
    let Some(it) = Attaching::with_pool("1G") else { return };
    let Some(_) = client("fsfreeze", "util-linux") else { return };
    mounted(&it, "a", "mkfs.ext4 -q -F");
    shell(&format!("fsfreeze -f {}", it.below.display()));
    let taken = it.lab.run(&["snapshot", "pool.img/a@1"]);
    let mut write = Writing::begin(&it.below.join("x"));
    let waited = !write.ends_within(Duration::from_millis(500));
    shell(&format!("fsfreeze -u {}", it.below.display()));
    assert!(waited, "it is frozen still");
    assert!(write.ends_within(PATIENCE));
    assert_eq!((taken.stderr.as_str(), taken.status.code()), ("", Some(0)));
    shell(&format!("mount -o remount,ro {}", it.below.display()));
    let taken = it.lab.run(&["snapshot", "pool.img/a@2"]);
    assert_eq!((taken.stderr.as_str(), taken.status.code()), ("", Some(0)));
}

#[test]
fn hooks_run_before_and_after_and_a_failed_one_keeps_the_snapshot_from_being_taken() {
    let Some(it) = Attaching::with_pool("1G") else { return };
    let lab = &it.lab;
    mounted(&it, "a", "mkfs.ext4 -q -F");
    let said = |name: &str| fs::read_to_string(lab.path(name)).unwrap_or_default();
    // The hooks write to the file system that is frozen in between, and use the pool.
    let file = it.below.join("hook");
    let before = format!("echo $FORKDISK_SNAPSHOTS in $FORKDISK_SNAPSHOT_POOL > {0}; cp {0} before", file.display());
    let after = format!("echo $FORKDISK_SNAPSHOT_RESULT > {0}; cp {0} after", file.display());
    lab.ok(&["snapshot", "--exec-before", &before, "--exec-after", &after, "pool.img/a@1"]);
    assert_eq!(said("before"), format!("a@1 in {}\n", lab.path(POOL).canonicalize().unwrap().display()));
    assert_eq!(said("after"), "taken\n");
    let refused = lab.run(&["snapshot", "--exec-before", "exit 3", "--exec-after", &after, "pool.img/a@2"]).refused();
    assert!(refused.contains("no snapshot was taken") && refused.contains("exit 3"), "{refused}");
    assert_eq!(said("after"), "failed\n");
    let refused = lab.run(&["snapshot", "--exec-after", "exit 4", "pool.img/a@3"]).refused();
    assert!(refused.contains("the snapshots were taken") && refused.contains("exit 4"), "{refused}");
    assert_eq!(lab.names(), ["a", "a@1", "a@3"]);
    // The verb is interrupted while the first hook runs.
    let before = format!("touch {}; sleep 2", lab.path("begun").display());
    let mut verb = lab.command(&["snapshot", "--exec-before", &before, "--exec-after", &after, "pool.img/a@4"]);
    fs::remove_file(lab.path("after")).unwrap();
    let verb = verb.stderr(Stdio::piped()).spawn().unwrap();
    wait_until("the first hook runs", || lab.path("begun").exists());
    signal(verb.id(), Signal::TERM);
    let refused = Run::from(verb.output_within(PATIENCE).unwrap()).refused();
    assert!(refused.contains("a signal ended the verb"), "{refused}");
    assert_eq!((said("after").as_str(), lab.names().len()), ("failed\n", 3));
}

/// A program that writes to a file. It cannot be killed while it waits for a frozen file system.
struct Writing(Child);

impl Writing {
    fn begin(path: &Path) -> Writing {
        Writing(Command::new("touch").arg(path).stderr(Stdio::null()).spawn().unwrap())
    }

    fn ends_within(&mut self, time: Duration) -> bool {
        let start = Instant::now();
        while self.0.try_wait().unwrap().is_none() {
            if start.elapsed() > time {
                return false;
            }
            thread::sleep(Duration::from_millis(10));
        }
        true
    }
}

/// A control socket in front of the daemon's own, which delays requests for snapshots.
struct Detour {
    socket: PathBuf,
    is_held_up: Arc<AtomicBool>,
    goes_on: Arc<AtomicBool>,
}

impl Detour {
    fn new(socket: PathBuf, own: PathBuf) -> Detour {
        let listener = UnixListener::bind(&socket).unwrap();
        let (is_held_up, goes_on) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (held, go) = (is_held_up.clone(), goes_on.clone());
        thread::spawn(move || {
            for client in listener.incoming() {
                let (mut client, mut daemon) = (client.unwrap(), UnixStream::connect(&own).unwrap());
                let (mut back, mut from) = (client.try_clone().unwrap(), daemon.try_clone().unwrap());
                thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut back);
                    let _ = back.shutdown(std::net::Shutdown::Both);
                });
                let (held, go) = (held.clone(), go.clone());
                thread::spawn(move || {
                    let mut buf = [0; 65536];
                    while let Ok(n @ 1..) = client.read(&mut buf) {
                        if String::from_utf8_lossy(&buf[..n]).contains("\"snapshot\"") {
                            held.store(true, Ordering::SeqCst);
                            wait_until("the detour goes on", || go.load(Ordering::SeqCst));
                        }
                        if daemon.write_all(&buf[..n]).is_err() {
                            break;
                        }
                    }
                    let _ = daemon.shutdown(std::net::Shutdown::Both);
                });
            }
        });
        Detour { socket, is_held_up, goes_on }
    }
}

/// A mounted volume, and a `snapshot` of it that is delayed while the file system is frozen.
struct HeldUp {
    server: Server,
    detour: Detour,
    verb: Child,
    write: Writing,
}

fn held_up(it: &Attaching, limit: &str) -> HeldUp {
    let lab = &it.lab;
    let server = Server::start(lab);
    mounted(it, "a", "mkfs.ext4 -q -F");
    let own = PathBuf::from(server.announced()["control"].as_str().unwrap());
    let detour = Detour::new(lab.path("detour.sock"), own);
    let control = detour.socket.display().to_string();
    let mut verb = lab.command(&["snapshot", "--control", &control, "--freeze-limit", limit, "pool.img/a@1"]);
    let verb = verb.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("the snapshot is asked for", || detour.is_held_up.load(Ordering::SeqCst));
    let mut write = Writing::begin(&it.below.join("x"));
    assert!(!write.ends_within(Duration::from_millis(300)), "it is frozen");
    HeldUp { server, detour, verb, write }
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

/// The process that holds the file system frozen.
fn holder_of(verb: &Child) -> u32 {
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", verb.id())).unwrap();
    children.trim().parse().unwrap()
}

#[test]
fn a_killed_verb_leaves_nothing_frozen() {
    let Some(it) = Attaching::with_pool("1G") else { return };
    let mut held = held_up(&it, "60s");
    held.verb.kill().unwrap();
    held.verb.wait().unwrap();
    assert!(held.write.ends_within(Duration::from_secs(5)), "it is thawed");
    held.detour.goes_on.store(true, Ordering::SeqCst);
    it.umount();
    it.lab.ok(&["detach", "pool.img/a"]);
    held.server.stop();
    it.lab.assert_clean();
}

#[test]
fn a_killed_daemon_leaves_nothing_frozen() {
    let Some(it) = Attaching::with_pool("1G") else { return };
    let held = held_up(&it, "60s");
    let HeldUp { server, detour, mut verb, mut write } = held;
    // Below the limit of the freeze: it is the end of the daemon that thaws. A loaded machine takes its time.
    let patience = Duration::from_secs(45);
    server.kill();
    detour.goes_on.store(true, Ordering::SeqCst);
    let failed = wait_at_most(&mut verb, patience);
    // The device is gone with the daemon: whether the write succeeds does not matter.
    assert!(write.ends_within(patience), "it is thawed");
    assert_eq!(failed.code(), Some(1));
    it.umount();
    it.lab.ok(&["detach", "pool.img/a"]);
    it.lab.assert_clean();
}

/// Checks that there is no snapshot; unmounts the file system and checks the pool.
fn nothing_was_taken(it: &Attaching, server: Server) {
    assert_eq!(it.lab.names(), ["a"]);
    it.umount();
    it.lab.ok(&["detach", "pool.img/a"]);
    server.stop();
    it.lab.assert_clean();
}

#[test]
fn a_killed_holder_leaves_nothing_frozen_and_no_snapshot() {
    let Some(it) = Attaching::with_pool("1G") else { return };
    let HeldUp { server, detour, verb, mut write } = held_up(&it, "60s");
    signal(holder_of(&verb), Signal::KILL);
    detour.goes_on.store(true, Ordering::SeqCst);
    let refused = Run::from(verb.output_within(PATIENCE).unwrap()).refused();
    assert!(refused.contains("were thawed before"), "{refused}");
    assert!(write.ends_within(Duration::from_secs(5)), "it is thawed");
    nothing_was_taken(&it, server);
}

#[test]
fn a_snapshot_that_takes_too_long_is_none_and_the_file_system_goes_on() {
    let Some(it) = Attaching::with_pool("1G") else { return };
    let start = Instant::now();
    let HeldUp { server, detour, verb, mut write } = held_up(&it, "2s");
    assert!(write.ends_within(Duration::from_secs(10)), "it is thawed");
    assert!(start.elapsed() > Duration::from_secs(2));
    detour.goes_on.store(true, Ordering::SeqCst);
    let refused = Run::from(verb.output_within(PATIENCE).unwrap()).refused();
    assert!(refused.contains("--freeze-limit"), "{refused}");
    nothing_was_taken(&it, server);
}

/// A verb can have its output, log and folder on the file systems it freezes; a file system with a
/// log of the daemon is not frozen, and the verb says so.
#[test]
fn a_snapshot_does_not_wait_for_what_it_froze_itself() {
    let Some(it) = Attaching::with_pool("1G") else { return };
    let lab = &it.lab;
    let log = lab.path("daemon.log");
    let server = Server::start_with(lab, POOL, &["--log-file", log.to_str().unwrap()]);
    mounted(&it, "a", "mkfs.ext4 -q -F");
    let output = fs::File::create(it.below.join("output")).unwrap();
    let pool = lab.path(POOL);
    let mut command = lab.command(&["snapshot", &format!("{}/a@1", pool.display()), "--json", "--log", "trace"]);
    let verb = command.current_dir(&it.below).stdout(output.try_clone().unwrap()).stderr(output).spawn();
    let start = Instant::now();
    assert!(wait_at_most(&mut verb.unwrap(), PATIENCE).success());
    drop(command);
    assert!(start.elapsed() < Duration::from_secs(20));
    assert!(fs::read_to_string(it.below.join("output")).unwrap().contains("a@1"));
    // The daemon reopens its log, and finds it on its own volume.
    let opened = |target: &Path| {
        let target = target.canonicalize().unwrap_or(target.to_path_buf());
        let links = fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap().flatten();
        links.filter_map(|entry| fs::read_link(entry.path()).ok()).any(|link| link == target)
    };
    let elsewhere = |target: &Path| {
        let _ = fs::remove_file(&log);
        std::os::unix::fs::symlink(target, &log).unwrap();
        signal(server.pid(), Signal::HUP);
        wait_until("the log is opened", || opened(target));
    };
    elsewhere(&it.below.join("daemon.log"));
    let taken = lab.run(&["snapshot", "pool.img/a@2"]);
    assert!(taken.stderr.contains("not frozen") && taken.stderr.contains("daemon lies there"), "{taken:?}");
    taken.ok();
    elsewhere(&lab.path("other.log"));
    it.umount();
    lab.ok(&["detach", "pool.img/a"]);
    server.stop();
    lab.assert_clean();
}
