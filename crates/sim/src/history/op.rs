//! Setups: what a run is besides its operations.

use std::ops::Range;
use std::time::Duration;

use forkdisk::WhenFull;

use super::run::Volumes;
use crate::disk::{Config, Volatile};
use crate::driver::{Op, operations, weights};
use crate::rng::{Rng, mix};

/// The focus of a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Profile {
    /// Everything.
    Mixed,
    /// Snapshots, clones, rollbacks and deletions of small volumes.
    Forks,
    /// Small pools that become full and grow.
    Full,
    /// I/O errors.
    Faults,
    /// Many operations in flight at a few places.
    Races,
    /// One operation at a time, many power cuts.
    Cuts,
    /// Whole blocks: demotion and promotion.
    Blocks,
    /// Reads and writes after clean reopening, without cuts: the fastest.
    Calm,
    /// Many small commits: the journal wraps around.
    Journal,
    /// Hundreds of volumes and snapshots.
    Crowd,
    /// Volumes of many blocks, nearly empty: maps of several levels.
    Large,
    /// Chunks that are copied when they are broken: few buffers, throttles, errors during copies.
    Copies,
    /// Volumes with quotas.
    Quotas,
    /// Volumes as files: replaced, renamed over each other, removed while open.
    Files,
    /// An origin on a separate disk, see `origins`; never drawn, only by request.
    Origins,
    /// The same, with rollbacks to many snapshots, deletions right after, and failed flushes while others are
    /// running; never drawn, only by request.
    Rollbacks,
    /// Ranges of many blocks, shared between volumes of several tables.
    Ranges,
    /// Scattered pages are gathered while everything else continues.
    Gathering,
    /// A sparse pool file, and the file system under it becomes full.
    Hosts,
    /// Volumes whose clones outlive them, gathered while other volumes release what they share.
    Heirs,
    /// Names and attributes, and volumes without a name.
    Names,
    /// Verbs on several volumes or properties.
    Transactions,
    /// The same, and folders that are kept, forked and rolled back as a whole.
    Folders,
    /// Volumes and snapshots with labels that expire.
    Lifetimes,
    /// Volumes that do not store what is there already, or zeroes.
    Comparing,
    /// Volumes with bounds.
    Bounds,
}

impl Profile {
    /// All that are drawn.
    pub const ALL: [Profile; 24] = [
        Profile::Mixed,
        Profile::Forks,
        Profile::Full,
        Profile::Faults,
        Profile::Races,
        Profile::Cuts,
        Profile::Blocks,
        Profile::Calm,
        Profile::Journal,
        Profile::Crowd,
        Profile::Large,
        Profile::Copies,
        Profile::Quotas,
        Profile::Files,
        Profile::Ranges,
        Profile::Gathering,
        Profile::Hosts,
        Profile::Heirs,
        Profile::Names,
        Profile::Transactions,
        Profile::Folders,
        Profile::Lifetimes,
        Profile::Comparing,
        Profile::Bounds,
    ];

    /// Those with an origin on a separate disk.
    pub const OF_ORIGINS: [Profile; 2] = [Profile::Origins, Profile::Rollbacks];

    /// Returns its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Profile::Mixed => "mixed",
            Profile::Forks => "forks",
            Profile::Full => "full",
            Profile::Faults => "faults",
            Profile::Races => "races",
            Profile::Cuts => "cuts",
            Profile::Blocks => "blocks",
            Profile::Calm => "calm",
            Profile::Journal => "journal",
            Profile::Crowd => "crowd",
            Profile::Large => "large",
            Profile::Origins => "origins",
            Profile::Rollbacks => "rollbacks",
            Profile::Copies => "copies",
            Profile::Quotas => "quotas",
            Profile::Files => "files",
            Profile::Ranges => "ranges",
            Profile::Gathering => "gathering",
            Profile::Hosts => "hosts",
            Profile::Heirs => "heirs",
            Profile::Names => "names",
            Profile::Transactions => "transactions",
            Profile::Folders => "folders",
            Profile::Lifetimes => "lifetimes",
            Profile::Comparing => "comparing",
            Profile::Bounds => "bounds",
        }
    }

    /// Returns the profile with this name.
    pub fn from_name(name: &str) -> Option<Profile> {
        Profile::ALL.into_iter().chain(Profile::OF_ORIGINS).find(|p| p.name() == name)
    }
}

