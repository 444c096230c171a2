//! Planning a write: the destination of each piece, decided before anything is done.
//!
//! - In place: the page is exclusive to the volume, and recovery would not verify its current contents.
//! - Provision or break: a new page; its mapping is published after the data was written.
//! - A piece smaller than the block size of the device: its page is completed from the old page or with
//!   zeroes.

use std::cell::Cell;

use crate::catalog::{Catalog, Failure, account_of, admit_divergence, directory, reserve_for};
use crate::device::{Segments, add_segment};
use crate::format::{VolumeRecord, data_checksum};
use crate::journal::Journal;
use crate::live::Live;
use crate::map::{Editor, Run, Stop, lookup};
use crate::planted::correct;
use crate::space::claims::QuotaClaim;
use crate::space::{AllocRequest, Need, alloc};
use crate::types::{BLOCK_PAGES, Epoch, PAGE_BYTES, PageAddr, VirtualPage, VolumeId};

use super::copy_break::ChunkCopy;

/// Most pieces of a chunk that are looked up to find where it lies.
const MAX_LOOKUPS: usize = 16;

/// A page that is completed before it is written.
pub(super) struct Partial {
    /// Offset and length of the new bytes in the client's buffer.
    pub at: usize,
    pub len: usize,
    /// Offset in the page.
    pub within: usize,
    /// Source of the other bytes of the page; `None`: zeroes.
    pub from: Option<PageAddr>,
    pub to: PageAddr,
}

/// Pages to be mapped after they were written.
pub(super) struct Fault {
    pub at: VirtualPage,
    pub len: u64,
    pub to: PageAddr,
    /// The old pages have other owners (a break); else there are none (a provision).
    pub shared: bool,
    /// Relocated because recovery may verify the old pages. These get no checksum, or the volume would move
    /// again at every flush.
    pub relocated: bool,
    /// Checksum of the data, if the next commit can use it.
    pub sum: Option<u64>,
}

/// Unmapped pages. A snapshot probably holds pages of this volume born in epochs up to `held`.
struct Hole {
    at: VirtualPage,
    held: Option<Epoch>,
}

/// The destination of each piece of a write.
pub(super) struct WritePlan {
    pub next: u64,
    pub start: u64,
    pub end: u64,
    unit: u64,
    /// Pages of a chunk, if chunks are copied as a whole on a break; `None`: they are not.
    pub copying: Option<u64>,
    pub segments: Segments,
    pub partials: Vec<Partial>,
    pub faults: Vec<Fault>,
    /// Pieces copied before they are written; each has its fault.
    pub copies: Vec<ChunkCopy>,
    /// Pages of the faults that the volume does not refer to yet.
    pub claim: QuotaClaim,
    /// All pages of the faults.
    pub new_pages: QuotaClaim,
    /// Pages of the faults that are mapped.
    pub published: Cell<u64>,
}

/// Refuses new pages that the bound of the volume does not allow. Pages that have to move for a moment only need not: a
/// sealed commit allows to overwrite them.
fn admit_new_pages(
    meta: &Catalog,
    (id, live): (VolumeId, &Live),
    pages: u64,
    moved: bool,
    _is_mapped: bool,
) -> Result<(), Failure> {
    let more = correct!(pages, Bug::BreaksUnbounded => if _is_mapped { 0 } else { pages });
    match admit_divergence(meta, id, live.new_pages.pages(), more) {
        Err(Failure::OverBound(_)) if moved => Err(Failure::Stop(Stop::NoSpace)),
        admitted => admitted,
    }
}

impl WritePlan {
    pub fn new(start: u64, len: u64, unit: usize, copying: Option<u64>) -> WritePlan {
        let (segments, partials, faults, copies) = (Segments::new(), Vec::new(), Vec::new(), Vec::new());
        let (end, unit) = (start + len, unit as u64);
        let (claim, new_pages) = (QuotaClaim::default(), QuotaClaim::default());
        let published = Cell::new(0);
        let next = start;
        WritePlan { next, start, end, unit, copying, segments, partials, faults, copies, claim, new_pages, published }
    }

    /// Plans the whole write in place if each piece goes to a mapped page that is exclusive to the volume, in
    /// device blocks, according to what is in memory. Otherwise leaves the plan empty.
    pub fn is_in_place(&mut self, meta: &mut Catalog, id: VolumeId) -> bool {
        if !self.start.is_multiple_of(self.unit) || !self.end.is_multiple_of(self.unit) {
            return false;
        }
        let record = meta.directory.of_handle(id);
        while self.next < self.end {
            let page = self.next / PAGE_BYTES;
            match lookup(&mut meta.tables, record, VirtualPage(page), self.end.div_ceil(PAGE_BYTES) - page) {
                Ok(Run { data: Some((addr, birth)), len, .. })
                    if birth > record.shared_at
                        && meta.journal.checksums.may_overwrite(addr, len)
                        && meta.watched.note(addr, len) =>
                {
                    self.in_place(addr, len);
                }
                _ => {
                    self.next = self.start;
                    self.segments.clear();
                    return false;
                }
            }
        }
        debug_assert!(self.partials.is_empty(), "whole units need no completion");
        true
    }

