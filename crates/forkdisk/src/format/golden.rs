//! The examples of docs/format.md, byte for byte: keeps the document and the code consistent.
//!
//! An example is a fenced block ```` ```hex NAME LENGTH ````. Each of its lines has an offset and the bytes
//! there (hexadecimal), and behind `|` what they are; bytes that no line lists are 0.

use crate::types::{AccountId, Block, Epoch, PAGE_SIZE, PageAddr, TABLE_FANOUT, VirtualPage, VolumeId};

use super::checksum::{Seed, page_checksum};
use super::count_log::{BlockChange, CountLog, LeafChange, decode_count_log, encode_count_segment};
use super::counts::{CountEntry, CountPage, Slot};
use super::entry::{MapEntry, TableRef};
use super::group::{DataChecksum, Decoded, JournalGroup, decode_group, encode_group};
use super::inherited::CloneProperty;
use super::ordered::{self, ORDERED_LEAF, TreeRoot};
use super::ordered::{ExceptionKey, Piece};
use super::record::{MovedRun, Record};
use super::settings::{BreakPolicy, CopierSettings, GatherPolicy, Throttle};
use super::stamp::Stamp;
use super::superblock::{JournalStart, Superblock};
use super::table::{decode_table, encode_table};
use super::volume::{
    Attributes, FileKind, Identity, NO_VOLUME, OriginFull, OriginRecord, SnapshotFlags, VolumeRecord, VolumeState,
};
use super::{
    Bound, CountNode, DirectorySlot, Extension, Lease, SLOTS_PER_PAGE, SUPERBLOCK_PAGES, WritePolicy, Writes, Zeroes,
    decode_directory_page, encode_directory_page,
};

const DOCUMENT: &str = include_str!("../../docs/format.md");
/// 00 01 02 … 0f.
const POOL: [u8; 16] = *b"\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f";
/// Pages of the pool of the examples (64 MiB).
const PAGES: u64 = 64 * 256;

/// Returns the bytes of the example called `name`.
fn example(name: &str) -> Vec<u8> {
    let start =
        DOCUMENT.lines().position(|l| l.strip_prefix("```hex ").is_some_and(|r| r.split(' ').next() == Some(name)));
    let start = start.unwrap_or_else(|| panic!("docs/format.md has no example {name:?}"));
    let mut lines = DOCUMENT.lines().skip(start);
    let length = lines.next().and_then(|l| l.rsplit(' ').next()).and_then(|n| n.parse().ok());
    let mut bytes = vec![0; length.unwrap_or_else(|| panic!("the example {name:?} says no length"))];
    for line in lines.take_while(|l| *l != "```") {
        let mut fields = line.split('|').next().unwrap_or("").split_whitespace();
        let at = fields.next().map(|f| usize::from_str_radix(f, 16).unwrap_or_else(|_| panic!("bad offset: {line}")));
        let at = at.unwrap_or_else(|| panic!("an empty line in the example {name:?}"));
        for (i, field) in fields.enumerate() {
            bytes[at + i] = u8::from_str_radix(field, 16).unwrap_or_else(|_| panic!("bad byte {field:?}: {line}"));
        }
    }
    bytes
}

/// Compares what the code writes with the example, and shows the code's bytes if they differ.
#[track_caller]
fn assert_example(name: &str, bytes: &[u8]) {
    if example(name) == bytes {
        return;
    }
    let mut shown = format!("```hex {name} {}\n", bytes.len());
    for (i, row) in bytes.chunks(16).enumerate().filter(|(_, row)| row.iter().any(|&b| b != 0)) {
        let hex: Vec<String> = row.iter().map(|b| format!("{b:02x}")).collect();
        shown += &format!("{:04x}  {}\n", i * 16, hex.join(" "));
    }
    panic!("the example {name:?} of docs/format.md is not what the code writes:\n{shown}```");
}

fn leaf() -> Vec<u8> {
    let mut entries = Box::new([MapEntry::ABSENT; TABLE_FANOUT]);
    entries[1] = MapEntry::page(PageAddr(0x1234), Epoch(5));
    let mut page = vec![0; PAGE_SIZE];
    encode_table(&entries, &mut page);
    page
}

