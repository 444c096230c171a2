//! What an interrupted verb leaves, and its messages.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::process::{Child, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{LIMIT, Lab, Limited, LimitedWait, POOL, Run, Server, client, noise, succeed, wait_until};

const MIB: usize = 1 << 20;

fn at(name: &str) -> String {
    format!("{POOL}/{name}")
}

#[test]
fn no_volume_is_deleted_for_its_name() {
    let lab = Lab::with_pool("64M");
    lab.import("import-7.partial", b"mine");
    lab.write_file("image.raw", &noise(1, MIB));
    lab.ok(&["import", "image.raw", &at("x")]);
    assert_eq!(lab.names(), ["import-7.partial", "x"]);
    let server = Server::start(&lab);
    lab.ok(&["import", "image.raw", &at("y")]);
    server.stop();
    assert_eq!(lab.names(), ["import-7.partial", "x", "y"]);
    assert_eq!(lab.contents("import-7.partial"), b"mine");
    lab.assert_clean();
}

#[test]
fn an_import_that_was_killed_is_not_in_the_pool_idle_or_served() {
    for is_served in [false, true] {
        let lab = Lab::with_pool("64M");
        let fresh = lab.stat("used");
        let server = is_served.then(|| Server::start(&lab));
        let mut import = lab.command(&["import", "-", &at("a")]).stdin(Stdio::piped()).spawn().unwrap();
        import.stdin.as_mut().unwrap().write_all(&noise(1, 16 * MIB)).unwrap();
        if let Some(server) = server {
            server.kill();
        }
        import.put_down().unwrap();
        assert!(lab.names().is_empty(), "served: {is_served}");
        lab.ok(&["create", &at("b"), "--size", "1M"]);
        assert_eq!(lab.names(), ["b"]);
        assert!(lab.stat("used") < fresh + (MIB as u64), "its space has come back");
        lab.assert_clean();
    }
}

/// Runs a program that writes to a pipe of which only the first `len` bytes are read.
fn read_in_part(lab: &Lab, args: &[&str], len: usize) -> Run {
    let mut child = lab.command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut vec![0; len]).unwrap();
    drop(out);
    child.output_within(LIMIT).unwrap().into()
}

#[test]
fn an_export_whose_reader_goes_away_has_failed() {
    let lab = Lab::with_pool("128M");
    lab.import("data", &noise(1, 8 * MIB));
    lab.ok(&["create", &at("holes"), "--size", "8M"]);
    for is_served in [false, true] {
        let server = is_served.then(|| Server::start(&lab));
        for (name, len) in [("data", MIB), ("data", 7 * MIB), ("holes", MIB)] {
            let message = read_in_part(&lab, &["export", &at(name), "-"], len).refused();
            assert!(message.contains("the reader went away after"), "{message}");
            assert!(message.contains("of 8388608 bytes"), "{message}");
            let after = message.split("after ").nth(1).unwrap().split(' ').next().unwrap();
            assert!((len..8 * MIB).contains(&after.parse().unwrap()), "{message}");
        }
        // A listing that is read only in part is no failure.
        let run = read_in_part(&lab, &["list", POOL], 4);
        assert!(run.status.success(), "{run:?}");
        if let Some(server) = server {
            server.stop();
        }
    }
}

