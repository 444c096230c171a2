//! Clients of a volume: a number of requests in flight, at given places, in a given order.

use std::cell::Cell;
use std::collections::HashSet;
use std::rc::Rc;

use anyhow::Result;
use forkdisk::{Device, Pool, Volume};
use forkdisk_uring::Rt;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng, rngs::SmallRng};

/// Work of clients.
#[derive(Clone)]
pub struct Job {
    /// Whether they write (zeroes) or read.
    pub write: bool,
    /// Bytes per request.
    pub len: usize,
    /// Requests in flight.
    pub depth: usize,
    /// Offsets in bytes, in the order of the requests.
    pub offsets: Rc<[u64]>,
}

impl Job {
    /// Returns the bytes of all requests.
    pub fn bytes(&self) -> u64 {
        self.offsets.len() as u64 * self.len as u64
    }
}

/// Returns the offsets of `span` bytes from the beginning, piece by piece.
pub fn sequential(span: u64, len: usize) -> Rc<[u64]> {
    (0..span / len as u64).map(|i| i * len as u64).collect()
}

/// Returns `count` different pieces of the first `span` bytes in random order, determined by the seed.
pub fn random(span: u64, len: usize, count: usize, seed: u64) -> Rc<[u64]> {
    let mut all = sequential(span, len).to_vec();
    all.shuffle(&mut SmallRng::seed_from_u64(seed));
    all.truncate(count);
    all.into()
}

/// As [`random`], for a span too large to be listed.
pub fn scattered(span: u64, len: usize, count: usize, seed: u64) -> Rc<[u64]> {
    let (mut rng, mut seen) = (SmallRng::seed_from_u64(seed), HashSet::with_capacity(count));
    let draws = std::iter::repeat_with(move || rng.random_range(0..span / len as u64) * len as u64);
    draws.filter(|&offset| seen.insert(offset)).take(count).collect()
}

/// Runs the job. Requests are made in the order of their offsets, the next one when one has ended.
pub async fn run<D: Device>(rt: &Rt, pool: &Pool<D>, volume: &Volume<D>, job: &Job) -> Result<()> {
    let next = Rc::new(Cell::new(0));
    let client = |_| {
        let (volume, job, next) = (volume.clone(), job.clone(), next.clone());
        let mut buf = pool.buffer(job.len);
        buf.fill(0);
        rt.spawn(async move {
            while let Some(&offset) = job.offsets.get(next.replace(next.get() + 1)) {
                let (result, returned) = match job.write {
                    true => volume.write(offset, buf, false).await,
                    false => volume.read(offset, buf).await,
                };
                buf = returned;
                result?;
            }
            forkdisk::Result::Ok(())
        })
    };
    let clients: Vec<_> = (0..job.depth).map(client).collect();
    for client in clients {
        client.await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_places_are_distinct_and_repeatable() {
        let a = random(1 << 20, 4096, 100, 7);
        let mut sorted = a.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), 100);
        assert_eq!(a, random(1 << 20, 4096, 100, 7));
        assert_ne!(a, random(1 << 20, 4096, 100, 8));
        assert!(a.iter().all(|o| o % 4096 == 0 && *o < 1 << 20));
        let mut all = scattered(1 << 20, 4096, 256, 7).to_vec();
        all.sort_unstable();
        assert_eq!(all, sequential(1 << 20, 4096).to_vec());
    }
}
