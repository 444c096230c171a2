//! docs/format.md is enough to read a pool: a reader written from it finds on the device the same volumes as
//! the engine, after a clean close and after a kill, and the counts on the device equal the references.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod links;
mod reader;

use std::rc::Rc;

use forkdisk::device::{Buf, Segment};
use forkdisk::testing::Inline;
use forkdisk::testing::MemoryDevice;
use forkdisk::{BreakPolicy, Changes, CreateOptions, Device, ExtensionChanges, FormatOptions, OpenOptions, Pool};

use reader::PAGE;

/// Two regions of count pages; the second begins at block 869.
const POOL: u64 = 900 << 20;
const MIB: u64 = 1 << 20;

/// A pool in memory, and the operations on it.
struct Lab {
    disk: MemoryDevice,
    tasks: Inline,
    pool: Pool<MemoryDevice>,
    random: u64,
    made: u64,
}

impl Lab {
    fn new(seed: u64, journal: u64) -> Lab {
        let (disk, tasks) = (MemoryDevice::new(POOL), Inline::default());
        let options = FormatOptions::new(POOL, *b"a second reader!", 1).with_journal(Some(journal));
        tasks.run(Pool::format(&disk, &options)).expect("a pool");
        let pool = open(&disk, &tasks);
        Lab { disk, tasks, pool, random: seed, made: 0 }
    }

    /// Writes a volume of `size` bytes, a MiB at a time.
    fn fill(&mut self, size: u64) {
        self.tasks.run(self.pool.create("filled", &CreateOptions::new(size, 2))).expect("created");
        let volume = self.pool.volume("filled").expect("created");
        for at in (0..size).step_by(MIB as usize) {
            let buf = Buf::copy_of(&vec![at.trailing_zeros() as u8; MIB as usize]);
            self.tasks.run(volume.write(at, buf, false)).0.expect("written");
        }
    }

    fn below(&mut self, n: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % n
    }

    /// Returns the name of an existing volume or snapshot.
    fn any(&mut self, snapshot: bool) -> Option<String> {
        let names: Vec<_> =
            self.pool.list().into_iter().filter(|v| v.is_snapshot() == snapshot).map(|v| v.name).collect();
        (!names.is_empty()).then(|| names[self.below(names.len() as u64) as usize].clone())
    }

    fn new_name(&mut self) -> String {
        self.made += 1;
        format!("folder/{}", self.made)
    }

    /// Returns a range with any start and end in a volume of `size` bytes.
    fn range(&mut self, size: u64) -> (u64, u64) {
        let unit = [1, 512, 4096, MIB][self.below(4) as usize].min(size);
        let from = self.below(size / unit) * unit;
        let len = (1 + self.below(8)) * unit;
        (from, len.min(size - from))
    }

    /// Runs a verb that is a transaction.
    fn transact(&mut self, name: &str) {
        let (pool, tasks) = (self.pool.clone(), self.tasks.clone());
        match self.below(3) {
            0 => {
                let names = [self.new_name(), self.new_name()];
                let options = CreateOptions::new(1 + self.below(MIB / 8), 2).with_quota(7 * MIB);
                tasks.run(pool.create_all(&names.each_ref().map(String::as_str), &options)).expect("created");
            }
            1 => {
                let (source, names) = (self.any(true).unwrap_or(name.to_string()), [self.new_name(), self.new_name()]);
                tasks.run(pool.clone_all(&source, &names.each_ref().map(String::as_str), 4)).expect("cloned");
            }
            _ => {
                let (chunk, quota) = (Some(4096 << self.below(8)), Some(8 * MIB));
                tasks.run(pool.set(name, &Changes::default().with_chunk(chunk).with_quota(quota))).expect("set");
            }
        }
    }

