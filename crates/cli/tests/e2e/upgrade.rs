//! Upgrades: a program takes over from a running daemon, and no client notices more than a pause.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::harness::{LIMIT, Lab, POOL, Server, client, has_ended, noise, succeed, wait_at_most, wait_until};
use crate::nbd::{Client, READ, WRITE};

const PAGE: usize = 4096;

pub fn upgrade(lab: &Lab) -> Value {
    lab.json(&["upgrade", POOL])
}

/// Makes a program from a shell script.
pub fn script(lab: &Lab, name: &str, text: &str) -> String {
    let path = lab.write_file(name, format!("#!/bin/sh\n{text}\n").as_bytes());
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

/// Prints the message of a program that can take over, on the socket that is its standard input.
const READY: &str = r#"printf '\034\000\000\000\000\000\000\000{"Ready":{"format":1}}      ' >&0"#;

/// Writes and reads back pages until `ends` is set; returns how many.
pub fn work(mut client: Client, ends: &AtomicBool, seed: u64) -> u64 {
    let mut round = 0;
    while !ends.load(Ordering::Relaxed) {
        let (page, data) = (round % 64, noise(seed + round, PAGE));
        client.write(page * PAGE as u64, &data, round % 5 == 0).unwrap();
        assert!(client.read(page * PAGE as u64, PAGE).unwrap() == data, "round {round}");
        round += 1;
    }
    for last in round.saturating_sub(64)..round {
        assert!(client.read(last % 64 * PAGE as u64, PAGE).unwrap() == noise(seed + last, PAGE));
    }
    client.flush().unwrap();
    round
}

#[test]
fn clients_go_on_over_twenty_upgrades() {
    let lab = Lab::with_pool("256M");
    let names: Vec<String> = (0..8).map(|n| format!("v{n}")).collect();
    names.iter().for_each(|name| drop(lab.ok(&["create", &format!("pool.img/{name}"), "--size", "1M"])));
    let options = ["--socket-dir", "each", "--tcp", "127.0.0.1:0", "--pid-file", "pid"];
    let server = Server::start_with(&lab, POOL, &options);
    let ends = Arc::new(AtomicBool::new(false));
    let clients = names.iter().zip(0u64..).map(|(name, n)| {
        let own = lab.path("each").join(format!("{name}.sock"));
        let client = Client::connect(if n % 2 == 0 { server.socket() } else { &own }, name).unwrap();
        let ends = ends.clone();
        thread::spawn(move || work(client, &ends, n * 1_000_000))
    });
    let clients: Vec<_> = clients.collect();
    for round in 0..20 {
        let upgraded = upgrade(&lab);
        assert_eq!((&upgraded["connections"], &upgraded["disconnected"]), (&9.into(), &0.into()), "{upgraded}");
        assert_eq!(fs::read_to_string(lab.path("pid")).unwrap().trim(), upgraded["pid"].to_string());
        lab.ok(&["snapshot", &format!("pool.img/v{}@{round}", round % 8)]);
        // New clients find the same sockets.
        drop(Client::connect(server.socket(), "v0").unwrap());
        drop(Client::connect(&lab.path("each").join("v1.sock"), "v1").unwrap());
    }
    ends.store(true, Ordering::Relaxed);
    let rounds: Vec<u64> = clients.into_iter().map(|client| client.join().unwrap()).collect();
    assert!(rounds.iter().all(|&count| count > 20), "{rounds:?}");
    server.stop();
    assert!(!lab.path("nbd.sock").exists() && fs::read_dir(lab.path("each")).unwrap().next().is_none());
    lab.assert_clean();
}

#[test]
fn fio_verifies_over_twenty_upgrades() {
    let Some(mut fio) = client("fio", "fio") else { return };
    let lab = Lab::with_pool("256M");
    lab.ok(&["create", "pool.img/a", "--size", "64M"]);
    let server = Server::start(&lab);
    let uri = format!("--uri={}", server.uri("a"));
    let job = ["--name=w", "--ioengine=nbd", &uri, "--rw=randrw", "--bs=4k", "--iodepth=32", "--size=64M"];
    fio.args(job).args(["--verify=crc32c", "--verify_backlog=64", "--verify_fatal=1", "--time_based", "--runtime=12"]);
    fio.current_dir(lab.path(""));
    let (done, ended) = mpsc::channel();
    let running = thread::spawn(move || {
        succeed(&mut fio);
        done.send(()).unwrap();
    });
    let mut count = 0;
    while ended.try_recv().is_err() && !running.is_finished() {
        upgrade(&lab);
        count += 1;
    }
    running.join().unwrap();
    assert!(count >= 20, "{count} upgrades");
    server.stop();
    lab.assert_clean();
}

#[test]
fn half_of_a_request_and_replies_that_wait_are_passed_on() {
    let lab = Lab::with_pool("128M");
    lab.import("a", &noise(1, 32 << 20));
    let server = Server::start(&lab);
    // One has sent a half of its data, one fetches no replies, one is in the middle of its greeting.
    let mut half = Client::connect(server.socket(), "a").unwrap();
    let data = noise(2, 8 << 20);
    half.start_write(0, 8 << 20, &data[..3 << 20]).unwrap();
    let mut slow = Client::connect(server.socket(), "a").unwrap();
    let sizes: Vec<u64> = (0..8).map(|n| slow.start(READ, 0, (16 + n) << 20, 1 << 20, &[]).unwrap()).collect();
    let mut new = UnixStream::connect(server.socket()).unwrap();
    new.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut greeting = [0; 18];
    new.read_exact(&mut greeting).unwrap();
    new.write_all(&[0, 0, 0, 3, b'I', b'H', b'A', b'V', b'E']).unwrap();
    thread::sleep(Duration::from_millis(100));
    for _ in 0..3 {
        assert_eq!(upgrade(&lab)["connections"], 4);
    }
    half.start_rest(&data[3 << 20..]).unwrap();
    assert!(half.finish(|_| 0).unwrap().1.is_empty());
    for _ in &sizes {
        let (cookie, read) = slow.finish(|_| 1 << 20).unwrap();
        let at = 16 + sizes.iter().position(|&size| size == cookie).unwrap();
        assert!(read == noise(1, 32 << 20)[at << 20..(at + 1) << 20], "{at}");
    }
    // The rest of NBD_OPT_GO.
    new.write_all(&[b"OPT\0\0\0\x07\0\0\0\x07\0\0\0\x01a\0\0".as_slice()].concat()).unwrap();
    let mut reply = [0; 20];
    new.read_exact(&mut reply).unwrap();
    assert_eq!(&reply[8..16], [0, 0, 0, 7, 0, 0, 0, 3]);
    assert!(half.read(0, 8 << 20).unwrap() == data);
    slow.start(WRITE, 0, 0, 4096, &noise(3, PAGE)).unwrap();
    assert!(slow.finish(|_| 0).unwrap().1.is_empty());
    assert!(half.read(0, PAGE).unwrap() == noise(3, PAGE));
    drop((half, slow, new));
    server.stop();
}

#[test]
fn a_program_that_fails_leaves_the_daemon_as_it_was() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let server = Server::start(&lab);
    let mut client = Client::connect(server.socket(), "a").unwrap();
    client.write(0, &noise(1, PAGE), false).unwrap();
    let none = "ended without taking over";
    let programs = [
        ("no-program", "exit 3".to_string(), none),
        ("killed", "kill -9 $$".to_string(), none),
        ("ends-when-it-is-ready", format!("{READY}; sleep 0.2; exit 1"), none),
        ("killed-when-it-is-ready", format!("{READY}; sleep 0.2; kill -9 $$"), none),
        ("closes-its-input", "exec </dev/null; exec sleep 20".to_string(), none),
        ("half-of-a-message", "printf x >&0; exec sleep 20".to_string(), "did not answer in time"),
        ("other-words", "echo 'Listening on port 80, as every server does' >&0; sleep 5".to_string(), "a message of"),
    ];
    for (name, text, why) in &programs {
        let program = script(&lab, name, text);
        let message = lab.run(&["upgrade", POOL, "--program", &program]).refused();
        assert!(message.contains(why) && message.contains(name), "{name}: {message}");
        assert!(client.read(0, PAGE).unwrap() == noise(1, PAGE), "{name}");
        client.write(0, &noise(1, PAGE), true).unwrap();
        drop(Client::connect(server.socket(), "a").unwrap());
        lab.ok(&["snapshot", &format!("pool.img/a@{name}")]);
    }
    let data = lab.path("text").display().to_string();
    fs::write(&data, "no program").unwrap();
    assert!(lab.run(&["upgrade", POOL, "--program", &data]).refused().contains("cannot be started"));
    assert!(lab.run(&["upgrade", POOL, "--program", "none"]).refused().contains("none"));
    let status = lab.json(&["upgrade", POOL]);
    assert_ne!(status["pid"], server.pid());
    assert!(client.read(0, PAGE).unwrap() == noise(1, PAGE));
    drop(client);
    server.stop();
    assert!(lab.run(&["upgrade", POOL]).refused().contains("no daemon"));
    lab.assert_clean();
}

