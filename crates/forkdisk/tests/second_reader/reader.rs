//! A reader of pools, written from docs/format.md. It shares only two checksum crates with the engine and
//! trusts nothing: every page is verified as the document requires.

use std::collections::{BTreeMap, BTreeSet};

use crc32c::{crc32c, crc32c_append};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::links;

pub const PAGE: usize = 4096;

/// Number of a volume's page → number of the pool's page.
pub type Map = BTreeMap<u64, u64>;

/// An entry of a map table.
#[derive(Clone, Copy)]
struct Entry {
    page: u64,
    mapped: u64,
    kind: u8,
    birth: u64,
    checksum: u32,
}

impl Entry {
    fn new(bytes: &[u8]) -> Entry {
        let (low, high) = (u64_at(bytes, 0), u64_at(bytes, 8));
        let (mapped, kind) = (low >> 40 & 0x1_ffff, (low >> 57 & 7) as u8);
        let birth = low >> 60 | (high & 0xffff_ffff) << 4;
        Entry { page: low & ((1 << 40) - 1), mapped, kind, birth, checksum: (high >> 32) as u32 }
    }
}

/// A volume or snapshot, or a dead volume (state 3).
#[derive(Clone)]
pub struct Volume {
    pub state: u8,
    pub parent: u64,
    pub size: u64,
    pub name: String,
    pub map: Map,
    pub quota: u64,
    level: u8,
    root: Entry,
    cursor: u64,
}

/// A pool as stored on its device.
pub struct Pool<'a> {
    page: &'a dyn Fn(u64) -> Vec<u8>,
    sb: Vec<u8>,
    pub volumes: BTreeMap<u64, Volume>,
    /// The value of an extended attribute of volumes with an extension.
    pub xattrs: BTreeMap<u64, Vec<u8>>,
    /// When volumes with an extension expire; 0: never.
    pub expiries: BTreeMap<u64, u64>,
    /// Accounts of volumes with a bound, as of the checkpoint: number, limit in bytes, pages charged to it.
    pub accounts: BTreeMap<u64, (u32, u64, u64)>,
    /// Records of the journal that were applied.
    pub replayed: usize,
    /// Data checksums that were verified.
    pub witnessed: usize,
    /// Transactions that were applied.
    pub transactions: usize,
}

pub fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap())
}

pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn page_sum(uuid: &[u8], page: u64, birth: u64, kind: u8, bytes: &[u8]) -> u32 {
    let identity = [uuid, &page.to_le_bytes(), &birth.to_le_bytes(), &[kind]].concat();
    crc32c_append(crc32c(&identity), bytes)
}

fn superblock(page: &dyn Fn(u64) -> Vec<u8>) -> Vec<u8> {
    let whole = |&(at, ref b): &(u64, Vec<u8>)| {
        &b[..8] == b"forkdisk" && page_sum(&b[16..32], at, 0, 0xf0, &b[..4092]) == u32_at(b, 4092)
    };
    let slots = [0, 128].map(|at| (at, page(at)));
    let newest = slots.into_iter().filter(whole).max_by_key(|(_, b)| u64_at(b, 48)).expect("a superblock").1;
    assert_eq!((u32_at(&newest, 8), u32_at(&newest, 12)), (1, 4096), "what this one knows");
    // A log of counts, transactions, special files, extensions, accounts, also of folders, hard links and extended
    // attributes.
    let unknown = u64_at(&newest, 40) & !(16 | 32 | 64 | 128 | 256 | 512);
    assert_eq!(unknown, u64::from(u32_at(&newest, 3868) > 0), "what this one knows");
    newest
}