/// Returns the level-1 table above [`leaf`], which lies in page 0x800 and was born in epoch 6.
fn upper() -> Vec<u8> {
    let seed = Seed { pool: POOL, page: PageAddr(0x800), level: 0, birth: 6 };
    let mut entries = Box::new([MapEntry::ABSENT; TABLE_FANOUT]);
    entries[0] = MapEntry::block(Block(0x20), Epoch(3));
    entries[255] =
        MapEntry::table(TableRef::on_disk(PageAddr(0x800)), Epoch(6), page_checksum(&seed, &leaf())).mapping(1);
    let mut page = vec![0; PAGE_SIZE];
    encode_table(&entries, &mut page);
    page
}

fn root() -> MapEntry {
    let seed = Seed { pool: POOL, page: PageAddr(0x801), level: 1, birth: 6 };
    MapEntry::table(TableRef::on_disk(PageAddr(0x801)), Epoch(6), page_checksum(&seed, &upper())).mapping(257)
}

/// Returns a leaf of an origin's ordered map: two chunks of 16 pages copied out for snapshot 2, one of them
/// in two pieces, and the list of both.
fn kept_leaf() -> Vec<u8> {
    let (sequence, mut page) = (VolumeId(2), Box::new([MapEntry::ABSENT; TABLE_FANOUT]));
    let piece = |to, pages| MapEntry::from_bits(Piece { to: PageAddr(to), pages }.to_bits());
    let pairs = [
        (ExceptionKey::chained(5, sequence, 0), piece(0x1240, 16)),
        (ExceptionKey::chained(7, sequence, 0), piece(0x1250, 4)),
        (ExceptionKey::chained(7, sequence, 4), piece(0x1300, 12)),
        (ExceptionKey::list(sequence, 5), MapEntry::from_bits(1 << 5 | 1 << 7)),
    ];
    pairs.iter().enumerate().for_each(|(i, &(key, value))| ordered::insert(&mut page, i, key.0, value));
    let mut bytes = vec![0; PAGE_SIZE];
    encode_table(&page, &mut bytes);
    bytes
}

#[test]
fn kept_chunks() {
    assert_example("ordered-leaf", &kept_leaf());
    let seed = Seed { pool: POOL, page: PageAddr(0x803), level: ORDERED_LEAF, birth: 6 };
    let leaf = MapEntry::table(TableRef::on_disk(PageAddr(0x803)), Epoch(6), page_checksum(&seed, &kept_leaf()));
    let mut above = Box::new([MapEntry::ABSENT; TABLE_FANOUT]);
    ordered::insert(&mut above, 0, 0, leaf);
    let mut bytes = vec![0; PAGE_SIZE];
    encode_table(&above, &mut bytes);
    assert_example("ordered-upper", &bytes);
    assert!(decode_table(&kept_leaf(), ORDERED_LEAF, PAGES).is_ok());
    assert!(decode_table(&bytes, ORDERED_LEAF + 1, PAGES).is_ok());
}

#[test]
fn origin_slot() {
    let origin = VolumeRecord {
        id: VolumeId(1),
        state: VolumeState::Origin,
        parent: NO_VOLUME,
        name: "disk".into(),
        origin: "/dev/sdb".into(),
        source: NO_VOLUME,
        size: 1 << 30,
        trim_end: 0,
        chunk: 1 << 16,
        referenced: 0,
        level: 2,
        root: MapEntry::ABSENT,
        shared_at: Epoch(0),
        created: 0x6553_f100,
        cursor: 0,
        flags: SnapshotFlags::default(),
        base: NO_VOLUME,
        origin_record: Some(Box::new(OriginRecord {
            exceptions: TreeRoot {
                entry: MapEntry::table(TableRef::on_disk(PageAddr(0x803)), Epoch(6), 0xdead_beef),
                height: 1,
            },
            copy_ahead: 8 << 20,
            when_full: OriginFull::Wait(60),
            clean: true,
            identity: Identity { modified: 0x1122_3344, fingerprint: 0x5566_7788 },
            rollback_to: NO_VOLUME,
        })),
        stamp: Some(stamp()),
        break_policy: BreakPolicy::Split,
        throttle: Throttle::NONE,
        seams: 0,
        estimated: false,
        gather: GatherPolicy::Off,
        quota: 0,
        attributes: None,
    };
    let snapshot = VolumeRecord {
        id: VolumeId(2),
        state: VolumeState::Snapshot,
        parent: VolumeId(1),
        name: "x".into(),
        origin: String::new(),
        referenced: 32,
        flags: SnapshotFlags { droppable: true, ..SnapshotFlags::default() },
        origin_record: None,
        stamp: None,
        ..origin.clone()
    };
    let clone = VolumeRecord {
        id: VolumeId(3),
        state: VolumeState::Volume,
        parent: NO_VOLUME,
        name: "c".into(),
        origin: "disk@x".into(),
        source: VolumeId(2),
        referenced: 0,
        flags: SnapshotFlags::default(),
        base: VolumeId(2),
        ..snapshot.clone()
    };
    let mut slots = [None; SLOTS_PER_PAGE];
    let [origin, snapshot, clone] = [origin, snapshot, clone].map(DirectorySlot::Volume);
    (slots[0], slots[1], slots[2]) = (Some(&origin), Some(&snapshot), Some(&clone));
    let mut page = vec![0; PAGE_SIZE];
    encode_directory_page(&slots, &mut page);
    assert_example("directory-origin", &page);
    let again = decode_directory_page(&example("directory-origin"), PAGES).expect("valid");
    assert_eq!((&again[0], &again[1], &again[2]), (&Some(origin), &Some(snapshot), &Some(clone)));
}

