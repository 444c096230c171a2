//! `serve`: its announcement, its end, and what it leaves.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{LIMIT, Lab, Limited, LimitedWait, POOL, Run, Server, client, noise, succeed, wait_until};
use crate::nbd::{Client, HAS_FLUSH};

#[test]
fn every_volume_and_snapshot_is_announced() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "pool.img/dir/b", "--size", "1M"]);
    lab.ok(&["snapshot", "pool.img/a@x"]);
    let server = Server::start(&lab);
    let announced = server.announced();
    assert_eq!(announced["socket"], server.socket().to_str().unwrap());
    let exports: Vec<(&str, &str)> = announced["exports"]
        .as_array()
        .unwrap()
        .iter()
        .map(|export| (export["name"].as_str().unwrap(), export["uri"].as_str().unwrap()))
        .collect();
    let uri = |name: &str| format!("nbd+unix:///{name}?socket={}", server.socket().display());
    let expected = ["a", "a@x", "dir/b"].map(|name| (name, uri(name)));
    assert_eq!(exports, expected.each_ref().map(|(name, uri)| (*name, uri.as_str())));
}

#[test]
fn flush_is_offered() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let server = Server::start(&lab);
    let client = Client::connect(server.socket(), "a").unwrap();
    assert_eq!((client.size, client.flags & HAS_FLUSH), (1 << 20, HAS_FLUSH));
}

#[test]
fn only_its_owner_reaches_the_socket() {
    let lab = Lab::with_pool("64M");
    let server = Server::start(&lab);
    let socket = fs::metadata(server.socket()).unwrap();
    assert!(socket.file_type().is_socket());
    assert_eq!(socket.permissions().mode() & 0o777, 0o600);
}

#[test]
fn the_usual_place_of_the_socket_is_private() {
    let lab = Lab::with_pool("64M");
    let uuid = lab.json(&["stats", POOL])["uuid"].as_str().unwrap().to_string();
    let is_root = rustix::process::geteuid().is_root();
    let run_dir = lab.path("run");
    fs::create_dir(&run_dir).unwrap();
    let mut command = lab.command(&["serve", POOL]);
    let child = command.env("XDG_RUNTIME_DIR", &run_dir).stdout(Stdio::null()).spawn().unwrap();
    let dir = if is_root { "/run/forkdisk".into() } else { run_dir.join("forkdisk") }.join(uuid);
    wait_until("the socket is there", || dir.join("nbd.sock").exists());
    assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
    let output = end(child);
    assert!(output.success());
    assert!(!dir.exists(), "nothing is left behind");
}

fn end(mut child: std::process::Child) -> std::process::ExitStatus {
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    child.wait_within(LIMIT).unwrap()
}

#[test]
fn a_trimmed_range_reads_as_zeroes_to_its_last_byte() {
    let lab = Lab::with_pool("64M");
    let mut contents = noise(1, 100_001);
    lab.import("a", &contents);
    lab.ok(&["snapshot", "pool.img/a@x"]);
    let server = Server::start(&lab);
    let mut client = Client::connect(server.socket(), "a").unwrap();
    for (offset, len) in [(10_000, 30_000), (50_000, 100), (61_000, 1000), (90_001, 10_000)] {
        client.trim(offset as u64, len as u32).unwrap();
        contents[offset..offset + len].fill(0);
    }
    let read = client.read(0, contents.len()).unwrap();
    assert_eq!(read.iter().zip(&contents).position(|(a, b)| a != b), None);
    drop(client);
    server.stop();
    assert!(lab.contents("a@x") == noise(1, 100_001));
    lab.assert_clean();
}

/// Returns the bytes that the pool's file takes in its file system.
fn taken(lab: &Lab) -> u64 {
    fs::metadata(lab.path(POOL)).unwrap().blocks() * 512
}

/// Writes the first `count` MiB of a volume.
fn write_pieces(client: &mut Client, count: u64) {
    for piece in 0..count {
        client.write(piece << 20, &noise(piece, 1 << 20), false).unwrap();
    }
}

#[test]
fn what_is_trimmed_becomes_a_hole_in_the_file_while_it_is_served() {
    for policy in ["--discard=yes", "--discard-after=1s"] {
        trimmed_while_served(policy);
    }
}