#[test]
fn a_full_pool_is_not_upgraded_while_writes_wait() {
    let lab = Lab::with_pool("16M");
    lab.ok(&["create", "pool.img/a", "--size", "64M"]);
    let server = Server::start_with(&lab, POOL, &["--wait-for-space", "60s"]);
    let mut client = Client::connect(server.socket(), "a").unwrap();
    for n in 0..24 {
        client.start(WRITE, 0, n << 20, 1 << 20, &noise(n, 1 << 20)).unwrap();
    }
    wait_until("a write waits", || lab.json(&["stats", POOL])["mode"] != "rw");
    let message = lab.run(&["upgrade", POOL]).refused();
    assert!(message.contains("the pool is full"), "{message}");
    lab.ok(&["grow", POOL, "--size", "64M"]);
    for _ in 0..24 {
        client.finish(|_| 0).unwrap();
    }
    wait_until("the pool has space", || lab.json(&["stats", POOL])["mode"] == "rw");
    assert_eq!(upgrade(&lab)["connections"], 2);
    assert!(client.read(23 << 20, PAGE).unwrap() == noise(23, 1 << 20)[..PAGE]);
    drop(client);
    server.stop();
}

#[test]
fn an_upgrade_without_descriptors_is_refused() {
    let lab = Lab::with_pool("64M");
    let names: Vec<String> = (0..90).map(|n| format!("pool.img/v{n}")).collect();
    lab.ok(&[&["create"], names.iter().map(String::as_str).collect::<Vec<_>>().as_slice(), &["--size", "4k"]].concat());
    let limit = "--nofile=260:260";
    let serve = ["serve", POOL, "--socket-dir", "each", "--max-connections", "16", "--control-connections", "16"];
    let program = lab.command(&serve);
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "--", "prlimit", limit])
        .arg("--")
        .arg(program.get_program())
        .args(program.get_args())
        .current_dir(lab.path(""));
    let mut child = command.stdout(std::process::Stdio::null()).spawn().unwrap();
    let own = lab.path("each").join("v7.sock");
    wait_until("it serves", || UnixStream::connect(&own).is_ok());
    let mut client = Client::connect(&own, "v7").unwrap();
    let message = lab.run(&["upgrade", POOL]).refused();
    assert!(message.contains("file descriptors"), "{message}");
    client.write(0, &noise(1, PAGE), true).unwrap();
    drop(client);
    lab.ok(&["stop", POOL]);
    assert!(wait_at_most(&mut child, Duration::from_secs(20)).success());
}