/// Everything about a run that does not follow from the operations.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The seed of everything.
    pub seed: u64,
    /// The focus of the history.
    pub profile: Profile,
    /// The disk.
    pub disk: Config,
    /// The pool's identity.
    pub uuid: [u8; 16],
    /// Length of the pool in bytes.
    pub pool: u64,
    /// Returns the length of the journal in bytes.
    pub journal: u64,
    /// Bytes of changed metadata that start a checkpoint.
    pub dirty: usize,
    /// Bytes of clean metadata kept in memory.
    pub cache: usize,
    /// Whether freed space is discarded.
    pub discard: bool,
    /// Most operations in flight.
    pub depth: usize,
    /// One side crash per this many steps on average; 0 for none.
    pub cut_every: u64,
    /// Masks tried at each of them.
    pub masks: u64,
    /// Usual size of a volume in pages.
    pub pages: u64,
    /// Most volumes and snapshots at a time.
    pub crowd: usize,
    /// What a write that finds no space does.
    pub when_full: WhenFull,
    /// Bytes of the disk where requests are slow.
    pub slow: Option<Range<u64>>,
    /// Whether there is memory that outlives the process: then a kill loses nothing acknowledged.
    pub lasting: bool,
    /// Whether freed space is retained.
    pub retain: bool,
    /// Whether there is a shared cache.
    pub shared: bool,
}

impl Setup {
    /// Returns the setup of a seed; the profile is drawn if none is given.
    pub fn new(seed: u64, profile: Option<Profile>) -> Setup {
        let mut rng = Rng::new(mix(&[seed, 1]));
        // Profiles added later are drawn separately: seeds of the first ones keep their histories.
        let first = *rng.pick(&Profile::ALL[..11]);
        let drawn = if mix(&[seed, 12]).is_multiple_of(10) { Profile::Copies } else { first };
        let drawn = if mix(&[seed, 13]).is_multiple_of(16) { Profile::Quotas } else { drawn };
        let drawn = if mix(&[seed, 14]).is_multiple_of(12) { Profile::Ranges } else { drawn };
        let drawn = if mix(&[seed, 15]).is_multiple_of(12) { Profile::Gathering } else { drawn };
        let drawn = if mix(&[seed, 16]).is_multiple_of(14) { Profile::Hosts } else { drawn };
        let drawn = if mix(&[seed, 17]).is_multiple_of(16) { Profile::Heirs } else { drawn };
        let drawn = if mix(&[seed, 18]).is_multiple_of(16) { Profile::Names } else { drawn };
        let drawn = if mix(&[seed, 19]).is_multiple_of(16) { Profile::Transactions } else { drawn };
        let drawn = if mix(&[seed, 20]).is_multiple_of(16) { Profile::Folders } else { drawn };
        let drawn = if mix(&[seed, 21]).is_multiple_of(16) { Profile::Lifetimes } else { drawn };
        let drawn = if mix(&[seed, 22]).is_multiple_of(16) { Profile::Comparing } else { drawn };
        let drawn = if mix(&[seed, 23]).is_multiple_of(16) { Profile::Bounds } else { drawn };
        let profile = profile.unwrap_or(drawn);
        let mib = 1 << 20;
        let small = profile == Profile::Full || profile == Profile::Bounds && mix(&[seed, 24]).is_multiple_of(2);
        let copies = profile == Profile::Copies;
        // Volumes that take all blocks of a leaf of counts.
        let tall = profile == Profile::Blocks && mix(&[seed, 13]).is_multiple_of(3);
        Setup {
            seed,
            profile,
            uuid: [7; 16],
            disk: Config {
                sector: *rng.pick(&[512, 512, 4096]),
                cache: if rng.one_in(8) { Volatile::No } else { Volatile::Yes },
            },
            pool: match small || copies && mix(&[seed, 11]).is_multiple_of(5) {
                true => 9 + rng.below(4),
                false => 24 + rng.below(40) + if tall { 40 } else { 0 },
            } * mib,
            journal: *rng.pick(&[1, 1, 2]) * mib,
            dirty: if profile == Profile::Journal { 4096 } else { *rng.pick(&[64, 256, 1024, 4096]) } << 10,
            cache: *rng.pick(&[64, 256, 4096]) << 10,
            discard: !rng.one_in(4) || profile == Profile::Hosts,
            depth: match profile {
                Profile::Cuts | Profile::Journal => 1 + rng.index(2),
                Profile::Races => 8,
                Profile::Copies | Profile::Gathering => *rng.pick(&[1, 4, 8, 8]),
                Profile::Heirs => *rng.pick(&[4, 8, 16]),
                _ => *rng.pick(&[1, 3, 5, 8]),
            },
            cut_every: match profile {
                Profile::Calm => 0,
                Profile::Cuts => 300,
                Profile::Crowd => 2000,
                _ => 400,
            },
            masks: 3,
            pages: match profile {
                Profile::Blocks => 512 + rng.below(512) + if tall { 10 * 256 } else { 0 },
                Profile::Races | Profile::Journal => *rng.pick(&[16, 64]),
                Profile::Crowd | Profile::Transactions | Profile::Folders => *rng.pick(&[2, 8]),
                Profile::Large | Profile::Ranges => 1 << 17,
                Profile::Full => *rng.pick(&[300, 800, 1600]),
                Profile::Copies => *rng.pick(&[24, 96, 300, 900]),
                Profile::Gathering => *rng.pick(&[24, 200, 600]),
                Profile::Bounds => *rng.pick(&[24, 300, 600, 1200, 1200]),
                _ => *rng.pick(&[24, 96, 300]),
            },
            crowd: match profile {
                Profile::Crowd => *rng.pick(&[130, 300]),
                Profile::Full => 7,
                Profile::Transactions | Profile::Folders => 40,
                _ => 14,
            },
            when_full: match rng.one_in(3) {
                true => WhenFull::Wait(Duration::from_secs(60)),
                false => WhenFull::Error,
            },
            slow: match profile {
                // Checkpoints end late, commits do not.
                Profile::Journal if rng.one_in(2) => Some(0..2 * mib),
                _ if rng.one_in(8) => Some(rng.below(4) * mib..8 * mib),
                _ => None,
            },
            lasting: false,
            retain: false,
            shared: false,
        }
    }

