//! The superblock: the root of everything. Two slots, each one page.

use crate::planted::correct;
use crate::types::{MAX_EPOCH, MAX_POOL_SIZE, PAGE_SIZE, PageAddr};

use super::checksum::{Seed, page_checksum};
use super::cursor::{Append, Reader};
use super::{CopierSettings, CountEntry, CountLog, CountNode, Layout, MapEntry};

const MAGIC: [u8; 8] = *b"forkdisk";
/// Version of the format.
pub const FORMAT_VERSION: u32 = 1;
/// Most extents of a journal.
pub const MAX_JOURNAL_EXTENTS: usize = 16;
/// Most level-3 count pages a pool can have (4 PiB).
const MAX_COUNT_ROOTS: u64 = 76;
const SEED_LEVEL: u8 = 0xf0;
const CHECKED_BYTES: usize = PAGE_SIZE - 4;
/// Offset of the copier's settings, behind the counts of the largest pool.
const COPIER_AT: usize = 3840;
/// Compatible feature: every page of the device is allocated in its host, and is to stay so.
const IS_PREALLOCATED: u64 = 1;
/// Incompatible feature: there is a log of counts.
const HAS_COUNT_LOG: u64 = 1;
/// Incompatible feature: the checksums of pages contain another UUID than the pool's.
const HAS_CHECKSUM_UUID: u64 = 2;
/// Incompatible feature: the pool has a heartbeat, which every open must respect.
const HAS_HEARTBEAT: u64 = 4;
/// Incompatible feature: leaves of counts have upper bits.
const HAS_LARGE_COUNTS: u64 = 8;
/// Incompatible feature: the journal may have transactions.
const HAS_TRANSACTIONS: u64 = 16;
/// Incompatible feature: attributes may have kinds of files, and there may be snapshots of removed volumes.
const HAS_SPECIAL_FILES: u64 = 32;
/// Incompatible feature: the directory may have extensions, and the journal records that set them.
const HAS_EXTENSIONS: u64 = 64;
/// Incompatible feature: volumes may have bounds, and entries of data the numbers of accounts.
const HAS_BOUNDS: u64 = 128;
/// Incompatible feature: folders may have bounds and quotas.
const HAS_FOLDER_BOUNDS: u64 = 256;
/// Incompatible feature: there may be hard links, and extensions may have extended attributes of files.
const HAS_LINKS_OR_XATTRS: u64 = 512;
const KNOWN_FEATURES: u64 = HAS_COUNT_LOG
    | HAS_CHECKSUM_UUID
    | HAS_HEARTBEAT
    | HAS_LARGE_COUNTS
    | HAS_TRANSACTIONS
    | HAS_SPECIAL_FILES
    | HAS_EXTENSIONS
    | HAS_BOUNDS
    | HAS_FOLDER_BOUNDS
    | HAS_LINKS_OR_XATTRS;
/// Shortest and longest interval between two beats, in milliseconds.
pub const BEATS_APART: std::ops::RangeInclusive<u32> = 100..=60_000;

/// Where replay starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct JournalStart {
    /// Byte position within the journal, a multiple of the page size.
    pub position: u64,
    /// Sequence number of the first record not in the checkpoint.
    pub sequence: u64,
    /// Chain value of the group before.
    pub chain: u64,
}