    /// Asserts that the plan has a place for every byte.
    pub fn check(&self) {
        assert_eq!(self.next, self.end, "a plan goes to the end of its write");
        let planned: u64 = self.segments.iter().map(|s| s.len as u64).sum();
        let partial: u64 = self.partials.iter().map(|partial| partial.len as u64).sum();
        assert!(!self.copies.is_empty() || planned + partial == self.end - self.start, "each byte has one place");
    }

    /// Pages allocated for it that no map has.
    pub fn unpublished(&self) -> u64 {
        self.faults.iter().map(|fault| fault.len).sum::<u64>() - self.published.get()
    }

    /// End of the write, as a page number (exclusive).
    pub fn end(&self) -> u64 {
        self.end.div_ceil(PAGE_BYTES)
    }

    /// Extends the write to page `end`.
    pub fn extend(&mut self, end: u64) {
        debug_assert!(self.end.is_multiple_of(PAGE_BYTES) && end * PAGE_BYTES > self.end);
        self.end = end * PAGE_BYTES;
    }

    /// Whether the free space admits new pages for all of it.
    pub fn fits(&self, meta: &Catalog, id: VolumeId) -> bool {
        reserve_for(meta, id, Need::Write(self.end() - self.start / PAGE_BYTES)).is_ok()
    }

    /// Plans on from where the last attempt stopped. Without `may_fault` it fails with `NoSpace` where a new
    /// page is needed.
    pub fn advance(
        &mut self,
        meta: &mut Catalog,
        (id, live): (VolumeId, &Live),
        may_fault: bool,
    ) -> Result<(), Failure> {
        while self.next < self.end {
            let page = VirtualPage(self.next / PAGE_BYTES);
            let whole = self.next.is_multiple_of(PAGE_BYTES) && self.end - self.next >= PAGE_BYTES;
            let max = if whole { self.whole_pages(page) } else { 1 };
            let held = directory::last_shared_at(&meta.directory, id);
            let (checkpoint, account) = (meta.checkpoint_pages(), account_of(meta, id));
            let (mut editor, record) = meta.handle_editor(id);
            let (chunk_pages, shared_at) = (record.chunk / PAGE_BYTES, record.shared_at);
            let run = lookup(editor.tables, record, page, max).map_err(Stop::from)?;
            let mut len = run.len;
            let is_young = |(_, birth)| correct!(birth > record.shared_at, Bug::WritesSharedInPlace => true);
            let mut alone = run.data.is_some_and(is_young);
            let has_room = may_fault && editor.space.reserve(Need::Write(len), checkpoint, account).is_ok();
            // While there is space, pages that a snapshot most likely holds are not looked up in the counts.
            let asks = run.data.is_some_and(|(_, birth)| !has_room || held.is_none_or(|until| birth > until));
            if !alone && asks && editor.is_alone_for_good(record, page)? {
                // Known from the counts only, one page at a time.
                (alone, len) = (true, 1);
            }
            let hole = run.data.is_none().then_some(Hole { at: page, held });
            let beside = if alone { None } else { self.neighbour_place(&mut editor, record, hole) };
            let mut moved = false;
            if let Some((addr, _)) = run.data.filter(|_| alone) {
                moved = !meta.journal.checksums.may_overwrite(addr, len);
                alone = !moved && meta.watched.note(addr, len);
            }
            match run.data {
                Some((addr, _)) if alone => self.in_place(addr, len),
                _ if !may_fault => return Err(Failure::Stop(Stop::NoSpace)),
                _ if self.copying.is_some() && self.copy_chunk(meta, (id, live), page)? => {}
                old => {
                    if old.is_none() {
                        meta.admits(id, live.claims.pages(), len)?;
                    }
                    admit_new_pages(meta, (id, live), len, moved, old.is_some())?;
                    let reserved = reserve_for(meta, id, Need::Write(len))?;
                    meta.space.find_reserved(&reserved).map_err(Stop::from)?;
                    let write = self.start / PAGE_BYTES..self.end();
                    let want = AllocRequest { volume: id, at: page, pages: len, chunk_pages, shared_at, write, beside };
                    let (to, n) = alloc::alloc_data(&mut meta.space, want, &reserved).map_err(Stop::from)?;
                    if old.is_none() {
                        self.claim.add(&live.claims, n);
                    }
                    self.new_pages.add(&live.new_pages, n);
                    let fault =
                        Fault { at: page, len: n, to, shared: old.is_some() && !moved, relocated: moved, sum: None };
                    self.fault(fault, old.map(|(addr, _)| addr), whole);
                }
            }
        }
        Ok(())
    }

