//! A RAID5 array that counts the requests to its disks.
//!
//! It works like md: the unit is a *row*, one 4 KiB page of every disk. Written pages wait in a
//! stripe cache; a row with complete data pages is written with its parity, without reads. A
//! row that must be written before it is complete, because the cache is full or a flush came, needs
//! reads first: the old pages and the old parity, or the missing pages, whichever is less. That is
//! a *read-modify-write*. Rows that are written at the same time are read together, then written
//! together.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use forkdisk::testing::{DeviceModel, Recording, Request, RequestKind};

const PAGE: u64 = 4096;
/// Size in bytes up to which adjacent requests to one disk are merged.
const MERGED: u64 = 512 << 10;

/// Geometry of an array.
#[derive(Clone, Copy, Debug)]
pub struct Raid5 {
    /// Disks; one of them holds the parity of a stripe.
    pub disks: u64,
    /// Bytes of a stripe on one disk.
    pub chunk: u64,
    /// Rows in the stripe cache.
    pub cache: usize,
}

/// The array of the published measurement.
pub const ARRAY: Raid5 = Raid5 { disks: 4, chunk: 512 << 10, cache: 4096 };

/// Result of a replay.
#[derive(Debug)]
pub struct Outcome {
    members: Vec<Recording>,
    /// Rows with clients' data that could not be written without reading, although clients wrote
    /// all of the row's pages at some time.
    pub of_data: u64,
    /// Rows with clients' data at the ends of a contiguous range of writes: the neighbours in
    /// the row were never written, or are metadata.
    pub at_ends: u64,
    /// Rows with metadata only.
    pub of_metadata: u64,
    /// Bytes that the array read in order to write.
    pub read: u64,
    /// Bytes written, including parity.
    pub written: u64,
}

impl Outcome {
    /// Returns the time of the slowest disk, with `depth` requests in flight.
    pub fn time(&self, model: &DeviceModel, depth: usize) -> Duration {
        self.members.iter().map(|m| model.time(m, depth)).max().unwrap_or_default()
    }
}

/// Waiting pages of a row: bit masks of all, and of those with clients' data.
#[derive(Clone, Copy, Default)]
struct Row {
    pages: u64,
    data: u64,
    touched: u64,
}

struct Array {
    of: Raid5,
    rows: HashMap<u64, Row>,
    /// Rows by the time of their last access.
    order: BTreeSet<(u64, u64)>,
    now: u64,
    /// Pages of each row that clients have written.
    ever: HashMap<u64, u64>,
    incomplete: Vec<(u64, Row)>,
    out: Outcome,
}

impl Raid5 {
    fn data_disks(&self) -> u64 {
        self.disks - 1
    }

    /// Returns the row of a page and the page's number in it.
    fn place(&self, page: u64) -> (u64, u64) {
        let per_chunk = self.chunk / PAGE;
        let (chunk, within) = (page / per_chunk, page % per_chunk);
        (chunk / self.data_disks() * per_chunk + within, chunk % self.data_disks())
    }

    /// Returns the disk of this page of a row; the page after the last data page is the parity.
    /// Parity rotates with the stripes.
    fn disk(&self, row: u64, page: u64) -> usize {
        let stripe = row / (self.chunk / PAGE);
        ((stripe + page) % self.disks) as usize
    }

    /// Replays a recording. Reads of the array are passed on.
    pub fn replay(self, recording: &Recording) -> Outcome {
        let members = (0..self.disks).map(|_| Recording::default()).collect();
        let out = Outcome { members, of_data: 0, at_ends: 0, of_metadata: 0, read: 0, written: 0 };
        let (rows, order, ever) = Default::default();
        let mut array = Array { of: self, rows, order, now: 0, ever, incomplete: Vec::new(), out };
        for request in &recording.requests {
            let pages = request.offset / PAGE..(request.offset + request.len).div_ceil(PAGE);
            match request.kind {
                RequestKind::Flush => array.flush(),
                kind if !kind.is_transfer() => {}
                RequestKind::Read => pages.for_each(|page| array.read(page)),
                kind => pages.for_each(|page| array.write(page, kind == RequestKind::WriteData)),
            }
        }
        array.flush();
        array.judge();
        array.out
    }
}

impl Array {
    fn write(&mut self, page: u64, data: bool) {
        let (number, at) = self.of.place(page);
        let all = (1 << self.of.data_disks()) - 1;
        self.now += 1;
        let row = self.rows.entry(number).or_default();
        self.order.remove(&(row.touched, number));
        row.pages |= 1 << at;
        row.data |= u64::from(data) << at;
        row.touched = self.now;
        *self.ever.entry(number).or_default() |= u64::from(data) << at;
        if row.pages == all {
            self.rows.remove(&number);
            return self.put(number, all);
        }
        self.order.insert((self.now, number));
        if self.rows.len() > self.of.cache {
            self.evict((self.of.cache / 4).max(1));
        }
    }