fn extension() -> Extension {
    Extension {
        expires: 0x6953_f100,
        last_used: 0x6553_f101,
        lease: Some(Lease::Process { pid: 0x1234, start: 0x5678, boot: POOL }),
        created_by: "cli:uid=0".into(),
        labels: [("job", "42"), ("owner", "ci")].map(|(key, value)| (key.to_string(), value.to_string())).into(),
        writes: WritePolicy { writes: Writes::Compare, zeroes: Zeroes::Holes },
        bound: Some(Bound {
            account: AccountId(5),
            diverge: 1 << 30,
            reserve: 1 << 20,
            charged: 2,
            folder: VolumeId(0),
        }),
        inherited: [(CloneProperty::Quota, 1 << 20), (CloneProperty::Expires, 60)].into(),
        xattrs: [("k".to_string(), vec![0xff])].into(),
        unknown: vec![(0x80, vec![1])],
    }
}

#[test]
fn hard_link_slot() {
    let (state, parent) = (VolumeState::HardLink, VolumeId(6));
    let slot = DirectorySlot::Volume(VolumeRecord { state, parent, ..VolumeRecord::empty(VolumeId(7), "j", 0) });
    let (mut page, mut slots) = (vec![0; PAGE_SIZE], [None; SLOTS_PER_PAGE]);
    slots[0] = Some(&slot);
    encode_directory_page(&slots, &mut page);
    assert_example("directory-hard-link", &page);
    let again = decode_directory_page(&example("directory-hard-link"), PAGES).expect("valid");
    assert_eq!(again[0], Some(slot));
}

#[test]
fn extension_slot() {
    let slot = DirectorySlot::Extension(VolumeId(6), extension());
    let (mut page, mut slots) = (vec![0; PAGE_SIZE], [None; SLOTS_PER_PAGE]);
    slots[1] = Some(&slot);
    encode_directory_page(&slots, &mut page);
    assert_example("directory-extension", &page);
    let again = decode_directory_page(&example("directory-extension"), PAGES).expect("valid");
    assert_eq!(again[1].as_ref(), Some(&slot));
}

#[test]
fn tables() {
    assert_example("table-level-0", &leaf());
    assert_example("table-level-1", &upper());
    assert!(decode_table(&leaf(), 0, PAGES).is_ok() && decode_table(&upper(), 1, PAGES).is_ok());
}

#[test]
fn count_pages() {
    let mut page = CountPage::default();
    page.set_whole(1, 3);
    page.set_page(2, 5, 0x0102);
    page.set_page(6, 255, 1);
    assert_example("count-leaf", page.bytes());
    let mut large = CountPage::default();
    (0..).zip([65_535, 70_000, 131_071]).for_each(|(i, count)| large.set_page(1, i, count));
    large.seal();
    assert_example("count-leaf-large", large.bytes());
    let node = CountNode { level: 0, index: 1 };
    let seed = Seed { pool: POOL, page: node.page(Slot::B), level: 0xe0, birth: 0 };
    let entry = CountEntry { slot: Some(Slot::B), checksum: page_checksum(&seed, page.bytes()), used: 258, common: 0 };
    let mut above = CountPage::default();
    above.set_entry(1, entry);
    above.set_entry(2, CountEntry { slot: None, checksum: 0, used: 1792, common: 2 });
    assert_example("count-upper", above.bytes());
}

