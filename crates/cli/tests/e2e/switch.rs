//! A door is pointed at another volume under its clients: after the answer no byte of the old one.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forkdisk_vhost_user::testing::Guest;
use serde_json::{Value, json};
use vhost::vhost_user::VhostUserFrontend;

use crate::harness::{LIMIT, Lab, POOL, Server, client, noise, succeed, wait_until};
use crate::nbd::Client;

const PAGE: usize = 4096;
const PAGES: usize = 64;
const SIZE: usize = PAGES * PAGE;
const HALF: usize = SIZE / 2;
pub const IN: u32 = 0;
pub const OUT: u32 = 1;

fn at(object: &str) -> String {
    format!("{POOL}/{object}")
}

/// A pool with the volumes `a` and `b` of one size, and their contents.
fn lab() -> (Lab, [Vec<u8>; 2]) {
    let (lab, contents) = (Lab::with_pool("256M"), [noise(1, SIZE), noise(2, SIZE)]);
    lab.import("a", &contents[0]);
    lab.import("b", &contents[1]);
    (lab, contents)
}

/// Kills a server and, after an upgrade, the process that serves; waits until the kernel has closed its sockets.
pub fn kill(server: Server) {
    let socket = server.socket().to_path_buf();
    server.kill();
    wait_until("the sockets are closed", || UnixStream::connect(&socket).is_err());
}

fn switch(lab: &Lab, door: &str, to: &str) {
    lab.ok(&["switch", &at(door), "--to", &at(to)]);
}

/// A control connection.
pub struct Control(BufReader<UnixStream>);

impl Control {
    pub fn connect(server: &Server) -> Control {
        let stream = UnixStream::connect(server.announced()["control"].as_str().unwrap()).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        Control(BufReader::new(stream))
    }

    /// Switches; returns how long that took.
    fn switch(&mut self, door: &str, to: &str) -> Duration {
        let (answer, took) = self.call("switch", json!({"door": door, "to": to}));
        assert_eq!(answer["result"]["to"], to, "{answer}");
        took
    }

    /// Rolls back under the clients; returns how long that took.
    pub fn roll_back(&mut self, snapshot: &str) -> Duration {
        let (answer, took) = self.call("rollback", json!({"snapshot": snapshot, "live": true}));
        assert!(answer["result"]["name"].is_string(), "{answer}");
        took
    }

    fn call(&mut self, method: &str, params: Value) -> (Value, Duration) {
        let request = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
        let start = Instant::now();
        writeln!(self.0.get_mut(), "{request}").unwrap();
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        (serde_json::from_str(&line).unwrap(), start.elapsed())
    }
}

/// Shows the figures of docs/figures.md.
pub fn show(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100];
    eprintln!("{what}: {} times, median {:?}, p99 {:?}, longest {:?}", times.len(), at(50), at(99), at(100));
}

/// Reads the first half, which is never written: it is all of one volume. Returns how often.
fn keep_reading(mut read: impl FnMut() -> Vec<u8>, contents: &[Vec<u8>; 2], ends: &AtomicBool) -> usize {
    let mut count = 0;
    while !ends.load(Ordering::Relaxed) {
        let found = read();
        assert!(contents.iter().any(|volume| found == volume[..HALF]), "a read has bytes of two volumes");
        count += 1;
    }
    count
}

