//! In user-mode Linux 6.1: the kernel's own nbd driver as a client, file systems on a served pool;
//! and the tests of all listeners on that kernel.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::harness::{LIMIT, Lab, LimitedWait, client, missing};

/// Time limit of a whole guest.
const WHOLE: Duration = Duration::from_secs(600);
/// Time of silence after which a guest counts as dead.
const SILENCE: Duration = Duration::from_secs(300);

/// End of a guest: its output, and whether that is complete.
struct Ended {
    said: String,
    is_whole: bool,
}

/// Runs a scenario in a guest with a disk of 2 GiB, with `words` (KEY=VALUE) in its environment;
/// returns its output. `None` (after saying why) if guests cannot run here. If user-mode Linux
/// dies, which is not tested, it is started once more.
#[track_caller]
fn run_in_guest(name: &str, words: &[String]) -> Option<String> {
    let mut ended = one_guest(name, words)?;
    if !ended.is_whole && !ended.said.contains("FAILED") {
        println!("the guest has died; once more");
        ended = one_guest(name, words)?;
    }
    assert!(ended.is_whole && !ended.said.contains("FAILED"), "see above");
    Some(ended.said)
}

#[track_caller]
fn one_guest(name: &str, words: &[String]) -> Option<Ended> {
    if !cfg!(target_arch = "x86_64") {
        eprintln!("not tested: there is no user-mode Linux for this processor");
        return None;
    }
    let lab = Lab::empty();
    let guest = match forkdisk_bench::Lab::unpack(&lab.path("")) {
        Ok(guest) => guest,
        Err(why) => {
            missing(&format!("{why:#}"));
            return None;
        }
    };
    let scripts = concat!(env!("CARGO_MANIFEST_DIR"), "/../../lab/uml/scenarios");
    let scenario = format!("{scripts}/{name}.sh");
    fs::copy(scenario, guest.scripts.join(format!("scenarios/{name}.sh"))).unwrap();
    let (work, disk) = (lab.path("guest"), lab.path("disk"));
    fs::create_dir_all(work.join("mnt")).unwrap();
    File::create(&disk).unwrap().set_len(2 << 30).unwrap();
    let shown = |path: &std::path::Path| path.display().to_string();
    // If the test fails, the guard ends the guest with all its processes.
    let mut command: Command = lab.command(&["bench", "inside", "guard"]);
    command.arg(&work).arg(&guest.kernel);
    command.args(["mem=1G", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "rw", "quiet"]);
    command.args(["con=null", "con0=fd:0,fd:1", "KIND=ubd", "MBS=512"]);
    let own = [
        ("uml_dir", shown(&work)),
        ("ubd0", shown(&disk)),
        ("init", shown(&guest.scripts.join("init.sh"))),
        ("SCEN", name.to_string()),
        ("LAB", shown(&guest.scripts)),
        ("LABOUT", shown(&work)),
        ("FORKDISK", env!("CARGO_BIN_EXE_forkdisk").to_string()),
    ];
    command.args(own.map(|(name, value)| format!("{name}={value}"))).args(words);
    if let Some(library) = &guest.preload {
        command.env("LD_PRELOAD", library);
    }
    let mut guard = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let (sender, lines) = channel();
    let console = BufReader::new(guard.stdout.take().unwrap());
    std::thread::spawn(move || {
        let lines = console.split(b'\n').map_while(Result::ok);
        lines.map(|line| String::from_utf8_lossy(&line).trim_end().to_string()).try_for_each(|line| sender.send(line))
    });
    let (mut said, start) = (Vec::new(), Instant::now());
    let end = loop {
        match lines.recv_timeout(SILENCE.min(WHOLE.saturating_sub(start.elapsed()))) {
            Ok(line) => said.push(line),
            Err(end) => break end,
        }
    };
    drop(guard.stdin.take());
    guard.wait_within(LIMIT).unwrap();
    let said = said.join("\n");
    println!("{said}");
    assert_eq!(end, RecvTimeoutError::Disconnected, "the guest says nothing any more");
    let is_whole = said.contains("System halted");
    Some(Ended { said, is_whole })
}

