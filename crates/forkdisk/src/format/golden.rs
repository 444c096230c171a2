//! The examples of docs/format.md, byte for byte: the document and the code cannot part.
//!
//! An example is a fenced block ```` ```hex NAME LENGTH ````. Each of its lines says at which offset
//! which bytes lie (hexadecimal), and behind `|` what they are; bytes that no line names are 0.

use super::checksum::{Seed, page_checksum};
use super::counts::{CountEntry, CountPage, Slot};
use super::entry::{Entry, TableRef};
use super::record::{Decoded, Group, Record, Witness, decode_group, encode_group};
use super::settings::{BreakPolicy, CopierSettings, Throttle};
use super::superblock::{JournalStart, Superblock};
use super::table::{decode_table, encode_table};
use super::volume::{
    Attributes, NO_VOLUME, SLOTS_PER_PAGE, VolumeRecord, VolumeState, decode_directory_page, encode_directory_page,
};
use super::{CountNode, SUPERBLOCK_PAGES};
use crate::types::{Block, Epoch, FANOUT, PAGE_SIZE, PageAddr, VirtualPage, VolumeId};

const DOCUMENT: &str = include_str!("../../../../docs/format.md");
/// 00 01 02 … 0f.
const POOL: [u8; 16] = *b"\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f";
/// Pages of the pool of the examples (64 MiB).
const PAGES: u64 = 64 * 256;

/// The bytes of the example called `name`.
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
    let mut entries = Box::new([Entry::ABSENT; FANOUT]);
    entries[1] = Entry::page(PageAddr(0x1234), Epoch(5));
    let mut page = vec![0; PAGE_SIZE];
    encode_table(&entries, &mut page);
    page
}

/// The level-1 table above [`leaf`], which lies in page 0x800 and was born in epoch 6.
fn upper() -> Vec<u8> {
    let seed = Seed { pool: POOL, page: PageAddr(0x800), level: 0, birth: 6 };
    let mut entries = Box::new([Entry::ABSENT; FANOUT]);
    entries[0] = Entry::block(Block(0x20), Epoch(3));
    entries[255] = Entry::table(TableRef::on_disk(PageAddr(0x800)), Epoch(6), page_checksum(&seed, &leaf()));
    let mut page = vec![0; PAGE_SIZE];
    encode_table(&entries, &mut page);
    page
}

fn root() -> Entry {
    let seed = Seed { pool: POOL, page: PageAddr(0x801), level: 1, birth: 6 };
    Entry::table(TableRef::on_disk(PageAddr(0x801)), Epoch(6), page_checksum(&seed, &upper()))
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
    let node = CountNode { level: 0, index: 1 };
    let seed = Seed { pool: POOL, page: node.page(Slot::B), level: 0xe0, birth: 0 };
    let entry = CountEntry { slot: Some(Slot::B), checksum: page_checksum(&seed, page.bytes()), used: 258, common: 0 };
    let mut above = CountPage::default();
    above.set_entry(1, entry);
    above.set_entry(2, CountEntry { slot: None, checksum: 0, used: 1792, common: 2 });
    assert_example("count-upper", above.bytes());
}

#[test]
fn superblock() {
    let superblock = Superblock {
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
        copier: CopierSettings {
            throttle: Throttle { percent: 50, bytes_per_second: 1 << 30 },
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
        size: 1 << 30,
        trim_end: 2 << 30,
        chunk: 1 << 16,
        referenced: 257,
        level: 2,
        root: Entry::table(TableRef::on_disk(PageAddr(0x802)), Epoch(6), 0xdead_beef),
        shared_at: Epoch(4),
        created: 0x6553_f100,
        cursor: 0,
        break_policy: BreakPolicy::Copy,
        throttle: Throttle { percent: 50, bytes_per_second: 100 << 20 },
        quota: 512 << 20,
        attributes: Some(attributes()),
    };
    let snapshot = VolumeRecord {
        id: VolumeId(2),
        state: VolumeState::Snapshot,
        parent: VolumeId(1),
        name: "x".into(),
        origin: String::new(),
        root: Entry::ABSENT,
        referenced: 0,
        trim_end: 0,
        break_policy: BreakPolicy::Split,
        throttle: Throttle::NONE,
        quota: 0,
        attributes: None,
        ..volume.clone()
    };
    let mut slots = [None; SLOTS_PER_PAGE];
    let folder = VolumeRecord { state: VolumeState::Folder, ..VolumeRecord::empty(VolumeId(3), "vm", 0x6553_f100) };
    (slots[0], slots[2], slots[3]) = (Some(&volume), Some(&snapshot), Some(&folder));
    let mut page = vec![0; PAGE_SIZE];
    encode_directory_page(&slots, &mut page);
    assert_example("directory-page", &page);
    let again = decode_directory_page(&example("directory-page"), PAGES).expect("valid");
    assert_eq!((&again[0], &again[2], &again[3]), (&Some(volume), &Some(snapshot), &Some(folder)));
}

fn records() -> Vec<Record> {
    let (v, w, now) = (VolumeId(1), VolumeId(2), 0x6553_f100);
    vec![
        Record::Map { volume: v, at: VirtualPage(7), len: 2, to: PageAddr(0x1234) },
        Record::Unmap { volume: v, at: VirtualPage(0x100), len: 0x200 },
        Record::Create { id: v, name: "vm/1".into(), size: 1 << 30, chunk: 1 << 16, now },
        Record::Snapshot { of: vec![(v, w, "x".into())], now },
        Record::Clone { source: w, id: VolumeId(3), name: "c".into(), now },
        Record::Rollback { volume: v, snapshot: w, dead: VolumeId(4) },
        Record::Delete { ids: vec![w, VolumeId(3)] },
        Record::Rename { id: v, name: "n".into() },
        Record::Resize { id: v, size: 0x12345 },
        Record::SetChunk { id: v, chunk: 4096 },
        Record::CloneRange { source: v, from: VirtualPage(1), target: w, to: VirtualPage(2), len: 3 },
        Record::Grow { size: 128 << 20 },
        Record::SetCopying {
            id: v,
            break_policy: BreakPolicy::Copy,
            throttle: Throttle { percent: 50, bytes_per_second: 100 << 20 },
        },
        Record::SetCopier { settings: CopierSettings { offload: true, ..CopierSettings::default() } },
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

#[test]
fn journal_group() {
    let witness = Witness { to: PageAddr(0x1234), pages: 2, sum: 0x8877_6655_4433_2211 };
    assert_group("journal-group", &records(), &[witness]);
    assert_group("journal-group-files", &records_of_files(), &[]);
}

#[track_caller]
fn assert_group(name: &str, records: &[Record], witnesses: &[Witness]) {
    let mut body = Vec::new();
    records.iter().for_each(|r| r.encode(&mut body));
    witnesses.iter().for_each(|w| w.encode(&mut body));
    let (first, count, confirmed) = (9, records.len() as u32, 9);
    let group = Group { incarnation: 2, first, count, bytes: 0, chain: 0, confirmed };
    let before = 0x1122_3344_5566_7788;
    let (bytes, _) = encode_group(&POOL, before, &group, &body);
    assert_example(name, &bytes);
    let Decoded::Group(_, again, found) = decode_group(&POOL, before, &example(name), 1 << 20) else {
        panic!("the example is no group")
    };
    assert_eq!((&again[..], &found[..]), (records, witnesses));
}