impl<'a> Pool<'a> {
    /// Reads the pool; `page` returns its pages.
    pub fn read(page: &'a dyn Fn(u64) -> Vec<u8>) -> Pool<'a> {
        let (replayed, witnessed, transactions) = (0, 0, 0);
        let (sb, volumes) = (superblock(page), BTreeMap::new());
        let mut pool = Pool {
            page,
            sb,
            volumes,
            replayed,
            witnessed,
            transactions,
            xattrs: BTreeMap::new(),
            expiries: BTreeMap::new(),
            accounts: BTreeMap::new(),
        };
        pool.directory();
        let alive = pool.volumes.iter().filter(|(_, v)| !matches!(v.state, 3 | 8));
        let maps: Vec<_> = alive.map(|(&id, v)| (id, pool.map_of(v))).collect();
        for (id, map) in maps {
            pool.volumes.get_mut(&id).unwrap().map = map;
        }
        if !pool.is_clean() {
            pool.replay();
        }
        pool
    }

    /// Whether it was closed cleanly.
    pub fn is_clean(&self) -> bool {
        u64_at(&self.sb, 64) == 1
    }

    /// Returns volumes and snapshots by their full names.
    pub fn by_name(&self) -> BTreeMap<String, &Volume> {
        let name = |v: &Volume| match v.state {
            1 => v.name.clone(),
            _ => format!("{}@{}", self.volumes[&v.parent].name, v.name),
        };
        self.volumes.values().filter(|v| !matches!(v.state, 3 | 8)).map(|v| (name(v), v)).collect()
    }

    /// Returns page `number` of a volume, zeroes for a hole.
    pub fn contents(&self, volume: &Volume, number: u64) -> Vec<u8> {
        volume.map.get(&number).map_or_else(|| vec![0; PAGE], |&page| (self.page)(page))
    }

    fn checked(&self, page: u64, birth: u64, kind: u8, sum: u32) -> Vec<u8> {
        let bytes = (self.page)(page);
        assert_eq!(page_sum(&self.sb[16..32], page, birth, kind, &bytes), sum, "kind {kind:x} in page {page:#x}");
        bytes
    }

    fn table(&self, entry: Entry, level: u8) -> Vec<Entry> {
        assert_eq!(entry.kind, 4);
        self.checked(entry.page, entry.birth, level, entry.checksum).chunks(16).map(Entry::new).collect()
    }

    fn directory(&mut self) {
        let (level, root) = (self.sb[104], Entry::new(&self.sb[120..136]));
        for number in 0..u64_at(&self.sb, 112) {
            let (mut entry, mut level) = (root, level);
            while entry.kind == 4 {
                entry = self.table(entry, level)[(number >> (8 * level) & 255) as usize];
                level = level.wrapping_sub(1);
            }
            if entry.kind == 0 {
                continue;
            }
            let page = self.checked(entry.page, 0, 0xd0, entry.checksum);
            for slot in page.chunks(512).filter(|slot| slot[0] == 7) {
                let (of, len) = (u64_at(slot, 16), usize::from(u16_at(slot, 24)));
                let fields = &slot[26..26 + len];
                assert!(self.expiries.insert(of, expiry(fields)).is_none(), "one extension");
                self.xattrs.extend(field(fields, 9).map(|value| (of, links::xattr(value))));
                if let Some(bound) = field(fields, 7) {
                    self.accounts.insert(of, (u32_at(bound, 0), u64_at(bound, 4), u64_at(bound, 12)));
                }
            }
            for slot in page.chunks(512).filter(|slot| !matches!(slot[0], 0 | 7)) {
                let n = usize::from(u16_at(slot, 96));
                let volume = Volume {
                    state: slot[0],
                    level: slot[1],
                    parent: u64_at(slot, 16),
                    size: u64_at(slot, 24),
                    root: Entry::new(&slot[80..96]),
                    cursor: u64_at(slot, 72),
                    name: String::from_utf8(slot[98..98 + n].to_vec()).unwrap(),
                    map: Map::new(),
                    quota: u64_at(slot, 496),
                };
                assert!(self.volumes.insert(u64_at(slot, 8), volume).is_none(), "a number is used once");
            }
        }
    }

    /// Returns the pages with the number of each account, in the maps of all volumes that are not deleted.
    pub fn charged(&self) -> BTreeMap<u32, BTreeSet<u64>> {
        let mut charged: BTreeMap<u32, BTreeSet<u64>> = BTreeMap::new();
        let alive = self.volumes.values().filter(|v| v.state != 3);
        let mut todo: Vec<_> = alive.map(|v| (v.root, v.level)).filter(|(root, _)| root.kind != 0).collect();
        while let Some((entry, level)) = todo.pop() {
            for child in self.table(entry, level) {
                let pages = match child.kind {
                    2 => child.page..child.page + 1,
                    3 => child.page..child.page + 256,
                    _ => 0..0,
                };
                charged.entry(child.checksum).or_default().extend(pages);
                if child.kind == 4 {
                    todo.push((child, level - 1));
                }
            }
        }
        charged
    }

    fn map_of(&self, volume: &Volume) -> Map {
        let mut map = Map::new();
        let mut todo = vec![(volume.root, volume.level, 0)];
        while let Some((entry, level, base)) = todo.pop() {
            if entry.kind == 0 {
                continue;
            }
            let children = self.table(entry, level);
            let mapped: u64 = children.iter().map(|c| [0, 0, 1, 256, c.mapped][usize::from(c.kind.min(4))]).sum();
            assert_eq!(entry.mapped, if level <= 1 { mapped } else { 0 }, "level {level} in page {:#x}", entry.page);
            for (i, child) in (0..).zip(children) {
                let first: u64 = base + (i << (8 * level));
                match (child.kind, level) {
                    (0, _) => {}
                    (2, 0) => drop(map.insert(first, child.page)),
                    (3, 1) => map.extend((0..256).map(|n| (first + n, child.page + n))),
                    (4, 1..) => todo.push((child, level - 1, first)),
                    (kind, level) => panic!("kind {kind} at level {level}"),
                }
            }
        }
        map
    }

    fn extents(&self) -> Vec<(u64, u64)> {
        let count = u32_at(&self.sb, 160) as usize;
        (0..count).map(|i| (u64_at(&self.sb, 168 + 16 * i), u64_at(&self.sb, 176 + 16 * i))).collect()
    }

    /// Returns the journal's page that contains `position`.
    fn ring(&self, position: u64) -> Vec<u8> {
        let total: u64 = self.extents().iter().map(|e| e.1).sum();
        let mut at = position / PAGE as u64 % total;
        for (first, pages) in self.extents() {
            if at < pages {
                return (self.page)(first + at);
            }
            at -= pages;
        }
        unreachable!("within the ring")
    }

    /// Returns how often the journal has wrapped around, as of the superblock.
    pub fn journal_rounds(&self) -> u64 {
        u64_at(&self.sb, 136) / (self.extents().iter().map(|e| e.1).sum::<u64>() * PAGE as u64)
    }

    fn replay(&mut self) {
        let (start, fresh, mut chain) = (u64_at(&self.sb, 136), u64_at(&self.sb, 144), u64_at(&self.sb, 152));
        let total: u64 = self.extents().iter().map(|e| e.1).sum::<u64>() * PAGE as u64;
        let (mut position, mut incarnation) = (start, 0);
        let mut held: Vec<Vec<u8>> = Vec::new();
        while position < start + total {
            let mut group = self.ring(position);
            if &group[..8] != b"fkdjrnl1" || u64_at(&group, 48) != chain {
                break;
            }
            let length = 64 + u32_at(&group, 36) as usize;
            let pages = length.div_ceil(PAGE) as u64;
            if position + pages * PAGE as u64 > start + total {
                break;
            }
            (1..pages).for_each(|i| group.extend(self.ring(position + i * PAGE as u64)));
            let covered = [&self.sb[16..32], &group[..40], &group[64..length]].concat();
            let (value, born) = (u64_at(&group, 40), u64_at(&group, 8));
            if xxh3_64_with_seed(&covered, chain) != value || born < incarnation || born > u64_at(&self.sb, 56) {
                break;
            }
            (chain, incarnation, position) = (value, born, position + pages * PAGE as u64);
            // Groups that a later one reports as durable need no verification.
            let confirmed = u64_at(&group, 24);
            let sure = held.iter().take_while(|g| u64_at(g, 16) + u64::from(u32_at(g, 32)) <= confirmed).count();
            held.drain(..sure).for_each(|g| drop(self.records(&g, fresh)));
            group.truncate(length);
            held.push(group);
        }
        for group in held {
            // Records that are read, not applied, end where the checksums begin.
            let checksums = self.records(&group, u64::MAX);
            if !checksums.chunks(20).all(|w| self.is_there(w)) {
                return;
            }
            self.records(&group, fresh);
        }
    }

    /// Applies the records of a group from sequence number `fresh` on; returns the bytes behind them.
    fn records(&mut self, group: &[u8], fresh: u64) -> Vec<u8> {
        let mut fields = Fields(&group[64..]);
        for sequence in (u64_at(group, 16)..).take(u32_at(group, 32) as usize) {
            self.record(&mut fields, sequence >= fresh);
        }
        assert!(fields.0.len().is_multiple_of(20), "whole checksums");
        fields.0.to_vec()
    }

    fn is_there(&mut self, checksum: &[u8]) -> bool {
        self.witnessed += 1;
        let (to, pages, sum) = (u64_at(checksum, 0), u64::from(u32_at(checksum, 8)), u64_at(checksum, 12));
        let bytes: Vec<u8> = (0..pages).flat_map(|i| (self.page)(to + i)).collect();
        xxh3_64_with_seed(&bytes, to) == sum
    }

    fn delete(&mut self, id: u64, apply: bool) {
        if apply {
            self.volumes.get_mut(&id).expect("a record names a volume there is").state = 3;
            self.expiries.remove(&id);
            self.xattrs.remove(&id);
        }
    }

    fn set_extension(&mut self, fields: &mut Fields, apply: bool) {
        let (id, len) = (fields.u64(), fields.u16());
        let fields = fields.take(usize::from(len));
        let (expires, value) = (expiry(fields), field(fields, 9).map(links::xattr));
        assert!(u64_at(&self.sb, 40) & 64 != 0, "the superblock says that there may be extensions");
        if apply {
            self.expiries.insert(id, expires);
            self.xattrs.remove(&id);
            self.xattrs.extend(value.map(|value| (id, value)));
        }
    }

    fn record(&mut self, fields: &mut Fields, apply: bool) {
        let mut ignored = BTreeMap::new();
        let volumes = if apply { &mut self.volumes } else { &mut ignored };
        self.replayed += usize::from(apply);
        let copy = |volumes: &mut BTreeMap<u64, Volume>, source: u64, id, state, parent, name| {
            if let Some(source) = volumes.get(&source).cloned() {
                volumes.insert(id, Volume { state, parent, name, quota: 0, ..source });
            }
        };
        let change = |volumes: &mut BTreeMap<u64, Volume>, id, f: &mut dyn FnMut(&mut Volume)| {
            if apply {
                f(volumes.get_mut(&id).expect("a record names a volume there is"));
            }
        };
        match fields.u8() {
            1 => {
                let (id, at, len, to) = (fields.u64(), fields.u64(), u64::from(fields.u32()), fields.u64());
                change(volumes, id, &mut |v| v.map.extend((0..len).map(|i| (at + i, to + i))));
            }
            2 => {
                let (id, at, len) = (fields.u64(), fields.u64(), fields.u64());
                change(volumes, id, &mut |v| v.map.retain(|page, _| !(at..at + len).contains(page)));
            }
            3 => {
                let (id, size, _chunk, _made, name) =
                    (fields.u64(), fields.u64(), fields.u64(), fields.u64(), fields.name());
                let root = Entry { page: 0, mapped: 0, kind: 0, birth: 0, checksum: 0 };
                let (map, cursor, quota) = (Map::new(), 0, 0);
                volumes.insert(id, Volume { state: 1, parent: 0, size, name, map, quota, level: 1, root, cursor });
            }
            4 => {
                let (_made, count) = (fields.u64(), fields.u32());
                for _ in 0..count {
                    let (source, id, name) = (fields.u64(), fields.u64(), fields.name());
                    copy(volumes, links::file_of(volumes, source), id, 2, source, name);
                }
            }
            5 => {
                let (source, id, _made, name) = (fields.u64(), fields.u64(), fields.u64(), fields.name());
                copy(volumes, source, id, 1, 0, name);
            }
            6 => {
                let (id, snapshot, _dead) = (fields.u64(), fields.u64(), fields.u64());
                let to = volumes.get(&snapshot).cloned();
                change(volumes, id, &mut |v| (v.map, v.size) = to.clone().map(|s| (s.map, s.size)).unwrap());
            }
            7 => (0..fields.u32()).for_each(|_| self.delete(fields.u64(), apply)),
            8 => {
                let (id, name) = (fields.u64(), fields.name());
                change(volumes, id, &mut |v| v.name.clone_from(&name));
            }
            9 => {
                let (id, size) = (fields.u64(), fields.u64());
                change(volumes, id, &mut |v| v.size = size);
            }
            10 => drop((fields.u64(), fields.u64())),
            11 => {
                let (source, from, target, to, len, _dead) =
                    (fields.u64(), fields.u64(), fields.u64(), fields.u64(), fields.u64(), fields.u64());
                let found = volumes.get(&source).map(|v| v.map.clone()).unwrap_or_default();
                change(volumes, target, &mut |v| {
                    v.map.retain(|page, _| !(to..to + len).contains(page));
                    v.map.extend(found.range(from..from + len).map(|(page, &at)| (page - from + to, at)));
                });
            }
            20 => drop(fields.take(14).len()),
            21 => drop(fields.take(28).len()),
            22 => {
                let (id, quota) = (fields.u64(), fields.u64());
                change(volumes, id, &mut |v| v.quota = quota);
            }
            12 | 40 => drop(fields.u64()),
            48 => drop((fields.u64(), fields.u8())),
            49 => {
                let (at, count) = (fields.u64(), fields.u32());
                let ids: Vec<u64> = (0..count).map(|_| fields.u64()).collect();
                for _ in 0..fields.u32() {
                    let (first, more) = (u64::from(fields.u8()), u64::from(fields.u8()));
                    let (from, to) = (fields.u64(), fields.u64());
                    for &id in &ids {
                        change(volumes, id, &mut |v| {
                            for i in 0..=more {
                                let place = v.map.get_mut(&(at + first + i)).filter(|place| **place == from + i);
                                place.into_iter().for_each(|place| *place = to + i);
                            }
                        });
                    }
                }
            }
            55 => self.set_extension(fields, apply),
            57 => links::make(volumes, fields.u64(), fields.u64(), fields.name()),
            58 => links::take_name(volumes, fields.u64(), fields.u64()),
            52 => {
                assert!(u64_at(&self.sb, 40) & 16 != 0, "the superblock says that there may be transactions");
                self.transactions += usize::from(apply);
                (0..fields.u32()).for_each(|_| self.record(fields, apply));
            }
            kind => panic!("a record of kind {kind}"),
        }
    }
}

/// The actual or the expected counts of a pool.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub blocks: BTreeMap<u64, u32>,
    pub pages: BTreeMap<u64, u32>,
}