/// ext4 and xfs: mkfs, mount, files, fstrim that frees space in the pool, a snapshot of the mounted
/// volume, unmount, fsck; a clone of the snapshot has the same files. The scenario prints `FAILED`
/// if a check fails.
#[test]
fn the_kernels_nbd_driver_carries_ext4_and_xfs() {
    if !std::path::Path::new("/usr/sbin/mkfs.xfs").exists() && !std::path::Path::new("/sbin/mkfs.xfs").exists() {
        return missing("mkfs.xfs is not installed: xfsprogs has it");
    }
    let Some(said) = run_in_guest("nbd-filesystems", &[]) else { return };
    for fs in ["ext4", "xfs"] {
        assert!(said.contains(&format!("R nbd-filesystems fs={fs} ")), "{fs} is missing");
    }
}

/// `attach --by nbd`: mkfs, mount, fstrim that frees space in the pool, `detach` of a device in use
/// is refused, a snapshot is a read-only device, partitions are devices, `detach`.
#[test]
fn volumes_are_attached_by_the_kernels_nbd_driver() {
    let Some(said) = run_in_guest("nbd-attach", &[]) else { return };
    assert!(said.contains("R nbd-attach used="));
}

/// `snapshot` freezes file systems on a device of the nbd driver, on a partition of it and on device-mapper
/// devices and LVM above both; a snapshot is mounted without a replay of its journal and contains closed files.
#[test]
fn snapshots_of_what_the_kernels_nbd_driver_carries_freeze_it() {
    if !["/usr/sbin", "/sbin"].iter().any(|dir| std::path::Path::new(dir).join("mkfs.xfs").exists()) {
        return missing("mkfs.xfs is not installed: xfsprogs has it");
    }
    let Some(said) = run_in_guest("nbd-freeze", &[]) else { return };
    for case in
        ["ext4 on=device", "ext4 on=partition", "ext4 on=dm", "ext4 on=dm-partition", "xfs on=device", "xfs on=dm"]
    {
        assert!(said.contains(&format!("R nbd-freeze fs={case} ")), "{case} is missing");
    }
    if said.contains("LVM is not installed") {
        missing("lvm is not installed: lvm2 has it");
    }
}

/// The tests of snapshots that freeze and of kills meanwhile, with `attach --by nbd` instead of `--by loop`.
#[test]
fn what_is_frozen_above_the_kernels_nbd_driver_is_thawed_whatever_ends() {
    let lab = Lab::empty();
    let names = lab.write_file("names", b"attach_freeze::\nprocess_crash::what_a_file_system_on_a_device\n");
    let words = ["FORKDISK_TEST_ATTACH_BY=nbd".to_string(), "THREADS=1".to_string()];
    if let Some(passed) = tests_in_guest(&names, &words) {
        assert!(passed >= 10, "{passed} tests");
    }
}

/// A real udevd with the rule of contrib/udev: names of volumes attached by `nbd` and `loop` appear
/// in its records and disappear, which is what systemd sees.
#[test]
fn udev_knows_the_lasting_names_of_attached_volumes() {
    if client("udevadm", "udev").is_none() {
        return;
    }
    let check = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/udev-guest");
    let Some(said) = run_in_guest("udev", &[format!("CHECK={check}")]) else { return };
    assert!(said.contains("udev: all of it works"));
}

/// The tests of this program listed in `lab/doors`, on Linux 6.1: every listener with the clients of the host.
#[test]
fn the_doors_work_on_linux_6_1() {
    let doors = concat!(env!("CARGO_MANIFEST_DIR"), "/../../lab/doors");
    let Some(passed) = tests_in_guest(std::path::Path::new(doors), &[]) else { return };
    let named = fs::read_to_string(doors).unwrap().lines().filter(|line| !line.starts_with('#')).count();
    assert!(passed >= named, "{passed} tests of {named} names");
}

/// Runs the tests of this program listed in the file `names` in a guest; returns how many have passed.
#[track_caller]
fn tests_in_guest(names: &std::path::Path, words: &[String]) -> Option<usize> {
    let this = std::env::current_exe().unwrap();
    let required = std::env::var("FORKDISK_TEST_REQUIRE_CLIENTS").unwrap_or_default();
    let own = [
        format!("E2E={}", this.display()),
        format!("DOORS={}", names.display()),
        format!("FORKDISK_TEST_REQUIRE_CLIENTS={required}"),
    ];
    let said = run_in_guest("e2e", &[&own, words].concat())?;
    let result = said.lines().find_map(|line| line.strip_prefix("test result: ok. ")).expect("a result");
    Some(result.split(' ').next().unwrap().parse().unwrap())
}