#[test]
fn a_thousand_switches_of_an_export_beside_readers_and_writers() {
    let (lab, mut contents) = lab();
    let server = Server::start(&lab);
    let base = contents.clone();
    let (mut own, mut control) = (Client::connect(server.socket(), "a").unwrap(), Control::connect(&server));
    let (ends, last) = (AtomicBool::new(false), PAGES - 1);
    let times = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut client = Client::connect(server.socket(), "a").unwrap();
            keep_reading(|| client.read(0, HALF).unwrap(), &base, &ends)
        });
        // Writes the last page: what it reads was written to one of the volumes, by itself.
        let writer = scope.spawn(|| {
            let mut client = Client::connect(server.socket(), "a").unwrap();
            let mut count = 0_u64;
            while !ends.load(Ordering::Relaxed) {
                client.write((last * PAGE) as u64, &count.to_le_bytes().repeat(PAGE / 8), false).unwrap();
                let found = client.read((last * PAGE) as u64, PAGE).unwrap();
                let written = u64::from_le_bytes(found[..8].try_into().unwrap());
                let is_base = base.iter().any(|volume| found == volume[last * PAGE..]);
                assert!(is_base || written <= count && found == written.to_le_bytes().repeat(PAGE / 8), "{count}");
                count += 1;
            }
            count
        });
        let mut times = Vec::new();
        for round in 0..1000_usize {
            // Acknowledged, and not flushed.
            let (old, new) = (round % 2, (round + 1) % 2);
            let page = PAGES / 2 + round % (PAGES / 2 - 1);
            let data = noise(100 + round as u64, PAGE);
            own.write((page * PAGE) as u64, &data, false).unwrap();
            contents[old][page * PAGE..][..PAGE].copy_from_slice(&data);
            times.push(control.switch("a", ["a", "b"][new]));
            let found = own.read(0, last * PAGE).unwrap();
            assert!(found == contents[new][..last * PAGE], "round {round}: bytes of the old volume");
        }
        ends.store(true, Ordering::Relaxed);
        let (reads, writes) = (reader.join().unwrap(), writer.join().unwrap());
        assert!(reads > 100 && writes > 100, "{reads} reads, {writes} writes");
        times
    });
    show("an NBD export", times);
    drop(own);
    kill(server);
    for (name, expected) in ["a", "b"].iter().zip(&contents) {
        assert!(lab.contents(name)[..last * PAGE] == expected[..last * PAGE], "{name} lost what was acknowledged");
    }
    lab.assert_clean();
}

#[test]
fn a_switch_outlives_kills_stops_and_upgrades_until_it_is_switched_back() {
    let (lab, contents) = lab();
    lab.ok(&["fork", &at("b"), &at("c")]);
    let is = |client: &mut Client, volume: usize| assert!(client.read(0, SIZE).unwrap() == contents[volume]);
    let first = Server::start(&lab);
    switch(&lab, "a", "b");
    is(&mut Client::connect(first.socket(), "a").unwrap(), 1);
    kill(first);
    for round in 0..6 {
        let server = Server::start(&lab);
        let mut client = Client::connect(server.socket(), "a").unwrap();
        is(&mut client, 1);
        lab.ok(&["upgrade", POOL]);
        is(&mut client, 1);
        is(&mut Client::connect(server.socket(), "a").unwrap(), 1);
        is(&mut Client::connect(server.socket(), "c").unwrap(), 1);
        drop(client);
        match round % 2 {
            0 => kill(server),
            _ => server.stop(),
        }
    }
    let server = Server::start(&lab);
    switch(&lab, "a", "a");
    is(&mut Client::connect(server.socket(), "a").unwrap(), 0);
    kill(server);
    let server = Server::start(&lab);
    is(&mut Client::connect(server.socket(), "a").unwrap(), 0);
    server.stop();
    lab.assert_clean();
}

#[test]
fn the_old_volume_is_free_and_the_new_one_is_in_use() {
    let (lab, contents) = lab();
    lab.ok(&["snapshot", &at("b@now")]);
    let server = Server::start_with(&lab, POOL, &["--socket-dir", "each"]);
    let mut client = Client::connect(&lab.path("each").join("a.sock"), "").unwrap();
    lab.ok(&["switch", "each/a.sock", "--to", &at("b")]);
    let refused = lab.run(&["delete", "-r", &at("b")]).refused();
    assert!(refused.contains("b is in use by an NBD client"), "{refused}");
    lab.ok(&["rename", &at("b"), &at("renamed")]);
    lab.ok(&["delete", &at("a")]);
    assert!(client.read(0, SIZE).unwrap() == contents[1]);
    // The export stays, and its volume can be made again without a change for it.
    lab.ok(&["create", &at("a"), "--size", "1M"]);
    assert!(Client::connect(server.socket(), "a").unwrap().read(0, SIZE).unwrap() == contents[1]);
    drop(client);
    lab.ok(&["delete", "-r", &at("renamed")]);
    let refused = Client::connect(server.socket(), "a").err().unwrap().to_string();
    assert!(refused.contains("was switched to a volume that is deleted"), "{refused}");
    switch(&lab, "a", "a");
    assert_eq!(Client::connect(server.socket(), "a").unwrap().size, 1 << 20);
    server.stop();
    lab.assert_clean();
}

