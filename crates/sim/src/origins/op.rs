//! Setups of histories with an origin: what a run is besides its operations.

use forkdisk::OriginFull;

use super::ops::fault::FAULT;
use super::run::Origins;
use crate::disk::{Config, Volatile};
use crate::driver::{Op, operations, weights};
use crate::history::Profile;
use crate::rng::{Rng, mix};

const MIB: u64 = 1 << 20;

/// Random draws of an operation.
pub const DRAWS_COUNT: usize = 4;

/// What the operations of a history are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Focus {
    /// Everything.
    Plain,
    /// Few chunks, many snapshots, failures all the time.
    Strikes,
    /// Exceptions fill several leaves of the map, and most of them are removed again.
    Sweeps,
}

/// Everything about a run that does not follow from the operations.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The seed of everything.
    pub seed: u64,
    /// The pool's disk and the origin's.
    pub disks: [Config; 2],
    /// Length of the pool in bytes.
    pub pool: u64,
    /// Bytes of the origin.
    pub origin: u64,
    /// Bytes of a chunk.
    pub chunk: u64,
    /// Bytes of changed metadata that start a checkpoint.
    pub dirty: usize,
    /// Bytes of clean metadata kept in memory.
    pub cache: usize,
    /// Most operations in flight.
    pub depth: usize,
    /// One side crash per this many steps on average.
    pub cut_every: u64,
    /// Masks tried at each of them.
    pub masks: u64,
    /// Most snapshots and clones at a time.
    pub crowd: usize,
    /// Whether requests are made to fail.
    pub faults: bool,
    /// Whether flushes of the origin's disk end only when nothing else can continue.
    pub slow_flushes: bool,
    /// Whether chunks are copied out before they are written.
    pub ahead: bool,
    /// What the operations are for.
    pub focus: Focus,
    /// After a deletion, one side crash per this many steps on average, as long as exceptions are relabelled.
    pub cut_deletions: u64,
    /// Whether there is memory that outlives the process: then a kill loses nothing acknowledged.
    pub lasting: bool,
    /// Whether freed space is retained.
    pub retain: bool,
    /// Whether there is a shared cache.
    pub shared: bool,
}

impl Setup {
    /// Returns the setup of a seed.
    pub fn new(seed: u64, profile: Profile) -> Setup {
        let setup = Setup::of_origins(seed);
        if profile == Profile::Rollbacks { setup.with_rollbacks() } else { setup }
    }

    /// The same with the focus of [`Profile::Rollbacks`].
    fn with_rollbacks(self) -> Setup {
        let mut rng = Rng::new(mix(&[self.seed, 41]));
        let setup = Setup { cut_every: 600, masks: 2, cut_deletions: 40, pool: 24 * MIB, ..self };
        if rng.one_in(2) {
            let pages = *rng.pick(&[24, 80]);
            return Setup {
                origin: pages * 4096,
                chunk: *rng.pick(&[4, 16]) << 10,
                depth: *rng.pick(&[3, 8]),
                crowd: *rng.pick(&[4, 12]),
                faults: true,
                slow_flushes: !rng.one_in(3),
                focus: Focus::Strikes,
                ..setup
            };
        }
        Setup {
            origin: (400 + rng.below(300)) * 4096,
            chunk: 4 << 10,
            dirty: 1 << 20,
            depth: *rng.pick(&[3, 8]),
            crowd: 8,
            faults: false,
            cut_every: 20_000,
            cut_deletions: 150,
            ahead: false,
            focus: Focus::Sweeps,
            ..setup
        }
    }

    /// Returns the setup of a short history explored completely: an origin of four chunks, nothing random.
    pub fn small(large_sectors: bool) -> Setup {
        let disk = Config { sector: if large_sectors { 4096 } else { 512 }, cache: Volatile::Yes };
        Setup {
            seed: 1,
            disks: [disk, disk],
            pool: 12 * MIB,
            origin: 4 * 4096,
            chunk: 4096,
            dirty: 1 << 20,
            cache: 64 << 10,
            depth: 8,
            cut_every: 0,
            masks: 0,
            crowd: 8,
            faults: true,
            slow_flushes: true,
            ahead: false,
            focus: Focus::Plain,
            cut_deletions: 0,
            lasting: false,
            retain: false,
            shared: false,
        }
    }

    fn of_origins(seed: u64) -> Setup {
        let mut rng = Rng::new(mix(&[seed, 31]));
        let disk = |rng: &mut Rng| Config {
            sector: *rng.pick(&[512, 512, 4096]),
            cache: if rng.one_in(8) { Volatile::No } else { Volatile::Yes },
        };
        let disks = [disk(&mut rng), disk(&mut rng)];
        let chunk = *rng.pick(&[4, 16, 16, 64, 256]) << 10;
        let full = rng.one_in(4);
        let pages = if full { 1200 + rng.below(400) } else { *rng.pick(&[24, 80, 400]) };
        // The last page of an origin need not be whole.
        let tail = if disks[1].sector == 512 { rng.below(8) * 512 } else { 0 };
        Setup {
            seed,
            disks,
            pool: if full { 9 + rng.below(3) } else { 16 + rng.below(16) } * MIB,
            origin: pages * 4096 + tail,
            chunk,
            dirty: *rng.pick(&[32, 128, 1024]) << 10,
            cache: *rng.pick(&[64, 256, 4096]) << 10,
            depth: *rng.pick(&[1, 3, 8]),
            cut_every: 300,
            masks: 3,
            crowd: *rng.pick(&[3, 8, 20]),
            faults: rng.one_in(4),
            slow_flushes: mix(&[seed, 40]).is_multiple_of(3),
            ahead: true,
            focus: Focus::Plain,
            cut_deletions: 0,
            lasting: false,
            retain: false,
            shared: false,
        }
    }

    /// Returns the drawn policy of an origin.
    pub fn policy(&self, draw: u64) -> (u64, OriginFull) {
        let mut rng = Rng::new(draw);
        let ahead = *rng.pick(&[0, 64 << 10, MIB, 8 * MIB]) * u64::from(self.ahead);
        let full = match rng.below(3) {
            0 => OriginFull::Wait(60),
            1 => OriginFull::Error,
            _ => OriginFull::DropOldest,
        };
        (ahead, full)
    }

    /// Returns the first `n` operations of the seed's history. Without faults in the setup none are armed.
    pub fn operations(&self, n: usize) -> Vec<Op> {
        let mut weights = weights::<Origins>(self.focus);
        weights.retain(|(name, _)| self.faults || *name != FAULT.name);
        operations(mix(&[self.seed, 32]), &weights, DRAWS_COUNT, self.depth > 1, n)
    }
}