fn trimmed_while_served(policy: &str) {
    let lab = Lab::with_pool("256M");
    lab.ok(&["create", "pool.img/a", "--size", "64M"]);
    let server = Server::start_with(&lab, POOL, &[policy]);
    let before = taken(&lab);
    let mut client = Client::connect(server.socket(), "a").unwrap();
    write_pieces(&mut client, 32);
    client.flush().unwrap();
    assert!(taken(&lab) >= before + (32 << 20));
    client.trim(0, 16 << 20).unwrap();
    client.trim(16 << 20, 16 << 20).unwrap();
    wait_until("the file is short again", || taken(&lab) < before + (2 << 20));
    drop(client);
    server.stop();
    lab.assert_clean();
}

#[test]
fn a_preallocated_pool_keeps_its_space_unless_it_is_told_to_discard() {
    const SIZE_BYTES: u64 = 64 << 20;
    let lab = Lab::empty();
    lab.ok(&["init", POOL, "--size", "64M", "--preallocate"]);
    assert!(taken(&lab) >= SIZE_BYTES, "{}", taken(&lab));
    lab.import("a", &noise(1, 16 << 20));
    lab.ok(&["delete", "pool.img/a"]);
    lab.ok(&["create", "pool.img/a", "--size", "64M"]);
    let write_and_trim = |policy: &[&str]| {
        let server = Server::start_with(&lab, POOL, policy);
        let mut client = Client::connect(server.socket(), "a").unwrap();
        write_pieces(&mut client, 16);
        client.trim(0, 16 << 20).unwrap();
        drop(client);
        server.stop();
        taken(&lab)
    };
    assert!(write_and_trim(&[]) >= SIZE_BYTES);
    assert!(write_and_trim(&["--discard=yes"]) < SIZE_BYTES - (8 << 20));
    lab.assert_clean();
}

#[test]
fn deleting_gives_holes_back_and_keeps_them_over_a_reopening() {
    let lab = Lab::with_pool("256M");
    let before = (taken(&lab), lab.stat("used"));
    lab.import("a", &noise(1, 32 << 20));
    lab.ok(&["snapshot", "pool.img/a@x"]);
    lab.ok(&["clone", "pool.img/a@x", "pool.img/b"]);
    lab.ok(&["delete", "-r", "pool.img/a"]);
    assert!(taken(&lab) >= before.0 + (32 << 20), "the clone holds it");
    lab.ok(&["delete", "pool.img/b"]);
    assert!(taken(&lab) < before.0 + (2 << 20));
    Server::start(&lab).stop();
    assert!(taken(&lab) < before.0 + (2 << 20));
    assert_eq!(lab.stat("used"), before.1);
}

#[test]
fn what_is_freed_while_it_is_served_is_a_hole_when_the_server_has_ended() {
    let lab = Lab::with_pool("256M");
    lab.ok(&["create", "pool.img/a", "--size", "64M"]);
    let before = taken(&lab);
    let server = Server::start(&lab);
    let mut client = Client::connect(server.socket(), "a").unwrap();
    write_pieces(&mut client, 32);
    client.trim(0, 32 << 20).unwrap();
    drop(client);
    server.stop();
    assert!(taken(&lab) < before + (2 << 20));
    lab.assert_clean();
}

#[test]
fn sigterm_leaves_the_pool_clean_and_everything_durable() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let server = Server::start(&lab);
    let mut client = Client::connect(server.socket(), "a").unwrap();
    client.write(0, &noise(1, 65536), false).unwrap();
    let socket = server.socket().to_path_buf();
    server.stop();
    assert!(!socket.exists(), "the socket goes with its server");
    assert_eq!(lab.json(&["stats", POOL])["clean"], true);
    assert!(lab.contents("a")[..65536] == noise(1, 65536));
    lab.assert_clean();
}

#[test]
fn sigint_ends_it_as_well() {
    let lab = Lab::with_pool("64M");
    let socket = lab.path("s");
    let mut command = lab.command(&["serve", POOL, "--socket", socket.to_str().unwrap()]);
    let mut child = command.stdout(Stdio::null()).spawn().unwrap();
    wait_until("the socket is there", || socket.exists());
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert!(child.wait_within(LIMIT).unwrap().success());
    assert_eq!(lab.json(&["stats", POOL])["clean"], true);
}

#[test]
fn a_killed_server_leaves_a_pool_that_opens() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let server = Server::start(&lab);
    let mut client = Client::connect(server.socket(), "a").unwrap();
    client.write(4096, &noise(2, 4096), true).unwrap();
    server.kill();
    assert!(lab.contents("a")[4096..8192] == noise(2, 4096), "acknowledged with FUA");
    lab.assert_clean();
    let server = Server::start(&lab);
    let mut client = Client::connect(server.socket(), "a").unwrap();
    assert!(client.read(4096, 4096).unwrap() == noise(2, 4096));
}