#[test]
fn clients_that_would_find_another_kind_of_disk_refuse_a_switch() {
    let (lab, contents) = lab();
    lab.ok(&["create", &at("large"), "--size", "4M"]);
    lab.ok(&["snapshot", &at("b@now")]);
    let refused = lab.run(&["switch", &at("a"), "--to", &at("b")]).refused();
    assert!(refused.contains("the pool is not being served"), "{refused}");
    let server = Server::start(&lab);
    let mut client = Client::connect(server.socket(), "a").unwrap();
    for (door, to, why) in [
        ("a", "large", "has 4194304 bytes, and the clients of the export a have opened a disk of 262144"),
        ("a", "b@now", "b@now cannot be written, and the clients of the export a"),
        ("a", "none", "none"),
        ("none", "a", "no export"),
    ] {
        let refused = lab.run(&["switch", &at(door), "--to", &at(to)]).refused();
        assert!(refused.contains(why), "{door} {to}: {refused}");
    }
    let refused = lab.run(&["switch", "nbd.sock", "--to", &at("b")]).refused();
    assert!(refused.contains("no socket of one volume"), "{refused}");
    assert!(client.read(0, SIZE).unwrap() == contents[0]);
    drop(client);
    // No client has it open.
    switch(&lab, "a", "large");
    assert_eq!(Client::connect(server.socket(), "a").unwrap().size, 4 << 20);
    switch(&lab, "a", "b@now");
    let mut client = Client::connect(server.socket(), "a").unwrap();
    assert!(client.flags & 2 != 0 && client.read(0, SIZE).unwrap() == contents[1], "read-only");
    // A client that can only read may get a volume, and does not write it.
    switch(&lab, "a", "b");
    assert!(client.write(0, &[0; PAGE], false).is_err());
    assert!(lab.contents("b") == contents[1]);
    drop(client);
    server.stop();
    lab.assert_clean();
}

#[test]
fn the_map_of_a_client_is_that_of_the_volume_it_shows() {
    let (lab, _) = lab();
    lab.ok(&["create", &at("empty"), "--size", &SIZE.to_string()]);
    lab.ok(&["snapshot", &at("a@one")]);
    let server = Server::start(&lab);
    let Some(mut nbdsh) = client("nbdsh", "libnbd-bin") else { return };
    let program = lab.command(&[]).get_program().to_str().unwrap().to_string();
    let script = format!(
        "
import subprocess
h.add_meta_context('base:allocation')
h.add_meta_context('qemu:dirty-bitmap:one')
h.connect_uri('{uri}')

def maps():
    found = {{}}
    h.block_status(h.get_size(), 0, lambda name, at, extents, error: found.update({{name: extents}}))
    return found

def to(volume):
    subprocess.check_call(['{program}', 'switch', '{a}', '--to', '{POOL}/' + volume], cwd='{dir}')

size = h.get_size()
assert maps() == {{'base:allocation': [size, 0], 'qemu:dirty-bitmap:one': [size, 0]}}, maps()
to('empty')
try:
    maps()
    raise SystemExit('empty has no snapshot')
except nbd.Error as error:
    assert error.errno == 'EINVAL', error
subprocess.check_call(['{program}', 'delete', '{a}@one'], cwd='{dir}')
subprocess.check_call(['{program}', 'snapshot', '{POOL}/empty@one'], cwd='{dir}')
to('a')
to('empty')
assert maps() == {{'base:allocation': [size, 3], 'qemu:dirty-bitmap:one': [size, 0]}}, maps()
",
        uri = server.uri("a"),
        a = at("a"),
        dir = lab.path("").display(),
    );
    succeed(nbdsh.args(["-c", &script]));
    server.stop();
    lab.assert_clean();
}

pub fn serve_disks(lab: &Lab) -> Server {
    Server::start_with(lab, POOL, &["--vhost-user", "vm"])
}

pub fn disk(lab: &Lab, name: &str) -> PathBuf {
    lab.path("vm").join(format!("{name}.sock"))
}

pub fn connect(socket: &Path) -> Guest {
    Guest::connect(socket, 2, 128, 1 << 20).unwrap()
}