#[test]
fn an_export_to_a_fifo_whose_reader_goes_away_has_failed() {
    let lab = Lab::with_pool("64M");
    lab.import("data", &noise(1, 8 * MIB));
    let fifo = lab.path("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let mut export = lab.command(&["export", &at("data"), "fifo"]);
    let child = export.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    File::open(&fifo).unwrap().read_exact(&mut vec![0; MIB]).unwrap();
    let message = Run::from(child.output_within(LIMIT).unwrap()).refused();
    assert!(message.contains("fifo: the reader went away after"), "{message}");
}

/// Starts an export long enough to be interrupted in the middle.
fn long_export(lab: &Lab, more: &[&str]) -> Child {
    lab.command(&[&["export", &at("data"), "out.raw"], more].concat()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn an_export_that_is_ended_leaves_no_new_file() {
    let lab = Lab::with_pool("1G");
    lab.import("data", &noise(1, 400 * MIB));
    for is_served in [false, true] {
        let server = is_served.then(|| Server::start(&lab));
        for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
            let mut export = long_export(&lab, &[]);
            std::thread::sleep(std::time::Duration::from_millis(60));
            let is_over = export.try_wait().unwrap().is_some();
            kill_process(Pid::from_child(&export), signal).unwrap();
            let status = export.wait_within(LIMIT).unwrap();
            if is_over || status.success() {
                assert_eq!(fs::metadata(lab.path("out.raw")).unwrap().len(), 400 << 20);
                fs::remove_file(lab.path("out.raw")).unwrap();
                continue;
            }
            let names: Vec<_> = fs::read_dir(lab.path("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            assert!(!names.iter().any(|name| name.to_string_lossy().contains("out.raw")), "{signal:?}: {names:?}");
        }
        if let Some(server) = server {
            server.stop();
        }
    }
    lab.ok(&["export", &at("data"), "out.raw"]);
    assert!(fs::read(lab.path("out.raw")).unwrap() == noise(1, 400 * MIB));
}

#[test]
fn a_file_that_is_overwritten_is_never_as_long_as_the_volume_before_it_is_whole() {
    let lab = Lab::with_pool("1G");
    lab.import("data", &noise(1, 400 * MIB));
    lab.write_file("out.raw", b"before");
    let mut export = long_export(&lab, &["--force"]);
    wait_until("it writes", || fs::metadata(lab.path("out.raw")).unwrap().len() > 6);
    kill_process(Pid::from_child(&export), Signal::TERM).unwrap();
    let status = export.wait_within(LIMIT).unwrap();
    let len = fs::metadata(lab.path("out.raw")).unwrap().len();
    assert!(status.success() || len < 400 << 20, "{status}, {len}");
    lab.ok(&["export", &at("data"), "out.raw", "--force"]);
    assert_eq!(fs::metadata(lab.path("out.raw")).unwrap().len(), 400 << 20);
}

#[test]
fn an_export_as_qcow2_is_the_same_disk_and_comes_back() {
    let lab = Lab::with_pool("256M");
    let mut disk = vec![0; 64 * MIB];
    disk[30 * MIB..31 * MIB].copy_from_slice(&noise(2, MIB));
    lab.import("a", &disk);
    let Some(mut compare) = client("qemu-img", "qemu-utils") else { return };
    for format in ["qcow2", "vhdx", "vdi"] {
        let file = format!("out.{format}");
        lab.ok(&["export", &at("a"), &file, "--format", format]);
        assert!(fs::metadata(lab.path(&file)).unwrap().len() < 24 << 20, "{format} has holes");
        lab.ok(&["import", &file, &at(format)]);
        assert!(lab.contents(format) == disk, "{format}");
    }
    lab.ok(&["export", &at("a"), "out.raw"]);
    succeed(compare.args(["compare", "-f", "raw", "-F", "qcow2"]).arg(lab.path("out.raw")).arg(lab.path("out.qcow2")));
    let message = lab.run(&["export", &at("a"), "out.qcow2", "--format", "qcow2"]).refused();
    assert!(message.contains("--force"), "{message}");
    lab.import("b", &noise(3, MIB));
    lab.ok(&["export", &at("b"), "out.qcow2", "--format", "qcow2", "--force"]);
    lab.ok(&["import", "out.qcow2", &at("c")]);
    assert!(lab.contents("c") == noise(3, MIB));
    let message = lab.run(&["export", &at("a"), "-", "--format", "qcow2"]).refused();
    assert!(message.contains("name one"), "{message}");
    let mut command = lab.command(&["export", &at("a"), "x.qcow2", "--format", "qcow2"]);
    let message = Run::from(command.env("PATH", lab.path("")).output_within(LIMIT).unwrap()).refused();
    assert!(message.contains("not installed") && message.contains("qemu-img convert"), "{message}");
    let mut names = fs::read_dir(lab.path("")).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(!names.any(|name| name.to_string_lossy().contains("partial") || name == "x.qcow2"));
}