    /// Runs one random operation; those that are not possible are refused and change nothing.
    fn step(&mut self) {
        let (pool, tasks) = (self.pool.clone(), self.tasks.clone());
        let Some(name) = self.any(false).filter(|_| self.below(20) > 0) else {
            let (name, size) = (self.new_name(), 1 + self.below(6 * MIB));
            tasks.run(pool.create(&name, &CreateOptions::new(size, 2))).expect("created");
            return;
        };
        if pool.info().unused > 64 * MIB && self.below(8) == 0 {
            return self.transact(&name);
        }
        let volume = pool.volume(&name).expect("listed");
        let (at, len) = self.range(volume.size());
        // Deletes where the pool is nearly full.
        let operation = if pool.info().unused < 32 * MIB { 10 } else { self.below(28) };
        match operation {
            0 => drop(tasks.run(pool.snapshot(&[(&name, &format!("s{}", self.made + self.random % 3))], 3))),
            1 => {
                let (source, copy) = (self.any(true).unwrap_or(name), self.new_name());
                tasks.run(pool.clone_volume(&source, &copy, 4)).expect("cloned");
            }
            2 | 3 => {
                let source = pool.volume(&self.any(true).unwrap_or(name)).expect("listed");
                let (from, n) = self.range(source.size());
                let n = n.min(volume.size() - at);
                // Ranges that overlap within one volume are refused.
                let _ = tasks.run(volume.clone_range(&source, from.min(source.size() - n), at, n));
            }
            4 | 5 => tasks.run(volume.discard(at, len)).expect("discarded"),
            6 => tasks.run(pool.resize(&name, 1 + self.below(6 * MIB))).expect("resized"),
            7 => tasks.run(pool.set_chunk(&name, 4096 << self.below(8))).expect("set"),
            8 => {
                let new = self.new_name();
                tasks.run(pool.rename(&name, &new)).expect("renamed");
            }
            9 => {
                drop(volume);
                if let Some(snapshot) = self.any(true) {
                    let (of, short) = snapshot.split_once('@').expect("a snapshot");
                    tasks.run(pool.rollback(of, short)).expect("rolled back");
                }
            }
            10 => {
                drop(volume);
                let names = [vec![name.clone()], pool.find(&name).expect("listed").hard_links].concat();
                let goes = |v: &String| names.iter().any(|name| v.split('@').next() == Some(name));
                let victims: Vec<_> = pool.names_after("", usize::MAX).into_iter().filter(goes).collect();
                tasks.run(pool.delete(&victims.iter().map(String::as_str).collect::<Vec<_>>())).expect("deleted");
            }
            11 => tasks.run(pool.checkpoint()).expect("a checkpoint"),
            24 => {
                let policy = if self.random.is_multiple_of(2) { BreakPolicy::Copy } else { BreakPolicy::Split };
                tasks.run(pool.set_break_policy(&name, policy)).expect("set");
            }
            25 => {
                let settings = pool.copier().settings.with_split_count(1 + self.below(8) as u32);
                tasks.run(pool.set_copier(settings)).expect("set");
            }
            27 => {
                let name = self.any(true).filter(|_| self.random.is_multiple_of(3)).unwrap_or(name);
                let expires = self.below(3) * (1 << 40);
                let extension = ExtensionChanges::default().with_expires(expires);
                let extension = match pool.find(&name).expect("listed").is_snapshot() {
                    true => extension,
                    // None at all, or more than all writes of this test.
                    false => extension.with_diverge(self.below(4).min(1) << 40),
                };
                tasks.run(pool.set(&name, &Changes::default().with_extension(extension))).expect("set");
                let found = pool.find(&name).expect("listed");
                let value = (!self.random.is_multiple_of(5)).then(|| self.random.to_le_bytes());
                if !found.is_snapshot() {
                    pool.set_xattr(found.id, "n", value.as_ref().map(|value| &value[..])).expect("set");
                    // Removed and renamed as every name, and the source of snapshots.
                    let further = format!("{name}-{}", self.random % 4);
                    let is_linked = pool.link_file(found.id, &further).is_ok();
                    match self.random >> 40 & 3 {
                        0 if is_linked => drop(tasks.run(pool.snapshot(&[(&further, "of-link")], 3))),
                        // Refused if it has snapshots.
                        1 if is_linked => drop(pool.remove_file(&name)),
                        _ => {}
                    }
                }
            }
            26 => {
                // None at all, or more than a volume of this size can refer to.
                let quota = self.below(2) * (6 * MIB + self.below(MIB));
                tasks.run(pool.set_quota(&name, quota)).expect("set");
            }
            _ => {
                let byte = self.below(255) as u8 + 1;
                tasks.run(volume.write(at, Buf::copy_of(&vec![byte; len as usize]), false)).0.expect("written");
            }
        }
    }