/// The state of the pool as of one checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The pool's identity.
    pub uuid: [u8; 16],
    /// The UUID in the checksums of pages and journal groups: the one at the pool's creation.
    pub checksum_uuid: [u8; 16],
    /// Ascends with every superblock written.
    pub generation: u64,
    /// Ascends with every open that writes.
    pub incarnation: u64,
    /// Whether the pool was closed cleanly: nothing to replay.
    pub clean: bool,
    /// Length of the pool in bytes.
    pub size: u64,
    /// Creation time, in seconds since 1970.
    pub created: u64,
    /// The pool's epoch.
    pub epoch: u64,
    /// Next number for a volume.
    pub next_id: u64,
    /// Level and root of the directory's map.
    pub directory_level: u8,
    /// See `directory_level`.
    pub directory: MapEntry,
    /// Directory pages in use.
    pub directory_pages: u64,
    /// The journal's extents: first page and number of pages.
    pub journal: Vec<(PageAddr, u32)>,
    /// Where replay starts.
    pub start: JournalStart,
    /// Entries of the level-3 count pages.
    pub counts: Vec<CountEntry>,
    /// The log that must be applied to the count pages.
    pub count_log: CountLog,
    /// There are counts of 65,535 or more, or there were.
    pub large_counts: bool,
    /// The journal may have transactions, so that versions that do not know them refuse the pool.
    pub transactions: bool,
    /// There may be symbolic links, FIFOs, sockets, and snapshots of removed volumes, so that versions that do not
    /// know them refuse the pool.
    pub special_files: bool,
    /// There may be extensions, so that versions that do not know them refuse the pool.
    pub extensions: bool,
    /// There may be bounds, so that versions that do not know them refuse the pool.
    pub bounds: bool,
    /// The same for bounds of folders.
    pub folder_bounds: bool,
    /// There may be hard links and extended attributes, so that versions that do not know them refuse the pool.
    pub links_or_xattrs: bool,
    /// Settings of the pool's copier.
    pub copier: CopierSettings,
    /// Milliseconds between two beats of its heartbeat; 0: it has none.
    pub heartbeat: u32,
    /// Every page was written when the pool was made, so that no write has to allocate space in the host. A hint.
    pub preallocated: bool,
}

/// Why a page is not a valid superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotSuper {
    /// Not a forkdisk pool.
    Foreign,
    /// Created by a version with features this one does not know.
    Newer(String),
    /// Damaged.
    Damaged(String),
}

impl Superblock {
    /// Encodes the superblock into the page `at`.
    pub fn encode(&self, at: PageAddr, page: &mut [u8]) {
        let mut out = Vec::with_capacity(PAGE_SIZE);
        out.extend_from_slice(&MAGIC);
        Append::u32(&mut out, FORMAT_VERSION);
        Append::u32(&mut out, PAGE_SIZE as u32);
        out.extend_from_slice(&self.uuid);
        let bit = |is: bool, bit: u64| if is { bit } else { 0 };
        let renewed = self.checksum_uuid != self.uuid;
        // Feature bits: compatible, incompatible.
        let features = [
            bit(self.count_log.pages > 0, HAS_COUNT_LOG),
            bit(renewed, HAS_CHECKSUM_UUID),
            bit(self.heartbeat > 0, HAS_HEARTBEAT),
            bit(self.large_counts, HAS_LARGE_COUNTS),
            bit(self.transactions, HAS_TRANSACTIONS),
            bit(self.special_files, HAS_SPECIAL_FILES),
            bit(self.extensions, HAS_EXTENSIONS),
            bit(self.bounds, HAS_BOUNDS),
            bit(self.folder_bounds, HAS_FOLDER_BOUNDS),
            bit(self.links_or_xattrs, HAS_LINKS_OR_XATTRS),
        ];
        out.u64s(&[bit(self.preallocated, IS_PREALLOCATED), features.iter().sum()]);
        for v in [
            self.generation,
            self.incarnation,
            u64::from(self.clean),
            self.size,
            self.created,
            self.epoch,
            self.next_id,
        ] {
            Append::u64(&mut out, v);
        }
        out.u64s(&[u64::from(self.directory_level), self.directory_pages]);
        out.extend_from_slice(&self.directory.to_bytes());
        out.u64s(&[self.start.position, self.start.sequence, self.start.chain]);
        Append::u32(&mut out, self.journal.len() as u32);
        Append::u32(&mut out, self.counts.len() as u32);
        for i in 0..MAX_JOURNAL_EXTENTS {
            let (first, len) = self.journal.get(i).copied().unwrap_or((PageAddr(0), 0));
            out.u64s(&[first.0, u64::from(len)]);
        }
        for entry in &self.counts {
            out.extend_from_slice(&entry.to_bytes());
        }
        assert!(out.len() <= COPIER_AT, "the counts end before the settings");
        out.resize(COPIER_AT, 0);
        self.copier.encode(&mut out);
        Append::u32(&mut out, self.count_log.pages);
        Append::u32(&mut out, self.count_log.checksum);
        out.extend_from_slice(if renewed { &self.checksum_uuid } else { &[0; 16] });
        Append::u32(&mut out, self.heartbeat);
        assert!(out.len() <= CHECKED_BYTES, "the superblock fits its page");
        page[..PAGE_SIZE].fill(0);
        page[..out.len()].copy_from_slice(&out);
        let sum = page_checksum(&seed(self.uuid, at), &page[..CHECKED_BYTES]);
        page[CHECKED_BYTES..PAGE_SIZE].copy_from_slice(&sum.to_le_bytes());
    }

