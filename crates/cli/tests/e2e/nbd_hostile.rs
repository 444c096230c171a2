//! NBD clients that announce much and send little, next to a well-behaved one.

use std::fs;

use crate::harness::{Lab, POOL, Server, noise, wait_until};
use crate::nbd::Client;

const MIB: usize = 1 << 20;
/// Longest write of the protocol.
const LONGEST: u32 = 32 << 20;
const CLIENTS: usize = 64;

/// Returns the daemon's resident memory in bytes.
fn resident(server: &Server) -> usize {
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

/// Returns the bytes that requests in flight hold of the memory shared by all connections.
fn granted(lab: &Lab) -> u64 {
    lab.json(&["stats", POOL])["live"]["server"]["shared_memory_used"].as_u64().unwrap()
}

/// Checks that a neighbour can write, flush and read back.
#[track_caller]
fn works(client: &mut Client) {
    for i in 0..50 {
        let data = noise(i, 4096);
        client.write(i * 4096, &data, i % 10 == 0).unwrap();
        assert!(client.read(i * 4096, 4096).unwrap() == data);
    }
    client.flush().unwrap();
}

fn crowd(server: &Server, data: &[u8]) -> Vec<Client> {
    let clients = (0..CLIENTS).map(|_| {
        let mut client = Client::connect(server.socket(), "v").unwrap();
        client.start_write(0, LONGEST, data).unwrap();
        client
    });
    clients.collect()
}

#[test]
fn announced_writes_take_no_memory_before_their_data_comes() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/v", "pool.img/neighbour", "--size", "40M"]);
    // Room for all announced data.
    let server = Server::start_with(&lab, POOL, &["--shared-memory", "2G"]);
    let mut neighbour = Client::connect(server.socket(), "neighbour").unwrap();
    works(&mut neighbour);
    let before = resident(&server);
    let clients = crowd(&server, &[]);
    wait_until("all writes are admitted", || granted(&lab) == u64::from(LONGEST) * CLIENTS as u64);
    let taken = resident(&server).saturating_sub(before);
    assert!(taken < 64 * MIB, "{CLIENTS} announced writes took {} MiB", taken / MIB);
    works(&mut neighbour);
    clients.into_iter().for_each(Client::vanish);
    // Repeatedly, as fast as possible.
    for _ in 0..200 {
        let mut client = Client::connect(server.socket(), "v").unwrap();
        client.start_write(0, LONGEST, &[]).unwrap();
        client.vanish();
    }
    works(&mut neighbour);
    wait_until("nothing is admitted any more", || granted(&lab) == 0);
    server.stop();
    lab.assert_clean();
}

#[test]
fn writes_of_which_half_has_come_hold_up_nobody_else_and_write_nothing() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/v", "pool.img/neighbour", "--size", "40M"]);
    let server = Server::start(&lab);
    let mut neighbour = Client::connect(server.socket(), "neighbour").unwrap();
    // As much as a socket buffers, whether the server reads it or not: most of the clients wait for memory.
    let clients = crowd(&server, &noise(1, 64 << 10));
    wait_until("the shared memory is taken", || granted(&lab) == 256 << 20);
    works(&mut neighbour);
    assert!(resident(&server) < 128 * MIB, "{} MiB", resident(&server) / MIB);
    clients.into_iter().for_each(Client::vanish);
    wait_until("the memory is given back", || granted(&lab) == 0);
    works(&mut neighbour);
    neighbour.write(20 << 20, &noise(2, 16 * MIB), false).unwrap();
    drop(neighbour);
    server.stop();
    assert!(lab.contents("v").iter().all(|&byte| byte == 0), "half a write was written");
    lab.assert_clean();
}