    /// Returns the setup of a short history explored completely: two small volumes, nothing random.
    pub fn small(large_sectors: bool) -> Setup {
        Setup {
            seed: 1,
            profile: Profile::Calm,
            uuid: [7; 16],
            disk: Config { sector: if large_sectors { 4096 } else { 512 }, cache: Volatile::Yes },
            pool: 12 << 20,
            journal: 1 << 20,
            dirty: 1 << 20,
            cache: 1 << 20,
            discard: true,
            depth: 1,
            cut_every: 0,
            masks: 0,
            pages: 4,
            crowd: 14,
            when_full: WhenFull::Error,
            slow: None,
            lasting: false,
            retain: false,
            shared: false,
        }
    }

    /// Returns the first `n` operations of the seed's history.
    pub fn operations(&self, n: usize) -> Vec<Op> {
        let weights = weights::<Volumes>(self.profile);
        operations(mix(&[self.seed, 2]), &weights, 5, self.depth > 1, n)
    }
}

#[cfg(test)]
mod tests {
    use super::super::ops;
    use super::*;

    #[test]
    fn a_history_follows_from_its_seed_and_a_longer_one_begins_alike() {
        for profile in Profile::ALL {
            let setup = Setup::new(5, Some(profile));
            let (short, long) = (setup.operations(50), setup.operations(3000));
            assert!(short.iter().zip(&long).all(|(a, b)| a.name == b.name && a.draws == b.draws));
            for (name, _) in weights::<Volumes>(profile) {
                assert!(long.iter().any(|op| op.name == name), "{profile:?} never does {name}");
            }
        }
    }

    #[test]
    fn every_operation_and_every_exception_from_the_order_of_draws_is_used() {
        let is_drawn = |name: &str, profile| weights::<Volumes>(profile).iter().any(|(other, _)| *other == name);
        for operation in ops::TABLE {
            assert!(Profile::ALL.iter().any(|&profile| is_drawn(operation.name, profile)), "{}", operation.name);
        }
        for &(profile, name, before) in ops::DRAWN_AFTER {
            assert!(is_drawn(name, profile) && is_drawn(before, profile), "{profile:?} {name} {before}");
        }
    }
}