#[test]
fn a_daemon_in_the_foreground_keeps_its_number() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let mut server = Server::start(&lab);
    let numbers: Vec<u64> = (0..3).map(|_| upgrade(&lab)["pid"].as_u64().unwrap()).collect();
    assert!(numbers.iter().all(|&pid| pid != u64::from(server.pid())));
    let gone = |i: usize| has_ended(numbers[i] as u32);
    wait_until("the earlier ones have ended", || gone(0) && gone(1));
    assert!(!gone(2));
    // A signal to the first process ends the last one in order.
    succeed(Command::new("kill").args(["-TERM", &server.pid().to_string()]));
    assert!(wait_at_most(server.child_mut(), Duration::from_secs(20)).success());
    assert!(gone(2));
    lab.assert_clean();
    // A kill of the first process kills the last one, a kill of that one ends the first.
    for of_first in [true, false] {
        let mut server = Server::start(&lab);
        let pid = {
            upgrade(&lab);
            upgrade(&lab)["pid"].as_u64().unwrap()
        };
        let target = if of_first { u64::from(server.pid()) } else { pid };
        succeed(Command::new("kill").args(["-KILL", &target.to_string()]));
        let status = wait_at_most(server.child_mut(), Duration::from_secs(20));
        assert!(status.signal() == Some(9) || status.code() == Some(137), "{status}");
        wait_until("the daemon is gone", || has_ended(pid as u32));
    }
    drop(Server::start(&lab));
}