#[test]
fn count_log_segment() {
    let mut even = [0; 4];
    (0..256).step_by(2).for_each(|page| even[page / 64] |= 1 << (page % 64));
    let rows = [0b1110_0001, 0, 0, 1 << 63];
    let written = BlockChange { whole: 0, pages: vec![(1, rows)] };
    let given_up = BlockChange { whole: -1, pages: vec![(-1, even), (300, [0b10, 0, 0, 0])] };
    let changes = [
        LeafChange { leaf: 1, used: 5, common: 0, blocks: vec![(2, written)] },
        LeafChange { leaf: 4, used: -384, common: -1, blocks: vec![(0, BlockChange::default()), (6, given_up)] },
    ];
    let bytes = encode_count_segment(&changes);
    assert_example("count-log", &bytes);
    assert_eq!(decode_count_log(&bytes, 5), Some(changes.to_vec()));
}

#[test]
fn superblock() {
    let superblock = Superblock {
        checksum_uuid: POOL,
        heartbeat: 0,
        uuid: POOL,
        generation: 0x11,
        incarnation: 2,
        clean: true,
        size: PAGES * PAGE_SIZE as u64,
        created: 0x6553_f100,
        epoch: 7,
        next_id: 4,
        directory_level: 1,
        directory: root(),
        directory_pages: 1,
        journal: vec![(PageAddr(0x200), 256)],
        start: JournalStart { position: 0x3000, sequence: 9, chain: 0x1122_3344_5566_7788 },
        counts: vec![CountEntry { slot: Some(Slot::A), checksum: 0x0a0b_0c0d, used: 0x104, common: 0 }],
        count_log: CountLog { pages: 4, checksum: 0x0403_0201 },
        large_counts: false,
        transactions: false,
        special_files: false,
        extensions: false,
        bounds: false,
        folder_bounds: false,
        links_or_xattrs: false,
        preallocated: false,
        copier: CopierSettings {
            throttle: Throttle { percent: 50, bytes_per_second: 1 << 30 },
            buffers: 8 << 20,
            ..CopierSettings::default()
        },
    };
    let mut page = vec![0; PAGE_SIZE];
    superblock.encode(SUPERBLOCK_PAGES[1], &mut page);
    assert_example("superblock", &page);
    assert_eq!(Superblock::decode(SUPERBLOCK_PAGES[1], &example("superblock")), Ok(superblock));
}

fn attributes() -> Attributes {
    let (accessed, modified, changed) = (0x1000, 0x2000, -1);
    Attributes { mode: 0o640, uid: 1000, gid: 100, accessed, modified, changed }
}

#[test]
fn directory_page() {
    let volume = VolumeRecord {
        id: VolumeId(1),
        state: VolumeState::Volume,
        parent: NO_VOLUME,
        name: "vm/1".into(),
        origin: "base@x".into(),
        source: VolumeId(9),
        size: 1 << 30,
        trim_end: 2 << 30,
        chunk: 1 << 16,
        referenced: 257,
        seams: 3,
        level: 2,
        root: MapEntry::table(TableRef::on_disk(PageAddr(0x802)), Epoch(6), 0xdead_beef),
        shared_at: Epoch(4),
        created: 0x6553_f100,
        cursor: 0,
        flags: Default::default(),
        base: NO_VOLUME,
        origin_record: None,
        stamp: None,
        break_policy: BreakPolicy::Copy,
        throttle: Throttle { percent: 50, bytes_per_second: 100 << 20 },
        estimated: true,
        gather: GatherPolicy::Above(20),
        quota: 512 << 20,
        attributes: Some(attributes()),
    };
    let snapshot = VolumeRecord {
        id: VolumeId(2),
        state: VolumeState::Snapshot,
        parent: VolumeId(1),
        name: "x".into(),
        origin: String::new(),
        source: NO_VOLUME,
        root: MapEntry::ABSENT,
        referenced: 0,
        seams: 0,
        gather: GatherPolicy::Off,
        trim_end: 0,
        break_policy: BreakPolicy::Split,
        estimated: false,
        throttle: Throttle::NONE,
        quota: 0,
        attributes: None,
        ..volume.clone()
    };
    let mut slots = [None; SLOTS_PER_PAGE];
    let folder = VolumeRecord { state: VolumeState::Folder, ..VolumeRecord::empty(VolumeId(3), "vm", 0x6553_f100) };
    let [volume, snapshot, folder] = [volume, snapshot, folder].map(DirectorySlot::Volume);
    (slots[0], slots[2], slots[3]) = (Some(&volume), Some(&snapshot), Some(&folder));
    let mut page = vec![0; PAGE_SIZE];
    encode_directory_page(&slots, &mut page);
    assert_example("directory-page", &page);
    let again = decode_directory_page(&example("directory-page"), PAGES).expect("valid");
    assert_eq!((&again[0], &again[2], &again[3]), (&Some(volume), &Some(snapshot), &Some(folder)));
}

