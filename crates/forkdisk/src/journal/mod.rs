//! The journal: records in the order in which they were published, written in groups, in a ring over the
//! journal's extents.
//!
//! This module keeps the bytes and positions; the pool does the I/O. Positions count bytes since the pool was
//! created, so they never wrap; the place in the extents is the position modulo the journal's length.

use crate::device::Segment;
use crate::format::{DataChecksum, JournalGroup, JournalStart, Record, encode_group};
use crate::planted::correct;
use crate::types::{PAGE_SIZE, PageAddr};

mod data_checksums;
mod volatile;

use self::data_checksums::ChecksummedPages;
use self::volatile::Writer;

#[cfg(feature = "planted")]
pub use self::volatile::tear;
pub use self::volatile::{
    GroupEnd, MIN_VOLATILE_BYTES, RecoveredRecord, VolatileLog, VolatileMemory, invalidate, last_base, recover,
};

/// Limit of the records of one group, in bytes: the next record begins another group. A record is never divided,
/// so the last one may exceed it by any length.
const MAX_GROUP_BYTES: usize = 128 << 10;

#[derive(Default)]
struct Batch {
    bytes: Vec<u8>,
    count: u32,
    first: u64,
    checksums: Vec<DataChecksum>,
}

/// A group to be written to the device.
#[derive(PartialEq, Eq)]
pub struct Outgoing {
    /// Whole pages.
    pub bytes: Vec<u8>,
    /// Position in the journal.
    pub position: u64,
}

/// What a commit writes.
pub struct PendingCommit {
    /// In order.
    pub groups: Vec<Outgoing>,
    /// The sequence number behind the last record.
    pub next: u64,
    /// The groups say that everything before this sequence number was durable.
    pub claims_durable: u64,
    /// The groups cover all data that their records map by checksums: it need not be flushed before them.
    pub covers_data: bool,
}

/// How far groups are written to the device, whether or not they are durable.
#[derive(Clone, Copy, Default)]
pub struct Written {
    /// The sequence number behind the last record.
    pub next: u64,
    /// The last group says that everything before this sequence number was durable.
    pub claims_durable: u64,
}

/// See the module.
pub struct Journal {
    uuid: [u8; 16],
    extents: Vec<(PageAddr, u32)>,
    length: u64,
    pub incarnation: u64,
    tail: u64,
    head: u64,
    chain: u64,
    next: u64,
    /// The last commit that was written.
    pub written: Written,
    confirmed: u64,
    pending: Vec<Batch>,
    pending_bytes: usize,
    recorded: u64,
    last_map: Option<usize>,
    /// Pages that recovery verifies by checksum.
    pub checksums: ChecksummedPages,
    /// The next record begins a batch: a mark lies before it.
    marked: bool,
    appended: u64,
    /// Those of them that may become durable before data written so far.
    unordered: u64,
    /// Where groups end, as far as replay has come; empty once the pool is open.
    group_ends: Vec<GroupEnd>,
    volatile: Option<Writer>,
    /// The sequence number behind the last record that did not fit into the volatile log, until a commit has
    /// it; otherwise zero. Until then nothing from the first such record on outlives the process.
    overflow_seq: u64,
}

impl Journal {
    /// Creates the journal in `extents` that continues behind `start`.
    pub fn new(uuid: [u8; 16], extents: Vec<(PageAddr, u32)>, incarnation: u64, start: JournalStart) -> Journal {
        let length = extents.iter().map(|&(_, n)| u64::from(n) * PAGE_SIZE as u64).sum();
        Journal {
            uuid,
            extents,
            length,
            incarnation,
            tail: start.position,
            head: start.position,
            chain: start.chain,
            next: start.sequence,
            written: Written::default(),
            confirmed: start.sequence,
            pending: Vec::new(),
            pending_bytes: 0,
            recorded: 0,
            last_map: None,
            checksums: ChecksummedPages::default(),
            marked: false,
            appended: 0,
            unordered: 0,
            group_ends: vec![GroupEnd { position: start.position, chain: start.chain }],
            volatile: None,
            overflow_seq: 0,
        }
    }

    /// Returns where the journal ends.
    fn end_position(&self) -> GroupEnd {
        GroupEnd { position: self.head, chain: self.chain }
    }

    /// Whether replay met a group that ends or begins there.
    pub fn has_group_end(&self, place: GroupEnd) -> bool {
        self.group_ends.contains(&place)
    }

    /// Records go to `log` as well from now on; the log begins empty.
    pub fn write_volatile(&mut self, log: &VolatileLog) {
        assert!(self.pending.is_empty(), "every record is in the journal or in the log");
        self.volatile = Some(Writer::begin(log, self.uuid, self.incarnation, self.next, self.end_position()));
    }