#[test]
fn a_mount_and_what_is_open_on_it_go_on() {
    let lab = Lab::with_pool("256M");
    fs::create_dir(lab.path("m")).unwrap();
    let server = Server::start_with(&lab, POOL, &["--mount", "m"]);
    let dir = lab.path("m");
    fs::create_dir(dir.join("d")).unwrap();
    let removed = File::options().read(true).write(true).create(true).truncate(true).open(dir.join("d/x")).unwrap();
    removed.write_all_at(&noise(1, 1 << 20), 0).unwrap();
    fs::remove_file(dir.join("d/x")).unwrap();
    let gone = File::open(dir.join("d")).unwrap();
    let ends = Arc::new(AtomicBool::new(false));
    let writers: Vec<_> = (0..4u64)
        .map(|n| {
            let (ends, path) = (ends.clone(), dir.join(format!("d/f{n}")));
            thread::spawn(move || {
                let mut count = 0;
                while !ends.load(Ordering::Relaxed) {
                    let data = noise(n * 1_000_000 + count, 100_000);
                    fs::write(&path, &data).unwrap();
                    assert!(fs::read(&path).unwrap() == data, "{n}: {count}");
                    if n % 2 == 0 {
                        fs::rename(&path, path.with_extension("new")).unwrap();
                        fs::rename(path.with_extension("new"), &path).unwrap();
                    }
                    File::open(&path).unwrap().sync_all().unwrap();
                    count += 1;
                }
                count
            })
        })
        .collect();
    for _ in 0..20 {
        assert_eq!(upgrade(&lab)["mounts"], 1);
        let mut found = vec![0; 1 << 20];
        removed.read_exact_at(&mut found, 0).unwrap();
        assert!(found == noise(1, 1 << 20));
        removed.write_all_at(&noise(1, 4096), 0).unwrap();
        assert!(gone.metadata().unwrap().is_dir());
        assert!(fs::read_dir(dir.join("d")).unwrap().count() <= 6);
    }
    ends.store(true, Ordering::Relaxed);
    let counts: Vec<u64> = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
    assert!(counts.iter().all(|&count| count > 10), "{counts:?}");
    drop((removed, gone));
    server.stop();
    assert_eq!(lab.names().len(), 4, "the removed file has gone");
    lab.assert_clean();
}

#[test]
fn control_connections_stay_and_other_requests_wait() {
    let lab = Lab::with_pool("64M");
    let control = lab.path("control.sock");
    let server = Server::start_with(&lab, POOL, &["--control", control.to_str().unwrap()]);
    let mut peer = UnixStream::connect(&control).unwrap();
    peer.set_read_timeout(Some(LIMIT)).unwrap();
    let request = br#"{"jsonrpc":"2.0","id":7,"method":"status","params":{}}"#;
    peer.write_all(&request[..20]).unwrap();
    thread::sleep(Duration::from_millis(50));
    let upgraded = lab.json(&["upgrade", POOL, "--control", control.to_str().unwrap()]);
    assert_eq!(upgraded["connections"], 2);
    peer.write_all(&request[20..]).and_then(|()| peer.write_all(b"\n")).unwrap();
    let mut reader = std::io::BufReader::new(&peer);
    let mut line = String::new();
    std::io::BufRead::read_line(&mut reader, &mut line).unwrap();
    let status: Value = serde_json::from_str(&line).unwrap();
    assert_eq!((&status["id"], &status["result"]["pid"]), (&7.into(), &upgraded["pid"]));
    server.stop();
}