    /// Evicts the least recently accessed rows.
    fn evict(&mut self, count: usize) {
        let mut oldest: Vec<u64> = self.order.iter().take(count).map(|&(_, number)| number).collect();
        oldest.sort_unstable();
        let rows: Vec<(u64, Row)> = oldest.iter().map(|&number| (number, self.forget(number))).collect();
        let parity = self.of.data_disks();
        let all = (1 << parity) - 1;
        for &(number, row) in &rows {
            let have = u64::from(row.pages.count_ones());
            let pages = if parity - have < have + 1 { all & !row.pages } else { row.pages | 1 << parity };
            for at in (0..self.of.disks).filter(|at| pages >> at & 1 == 1) {
                self.request(RequestKind::Read, number, at);
                self.out.read += PAGE;
            }
        }
        for &(number, row) in &rows {
            self.put(number, row.pages);
        }
        self.incomplete.extend(rows);
    }

    fn forget(&mut self, number: u64) -> Row {
        let row = self.rows.remove(&number).expect("a row that is listed");
        self.order.remove(&(row.touched, number));
        row
    }

    fn flush(&mut self) {
        self.evict(self.order.len());
        let flush = Request { kind: RequestKind::Flush, offset: 0, len: 0 };
        self.out.members.iter_mut().for_each(|m| m.requests.push(flush));
    }

    /// Writes pages of a row, and its parity.
    fn put(&mut self, number: u64, pages: u64) {
        let parity = self.of.data_disks();
        for at in (0..self.of.disks).filter(|&at| at == parity || pages >> at & 1 == 1) {
            self.request(RequestKind::WriteData, number, at);
            self.out.written += PAGE;
        }
    }

    fn read(&mut self, page: u64) {
        let (number, at) = self.of.place(page);
        self.request(RequestKind::Read, number, at);
    }

    fn request(&mut self, kind: RequestKind, row: u64, at: u64) {
        let requests = &mut self.out.members[self.of.disk(row, at)].requests;
        match requests.last_mut() {
            Some(r) if r.kind == kind && r.offset + r.len == row * PAGE && r.len < MERGED => r.len += PAGE,
            _ => requests.push(Request { kind, offset: row * PAGE, len: PAGE }),
        }
    }

    /// Classifies the rows that were incomplete.
    fn judge(&mut self) {
        let all = (1 << self.of.data_disks()) - 1;
        for (number, row) in std::mem::take(&mut self.incomplete) {
            match row.data {
                0 => self.out.of_metadata += 1,
                _ if self.ever[&number] == all => self.out.of_data += 1,
                _ => self.out.at_ends += 1,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Raid5 = Raid5 { disks: 4, chunk: 8192, cache: 4 };
    const STRIPE: u64 = 3 * 8192;
    const FLUSH: Request = Request { kind: RequestKind::Flush, offset: 0, len: 0 };

    fn write(offset: u64, len: u64) -> Request {
        Request { kind: RequestKind::WriteData, offset, len }
    }

    fn replay(requests: Vec<Request>) -> Outcome {
        SMALL.replay(&Recording { requests })
    }

    #[test]
    fn whole_stripes_in_pages_need_no_reads() {
        let out = replay((0..12).map(|i| write(i * PAGE, PAGE)).chain([FLUSH]).collect());
        assert_eq!((out.of_data, out.at_ends, out.read), (0, 0, 0));
        assert_eq!(out.written, 2 * STRIPE * 4 / 3, "a third more for parity");
        assert!(out.members.iter().all(|m| m.count(RequestKind::WriteData) == 1), "in order on every disk");
    }

    #[test]
    fn a_flush_in_the_midst_of_a_stripe_costs_reads() {
        let out = replay(vec![write(0, 2 * 8192), FLUSH, write(2 * 8192, 8192), FLUSH]);
        // Two rows: the one missing page is read, then two old pages or page and parity.
        assert_eq!((out.of_data, out.at_ends, out.read), (4, 0, 2 * PAGE + 2 * 2 * PAGE));
    }

    #[test]
    fn the_end_of_what_was_written_is_told_apart() {
        let metadata = Request { kind: RequestKind::WriteMetadata, offset: 10 * STRIPE, len: PAGE };
        let out = replay(vec![write(0, STRIPE + 8192), metadata, FLUSH]);
        assert_eq!((out.of_data, out.at_ends, out.of_metadata), (0, 2, 1));
    }

    #[test]
    fn metadata_behind_the_end_leaves_it_an_end() {
        let metadata = Request { kind: RequestKind::WriteMetadata, offset: STRIPE + 8192, len: 2 * 8192 };
        let out = replay(vec![write(0, STRIPE + 8192), FLUSH, metadata, FLUSH]);
        assert_eq!((out.of_data, out.at_ends, out.of_metadata), (0, 2, 2));
    }

    #[test]
    fn a_late_page_finds_its_row_gone_from_a_full_cache() {
        let early = (0..8).map(|stripe| write(stripe * STRIPE, 2 * 8192));
        let late = (0..8).map(|stripe| write(stripe * STRIPE + 2 * 8192, 8192));
        let out = replay(early.chain(late).collect());
        assert!(out.of_data >= 12, "{out:?}");
    }
}