    /// Ends replay: the group ends that it met are no longer needed.
    pub fn end_replay(&mut self) {
        self.group_ends = Vec::new();
    }

    /// Whether the volatile log is so full that a commit is due.
    pub fn volatile_is_filling(&self) -> bool {
        self.volatile.as_ref().is_some_and(Writer::is_filling)
    }

    /// Whether more records have to wait until a commit has emptied the volatile log.
    pub fn volatile_is_nearly_full(&self) -> bool {
        self.volatile.as_ref().is_some_and(Writer::is_nearly_full)
    }

    /// Whether everything recorded so far is in the journal or in the volatile log, if there is one.
    pub fn is_process_safe(&self) -> bool {
        correct!(self.overflow_seq == 0, Bug::NamesOutrunVolatileLog => true)
    }

    /// Notes the end of a commit that took everything before this sequence number, or found it covered by a
    /// checkpoint.
    pub fn committed(&mut self, next: u64) {
        if next >= self.overflow_seq {
            self.overflow_seq = 0;
        }
    }

    /// Returns the length of the journal in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Returns the bytes between the start of replay and the end.
    pub fn used(&self) -> u64 {
        self.head - self.tail
    }

    /// Returns the bytes of records not yet taken for writing.
    pub fn pending(&self) -> usize {
        self.pending_bytes
    }

    /// Returns the bytes of records appended since the open, merged ones once.
    pub fn recorded(&self) -> u64 {
        self.recorded
    }

    /// Returns the number of records appended since the open, merged ones included.
    pub fn appended(&self) -> u64 {
        self.appended
    }

    /// Returns the sequence number of the next record.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Returns the chain value of the last group.
    pub fn chain(&self) -> u64 {
        self.chain
    }

    /// Appends a record that must not become durable before all data written so far.
    pub fn append(&mut self, record: &Record) {
        correct!(
            self.checksums.require_data_flush(),
            Bug::GatherRecordBeforeData => match record {
                Record::Gather { .. } => (),
                _ => self.checksums.require_data_flush(),
            }
        );
        self.add(record);
    }

    /// Appends a record that may become durable before data written so far.
    pub fn append_unordered(&mut self, record: &Record) {
        self.unordered += 1;
        self.add(record);
    }

    /// Appends the record of a first write; `sum` is the checksum of the pages' contents, if known.
    pub fn append_map(&mut self, record: &Record, sum: Option<u64>) {
        let Record::Map { len, to, .. } = record else { return self.append(record) };
        let sum = sum.filter(|_| self.checksums.wants(u64::from(*len)));
        self.add(record);
        match (sum, self.pending.last_mut()) {
            (Some(sum), Some(batch)) => {
                batch.checksums.push(DataChecksum { to: *to, pages: *len, sum });
                self.checksums.add(*to, u64::from(*len));
            }
            _ => self.checksums.require_data_flush(),
        }
    }

    /// Appends the record of copied pages. `checksums` are those of the copied data, all of them with the
    /// first record of several and none with the others; `None`: unknown.
    pub fn append_copied(&mut self, record: &Record, checksums: Option<&[DataChecksum]>) {
        let Some(checksums) = checksums else { return self.append(record) };
        self.add(record);
        let vouched = correct!(
            checksums,
            Bug::KeptNotVouched => match record {
                Record::CopyOut { .. } => &[],
                _ => checksums,
            }
        );
        for checksum in vouched {
            match self.pending.last_mut().filter(|_| self.checksums.wants(u64::from(checksum.pages))) {
                Some(batch) => {
                    batch.checksums.push(*checksum);
                    self.checksums.add(checksum.to, u64::from(checksum.pages));
                }
                None => self.checksums.require_data_flush(),
            }
        }
    }

    fn add(&mut self, record: &Record) {
        self.appended += 1;
        let is_longer = record.is_run() && self.extend_last(record);
        let begun_at = if is_longer { 0 } else { self.begin_record(record) };
        // The last numbered record also goes to the volatile log.
        let (Some(volatile), Some(batch)) = (&mut self.volatile, self.pending.last()) else { return };
        let fits = match is_longer {
            true => volatile.add(self.next - 1, record),
            false => volatile.add_encoded(self.next - 1, &batch.bytes[begun_at..]),
        };
        if !fits {
            self.overflow_seq = self.next;
        }
    }

