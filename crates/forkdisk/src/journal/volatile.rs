//! The volatile log: records that are published and not yet in the journal, in memory that outlives the process.
//!
//! A crash of the process alone loses nothing that the device has completed; it loses only the latest records,
//! which are in the memory of the process. So each record is also copied, when it is published, into memory that
//! the kernel keeps for the next process (see [`VolatileMemory`]): one store, no system call and no request. The
//! next open replays these records behind the journal. After a crash of the machine the memory is gone, and the
//! guarantees are those of a disk with a volatile write cache.
//!
//! The memory is a header of one page and two *areas* of equal length. Records go to one area until a commit takes
//! them, then to the other. The records of the other area are in the journal, because one commit runs at a time.
//! All integers are little-endian; the memory never leaves the machine.
//!
//! | where | what |
//! |---|---|
//! | 0 | magic `fkdkvlt1` |
//! | 8 | UUID of the pool |
//! | 24 | identity: boot and device, a digest of 32 bytes |
//! | 56 | incarnation |
//! | 64 | bytes of an area |
//! | 72 | checksum of the bytes before |
//! | 4096, and 4096 + bytes of an area | the areas |
//!
//! | in an area | what |
//! |---|---|
//! | 0 | generation; the sequence number of its first record; checksum of both |
//! | 24 | twice: journal position and chain value of the group before its records; checksum, with generation |
//! | 72 | entries, contiguous |
//!
//! | in an entry | what |
//! |---|---|
//! | 0 | sequence number (8 bytes) |
//! | 8 | bytes of the record (4 bytes) |
//! | 12 | checksum of all but these 4 bytes, with incarnation and generation |
//! | 16 | the record |
//!
//! Nothing depends on the order of stores: an entry is valid if its checksum is right, it begins where the one
//! before ends, and its sequence number is that of the one before (an extension of a record) or the next one.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::format::Record;
use crate::planted::correct;
use crate::types::PAGE_SIZE;

const MAGIC: [u8; 8] = *b"fkdkvlt1";
/// Bytes of the header that its checksum covers.
const HEADER_BYTES: usize = 72;
/// Offset of the bases of an area, bytes of each base, and offset of the entries.
const BASES_OFFSET: usize = 24;
const BASE_BYTES: usize = 24;
const ENTRIES_OFFSET: usize = BASES_OFFSET + 2 * BASE_BYTES;
/// Bytes of an entry before its record.
const ENTRY_BYTES: usize = 16;
/// Smallest useful size of the memory, in bytes.
pub const MIN_VOLATILE_BYTES: usize = PAGE_SIZE + 2 * (16 << 10);

/// Memory that outlives the process, such as a shared map of a file on tmpfs. Cheap to clone; all clones are
/// the same memory of at least [`MIN_VOLATILE_BYTES`] bytes.
#[derive(Clone)]
pub struct VolatileMemory(Rc<RefCell<dyn AsMut<[u8]>>>);

impl VolatileMemory {
    /// Wraps `memory`.
    pub fn new(memory: impl AsMut<[u8]> + 'static) -> VolatileMemory {
        VolatileMemory(Rc::new(RefCell::new(memory)))
    }

    /// Returns a copy of the bytes: what a crash of the process now would leave.
    #[cfg(feature = "planted")]
    pub fn copy(&self) -> VolatileMemory {
        VolatileMemory::new(self.bytes())
    }

    /// Returns the bytes.
    #[cfg(feature = "planted")]
    pub fn bytes(&self) -> Vec<u8> {
        self.with(|bytes| bytes.to_vec())
    }

    fn with<T>(&self, f: impl FnOnce(&mut [u8]) -> T) -> T {
        f(self.0.borrow_mut().as_mut())
    }
}

impl fmt::Debug for VolatileMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VolatileMemory({} bytes)", self.with(|bytes| bytes.len()))
    }
}

/// The volatile log of a pool, as it is opened.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct VolatileLog {
    /// The memory.
    pub memory: VolatileMemory,
    /// What the log belongs to besides the pool's UUID: a digest of the boot and of the device. A log with
    /// another identity is not replayed.
    pub identity: [u8; 32],
    /// Whether this open also writes the log; otherwise it only replays what an earlier process left.
    pub write: bool,
}

/// A place in the journal: behind a group with this chain value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupEnd {
    /// Position in the journal.
    pub position: u64,
    /// Chain value there.
    pub chain: u64,
}

/// A record that an earlier process left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecoveredRecord {
    /// Its sequence number.
    pub sequence: u64,
    /// The record, or an extension of the one with the same number.
    pub record: Record,
}