    /// Reads all volumes through the engine and through the second reader, and notes the cases covered.
    fn compare(&mut self, seen: &mut Seen) {
        let page = |number: u64| {
            let segment = Segment { offset: number * PAGE as u64, at: 0, len: PAGE };
            let (result, buf) = self.tasks.run(self.disk.read(Buf::zeroed(PAGE), [segment].into_iter().collect()));
            result.expect("the device reads");
            buf.to_vec()
        };
        let found = reader::Pool::read(&page);
        let (listed, volumes) = (self.pool.list(), found.by_name());
        assert_eq!(listed.iter().map(|v| (&v.name, v.size, v.quota)).collect::<Vec<_>>(), {
            volumes.iter().map(|(name, v)| (name, v.size, v.quota)).collect::<Vec<_>>()
        });
        let expires = |id: u64| found.expiries.get(&id).copied().unwrap_or(0);
        assert!(listed.iter().all(|v| v.expires == expires(v.id.0)), "{:?}", found.expiries);
        let xattr = |id: u64| found.xattrs.get(&id);
        assert!(listed.iter().all(|v| v.xattrs.get("n") == xattr(v.id.0)), "{:?}", found.xattrs);
        seen.xattrs += usize::from(listed.iter().any(|v| v.is_snapshot() && !v.xattrs.is_empty()));
        let links = links::names(&found.volumes);
        assert!(listed.iter().all(|v| v.hard_links == links.get(&v.id.0).cloned().unwrap_or_default()), "{links:?}");
        seen.linked += links.len();
        let living = |id: &u64| found.volumes.get(id).is_some_and(|v| v.state != 3);
        assert!(found.expiries.keys().all(living), "an extension outlives its volume");
        seen.expiring += usize::from(listed.iter().any(|v| v.expires > 0));
        for (name, found_volume) in volumes {
            let volume = self.pool.volume(&name).expect("listed");
            for number in 0..found_volume.size.div_ceil(PAGE as u64) {
                let len = (found_volume.size - number * PAGE as u64).min(PAGE as u64) as usize;
                let (result, buf) = self.tasks.run(volume.read(number * PAGE as u64, Buf::zeroed(len)));
                result.expect("the engine reads");
                assert_eq!(buf[..], found.contents(found_volume, number)[..len], "page {number} of {name}");
            }
        }
        if found.is_clean() {
            let counts = found.counts();
            assert_eq!(counts, found.references());
            seen.second_region |= counts.blocks.keys().any(|&block| block > 869);
            assert_eq!(found.replayed, 0, "nothing to replay");
            let charged = found.charged();
            for v in listed.iter().filter(|v| v.diverge > 0) {
                let (account, limit, pages) = found.accounts[&v.id.0];
                let counted = charged.get(&account).map_or(0, |pages| pages.len() as u64);
                assert_eq!((limit, pages, pages), (v.diverge, counted, v.diverged / PAGE as u64), "{}", v.name);
                seen.charged += pages;
            }
        }
        let log = found.count_log_pages();
        seen.logged += usize::from(log > 0);
        seen.emptied += usize::from(log < seen.log);
        seen.log = log;
        seen.replayed += found.replayed;
        seen.witnessed += found.witnessed;
        seen.transactions += found.transactions;
        seen.rounds = seen.rounds.max(found.journal_rounds());
    }
}

/// The cases that the comparisons covered.
#[derive(Default)]
struct Seen {
    /// Records in the journal.
    replayed: usize,
    /// How often data had to be verified to decide whether a group is valid.
    witnessed: usize,
    /// Transactions in the journal.
    transactions: usize,
    /// How often a volume or snapshot was to expire.
    expiring: usize,
    xattrs: usize,
    linked: usize,
    /// Pages that were charged to bounds.
    charged: u64,
    /// How often the journal has wrapped around.
    rounds: u64,
    /// How often there was a log of counts, how often it was shorter than before, and its length.
    logged: usize,
    emptied: usize,
    log: u32,
    /// Whether there were counts in the second region.
    second_region: bool,
}

fn open(disk: &MemoryDevice, tasks: &Inline) -> Pool<MemoryDevice> {
    tasks.run(Pool::open(disk.clone(), Rc::new(tasks.clone()), OpenOptions::default())).expect("opened")
}

#[test]
fn a_reader_written_from_the_document_finds_what_the_engine_shows() {
    let mut seen = Seen::default();
    for (seed, journal) in [(1, MIB), (2, MIB), (3, 800 * MIB)] {
        let mut lab = Lab::new(seed, journal);
        if journal > MIB {
            // With the journal it fills the first region.
            lab.fill(68 * MIB);
        }
        for _ in 0..12 {
            (0..100).for_each(|_| lab.step());
            // As a kill would leave it: no task continues, everything acknowledged is there.
            lab.tasks.run(lab.pool.flush()).expect("flushed");
            lab.compare(&mut seen);
            if lab.below(3) == 0 {
                lab.tasks.run(lab.pool.close()).expect("closed");
                lab.pool = open(&lab.disk, &lab.tasks);
                lab.compare(&mut seen);
            }
        }
    }
    assert!(seen.replayed > 100 && seen.rounds > 0 && seen.second_region, "there was little to be seen");
    assert!(seen.witnessed > 0, "no group vouched for data");
    assert!(seen.expiring > 10, "only {} times something expires", seen.expiring);
    assert!(seen.linked > 10, "only {} files with several names", seen.linked);
    assert!(seen.xattrs > 10, "only {} times a snapshot has an extended attribute", seen.xattrs);
    assert!(seen.charged > 100, "only {} pages were charged to bounds", seen.charged);
    assert!(seen.transactions > 10, "only {} transactions", seen.transactions);
    assert!(seen.logged > 3 && seen.emptied > 1, "{} logs, emptied {} times", seen.logged, seen.emptied);
}

#[test]
fn a_directory_page_that_empties_in_the_life_that_made_it_is_given_back() {
    let mut lab = Lab::new(1, MIB);
    let names: Vec<String> = (0..20).map(|i| format!("v{i}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    for name in &names {
        lab.tasks.run(lab.pool.create(name, &CreateOptions::new(MIB, 2))).expect("created");
    }
    let before = lab.pool.info().unused;
    lab.tasks.run(lab.pool.checkpoint()).expect("a checkpoint");
    lab.tasks.run(lab.pool.delete(&names)).expect("deleted");
    lab.tasks.run(lab.pool.wait_freed()).expect("settled");
    lab.tasks.run(lab.pool.close()).expect("closed");
    assert_eq!(lab.pool.info().unused, before);
    lab.compare(&mut Seen::default());
}