impl Counts {
    fn change_block(&mut self, block: u64, by: i64) {
        change(&mut self.blocks, block, by);
    }

    fn change_page(&mut self, page: u64, by: i64) {
        change(&mut self.pages, page, by);
    }

    /// Returns the pages with references.
    fn used(&self) -> u64 {
        let alone = self.pages.keys().filter(|&&page| !self.blocks.contains_key(&(page / 256))).count();
        256 * self.blocks.len() as u64 + alone as u64
    }
}

fn change(counts: &mut BTreeMap<u64, u32>, of: u64, by: i64) {
    let now = counts.get(&of).copied().unwrap_or_default().checked_add_signed(by as i32).expect("not below zero");
    match now {
        0 => drop(counts.remove(&of)),
        now => drop(counts.insert(of, now)),
    }
}

impl Pool<'_> {
    /// Returns the counts on the device.
    pub fn counts(&self) -> Counts {
        let (mut counts, mut used) = (Counts::default(), 0);
        for i in 0..u32_at(&self.sb, 164) as usize {
            used += self.count_page(3, i as u64, &self.sb[424 + 16 * i..440 + 16 * i], &mut counts) as i64;
        }
        used += self.logged(&mut counts);
        assert_eq!(counts.used(), used as u64, "pages in use, with the log");
        counts
    }

    /// Returns the pages of the log of counts.
    pub fn count_log_pages(&self) -> u32 {
        u32_at(&self.sb, 3868)
    }

    /// Applies the log of counts; returns the change of the pages in use.
    fn logged(&self, counts: &mut Counts) -> i64 {
        let pages = u64::from(self.count_log_pages());
        let log: Vec<u8> = (1..=pages).flat_map(|i| (self.page)(if i < 128 { i } else { i + 1 })).collect();
        if pages > 0 {
            assert_eq!(page_sum(&self.sb[16..32], 1, 0, 0xc0, &log), u32_at(&self.sb, 3872), "the log of counts");
        }
        let (mut used, mut at) = (0, 0);
        while at < log.len() {
            let mut fields = Fields(&log[at..]);
            let (count, mut leaf) = (fields.number(), 0);
            assert!(count > 0, "a segment says something");
            for _ in 0..count {
                leaf += fields.number();
                used += fields.signed();
                let common = fields.signed();
                let is_used = |block: u64| !(block - 1).is_multiple_of(868);
                (1 + 7 * leaf..8 + 7 * leaf).filter(|&b| is_used(b)).for_each(|b| counts.change_block(b, common));
                let mask = fields.u8();
                for block in (0..7).filter(|i| mask >> i & 1 == 1).map(|i| 1 + 7 * leaf + i) {
                    let head = fields.number();
                    if head & 1 == 1 {
                        counts.change_block(block, fields.signed());
                    }
                    for _ in 0..head / 2 {
                        let by = fields.signed();
                        fields.bits().into_iter().for_each(|page| counts.change_page(block * 256 + page, by));
                    }
                }
                leaf += 1;
            }
            at = (log.len() - fields.0.len()).next_multiple_of(4 * PAGE);
        }
        used
    }

    /// Adds the counts below an entry of the count tree; returns the pages in use there.
    fn count_page(&self, level: u8, index: u64, entry: &[u8], counts: &mut Counts) -> u64 {
        let (slot, sum, said) = (u64::from(entry[0]), u32_at(entry, 4), u64_at(entry, 8));
        let common = u32::from(u16_at(entry, 2));
        assert!(level == 0 || common == 0, "references noted above a page that is no leaf");
        if slot == 0 && common == 0 {
            assert_eq!(entry, [0; 16]);
            return 0;
        }
        let (region, within) = match level {
            0 => (index / 124, 8 + index % 124 + 124 * slot.saturating_sub(1)),
            _ => (index << (8 * (level - 1)), (u64::from(level) - 1) * 2 + slot.saturating_sub(1)),
        };
        let bytes = match slot {
            0 => vec![0; 4096],
            _ => self.checked((1 + 868 * region) * 256 + within, 0, 0xe0 + level, sum),
        };
        let mut leaf = |(bytes, block): (&[u8], u64)| match (block - 1) % 868 {
            0 => 0,
            _ => block_counts(bytes, block, common, counts),
        };
        let used = match level {
            0 => bytes.chunks_exact(528).zip(1 + 7 * index..).map(&mut leaf).sum(),
            _ => {
                let children = if level == 1 { 124 } else { 256 };
                let below = |(i, e)| self.count_page(level - 1, index * children + i, e, counts);
                (0..children).zip(bytes.chunks(16)).map(below).sum::<u64>()
            }
        };
        assert_eq!(used, said, "pages in use under count page {index} of level {level}");
        used
    }

    /// Returns all references, counted by walking all maps.
    pub fn references(&self) -> Counts {
        let mut counts = Counts::default();
        let mut seen = std::collections::BTreeSet::new();
        let span = |level: u8| 1u64 << (8 * (u32::from(level) + 1));
        let mut todo: Vec<_> = self.volumes.values().map(|v| (v.root, v.level, 0, v.cursor)).collect();
        todo.push((Entry::new(&self.sb[120..136]), self.sb[104], 0, 0));
        while let Some((entry, level, first, cursor)) = todo.pop() {
            match entry.kind {
                // Entries before the cursor of a dead volume are no references any more.
                _ if first + span(level) <= cursor => continue,
                0 => continue,
                _ => *counts.pages.entry(entry.page).or_default() += 1,
            }
            // The targets of a shared table are counted once: its entries are.
            if !seen.insert(entry.page) {
                continue;
            }
            let step = span(level) / 256;
            for (child, first) in self.table(entry, level).into_iter().zip((0..).map(|i| first + i * step)) {
                match child.kind {
                    4 => todo.push((child, level - 1, first, cursor)),
                    _ if first + step <= cursor => {}
                    2 => *counts.pages.entry(child.page).or_default() += 1,
                    3 => *counts.blocks.entry(child.page / 256).or_default() += 1,
                    _ => {}
                }
            }
        }
        for (first, pages) in self.extents() {
            (first / 256..(first + pages) / 256).for_each(|b| *counts.blocks.entry(b).or_default() += 1);
        }
        counts
    }
}