/// Writes the log.
pub struct Writer {
    memory: VolatileMemory,
    /// Bytes of an area.
    length: usize,
    incarnation: u64,
    generation: u64,
    /// Offset of the next entry in the area of this generation.
    at: usize,
    /// Index of the base (0 or 1) that is written next.
    base: usize,
    /// A record did not fit: nothing more is written until the next area.
    overflown: bool,
    scratch: Vec<u8>,
}

fn put(bytes: &mut [u8], at: usize, values: &[u64]) {
    for (i, value) in values.iter().enumerate() {
        bytes[at + 8 * i..at + 8 * i + 8].copy_from_slice(&value.to_le_bytes());
    }
}

fn get(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn area_length(memory: &[u8]) -> usize {
    (memory.len().saturating_sub(PAGE_SIZE) / 2) & !7
}

/// Returns the offset of the area of a generation.
fn area_at(generation: u64, length: usize) -> usize {
    PAGE_SIZE + (generation % 2) as usize * length
}

fn sum_of(seed: u64, bytes: &[u8]) -> u64 {
    xxh3_64_with_seed(bytes, seed)
}

impl Writer {
    /// Begins a log; the earlier contents of the memory become invalid.
    pub fn begin(log: &VolatileLog, uuid: [u8; 16], incarnation: u64, next: u64, place: GroupEnd) -> Writer {
        let memory = log.memory.clone();
        let length = memory.with(|bytes| {
            bytes[..HEADER_BYTES + 8].fill(0);
            let length = area_length(bytes);
            bytes[8..24].copy_from_slice(&uuid);
            bytes[24..56].copy_from_slice(&log.identity);
            put(bytes, 56, &[incarnation, length as u64]);
            length
        });
        let mut writer = Writer {
            memory,
            length,
            incarnation,
            generation: 0,
            at: 0,
            base: 0,
            overflown: false,
            scratch: Vec::new(),
        };
        // Both: an area that another log left must not be taken for this one's.
        writer.memory.with(|bytes| (0..2).for_each(|g| bytes[area_at(g, length)..][..ENTRIES_OFFSET].fill(0)));
        writer.switch(next, place);
        writer.memory.with(|bytes| {
            bytes[..8].copy_from_slice(&MAGIC);
            let sum = sum_of(0, &bytes[..HEADER_BYTES]);
            put(bytes, HEADER_BYTES, &[sum]);
        });
        writer
    }

    /// Switches to the other area: a commit takes all records so far. `next` is the sequence number of the
    /// next record, `place` is where the journal ends once the commit has written it.
    pub fn switch(&mut self, next: u64, place: GroupEnd) {
        self.generation += 1;
        (self.at, self.base, self.overflown) = (ENTRIES_OFFSET, 0, false);
        let (generation, from) = (self.generation, area_at(self.generation, self.length));
        self.memory.with(|bytes| {
            let area = &mut bytes[from..];
            area[..ENTRIES_OFFSET].fill(0);
            put(area, 0, &[generation, next]);
            let sum = sum_of(1, &area[..16]);
            put(area, 16, &[sum]);
        });
        self.set_base(place);
    }

    /// Notes that the journal advanced without a record.
    pub fn set_base(&mut self, place: GroupEnd) {
        let (at, seed) =
            (area_at(self.generation, self.length) + BASES_OFFSET + self.base * BASE_BYTES, self.generation);
        self.base = 1 - self.base;
        self.memory.with(|bytes| {
            put(bytes, at, &[place.position, place.chain, 0]);
            let sum = sum_of(seed, &bytes[at..at + 16]);
            put(bytes, at + 16, &[sum]);
        });
    }

    /// Adds a record with this sequence number, or an extension of the record that has it. Returns false if
    /// there is no space for it.
    pub fn add(&mut self, sequence: u64, record: &Record) -> bool {
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.clear();
        record.encode(&mut scratch);
        let fits = self.add_encoded(sequence, &scratch);
        self.scratch = scratch;
        fits
    }

    /// As [`add`](Self::add), for an encoded record.
    pub fn add_encoded(&mut self, sequence: u64, record: &[u8]) -> bool {
        let len = ENTRY_BYTES + record.len();
        if self.overflown || self.at + len > self.length {
            self.overflown = true;
            return false;
        }
        let at = area_at(self.generation, self.length) + self.at;
        let sum = record_sum(seed(self.incarnation, self.generation), sequence, record);
        self.memory.with(|bytes| {
            let (head, body) = bytes[at..at + len].split_at_mut(ENTRY_BYTES);
            body.copy_from_slice(record);
            put(head, 0, &[sequence, u64::from(sum) << 32 | record.len() as u64]);
        });
        self.at += len;
        true
    }

    /// Whether a commit is due because of what was added since the last one.
    pub fn is_filling(&self) -> bool {
        self.at > self.length / 2
    }

    /// Whether hardly any space is left before the next commit, so that further records have to wait for it.
    pub fn is_nearly_full(&self) -> bool {
        self.at > self.length / 4 * 3
    }
}

/// Returns the seed of the checksums of entries; entries that an earlier log left in the same place have
/// another.
fn seed(incarnation: u64, generation: u64) -> u64 {
    incarnation.rotate_left(32) ^ generation
}

/// Returns the checksum of an entry, without its own four bytes.
fn entry_sum(seed: u64, entry: &[u8]) -> u32 {
    record_sum(seed, get(entry, 0), &entry[ENTRY_BYTES..])
}

/// Returns the checksum of the entry of a record.
fn record_sum(seed: u64, sequence: u64, record: &[u8]) -> u32 {
    let len = record.len() as u64;
    sum_of(seed ^ sequence.rotate_left(20) ^ len.rotate_left(52), record) as u32
}

/// Invalidates the contents of the memory.
pub fn invalidate(memory: &VolatileMemory) {
    memory.with(|bytes| bytes[..HEADER_BYTES + 8].fill(0));
}

/// Leaves what a process that dies while it adds a record leaves, for the simulator: the number of the record
/// and most of its bytes, without a checksum.
#[cfg(feature = "planted")]
pub fn tear(memory: &VolatileMemory) {
    memory.with(|bytes| {
        let length = area_length(bytes);
        let areas = (0..2).map(|i| PAGE_SIZE + i * length);
        let Some(from) = areas.max_by_key(|&from| get(bytes, from)) else { return };
        let (mut at, mut last) = (from + ENTRIES_OFFSET, None);
        while at + ENTRY_BYTES <= from + length {
            let len = u32::from_le_bytes(bytes[at + 8..at + 12].try_into().expect("four bytes")) as usize;
            let seed = seed(get(bytes, 56), get(bytes, from));
            let end = at + ENTRY_BYTES + len;
            let is_whole = len > 0 && end <= from + length && {
                let sum = u32::from_le_bytes(bytes[at + 12..at + 16].try_into().expect("four bytes"));
                sum == entry_sum(seed, &bytes[at..end])
            };
            if !is_whole {
                break;
            }
            (last, at) = (Some(at..end), end);
        }
        let Some(last) = last.filter(|last| at + last.len() <= from + length) else { return };
        let next = get(bytes, last.start) + 1;
        let len = last.len();
        bytes.copy_within(last, at);
        put(bytes, at, &[next]);
        bytes[at + len - 1] ^= 1;
    });
}

/// One area, as it was left.
struct Area {
    generation: u64,
    first: u64,
    bases: Vec<GroupEnd>,
    left: Vec<RecoveredRecord>,
}

impl Area {
    /// Returns the sequence number behind its last record.
    fn next(&self) -> u64 {
        self.left.last().map_or(self.first, |left| left.sequence + 1)
    }
}

/// Returns what a process left in the log of this pool, if it had this incarnation: records in order, from a
/// place of the journal on. `is_place` tells whether the journal has, or had, a group that ends there.
pub fn recover(
    log: &VolatileLog,
    uuid: [u8; 16],
    incarnation: u64,
    is_place: impl Fn(GroupEnd) -> bool,
) -> Vec<RecoveredRecord> {
    log.memory.with(|bytes| {
        let areas = areas_of(log, bytes, uuid, incarnation);
        let Some(begin) = areas.iter().position(|area| area.bases.iter().any(|&place| is_place(place))) else {
            return Vec::new();
        };
        let mut out: Vec<RecoveredRecord> = Vec::new();
        let mut next = None;
        for area in areas.into_iter().skip(begin) {
            if next.is_some_and(|next| next != area.first) {
                // Records did not fit into the area before. If the journal has the commit that took them, it has all
                // of that area.
                if !area.bases.iter().any(|&place| is_place(place)) {
                    break;
                }
                out.clear();
            }
            next = Some(area.next());
            out.extend(area.left);
        }
        out
    })
}

/// Returns where the last group ends that the process which wrote the log had taken for writing; `None` if the log is
/// not of this pool and `incarnation`. What follows in the journal was written early, and is in the log if it counts.
pub fn last_base(log: &VolatileLog, uuid: [u8; 16], incarnation: u64) -> Option<GroupEnd> {
    log.memory.with(|bytes| {
        let bases = areas_of(log, bytes, uuid, incarnation).into_iter().flat_map(|area| area.bases);
        bases.max_by_key(|base| base.position)
    })
}

/// Returns the valid areas, oldest first; none if the log is of another pool or incarnation.
fn areas_of(log: &VolatileLog, bytes: &[u8], uuid: [u8; 16], incarnation: u64) -> Vec<Area> {
    let known = bytes.len() >= MIN_VOLATILE_BYTES
        && bytes[..8] == MAGIC
        && get(bytes, HEADER_BYTES) == sum_of(0, &bytes[..HEADER_BYTES])
        && get(bytes, 64) as usize == area_length(bytes);
    let ours = known && bytes[8..24] == uuid && bytes[24..56] == log.identity;
    if !ours || correct!(get(bytes, 56) != incarnation, Bug::VolatileOfEarlierLife => false) {
        return Vec::new();
    }
    let length = area_length(bytes);
    let written = get(bytes, 56);
    let areas = (0..2).filter_map(|i| read_area(&bytes[PAGE_SIZE + i * length..][..length], written));
    let mut areas: Vec<Area> = areas.collect();
    areas.sort_by_key(|area| area.generation);
    areas
}

fn read_area(area: &[u8], incarnation: u64) -> Option<Area> {
    let (generation, first) = (get(area, 0), get(area, 8));
    if generation == 0 || get(area, 16) != sum_of(1, &area[..16]) {
        return None;
    }
    let base = |i: usize| {
        let at = BASES_OFFSET + i * BASE_BYTES;
        let place = GroupEnd { position: get(area, at), chain: get(area, at + 8) };
        (get(area, at + 16) == sum_of(generation, &area[at..at + 16])).then_some(place)
    };
    let mut out = Area { generation, first, bases: (0..2).filter_map(base).collect(), left: Vec::new() };
    let mut rest = &area[ENTRIES_OFFSET..];
    while rest.len() > ENTRY_BYTES {
        let len = u32::from_le_bytes(rest[8..12].try_into().expect("four bytes")) as usize;
        let Some(entry) = rest.get(..ENTRY_BYTES.saturating_add(len)).filter(|_| len > 0) else { break };
        let sum = u32::from_le_bytes(rest[12..16].try_into().expect("four bytes"));
        let is_torn = sum != entry_sum(seed(incarnation, generation), entry);
        if correct!(is_torn, Bug::VolatileTornTaken => false) {
            break;
        }
        let (sequence, last) = (get(rest, 0), out.left.last().map(|left| left.sequence));
        let goes_on = last.map_or(sequence == first, |last| sequence == last || sequence == last + 1);
        let Some(record) = Record::decode_one(&entry[ENTRY_BYTES..]).filter(|_| goes_on) else { break };
        out.left.push(RecoveredRecord { sequence, record });
        rest = &rest[entry.len()..];
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{PageAddr, VirtualPage, VolumeId};

    const UUID: [u8; 16] = [3; 16];

    fn log(bytes: usize) -> VolatileLog {
        VolatileLog { memory: VolatileMemory::new(vec![0xa5; bytes]), identity: [9; 32], write: true }
    }

    fn map(at: u64) -> Record {
        Record::Map { volume: VolumeId(1), at: VirtualPage(at), len: 1, to: PageAddr(5000 + at) }
    }

    fn place(position: u64) -> GroupEnd {
        GroupEnd { position, chain: position * 7 + 1 }
    }

    fn sequences(log: &VolatileLog, incarnation: u64, at: u64) -> Vec<u64> {
        recover(log, UUID, incarnation, |p| p == place(at)).iter().map(|left| left.sequence).collect()
    }

    #[test]
    fn what_was_added_is_found_behind_its_place() {
        let log = log(MIN_VOLATILE_BYTES);
        let mut writer = Writer::begin(&log, UUID, 4, 10, place(100));
        for sequence in [10, 11, 11, 12] {
            assert!(writer.add(sequence, &map(sequence)));
        }
        assert_eq!(sequences(&log, 4, 100), [10, 11, 11, 12]);
        let left = recover(&log, UUID, 4, |p| p == place(100));
        assert_eq!(left[3], RecoveredRecord { sequence: 12, record: map(12) });
        assert!(sequences(&log, 3, 100).is_empty(), "another incarnation");
        assert!(sequences(&log, 4, 101).is_empty(), "another place");
        assert!(recover(&log, [4; 16], 4, |_| true).is_empty(), "another pool");
        let other = VolatileLog { identity: [8; 32], ..log.clone() };
        assert!(recover(&other, UUID, 4, |_| true).is_empty(), "another boot or device");
        writer.set_base(place(101));
        assert_eq!(sequences(&log, 4, 100), sequences(&log, 4, 101), "the group may be there or not");
        invalidate(&log.memory);
        assert!(sequences(&log, 4, 100).is_empty());
    }

    #[test]
    fn records_of_a_commit_count_until_the_next_one() {
        let log = log(MIN_VOLATILE_BYTES);
        let mut writer = Writer::begin(&log, UUID, 1, 0, place(0));
        writer.add(0, &map(0));
        writer.switch(1, place(8));
        writer.add(1, &map(1));
        assert_eq!(sequences(&log, 1, 0), [0, 1], "the journal has nothing of it");
        assert_eq!(sequences(&log, 1, 8), [1], "the journal has the first");
        writer.switch(2, place(16));
        writer.add(2, &map(2));
        assert!(sequences(&log, 1, 0).is_empty(), "a journal that lost a commit is another one's");
        assert_eq!((sequences(&log, 1, 8), sequences(&log, 1, 16)), (vec![1, 2], vec![2]));
    }

    #[test]
    fn a_torn_entry_and_all_behind_it_do_not_count() {
        let log = log(MIN_VOLATILE_BYTES);
        let mut writer = Writer::begin(&log, UUID, 1, 0, place(0));
        assert!((0..3).all(|sequence| writer.add(sequence, &map(sequence))));
        let (begin, end) = (area_at(1, writer.length) + ENTRIES_OFFSET, area_at(1, writer.length) + writer.at);
        let one = (end - begin) / 3;
        for byte in begin..end {
            log.memory.with(|bytes| bytes[byte] ^= 0x40);
            let whole: Vec<u64> = (0..((byte - begin) / one) as u64).collect();
            assert_eq!(sequences(&log, 1, 0), whole, "byte {byte}");
            log.memory.with(|bytes| bytes[byte] ^= 0x40);
        }
    }

    #[test]
    fn a_damaged_head_is_noticed() {
        let log = log(MIN_VOLATILE_BYTES);
        let mut writer = Writer::begin(&log, UUID, 1, 0, place(0));
        writer.add(0, &map(0));
        let area = area_at(1, writer.length);
        for byte in (0..HEADER_BYTES + 8).chain(area..area + BASES_OFFSET + BASE_BYTES) {
            log.memory.with(|bytes| bytes[byte] ^= 1);
            assert!(sequences(&log, 1, 0).is_empty(), "byte {byte}");
            log.memory.with(|bytes| bytes[byte] ^= 1);
        }
    }

    #[test]
    fn what_does_not_fit_ends_the_area_and_not_the_log() {
        let log = log(MIN_VOLATILE_BYTES);
        let mut writer = Writer::begin(&log, UUID, 1, 0, place(0));
        let mut sequence = 0;
        while writer.add(sequence, &map(sequence)) {
            sequence += 1;
        }
        sequence += 1;
        assert!(writer.is_filling() && writer.is_nearly_full());
        assert!(!writer.add(sequence, &Record::Delete { ids: Vec::new() }), "nothing behind what is missing");
        assert_eq!(sequences(&log, 1, 0).len() as u64, sequence - 1);
        writer.switch(sequence + 1, place(8));
        assert!(!writer.is_filling());
        writer.add(sequence + 1, &map(0));
        assert_eq!(sequences(&log, 1, 0).len() as u64, sequence - 1, "nothing behind what is missing");
        assert_eq!(sequences(&log, 1, 8), [sequence + 1]);
        let left = recover(&log, UUID, 1, |p| p == place(0) || p == place(8));
        let left: Vec<u64> = left.iter().map(|left| left.sequence).collect();
        assert_eq!(left, [sequence + 1], "the journal has all of the area that was full");
    }

    #[test]
    fn a_new_log_has_nothing_of_the_one_before() {
        let log = log(MIN_VOLATILE_BYTES);
        let mut writer = Writer::begin(&log, UUID, 1, 0, place(0));
        assert!((0..9).all(|sequence| writer.add(sequence, &map(sequence))));
        let mut writer = Writer::begin(&log, UUID, 2, 0, place(0));
        assert!(sequences(&log, 2, 0).is_empty());
        writer.add(0, &map(77));
        assert_eq!(sequences(&log, 2, 0), [0]);
    }
}
