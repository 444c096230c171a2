//! P1 and P2 with a real process: a server that is killed repeatedly under clients that know
//! the allowed contents of every sector.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::harness::{Lab, Server};
use crate::nbd::Client;

pub const SECTOR: usize = 512;
/// Sectors of each client's own part of the volume.
pub const PART: u64 = 4096;
pub const CLIENTS: u64 = 3;
/// Largest write, in sectors.
const MOST: u64 = 64;

/// Allowed contents of a sector: the version known to be durable, and all versions sent since.
#[derive(Clone, Default)]
struct Sector {
    durable: u64,
    since: Vec<u64>,
}

/// A client's knowledge of its part.
pub struct Part {
    first: u64,
    sectors: HashMap<u64, Sector>,
    versions: Arc<AtomicU64>,
    /// Sectors in `since` whose last version was acknowledged.
    acknowledged: Vec<u64>,
}

/// Returns the bytes of version `version` of a sector, which identify both.
fn stamp(sector: u64, version: u64) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    if version == 0 {
        return bytes;
    }
    for (i, word) in bytes.chunks_exact_mut(8).enumerate() {
        let value = match i {
            0 => version,
            1 => sector,
            _ => (version ^ sector << 32 ^ i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

impl Part {
    pub fn new(client: u64, versions: &Arc<AtomicU64>) -> Part {
        let versions = versions.clone();
        Part { first: client * PART, sectors: HashMap::new(), versions, acknowledged: Vec::new() }
    }

    /// Works until the server is gone.
    pub fn work(&mut self, socket: &Path, rng: &mut SmallRng) {
        let Ok(mut client) = Client::connect(socket, "a") else { return };
        while self.step(&mut client, rng).is_ok() {}
    }

    fn step(&mut self, client: &mut Client, rng: &mut SmallRng) -> io::Result<()> {
        if rng.random_ratio(1, 8) {
            client.flush()?;
            for sector in self.acknowledged.drain(..) {
                settle(self.sectors.entry(sector).or_default());
            }
            return Ok(());
        }
        let count = rng.random_range(1..=MOST);
        let start = self.first + rng.random_range(0..=PART - count);
        let version = self.versions.fetch_add(1, Ordering::Relaxed) + 1;
        let mut data = Vec::with_capacity(count as usize * SECTOR);
        for sector in start..start + count {
            data.extend(stamp(sector, version));
            self.sectors.entry(sector).or_default().since.push(version);
        }
        let fua = rng.random_ratio(1, 4);
        client.write(start * SECTOR as u64, &data, fua)?;
        for sector in start..start + count {
            if fua {
                settle(self.sectors.entry(sector).or_default());
            } else {
                self.acknowledged.push(sector);
            }
        }
        Ok(())
    }

    /// Adopts `contents`, which are known to be complete, as the server's state.
    pub fn adopt(&mut self, contents: &[u8]) {
        self.acknowledged.clear();
        for sector in self.first..self.first + PART {
            let at = sector as usize * SECTOR;
            let durable = u64::from_le_bytes(contents[at..at + 8].try_into().unwrap());
            self.sectors.insert(sector, Sector { durable, since: Vec::new() });
        }
    }

    /// Checks the server's state against the allowed contents; it becomes the durable state.
    pub fn verify(&mut self, contents: &[u8]) {
        self.acknowledged.clear();
        for sector in self.first..self.first + PART {
            let known = self.sectors.entry(sector).or_default();
            let at = sector as usize * SECTOR;
            let found = &contents[at..at + SECTOR];
            let version = u64::from_le_bytes(found[..8].try_into().unwrap());
            let is_legal = version == known.durable || known.since.contains(&version);
            assert!(
                is_legal && found == stamp(sector, version),
                "sector {sector} holds version {version} ({:x?}…), may hold {} or one of {:?}",
                &found[..24],
                known.durable,
                known.since
            );
            *known = Sector { durable: version, since: Vec::new() };
        }
    }
}

/// Marks the last version sent as durable: a client waits for each of its requests.
fn settle(sector: &mut Sector) {
    if let Some(&last) = sector.since.last() {
        *sector = Sector { durable: last, since: Vec::new() };
    }
}

pub fn number_from_env(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text}: a number")))
}

#[test]
fn what_was_flushed_survives_every_kill() {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = number_from_env("FORKDISK_TEST_SEED", clock);
    let kills = number_from_env("FORKDISK_TEST_KILLS", 6);
    println!("replay with FORKDISK_TEST_SEED={seed} FORKDISK_TEST_KILLS={kills}");
    let mut rng = SmallRng::seed_from_u64(seed);
    let lab = Lab::with_pool("512M");
    let size = (CLIENTS * PART * SECTOR as u64).to_string();
    lab.ok(&["create", "pool.img/a", "--size", &size]);
    let versions = Arc::new(AtomicU64::new(0));
    let mut parts: Vec<Part> = (0..CLIENTS).map(|client| Part::new(client, &versions)).collect();
    let mut frozen: Vec<(String, Vec<u8>)> = Vec::new();
    for round in 0..kills {
        let before = versions.load(Ordering::Relaxed);
        let server = Server::start(&lab);
        std::thread::scope(|scope| {
            for part in &mut parts {
                let (socket, mut rng) = (server.socket().to_path_buf(), SmallRng::seed_from_u64(rng.random()));
                scope.spawn(move || part.work(&socket, &mut rng));
            }
            std::thread::sleep(Duration::from_millis(rng.random_range(50..1500)));
            server.kill();
        });
        assert!(versions.load(Ordering::Relaxed) > before, "round {round}: no client got anything written");
        lab.assert_clean();
        let contents = lab.contents("a");
        parts.iter_mut().for_each(|part| part.verify(&contents));
        for (name, expected) in &frozen {
            assert!(lab.contents(name) == *expected, "the snapshot {name} has changed");
        }
        let name = format!("a@{round}");
        lab.ok(&["snapshot", &format!("pool.img/{name}")]);
        frozen.push((name, contents));
    }
}