fn read(guest: &mut Guest, len: usize) -> Vec<u8> {
    let (status, data) = guest.request(IN, 0, &[], len).unwrap();
    assert_eq!(status, 0);
    data
}

#[test]
fn a_thousand_switches_of_a_virtual_machine_s_disk_and_kills_between_them() {
    let (lab, mut contents) = lab();
    let mut server = serve_disks(&lab);
    let (mut guest, socket) = (connect(&disk(&lab, "a")), disk(&lab, "a"));
    let mut control = Control::connect(&server);
    let mut times = Vec::new();
    for round in 0..1000_usize {
        let (old, new) = (round % 2, (round + 1) % 2);
        let page = round % PAGES;
        let data = noise(100 + round as u64, PAGE);
        guest.request(OUT, (page * PAGE / 512) as u64, &data, 0).unwrap();
        contents[old][page * PAGE..][..PAGE].copy_from_slice(&data);
        // These are under way during the switch: each is answered with one of the volumes.
        for slot in 0..8 {
            guest.queues[1].submit(slot, IN, 0, SIZE as u32, true).unwrap();
        }
        guest.queues[1].notify().unwrap();
        times.push(control.switch(socket.to_str().unwrap(), ["a", "b"][new]));
        assert!(read(&mut guest, SIZE) == contents[new], "round {round}: bytes of the old volume");
        for _ in 0..8 {
            let done = guest.queues[1].wait(20).unwrap();
            let found = guest.queues[1].data(done.slot, SIZE).unwrap();
            assert!(done.status == 0 && contents.contains(&found), "round {round}: bytes of two volumes");
        }
        if round < 500 && round % 50 == 20 {
            kill(server);
            server = serve_disks(&lab);
            control = Control::connect(&server);
            guest.reconnect(&socket).unwrap();
            assert!(read(&mut guest, SIZE) == contents[new], "round {round}: after a kill");
        }
        if round > 500 && round % 50 == 20 {
            lab.ok(&["upgrade", POOL]);
            control = Control::connect(&server);
            assert!(read(&mut guest, SIZE) == contents[new], "round {round}: after an upgrade");
        }
    }
    show("a virtual machine's disk", times);
    drop(guest);
    server.stop();
    for (name, expected) in ["a", "b"].iter().zip(&contents) {
        assert!(lab.contents(name) == *expected, "{name}");
    }
    lab.assert_clean();
}

#[test]
fn a_virtual_machine_learns_the_size_of_the_disk_that_it_is_switched_to() {
    let (lab, contents) = lab();
    lab.ok(&["create", &at("large"), "--size", "4M"]);
    let server = serve_disks(&lab);
    let own = lab.path("own.sock");
    lab.ok(&["vhost-user", &at("a"), own.to_str().unwrap()]);
    let mut guest = connect(&own);
    let to_large = ["switch", "own.sock", "--to", &at("large")];
    let refused = lab.run(&to_large).refused();
    assert!(refused.contains("cannot be told"), "{refused}");
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    guest.frontend.set_backend_request_fd(&theirs).unwrap();
    assert_eq!(guest.capacity().unwrap(), SIZE as u64);
    ours.set_read_timeout(Some(LIMIT)).unwrap();
    lab.ok(&to_large);
    ours.read_exact(&mut [0; 12]).unwrap();
    assert_eq!(guest.capacity().unwrap(), 4 << 20);
    assert_eq!(read(&mut guest, SIZE), vec![0; SIZE]);
    // One virtual machine per disk.
    let mut second = connect(&disk(&lab, "b"));
    let refused = lab.run(&["switch", "own.sock", "--to", &at("b")]).refused();
    assert!(refused.contains("b is the disk of a virtual machine already"), "{refused}");
    assert!(read(&mut second, SIZE) == contents[1]);
    drop(second);
    lab.ok(&["delete", &at("a")]);
    let refused = lab.run(&["delete", &at("large")]).refused();
    assert!(refused.contains("large is in use by a virtual machine"), "{refused}");
    guest.reconnect(&own).unwrap();
    assert_eq!(guest.capacity().unwrap(), 4 << 20, "later front ends, too");
    drop(guest);
    server.stop();
    lab.assert_clean();
}