#[test]
fn a_socket_path_that_is_taken_is_refused() {
    let lab = Lab::with_pool("64M");
    lab.write_file("taken", b"precious");
    let message = lab.run(&["serve", POOL, "--socket", "taken"]).refused();
    assert!(message.contains("taken"), "{message}");
    assert_eq!(fs::read(lab.path("taken")).unwrap(), b"precious");
}

#[test]
fn the_log_goes_to_stderr() {
    let lab = Lab::with_pool("64M");
    let socket = lab.path("s");
    let mut command: Command = lab.command(&["serve", POOL, "--socket", socket.to_str().unwrap()]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("the socket is there", || socket.exists());
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let output = child.output_within(LIMIT).unwrap();
    let (out, log) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(out.contains(socket.to_str().unwrap()) && !out.contains("INFO"), "{out}");
    assert!(log.contains("INFO"), "{log}");
}

#[test]
fn no_more_clients_than_allowed_are_served_at_a_time() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let server = Server::start_with(&lab, POOL, &["--max-connections", "2"]);
    let connect = || Client::connect(server.socket(), "a");
    let (mut first, second) = (connect().unwrap(), connect().unwrap());
    assert!(connect().is_err(), "a third one");
    first.write(0, &noise(1, 4096), false).unwrap();
    drop(second);
    wait_until("there is a place again", || connect().is_ok_and(|mut third| third.read(0, 4096).is_ok()));
    assert!(first.read(0, 4096).unwrap() == noise(1, 4096));
}

#[test]
fn one_export_takes_no_more_clients_than_it_may_and_leaves_room_for_the_others() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "pool.img/b", "--size", "1M"]);
    let server = Server::start_with(&lab, POOL, &["--max-export-connections", "2"]);
    let connect = |export| Client::connect(server.socket(), export);
    let (mut first, second) = (connect("a").unwrap(), connect("a").unwrap());
    assert!(connect("a").is_err(), "a third one");
    // Under its new name it is the same export.
    lab.ok(&["rename", "pool.img/a", "pool.img/c"]);
    assert!(connect("c").is_err(), "a third one by another name");
    let others = (connect("b").unwrap(), connect("b").unwrap());
    first.write(0, &noise(1, 4096), false).unwrap();
    drop((second, others));
    wait_until("there is a place again", || connect("c").is_ok_and(|mut third| third.read(0, 4096).is_ok()));
    assert!(first.read(0, 4096).unwrap() == noise(1, 4096));
}

#[test]
fn a_flood_of_bad_clients_does_not_flood_the_log() {
    const CLIENTS: usize = 400;
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let server = Server::start_with(&lab, POOL, &["--log", "debug", "--log-burst", "3"]);
    for _ in 0..CLIENTS {
        let mut stream = UnixStream::connect(server.socket()).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        // The server may close the connection before all is written.
        let _ = stream.write_all(&noise(2, 64));
        let mut said = Vec::new();
        let _ = stream.read_to_end(&mut said);
    }
    let mut client = Client::connect(server.socket(), "a").unwrap();
    client.write(0, &noise(1, 4096), true).unwrap();
    drop(client);
    server.stop();
    let log = fs::read_to_string(lab.path("serve.log")).unwrap();
    assert!(log.contains("stopped"), "other lines are there: {log}");
    assert!(log.lines().count() < CLIENTS / 4, "{} lines: {log}", log.lines().count());
}

#[test]
fn a_kernel_that_is_too_old_is_named_at_the_start() {
    let lab = Lab::empty();
    let Some(mut setarch) = client("setarch", "util-linux") else { return };
    let program = lab.command(&["init", POOL, "--size", "64M"]);
    // The kernel reports itself as Linux 2.6.
    setarch.args([std::env::consts::ARCH, "--uname-2.6"]).arg(program.get_program()).args(program.get_args());
    setarch.current_dir(lab.path("")).env_remove("FORKDISK_ANY_KERNEL");
    let refused = Run::from(setarch.output_within(LIMIT).unwrap()).refused();
    assert!(refused.starts_with("forkdisk: forkdisk needs Linux 5.15 or later, this is 2.6."), "{refused}");
    assert!(refused.contains("FORKDISK_ANY_KERNEL=1") && !lab.path(POOL).exists(), "{refused}");
    succeed(setarch.env("FORKDISK_ANY_KERNEL", "1"));
    lab.assert_clean();
}
