//! `stop` with clients connected, and restarts under clients that reconnect.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

use crate::harness::{LIMIT, Lab, LimitedWait, POOL, Server, client, noise, succeed};
use crate::nbd::Client;

#[test]
fn stop_tells_who_is_connected_and_ends_only_when_it_may() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "pool.img/b", "--size", "1M"]);
    let server = Server::start(&lab);
    let connect = |export| Client::connect(server.socket(), export).unwrap();
    let mut clients = vec![connect("a"), connect("b")];
    let message = lab.run(&["stop", POOL]).refused();
    for word in ["2 clients are connected", " on a", " on b", "--wait-for-clients", "--force"] {
        assert!(message.contains(word), "{word}: {message}");
    }
    clients[0].write(0, &noise(1, 4096), false).unwrap();
    // Two of them: the later one finds the daemon gone.
    let stop = || lab.command(&["stop", POOL, "--wait-for-clients"]).stdin(Stdio::null()).spawn().unwrap();
    let mut waiting = [stop(), stop()];
    std::thread::sleep(Duration::from_millis(500));
    assert!(waiting.iter_mut().all(|stop| stop.try_wait().unwrap().is_none()), "they wait");
    clients[1].write(0, &noise(2, 4096), false).unwrap();
    drop(clients);
    assert!(waiting.iter_mut().all(|stop| stop.wait_within(LIMIT).unwrap().success()));
    assert!(lab.contents("a")[..4096] == noise(1, 4096) && lab.contents("b")[..4096] == noise(2, 4096));
    drop(server);

    // The daemon is killed meanwhile, so the pool is not clean.
    let server = Server::start(&lab);
    let mut client = Client::connect(server.socket(), "a").unwrap();
    client.write(4096, &noise(4, 4096), false).unwrap();
    let stop = lab.command(&["stop", POOL, "--wait-for-clients"]).stdin(Stdio::null()).stderr(Stdio::piped()).spawn();
    std::thread::sleep(Duration::from_millis(500));
    server.kill();
    let (mut stop, mut said) = (stop.unwrap(), String::new());
    let status = stop.wait_within(LIMIT).unwrap();
    stop.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(status.code() == Some(1) && said.contains("without closing the pool"), "{said}");

    let server = Server::start(&lab);
    let mut client = Client::connect(server.socket(), "a").unwrap();
    client.write(0, &noise(3, 4096), false).unwrap();
    lab.ok(&["stop", POOL, "--force"]);
    assert!(client.read(0, 4096).is_err());
    assert!(lab.contents("a")[..4096] == noise(3, 4096));
    lab.assert_clean();
}

/// Starts a daemon with default sockets; returns the URI and the socket that it prints.
fn start_at_the_usual_place(lab: &Lab, pool: &str) -> (String, String) {
    let said: Value = serde_json::from_str(&lab.ok(&["serve", pool, "--daemon", "--json"])).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_string();
    (text(&said["exports"][0]["uri"]), text(&said["socket"]))
}

#[test]
fn qemu_outlives_a_restart_at_the_uri_that_serve_prints_even_of_a_moved_pool() {
    let Some(mut qemu) = client("qemu-io", "qemu-utils") else { return };
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let (uri, socket) = start_at_the_usual_place(&lab, POOL);
    let options = format!("driver=nbd,server.type=unix,server.path={socket},export=a,reconnect-delay=60");
    let mut qemu = qemu
        .args(["-t", "writeback", "--image-opts", &options])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = qemu.stdin.take().unwrap();
    stdin.write_all(b"write -P 77 0 64k\n").unwrap();
    let mut said = BufReader::new(qemu.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("ops;") {
        line.clear();
        assert!(said.read_line(&mut line).unwrap() > 0, "qemu-io ended");
    }
    assert!(lab.run(&["stop", POOL]).refused().contains("qemu-io"));
    lab.ok(&["stop", POOL, "--force"]);
    fs::rename(lab.path(POOL), lab.path("moved.img")).unwrap();
    assert_eq!(start_at_the_usual_place(&lab, "moved.img"), (uri.clone(), socket));
    stdin.write_all(b"flush\nread -P 77 0 64k\nwrite -P 78 0 64k\nflush\nquit\n").unwrap();
    drop(stdin);
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    assert!(qemu.wait_within(LIMIT).unwrap().success());
    assert!(rest.contains("read 65536/65536") && !rest.contains("failed"), "{rest}");
    succeed(client("qemu-io", "qemu-utils").unwrap().args(["-r", "-f", "raw", "-c", "read -P 78 0 64k", &uri]));
    lab.ok(&["stop", "moved.img"]);
}