    /// Decodes the superblock in the page `at`.
    pub fn decode(at: PageAddr, page: &[u8]) -> Result<Superblock, NotSuper> {
        let mut r = Reader(&page[..CHECKED_BYTES]);
        if r.array() != Some(MAGIC) {
            return Err(NotSuper::Foreign);
        }
        let short = || NotSuper::Damaged("too short".into());
        let version = r.u32().ok_or_else(short)?;
        let page_size = r.u32().ok_or_else(short)?;
        let uuid: [u8; 16] = r.array().ok_or_else(short)?;
        let sum = u32::from_le_bytes(page[CHECKED_BYTES..PAGE_SIZE].try_into().expect("four bytes"));
        let is_torn = page_checksum(&seed(uuid, at), &page[..CHECKED_BYTES]) != sum;
        if correct!(is_torn, Bug::TornSuperblockAccepted => false) {
            return Err(NotSuper::Damaged("its checksum does not match".into()));
        }
        if version != FORMAT_VERSION || page_size != PAGE_SIZE as u32 {
            return Err(NotSuper::Newer(format!("format version {version}, page size {page_size}")));
        }
        let compatible = r.u64().ok_or_else(short)?;
        let incompatible = r.u64().ok_or_else(short)?;
        if incompatible & !KNOWN_FEATURES != 0 {
            return Err(NotSuper::Newer(format!("incompatible feature bits {incompatible:#x}")));
        }
        let mut behind = Reader(&page[COPIER_AT..CHECKED_BYTES]);
        let settings = CopierSettings::decode(&mut behind);
        let fields = settings.and_then(|copier| {
            let count_log = CountLog { pages: behind.u32()?, checksum: behind.u32()? };
            let has_one = incompatible & HAS_COUNT_LOG != 0;
            (count_log.makes_sense() && has_one == (count_log.pages > 0)).then_some(())?;
            let renewed = behind.array()?;
            let checksum_uuid = if incompatible & HAS_CHECKSUM_UUID != 0 { renewed } else { uuid };
            let heartbeat = behind.u32()?;
            let beats = heartbeat == 0 || BEATS_APART.contains(&heartbeat);
            (beats && (incompatible & HAS_HEARTBEAT != 0) == (heartbeat > 0)).then_some(())?;
            let large_counts = incompatible & HAS_LARGE_COUNTS != 0;
            Some(Superblock {
                checksum_uuid,
                heartbeat,
                large_counts,
                transactions: incompatible & HAS_TRANSACTIONS != 0,
                special_files: incompatible & HAS_SPECIAL_FILES != 0,
                extensions: incompatible & HAS_EXTENSIONS != 0,
                bounds: incompatible & HAS_BOUNDS != 0,
                folder_bounds: incompatible & HAS_FOLDER_BOUNDS != 0,
                links_or_xattrs: incompatible & HAS_LINKS_OR_XATTRS != 0,
                preallocated: compatible & IS_PREALLOCATED != 0,
                ..Superblock::fields(uuid, &mut r, copier, count_log)?
            })
        });
        fields.ok_or_else(|| NotSuper::Damaged("a field makes no sense".into()))
    }

