//! Operations on an origin and beside it, with raw draws in place of names and offsets.

use forkdisk::OriginFull;

use crate::disk::{Config, Volatile};
use crate::history::Profile;
use crate::rng::{Rng, mix};

const MIB: u64 = 1 << 20;

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are those of the engine's verbs")]
pub enum Kind {
    Read,
    Write,
    /// Writes the next range after the last write of the origin.
    Append,
    /// Overwrites the backing of a running read of a snapshot.
    Chase,
    /// A write that starts or ends within a sector.
    Ragged,
    Zero,
    Discard,
    Flush,
    Snapshot,
    /// A snapshot of the origin with separate copies.
    Independent,
    /// Snapshots of the origin and of a pool volume at one instant.
    Group,
    Clone,
    /// Makes a clone independent of its backing.
    Flatten,
    Delete,
    /// The origin gets the contents of one of its snapshots.
    Rollback,
    /// Waits until a rollback has restored everything.
    RolledBack,
    Checkpoint,
    Check,
    Settle,
    /// Closes cleanly, compares the origin as an ordinary disk, and opens again.
    Reopen,
    /// Cuts the power of both disks.
    Cut,
    /// Kills the process.
    Kill,
    /// Arms an I/O error on one of the disks.
    Fault,
    /// Changes how much is copied ahead, and what happens when the pool is full.
    Set,
    /// Stops the protection of the origin, and protects it again.
    Unprotect,
    /// Concurrent writes of one chunk each at many places of a range.
    Sweep,
    /// Leaves of the map of exceptions are filled for one snapshot and emptied except for a few pairs of
    /// others; then one of those is deleted.
    Thin,
    /// Deletes the oldest of the snapshots.
    DeleteOldest,
    /// Deletes a snapshot, and cuts the power while its exceptions are relabelled.
    DeleteAndCut,
    /// A flush of one of the disks fails while a snapshot, a checkpoint and flushes are running.
    Strike,
}

/// One operation, not yet resolved.
#[derive(Clone, Copy, Debug)]
pub struct Op {
    /// The operation.
    pub kind: Kind,
    /// Its number in the whole history, from 1; also the mark of what it writes.
    pub number: u32,
    /// Executor steps between the operation before it and this one.
    pub gap: u32,
    /// Raw random draws.
    pub draws: [u64; 4],
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
    /// Weights of the operations.
    pub weights: &'static [(Kind, u64)],
    /// After a deletion, one side crash per this many steps on average, as long as exceptions are relabelled.
    pub cut_deletions: u64,
    /// Whether there is memory that outlives the process: then a kill loses nothing acknowledged.
    pub lasting: bool,
}

/// Without faults in the setup [`Kind::Fault`] is ignored.
#[rustfmt::skip]
const ORIGINS: &[(Kind, u64)] = {
    use Kind::*;
    &[
        (Read, 30), (Write, 60), (Append, 16), (Chase, 8), (Ragged, 3), (Zero, 2), (Discard, 1), (Flush, 12),
        (Snapshot, 14), (Independent, 3), (Group, 3), (Clone, 5), (Flatten, 2), (Delete, 14), (Rollback, 4),
        (RolledBack, 1), (Checkpoint, 4), (Check, 1), (Settle, 1), (Reopen, 1), (Cut, 2), (Kill, 1), (Fault, 8),
        (Set, 2), (Unprotect, 1),
    ]
};

/// Few chunks, many snapshots, failures all the time.
#[rustfmt::skip]
const STRIKES: &[(Kind, u64)] = {
    use Kind::*;
    &[
        (Read, 10), (Write, 30), (Append, 4), (Chase, 4), (Zero, 1), (Flush, 6), (Snapshot, 16), (Independent, 2),
        (Group, 4), (Clone, 2), (Flatten, 1), (Delete, 8), (DeleteOldest, 6), (DeleteAndCut, 3), (Rollback, 10),
        (RolledBack, 2), (Checkpoint, 3), (Check, 1), (Settle, 1), (Reopen, 1), (Cut, 1), (Kill, 1), (Fault, 3),
        (Strike, 36), (Set, 2), (Unprotect, 1),
    ]
};

/// Exceptions fill several leaves of the map, and most of them are removed again.
#[rustfmt::skip]
const SWEEPS: &[(Kind, u64)] = {
    use Kind::*;
    &[
        (Read, 6), (Write, 24), (Chase, 2), (Zero, 1), (Flush, 4), (Snapshot, 8), (Independent, 1), (Group, 1),
        (Clone, 1), (Delete, 6), (DeleteOldest, 8), (DeleteAndCut, 4), (Rollback, 3), (RolledBack, 1), (Checkpoint, 3),
        (Check, 1), (Settle, 2), (Reopen, 2), (Cut, 1), (Kill, 1), (Sweep, 2), (Thin, 20), (Set, 1),
    ]
};

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
                weights: STRIKES,
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
            weights: SWEEPS,
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
            weights: &[],
            cut_deletions: 0,
            lasting: false,
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
            weights: ORIGINS,
            cut_deletions: 0,
            lasting: false,
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

    /// Returns the first `n` operations of the seed's history.
    pub fn operations(&self, n: usize) -> Vec<Op> {
        let weight = |&(kind, weight): &(Kind, u64)| if kind == Kind::Fault && !self.faults { 0 } else { weight };
        let weights: Vec<(Kind, u64)> = self.weights.iter().map(|w| (w.0, weight(w))).collect();
        let total: u64 = weights.iter().map(|w| w.1).sum();
        let mut rng = Rng::new(mix(&[self.seed, 32]));
        (1..=n as u32)
            .map(|number| {
                let mut at = rng.below(total);
                let here = |&&(_, weight): &&(Kind, u64)| {
                    let here = at < weight;
                    at = at.saturating_sub(weight);
                    here
                };
                let kind = weights.iter().find(here).map_or(Kind::Read, |w| w.0);
                let gap = if self.depth > 1 { rng.below(12) as u32 } else { 0 };
                Op { kind, number, gap, draws: std::array::from_fn(|_| rng.next()) }
            })
            .collect()
    }
}