    /// Computes the checksums of new pages where the next commit can use them; `segments` of `bytes` are
    /// about to be written.
    pub fn checksum_data(&mut self, journal: &Journal, bytes: &[u8], segments: &Segments) {
        for fault in self.faults.iter_mut().filter(|fault| !fault.relocated && journal.checksums.wants(fault.len)) {
            let (from, len) = (fault.to.offset(), fault.len * PAGE_BYTES);
            let whole = segments.iter().find(|s| s.offset <= from && from + len <= s.offset + s.len as u64);
            fault.sum = whole.map(|s| {
                let at = s.at + (from - s.offset) as usize;
                data_checksum(fault.to, &bytes[at..at + len as usize])
            });
        }
    }

    /// The address that makes these pages contiguous with those that this write planned before them in the
    /// chunk; for a hole, with what the chunk has and keeps. Uses only what is in memory.
    fn neighbour_place(&self, editor: &mut Editor<'_>, record: &VolumeRecord, hole: Option<Hole>) -> Option<PageAddr> {
        let at = (self.next - self.start) as usize;
        let last = self.segments.last().filter(|s| s.at + s.len == at && !self.next.is_multiple_of(record.chunk));
        let before = last.map(|s| s.offset + s.len as u64);
        if let Some(end) = before.filter(|end| end.is_multiple_of(PAGE_BYTES)) {
            return Some(PageAddr(end / PAGE_BYTES));
        }
        let Hole { at: VirtualPage(page), held } = hole?;
        let chunk = record.chunk / PAGE_BYTES;
        let mut at = page - page % chunk;
        let end = at + chunk;
        for _ in 0..MAX_LOOKUPS {
            if at >= end {
                break;
            }
            let run = lookup(editor.tables, record, VirtualPage(at), end - at).ok()?;
            if let Some((addr, birth)) = run.data {
                let is_alone = birth > record.shared_at
                    || held.is_none_or(|until| birth > until)
                        && editor.is_alone_for_good(record, VirtualPage(at)).ok()?;
                if is_alone {
                    return (addr.0 + page).checked_sub(at).map(PageAddr);
                }
            }
            at += run.len;
        }
        None
    }

    /// How many whole pages from `page` on are planned at once: within a block, and up to the last chunk if
    /// the write ends within it and it is to be copied.
    fn whole_pages(&self, page: VirtualPage) -> u64 {
        let end = self.end / PAGE_BYTES;
        let cut = self.copying.map(|chunk| end / chunk * chunk).filter(|&cut| cut > page.0);
        (cut.unwrap_or(end) - page.0).min(BLOCK_PAGES - page.index() as u64)
    }

    /// Drops the plan from byte `from` of the volume on.
    pub(super) fn forget_from(&mut self, from: u64) {
        let keep = from.saturating_sub(self.start) as usize;
        self.partials.retain(|p| p.at < keep);
        self.segments.retain(|s| s.at < keep);
        if let Some(last) = self.segments.last_mut() {
            last.len = last.len.min(keep - last.at);
        }
    }

    fn in_place(&mut self, addr: PageAddr, pages: u64) {
        let within = self.next % PAGE_BYTES;
        let stop = (self.next / PAGE_BYTES * PAGE_BYTES + pages * PAGE_BYTES).min(self.end);
        let (at, len) = ((self.next - self.start) as usize, (stop - self.next) as usize);
        if within.is_multiple_of(self.unit) && (len as u64).is_multiple_of(self.unit) {
            add_segment(&mut self.segments, addr.offset() + within, at, len);
        } else {
            // Only the last page of a run can be partial.
            let full = len as u64 / PAGE_BYTES * PAGE_BYTES;
            if full > 0 && within == 0 {
                add_segment(&mut self.segments, addr.offset(), at, full as usize);
                self.next += full;
                return;
            }
            self.partials.push(Partial { at, len, within: within as usize, from: Some(addr), to: addr });
        }
        self.next = stop;
    }

    fn fault(&mut self, fault: Fault, old: Option<PageAddr>, whole: bool) {
        let at = (self.next - self.start) as usize;
        let Fault { at: page, len: n, to, .. } = fault;
        self.faults.push(fault);
        if whole {
            add_segment(&mut self.segments, to.offset(), at, (n * PAGE_BYTES) as usize);
            self.next += n * PAGE_BYTES;
            return;
        }
        let stop = ((page.0 + 1) * PAGE_BYTES).min(self.end);
        let within = (self.next % PAGE_BYTES) as usize;
        let from = correct!(old, Bug::NeighboursLostInBreak => None);
        self.partials.push(Partial { at, len: (stop - self.next) as usize, within, from, to });
        self.next = stop;
    }
}