    fn fields(uuid: [u8; 16], r: &mut Reader<'_>, copier: CopierSettings, count_log: CountLog) -> Option<Superblock> {
        let [generation, incarnation, clean, size] = [r.u64()?, r.u64()?, r.u64()?, r.u64()?];
        let [created, epoch, next_id] = [r.u64()?, r.u64()?, r.u64()?];
        let [directory_level, directory_pages] = [r.u64()?, r.u64()?];
        let directory = MapEntry::from_bytes(r.array()?);
        let start = JournalStart { position: r.u64()?, sequence: r.u64()?, chain: r.u64()? };
        let (extents, roots) = (r.u32()? as usize, r.u32()?);
        let layout = Layout::new(size);
        if size > MAX_POOL_SIZE || layout.blocks() < 2 || extents > MAX_JOURNAL_EXTENTS || epoch >= MAX_EPOCH {
            return None;
        }
        (directory_pages <= layout.pages()).then_some(())?;
        (extents > 0 && start.position.is_multiple_of(PAGE_SIZE as u64)).then_some(())?;
        let mut journal = Vec::new();
        for i in 0..MAX_JOURNAL_EXTENTS {
            let (first, len) = (r.u64()?, r.u64()?);
            let inside = first.checked_add(len)? <= layout.pages();
            if i < extents {
                journal.push((PageAddr(first), u32::try_from(len).ok().filter(|&n| inside && n > 0)?));
            }
        }
        if u64::from(roots) != layout.count_nodes(3) || u64::from(roots) > MAX_COUNT_ROOTS {
            return None;
        }
        let counts = (0..u64::from(roots))
            .map(|index| CountEntry::from_bytes(r.array()?, layout.initially_free_under(CountNode { level: 3, index })))
            .collect::<Option<_>>()?;
        let directory_level = u8::try_from(directory_level).ok().filter(|l| (1..=4).contains(l))?;
        directory.flaw(directory_level + 1, layout.pages()).is_none().then_some(())?;
        let clean = clean != 0;
        Some(Superblock {
            uuid,
            checksum_uuid: uuid,
            generation,
            incarnation,
            clean,
            size,
            created,
            epoch,
            next_id,
            directory_level,
            directory,
            directory_pages,
            journal,
            start,
            counts,
            count_log,
            large_counts: false,
            transactions: false,
            special_files: false,
            extensions: false,
            bounds: false,
            folder_bounds: false,
            links_or_xattrs: false,
            preallocated: false,
            copier,
            heartbeat: 0,
        })
    }
}

fn seed(uuid: [u8; 16], at: PageAddr) -> Seed {
    Seed { pool: uuid, page: at, level: SEED_LEVEL, birth: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{SUPERBLOCK_PAGES, Slot};

    fn sample() -> Superblock {
        Superblock {
            uuid: [3; 16],
            checksum_uuid: [4; 16],
            generation: 9,
            incarnation: 2,
            clean: true,
            size: 1 << 52,
            created: 1,
            epoch: 5,
            next_id: 6,
            directory_level: 1,
            directory: MapEntry::ABSENT,
            directory_pages: 0,
            journal: vec![(PageAddr(512), 256); MAX_JOURNAL_EXTENTS],
            start: JournalStart { position: 4096, sequence: 7, chain: 8 },
            counts: vec![
                CountEntry { slot: Some(Slot::B), checksum: 1, used: 2, common: 0 };
                Layout::new(1 << 52).count_nodes(3) as usize
            ],
            count_log: CountLog { pages: 252, checksum: 9 },
            large_counts: true,
            transactions: true,
            special_files: true,
            extensions: true,
            bounds: true,
            folder_bounds: true,
            links_or_xattrs: true,
            preallocated: true,
            copier: CopierSettings { split_count: 3, ..CopierSettings::default() },
            heartbeat: 60_000,
        }
    }

    #[test]
    fn the_largest_pool_fits() {
        let mut page = vec![0; PAGE_SIZE];
        sample().encode(SUPERBLOCK_PAGES[0], &mut page);
        assert_eq!(Superblock::decode(SUPERBLOCK_PAGES[0], &page), Ok(sample()));
    }

    #[test]
    fn a_superblock_whose_fields_make_no_sense_is_damaged() {
        let crooked = JournalStart { position: 4095, ..sample().start };
        let long = CountLog { pages: 253, checksum: 9 };
        for bad in [
            Superblock { journal: vec![], ..sample() },
            Superblock { start: crooked, ..sample() },
            Superblock { count_log: long, ..sample() },
            Superblock { heartbeat: 99, ..sample() },
        ] {
            let mut page = vec![0; PAGE_SIZE];
            bad.encode(SUPERBLOCK_PAGES[0], &mut page);
            let decoded = Superblock::decode(SUPERBLOCK_PAGES[0], &page);
            assert!(matches!(decoded, Err(NotSuper::Damaged(_))), "{decoded:?}");
        }
    }

    #[test]
    fn any_flipped_bit_and_the_wrong_slot_are_noticed() {
        let mut page = vec![0; PAGE_SIZE];
        sample().encode(SUPERBLOCK_PAGES[0], &mut page);
        assert!(Superblock::decode(SUPERBLOCK_PAGES[1], &page).is_err());
        for bit in 0..PAGE_SIZE * 8 {
            page[bit / 8] ^= 1 << (bit % 8);
            assert!(Superblock::decode(SUPERBLOCK_PAGES[0], &page).is_err(), "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
    }
}
