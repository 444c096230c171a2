//! Clients that die in the middle of their requests: requests sent are carried out or not, and
//! nothing stays behind: no lock, no page, no request that never ends.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::harness::{Lab, Server, noise};
use crate::nbd::Client;

const SIZE: usize = 16 << 20;
/// Range of the dying clients' writes; their last requests may come after all others.
const THEIRS: usize = SIZE / 2;
const CLIENTS: u64 = 6;

/// Sends writes of any alignment without waiting for replies, the last one only in part, and disconnects.
fn write_and_vanish(server: &Server, seed: u64) {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut client = Client::connect(server.socket(), "a").unwrap();
    for _ in 0..rng.random_range(1..40) {
        let len = rng.random_range(1..200_000);
        let offset = rng.random_range(0..THEIRS - len) as u64;
        client.start_write(offset, len as u32, &noise(seed, len)).unwrap();
    }
    client.start_write(0, 1 << 20, &noise(seed, rng.random_range(0..1 << 20))).unwrap();
    client.vanish();
}

#[test]
fn clients_that_vanish_leave_no_lock_and_no_page() {
    let lab = Lab::with_pool("256M");
    let empty = lab.stat("used");
    lab.ok(&["create", "pool.img/a", "--size", &SIZE.to_string()]);
    for round in 0..4 {
        lab.ok(&["snapshot", &format!("pool.img/a@{round}")]);
        let server = Server::start(&lab);
        std::thread::scope(|scope| {
            for client in 0..CLIENTS {
                let server = &server;
                scope.spawn(move || write_and_vanish(server, round * CLIENTS + client));
            }
        });
        // Would wait forever for a range that is still locked.
        let mut client = Client::connect(server.socket(), "a").unwrap();
        let whole = noise(1000 + round, SIZE);
        for (i, piece) in whole.chunks(1 << 20).enumerate() {
            client.write((i as u64) << 20, piece, false).unwrap();
        }
        let mut read = Vec::new();
        for at in (0..SIZE).step_by(1 << 20) {
            read.extend(client.read(at as u64, 1 << 20).unwrap());
        }
        assert!(read[THEIRS..] == whole[THEIRS..], "round {round}");
        drop(client);
        server.stop();
        lab.assert_clean();
    }
    assert_eq!(lab.json(&["list", "pool.img/a"])[0]["referenced"], SIZE);
    lab.ok(&["delete", "-r", "pool.img/a"]);
    assert_eq!(lab.stat("used"), empty);
}