    /// Appends a record that an earlier process left, under the number that it had there.
    pub fn append_recovered(&mut self, left: &RecoveredRecord) {
        self.checksums.require_data_flush();
        self.appended += 1;
        if left.sequence + 1 == self.next && self.extend_last(&left.record) {
            return;
        }
        assert_eq!(left.sequence, self.next, "records are left behind in order");
        self.begin_record(&left.record);
    }

    /// Begins a record with a new number; returns its offset in the last batch.
    fn begin_record(&mut self, record: &Record) -> usize {
        if std::mem::take(&mut self.marked) || self.pending.last().is_none_or(|b| b.bytes.len() > MAX_GROUP_BYTES) {
            self.pending.push(Batch { first: self.next, ..Batch::default() });
        }
        let batch = self.pending.last_mut().expect("just added");
        let before = batch.bytes.len();
        record.encode(&mut batch.bytes);
        batch.count += 1;
        self.last_map = record.is_run().then_some(before);
        self.pending_bytes += batch.bytes.len() - before;
        self.recorded += (batch.bytes.len() - before) as u64;
        self.next += 1;
        before
    }

    /// Extends the last pending record if `record` continues it.
    fn extend_last(&mut self, record: &Record) -> bool {
        let (Some(at), Some(batch)) = (self.last_map, self.pending.last_mut()) else { return false };
        let Some(mut last) = Record::decode_one(&batch.bytes[at..]) else { return false };
        if !last.extend(record) {
            return false;
        }
        batch.bytes.truncate(at);
        last.encode(&mut batch.bytes);
        true
    }

    /// Returns the bytes that the pending records would take in the journal.
    pub fn needed(&self) -> u64 {
        self.pending.iter().map(|b| JournalGroup::length(b.bytes.len() + 20 * b.checksums.len())).sum()
    }

    /// Whether the pending records reach the end of the extent of the journal that they will be written to:
    /// with the next record they would span two, which takes a request each. Extents of less than `shortest`
    /// bytes do not count: they end too often.
    pub fn fills_extent(&self, shortest: u64) -> bool {
        let (_, bytes, within) = self.extent_at(self.head);
        bytes >= shortest && !self.pending.is_empty() && self.needed() >= bytes - within
    }

    /// Whether the pending records fit before the journal is full.
    pub fn fits(&self) -> bool {
        correct!(self.used() + self.needed() <= self.length, Bug::JournalOverwritesTail => true)
    }

    /// Takes the pending records as groups, in order.
    pub fn take(&mut self) -> PendingCommit {
        assert!(self.fits(), "the journal would overwrite what replay needs");
        self.pending_bytes = 0;
        self.last_map = None;
        let covered = self.checksums.covers_data();
        let mut groups = Vec::new();
        for mut batch in std::mem::take(&mut self.pending) {
            if covered {
                batch.checksums.iter().for_each(|w| w.encode(&mut batch.bytes));
            }
            groups.push(self.outgoing(batch.first, batch.count, &batch.bytes));
        }
        self.checksums.take(self.next);
        let (next, place) = (self.next, self.end_position());
        if let Some(volatile) = &mut self.volatile {
            volatile.switch(next, place);
        }
        PendingCommit { groups, next, claims_durable: self.durable_seq(), covers_data: covered }
    }

    /// Returns a group without records, which says that everything so far is durable.
    pub fn seal(&mut self) -> Outgoing {
        let group = self.outgoing(self.confirmed, 0, &[]);
        let place = self.end_position();
        if let Some(volatile) = &mut self.volatile {
            volatile.set_base(place);
        }
        group
    }

    /// Whether there is space for a [`seal`](Self::seal).
    pub fn seal_fits(&self) -> bool {
        self.used() + JournalGroup::length(0) <= self.length
    }

    fn outgoing(&mut self, first: u64, count: u32, body: &[u8]) -> Outgoing {
        let (bytes, chain) = encoded(self, first, count, body);
        let position = self.head;
        self.head += bytes.len() as u64;
        self.chain = chain;
        Outgoing { bytes, position }
    }

    /// Everything before this sequence number is durable.
    pub fn durable_seq(&self) -> u64 {
        correct!(self.confirmed, Bug::UnflushedBelievedDurable => self.confirmed.max(self.written.next))
    }

    /// Notes that everything before sequence number `next` is durable.
    pub fn set_durable(&mut self, next: u64) {
        self.confirmed = self.confirmed.max(next);
    }

    /// Notes that the device itself says everything before `sequence` is durable: by a durable group or a
    /// checkpoint.
    pub fn durable_recorded(&mut self, sequence: u64) {
        self.checksums.set_durable(sequence);
    }

