//! The pattern stomper: stamps random pages of a disk, records their expected contents, forks with
//! a snapshot, and verifies.

use std::collections::HashMap;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::harness::{Server, noise};
use crate::nbd::Client;

pub const PAGE: u64 = 4096;

/// Returns the contents of a page after the stomper of `seed` stamped it in round `round`.
fn stamp(seed: u64, page: u64, round: u64) -> Vec<u8> {
    let mut bytes = noise(seed ^ page << 24 ^ round << 44, PAGE as usize);
    for (at, word) in [seed, page, round].into_iter().enumerate() {
        bytes[at * 8..at * 8 + 8].copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// Expected contents of a disk. A clone of it is the expectation for a snapshot or clone of the disk.
#[derive(Clone)]
pub struct Stomper {
    seed: u64,
    pages: u64,
    round: u64,
    rng: SmallRng,
    /// Seed and round of the last stamp of each page; pages that are missing were never written, or discarded.
    stamped: HashMap<u64, (u64, u64)>,
}

impl Stomper {
    /// Creates the stomper for a disk of `bytes` bytes, all zeroes.
    pub fn new(seed: u64, bytes: u64) -> Stomper {
        let rng = SmallRng::seed_from_u64(seed);
        Stomper { seed, pages: bytes / PAGE, round: 0, rng, stamped: HashMap::new() }
    }

    /// Returns the stomper for a fork of the disk, with a new seed.
    pub fn fork(&self, seed: u64) -> Stomper {
        Stomper { seed, rng: SmallRng::seed_from_u64(seed), ..self.clone() }
    }

    /// Stamps `count` random pages, one delta.
    pub fn stomp(&mut self, client: &mut Client, count: usize) {
        self.round += 1;
        for _ in 0..count {
            let page = self.rng.random_range(0..self.pages);
            self.stamp(client, page);
        }
    }

    /// Stamps every page.
    pub fn wipe(&mut self, client: &mut Client) {
        self.round += 1;
        (0..self.pages).for_each(|page| self.stamp(client, page));
    }

    fn stamp(&mut self, client: &mut Client, page: u64) {
        client.write(page * PAGE, &stamp(self.seed, page, self.round), false).unwrap();
        self.stamped.insert(page, (self.seed, self.round));
    }

    /// Discards a range of pages.
    pub fn discard(&mut self, client: &mut Client, first: u64, count: u64) {
        client.trim(first * PAGE, (count * PAGE) as u32).unwrap();
        (first..first + count).for_each(|page| _ = self.stamped.remove(&page));
    }

    /// Returns the number of pages with contents.
    pub fn mapped(&self) -> u64 {
        self.stamped.len() as u64
    }

    /// Compares every page of the disk.
    #[track_caller]
    pub fn verify(&self, client: &mut Client) {
        const AT_ONCE: u64 = 256;
        for first in (0..self.pages).step_by(AT_ONCE as usize) {
            let count = AT_ONCE.min(self.pages - first);
            let bytes = client.read(first * PAGE, (count * PAGE) as usize).unwrap();
            for (i, shown) in bytes.chunks(PAGE as usize).enumerate() {
                let page = first + i as u64;
                let expected = self.stamped.get(&page);
                let is_right = match expected {
                    Some(&(seed, round)) => shown == stamp(seed, page, round),
                    None => shown.iter().all(|&byte| byte == 0),
                };
                assert!(is_right, "page {page} must show {expected:?}, shows {:?}", &shown[..24]);
            }
        }
    }

    /// As [`verify`](Self::verify), over a new connection.
    #[track_caller]
    pub fn verify_export(&self, server: &Server, export: &str) {
        self.verify(&mut Client::connect(server.socket(), export).unwrap());
    }
}