fn records() -> Vec<Record> {
    let (v, w, now) = (VolumeId(1), VolumeId(2), 0x6553_f100);
    let flags = SnapshotFlags { independent: true, ..SnapshotFlags::default() };
    let identity = Identity { modified: 0x1122_3344, fingerprint: 0x5566_7788 };
    vec![
        Record::Map { volume: v, at: VirtualPage(7), len: 2, to: PageAddr(0x1234) },
        Record::Unmap { volume: v, at: VirtualPage(0x100), len: 0x200 },
        Record::Create { id: v, name: "vm/1".into(), size: 1 << 30, chunk: 1 << 16, now },
        Record::Snapshot { of: vec![(v, w, "x".into())], now, flags: Default::default() },
        Record::Clone { source: w, id: VolumeId(3), name: "c".into(), now },
        Record::Rollback { volume: v, snapshot: w, dead: VolumeId(4) },
        Record::Delete { ids: vec![w, VolumeId(3)] },
        Record::Rename { id: v, name: "n".into() },
        Record::Resize { id: v, size: 0x12345 },
        Record::SetChunk { id: v, chunk: 4096 },
        Record::CloneRange {
            source: v,
            from: VirtualPage(1),
            target: w,
            to: VirtualPage(2),
            len: 3,
            dead: VolumeId(14),
        },
        Record::Grow { size: 128 << 20 },
        Record::Snapshot { of: vec![(v, w, "x".into())], now, flags },
        Record::Protect {
            id: v,
            name: "disk".into(),
            path: "/dev/sdb".into(),
            size: 1 << 30,
            chunk: 1 << 16,
            now,
            identity,
        },
        Record::SetOrigin { id: v, copy_ahead: 8 << 20, when_full: OriginFull::Wait(60) },
        Record::Identify { id: v, clean: true, identity, path: "/dev/sdb".into() },
        Record::CopyOut { origin: v, sequence: w, at: VirtualPage(0x50), len: 16, to: PageAddr(0x1240) },
        Record::SetCopying {
            id: v,
            break_policy: BreakPolicy::Copy,
            throttle: Throttle { percent: 50, bytes_per_second: 100 << 20 },
        },
        Record::SetCopier { settings: CopierSettings { offload: true, buffers: 8 << 20, ..CopierSettings::default() } },
        Record::SetQuota { id: v, quota: 512 << 20 },
    ]
}

fn records_of_files() -> Vec<Record> {
    let (v, w, now) = (VolumeId(1), VolumeId(2), 0x6553_f100);
    vec![
        Record::SetAttributes { id: v, attributes: Some(attributes()) },
        Record::MakeFolder { id: VolumeId(5), name: "f".into(), attributes: None, now },
        Record::Unlink { id: v },
        Record::RenameOver { id: v, name: "w".into(), replaced: w, kept: true },
        Record::RenameFolder { from: "f".into(), to: "g".into() },
        Record::Replace { volume: v, source: w, dead: VolumeId(4) },
    ]
}

fn records_of_unnamed() -> Vec<Record> {
    let id = VolumeId(6);
    vec![
        Record::CreateUnnamed { id, size: 1 << 30, chunk: 1 << 16, now: 0x6553_f100 },
        Record::NameVolume { id, name: "i".into() },
    ]
}

fn records_of_rollbacks() -> Vec<Record> {
    let (origin, snapshot) = (VolumeId(1), VolumeId(2));
    vec![
        Record::RollbackProgress { origin, snapshot, cursor: 0x40 },
        Record::ChunksRolledBack { origin, first: 0x82, count: 3 },
        Record::RollbackProgress { origin, snapshot: VolumeId(0), cursor: 0x400 },
    ]
}