    /// Returns where replay starts once the present state is durable. What is appended from here on goes into
    /// separate records and batches, since replay skips those before.
    pub fn mark(&mut self) -> JournalStart {
        correct!((self.last_map, self.marked) = (None, true), Bug::RecordsGrowOverMarks => ());
        JournalStart { position: self.head, sequence: self.next, chain: self.chain }
    }

    /// Notes that a checkpoint with this start is durable, and so are the records before it: those still
    /// pending need not be written any more. Otherwise more of them than the journal is long would never be.
    pub fn released(&mut self, start: JournalStart) {
        self.tail = start.position;
        self.durable_recorded(start.sequence);
        self.pending.retain(|batch| batch.first >= start.sequence);
        self.pending_bytes = self.pending.iter().map(|batch| batch.bytes.len()).sum();
        if self.pending.is_empty() {
            self.last_map = None;
        }
    }

    /// Replay found a group here: continue behind it.
    pub fn replayed(&mut self, group: &JournalGroup) {
        self.head += JournalGroup::length(group.bytes as usize);
        self.chain = group.chain;
        // One without records may come before the record that the checkpoint names.
        self.next = self.next.max(group.first + u64::from(group.count));
        self.confirmed = self.confirmed.max(group.confirmed);
        self.group_ends.push(self.end_position());
    }

    /// Returns the position behind the last group.
    pub fn head(&self) -> u64 {
        self.head
    }

    /// Returns where `len` bytes from `position` lie on the device, as segments of one buffer.
    pub fn segments(&self, position: u64, len: usize) -> Vec<Segment> {
        let (mut at, mut out) = (0, Vec::new());
        while at < len {
            let (offset, bytes, within) = self.extent_at(position + at as u64);
            let n = (bytes - within).min((len - at) as u64) as usize;
            out.push(Segment { offset: offset + within, at, len: n });
            at += n;
        }
        out
    }

    /// Returns the extent of the journal that holds `position`: its offset on the device, its length, and the
    /// offset of `position` in it.
    fn extent_at(&self, position: u64) -> (u64, u64, u64) {
        let mut within = position % self.length;
        for &(first, pages) in &self.extents {
            let bytes = u64::from(pages) * PAGE_SIZE as u64;
            if within < bytes {
                return (first.offset(), bytes, within);
            }
            within -= bytes;
        }
        unreachable!("the pieces are as long as the journal")
    }
}

/// Returns the group that [`Journal::take`] would return if this record of a first write were the only one; `sum` is
/// the checksum of its pages. `None` if there are others, if the group would not cover the data, or if the journal is
/// full.
pub fn group_of(journal: &Journal, record: &Record, sum: u64) -> Option<Outgoing> {
    let Record::Map { len, to, .. } = record else { return None };
    let is_covered = journal.checksums.covers_data() && journal.checksums.wants(u64::from(*len));
    if !journal.pending.is_empty() || !is_covered {
        return None;
    }
    let mut body = Vec::new();
    record.encode(&mut body);
    DataChecksum { to: *to, pages: *len, sum }.encode(&mut body);
    let (bytes, _) = encoded(journal, journal.next, 1, &body);
    (journal.used() + bytes.len() as u64 <= journal.length).then_some(Outgoing { bytes, position: journal.head })
}

/// Returns whether [`Journal::take`] would return exactly this group.
pub fn is_next_group(journal: &Journal, group: &Outgoing) -> bool {
    let [batch] = &journal.pending[..] else { return false };
    if batch.count != 1 || group.position != journal.head {
        return false;
    }
    let mut body = batch.bytes.clone();
    if journal.checksums.covers_data() {
        batch.checksums.iter().for_each(|checksum| checksum.encode(&mut body));
    }
    encoded(journal, batch.first, batch.count, &body).0 == group.bytes
}

/// Encodes the next group, in whole pages; also returns its chain value.
fn encoded(journal: &Journal, first: u64, count: u32, body: &[u8]) -> (Vec<u8>, u64) {
    let (incarnation, confirmed) = (journal.incarnation, journal.durable_seq());
    let group = JournalGroup { incarnation, first, count, bytes: body.len() as u32, chain: 0, confirmed };
    let (mut bytes, chain) = encode_group(&journal.uuid, journal.chain, &group, body);
    bytes.resize(bytes.len().next_multiple_of(PAGE_SIZE), 0);
    (bytes, chain)
}

/// Returns the number of records appended since the open that follow data or names: all but times of changes.
pub fn appended_in_order(journal: &Journal) -> u64 {
    journal.appended - journal.unordered
}

#[cfg(test)]
mod tests;
