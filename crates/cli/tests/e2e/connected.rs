//! `fork --connect`: each new volume comes with a connection to it.

use std::os::unix::net::UnixStream;

use forkdisk_control::{Client as ControlClient, params};
use serde_json::Value;

use crate::harness::{Lab, POOL, Server, client, noise, succeed, wait_until};
use crate::nbd::Client;

const SIZE: usize = 256 << 10;

fn lab() -> Lab {
    let lab = Lab::with_pool("256M");
    lab.import("base", &noise(1, SIZE));
    lab
}

fn fork(children: &[String]) -> params::Fork {
    params::Fork { source: "base".into(), children: children.to_vec(), connect: true, ..Default::default() }
}

fn control(server: &Server) -> ControlClient {
    ControlClient::connect(server.announced()["control"].as_str().unwrap().as_ref()).unwrap()
}

#[test]
fn every_child_has_a_connection_that_opens_it_and_nothing_else() {
    let lab = lab();
    let server = Server::start(&lab);
    let mut control = control(&server);
    for round in 0..3 {
        let names: Vec<String> = (0..20).map(|n| format!("kids/{round}-{n}")).collect();
        let made = control.call(fork(&names), None, |_| {}).unwrap();
        let sockets = control.take_files();
        assert_eq!((made.len(), sockets.len()), (20, 20));
        for (n, (name, socket)) in names.iter().zip(sockets).enumerate() {
            let mut client = Client::over(UnixStream::from(socket), if n % 2 == 0 { "" } else { name }).unwrap();
            assert!(client.read(0, SIZE).unwrap() == noise(1, SIZE));
            client.write(0, &noise(n as u64, 4096), true).unwrap();
            let refused = lab.run(&["delete", &format!("{POOL}/{name}")]).refused();
            assert!(refused.contains("an NBD client"), "{refused}");
            drop(client);
            assert!(lab.contents(name)[..4096] == noise(n as u64, 4096));
        }
    }
    // A connection opens its own child only.
    let names = ["one".to_string(), "two".to_string()];
    control.call(fork(&names), None, |_| {}).unwrap();
    for socket in control.take_files() {
        let refused = Client::over(UnixStream::from(socket), "base").err().unwrap().to_string();
        assert!(refused.contains("no export"), "{refused}");
    }
    server.stop();
    lab.assert_clean();
}

#[test]
fn connections_that_do_not_fit_leave_nothing_behind() {
    let lab = lab();
    lab.ok(&["fork", "pool.img/base", "pool.img/folder/a"]);
    let refused = lab.run(&["fork", "pool.img/base", "pool.img/k", "--connect", "--", "true"]).refused();
    assert!(refused.contains("not being served"), "{refused}");
    let server = Server::start_with(&lab, POOL, &["--max-connections", "8"]);
    let before = lab.names();
    for (source, child, why) in [
        ("base", "kids/{1..9}", "8 more clients can connect (max_connections)"),
        ("base", "kids/{1..254}", "at most 253"),
        ("folder", "kids", "is a folder"),
    ] {
        let (source, child) = (format!("{POOL}/{source}"), format!("{POOL}/{child}"));
        let refused = lab.run(&["fork", &source, &child, "--connect", "--", "true"]).refused();
        assert!(refused.contains(why), "{refused}");
    }
    assert_eq!(lab.names(), before);
    server.stop();
    lab.assert_clean();
}

#[test]
fn a_program_gets_the_connections_of_its_disks_as_from_a_service_manager() {
    let lab = lab();
    let server = Server::start(&lab);
    let Some(python) = client("python3", "python3") else { return };
    let program = python.get_program().to_str().unwrap();
    let script = "
import os, socket
assert int(os.environ['LISTEN_PID']) == os.getpid()
count = int(os.environ['LISTEN_FDS'])
names = os.environ['LISTEN_FDNAMES'].split(':')
greetings = [socket.socket(fileno=3 + n).recv(8) for n in range(count)]
assert greetings == [b'NBDMAGIC'] * count, greetings
print(count, *names)
";
    let words = ["fork", "pool.img/base", "pool.img/kids/{1..60}", "--connect", "--", program, "-c", script];
    let expected: Vec<String> = (1..=60).map(|n| format!("kids/{n}")).collect();
    assert_eq!(lab.ok(&words).trim(), format!("60 {}", expected.join(" ")));
    // The exit status is the program's, and a lease of the connection lasts as long as it.
    let words = ["fork", "pool.img/base", "pool.img/leased", "--lease", "connection", "--connect", "--"];
    let run = lab.run(&[&words[..], &["sh", "-c", "exec 3>&-; test -e nbd.sock && exit 7"]].concat());
    assert_eq!(run.status.code(), Some(7), "{run:?}");
    wait_until("the lease has ended", || !lab.names().contains(&"leased".to_string()));
    let missing = lab.run(&["fork", "pool.img/base", "pool.img/m", "--connect", "--", "no-such-program"]).refused();
    assert!(missing.contains("no-such-program"), "{missing}");
    if let Some(nbdsh) = client("nbdsh", "python3-libnbd") {
        let nbdsh = nbdsh.get_program().to_str().unwrap().to_string();
        // It starts an interpreter by name, which must be the system's.
        let program = ["env", "PATH=/usr/bin:/bin", &nbdsh, "-c"];
        let words = [&["fork", "pool.img/base", "pool.img/shell", "--connect", "--"][..], &program].concat();
        let script = "h.connect_socket(3); print(h.get_size())";
        assert_eq!(lab.ok(&[&words[..], &[script]].concat()).trim(), SIZE.to_string());
    }
    server.stop();
    lab.assert_clean();
}

#[test]
fn python_receives_the_connections_as_the_documentation_says() {
    let lab = lab();
    let server = Server::start(&lab);
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/control.md")).unwrap();
    let script = text.split("```python\n").find(|part| part.contains("recv_fds")).expect("an example");
    let script = script.split("```").next().unwrap();
    let Some(mut python) = client("python3", "python3") else { return };
    let socket = server.announced()["control"].as_str().unwrap();
    let printed = succeed(python.args(["-c", &format!("SOCK = {socket:?}\n{script}")]));
    assert!(printed.contains("kids/1 b'NBDMAGIC") && printed.contains("kids/2 b'NBDMAGIC"), "{printed}");
    let _: Value = lab.json(&["list", POOL]);
    server.stop();
}