fn block_counts(bytes: &[u8], block: u64, common: u32, counts: &mut Counts) -> u64 {
    let whole = u32_at(bytes, 0) + common;
    let pages: Vec<u32> = (0..256).map(|i| u32::from(u16_at(bytes, 16 + 2 * i))).collect();
    if whole > 0 {
        counts.blocks.insert(block, whole);
    }
    counts.pages.extend((block * 256..).zip(pages.iter().copied()).filter(|&(_, n)| n > 0));
    if whole > 0 { 256 } else { pages.iter().filter(|&&n| n > 0).count() as u64 }
}

/// When an extension with these fields expires.
fn expiry(fields: &[u8]) -> u64 {
    field(fields, 1).map_or(0, |value| u64_at(value, 0))
}

/// Returns the value of a field of an extension.
fn field(mut rest: &[u8], wanted: u8) -> Option<&[u8]> {
    while !rest.is_empty() {
        let (kind, end) = (rest[0], 3 + usize::from(u16_at(rest, 1)));
        if kind == wanted {
            return Some(&rest[3..end]);
        }
        rest = &rest[end..];
    }
    None
}

/// Fields in sequence.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take(&mut self, n: usize) -> &[u8] {
        let (head, tail) = self.0.split_at(n);
        self.0 = tail;
        head
    }

    fn u8(&mut self) -> u8 {
        self.take(1)[0]
    }

    fn u16(&mut self) -> u16 {
        u16_at(self.take(2), 0)
    }

    fn u32(&mut self) -> u32 {
        u32_at(self.take(4), 0)
    }

    fn u64(&mut self) -> u64 {
        u64_at(self.take(8), 0)
    }

    fn number(&mut self) -> u64 {
        let mut n = 0;
        for shift in (0..).step_by(7) {
            let byte = self.u8();
            n |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        n
    }

    fn signed(&mut self) -> i64 {
        let n = self.number();
        if n.is_multiple_of(2) { (n / 2) as i64 } else { -((n / 2) as i64) - 1 }
    }

    /// Returns a set of a block's pages.
    fn bits(&mut self) -> Vec<u64> {
        let parameters = self.u8();
        let (mut pages, mut at, mut bits) = (Vec::new(), 0, Vec::new());
        for _ in 0..self.number() {
            let first = at + self.code(parameters & 15, &mut bits);
            at = first + self.code(parameters >> 4, &mut bits) + 1;
            pages.extend(first..at);
        }
        pages
    }

    /// Returns a Rice code; `bits` are those left of the last byte.
    fn code(&mut self, parameter: u8, bits: &mut Vec<u8>) -> u64 {
        let mut bit = || {
            if bits.is_empty() {
                let byte = self.u8();
                bits.extend((0..8).rev().map(|i| byte >> i & 1));
            }
            u64::from(bits.pop().unwrap())
        };
        let ones = std::iter::from_fn(|| (bit() == 1).then_some(())).count() as u64;
        (0..parameter).fold(ones << parameter, |n, i| n | bit() << i)
    }

    fn name(&mut self) -> String {
        let n = usize::from(u16_at(self.take(2), 0));
        String::from_utf8(self.take(n).to_vec()).unwrap()
    }
}
