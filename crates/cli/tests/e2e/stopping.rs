//! `stop` with clients connected.

use std::process::Stdio;
use std::time::Duration;

use crate::harness::{LIMIT, Lab, LimitedWait, POOL, Server, noise};
use crate::nbd::Client;

#[test]
fn stop_tells_who_is_connected_and_ends_only_when_it_may() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "pool.img/b", "--size", "1M"]);
    let server = Server::start(&lab);
    let connect = |export| Client::connect(server.socket(), export).unwrap();
    let mut clients = vec![connect("a"), connect("b")];
    let message = lab.run(&["stop", POOL]).refused();
    for word in ["2 clients are connected", " on a", " on b", "--wait", "--force"] {
        assert!(message.contains(word), "{word}: {message}");
    }
    clients[0].write(0, &noise(1, 4096), false).unwrap();
    let mut waiting = lab.command(&["stop", POOL, "--wait"]).stdin(Stdio::null()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(waiting.try_wait().unwrap(), None, "it waits");
    clients[1].write(0, &noise(2, 4096), false).unwrap();
    drop(clients);
    assert!(waiting.wait_within(LIMIT).unwrap().success());
    assert!(lab.contents("a")[..4096] == noise(1, 4096) && lab.contents("b")[..4096] == noise(2, 4096));
    drop(server);

    let server = Server::start(&lab);
    let mut client = Client::connect(server.socket(), "a").unwrap();
    client.write(0, &noise(3, 4096), false).unwrap();
    lab.ok(&["stop", POOL, "--force"]);
    assert!(client.read(0, 4096).is_err());
    assert!(lab.contents("a")[..4096] == noise(3, 4096));
    lab.assert_clean();
}