fn stamp() -> Box<Stamp> {
    let hashes = std::array::from_fn(|zone| 0x1000 + zone as u16);
    Box::new(Stamp { device: "wwn:naa.1".into(), hashes, written: 0x8000_0003 })
}

fn records_of_stamps() -> Vec<Record> {
    let id = VolumeId(1);
    vec![Record::Stamp { id, stamp: stamp() }, Record::ZonesWritten { id, zones: 4 }]
}

fn records_of_clones() -> Vec<Record> {
    vec![Record::Flatten { id: VolumeId(3) }]
}

fn records_of_gathering() -> Vec<Record> {
    let (v, w) = (VolumeId(1), VolumeId(2));
    let moved = vec![
        MovedRun { slot: 7, len: 2, from: PageAddr(0x1234), to: PageAddr(0x2007) },
        MovedRun { slot: 255, len: 1, from: PageAddr(0x1300), to: PageAddr(0x20ff) },
    ];
    vec![
        Record::SetGather { id: v, gather: GatherPolicy::Idle },
        Record::Gather { volumes: vec![v, w], at: VirtualPage(0x100), moved },
    ]
}

fn records_of_exchanges() -> Vec<Record> {
    vec![Record::Exchange { a: "f".into(), b: "g".into() }]
}

fn records_of_transactions() -> Vec<Record> {
    let (id, size, chunk, now) = (VolumeId(6), 1 << 30, 1 << 16, 0x6553_f100);
    let parts =
        vec![Record::Create { id, name: "i".into(), size, chunk, now }, Record::SetQuota { id, quota: 1 << 29 }];
    vec![Record::Transaction { parts }]
}

fn records_of_special_files() -> Vec<Record> {
    let (id, remnant, now) = (VolumeId(6), VolumeId(7), 0x6553_f100);
    vec![
        Record::SetAttributes { id, attributes: Some(attributes().with_kind(FileKind::Link)) },
        Record::KeepSnapshots { id, remnant, now, name: ".snapshots/i/~6".into() },
    ]
}

fn records_of_extensions() -> Vec<Record> {
    let id = VolumeId(6);
    let expiring = Extension { expires: 0x6953_f100, ..Extension::default() };
    vec![
        Record::SetExtension { id, extension: Box::new(expiring) },
        Record::SetExtension { id, extension: Box::default() },
    ]
}

fn records_of_hard_links() -> Vec<Record> {
    let (file, link) = (VolumeId(6), VolumeId(7));
    vec![Record::MakeHardLink { id: link, file, name: "j".into() }, Record::TakeName { file, link }]
}

#[test]
fn journal_group() {
    let checksum = DataChecksum { to: PageAddr(0x1234), pages: 2, sum: 0x8877_6655_4433_2211 };
    assert_group("journal-group", &records(), &[checksum]);
    assert_group("journal-group-rollback", &records_of_rollbacks(), &[]);
    assert_group("journal-group-files", &records_of_files(), &[]);
    assert_group("journal-group-unnamed", &records_of_unnamed(), &[]);
    assert_group("journal-group-stamps", &records_of_stamps(), &[]);
    assert_group("journal-group-clones", &records_of_clones(), &[]);
    assert_group("journal-group-gathering", &records_of_gathering(), &[]);
    assert_group("journal-group-special", &records_of_special_files(), &[]);
    assert_group("journal-group-transaction", &records_of_transactions(), &[]);
    assert_group("journal-group-exchange", &records_of_exchanges(), &[]);
    assert_group("journal-group-extensions", &records_of_extensions(), &[]);
    assert_group("journal-group-hard-links", &records_of_hard_links(), &[]);
}

#[track_caller]
fn assert_group(name: &str, records: &[Record], checksums: &[DataChecksum]) {
    let mut body = Vec::new();
    records.iter().for_each(|r| r.encode(&mut body));
    checksums.iter().for_each(|w| w.encode(&mut body));
    let (first, count, confirmed) = (9, records.len() as u32, 9);
    let group = JournalGroup { incarnation: 2, first, count, bytes: 0, chain: 0, confirmed };
    let before = 0x1122_3344_5566_7788;
    let (bytes, _) = encode_group(&POOL, before, &group, &body);
    assert_example(name, &bytes);
    let Decoded::Group(_, again, found) = decode_group(&POOL, before, &example(name), 1 << 20) else {
        panic!("the example is no group")
    };
    assert_eq!((&again[..], &found[..]), (records, checksums));
}
