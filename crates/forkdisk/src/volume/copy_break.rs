//! Breaking by copying: a first write to a shared chunk moves the whole chunk to a new place, in one piece,
//! and merges the client's bytes.
//!
//! Each byte of the chunk is read at most once (bytes that the write covers are not) and written once.
//! Unmapped pages stay holes unless the write touches them. Without space for the whole chunk, only the
//! written pages are broken (policy `split`).

use std::ops::Range;
use std::rc::Rc;

use smallvec::smallvec;

use crate::catalog::{Catalog, Failure, admit_divergence, pages_of, reserve_for};
use crate::copier::{CopyError, CopySource, Job, JobGroup, Moved, Piece, Place, ProvidedBytes};
use crate::device::{Buf, CachedDevice, Device};
use crate::error::{Error, ErrorKind, Result};
use crate::live::{CopyPart, InflightBreak, Live};
use crate::map::{Run, Stop, lookup};
use crate::planted::correct;
use crate::space::{AllocRequest, Need, Refusal, alloc};
use crate::sync::QueuedWrite;
use crate::types::{BLOCK_PAGES, Epoch, PAGE_BYTES, PageAddr, VirtualPage, VolumeId};

use super::Volume;
use super::fault::{Fault, WritePlan};
use super::pending_write::{PendingWrite, is_mergeable};

/// Covered pages are read nevertheless if that saves a request, up to this many pages: a request costs the
/// disks of docs/benchmarks.md as much as 80 to 120 KiB.
const READ_THROUGH_PAGES: u64 = 16;

/// Where the old contents of a page are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OldContents {
    /// At this address; the rest of the run follows.
    At(PageAddr),
    /// Unmapped: zeroes.
    Hole,
    /// Irrelevant: the write covers it.
    Covered,
}

/// Pages that are copied to one contiguous place.
pub(super) struct ChunkCopy {
    pub at: VirtualPage,
    pub to: PageAddr,
    /// Runs of pages and their sources.
    pub from: Vec<(u64, OldContents)>,
}

impl ChunkCopy {
    /// Its range in the volume, in bytes.
    fn range(&self) -> Range<u64> {
        self.at.0 * PAGE_BYTES..(self.at.0 + self.pages()) * PAGE_BYTES
    }

    fn pages(&self) -> u64 {
        self.from.iter().map(|&(len, _)| len).sum()
    }
}

/// A run of pages of a chunk: first page, number of pages, address.
type ChunkRun = (u64, u64, Option<PageAddr>);

impl WritePlan {
    /// Plans to copy the chunk around `page`, which cannot be written in place. False if it is not copied: by
    /// policy, because nothing of it is shared or has to be copied, or because space is short.
    pub(super) fn copy_chunk(
        &mut self,
        meta: &mut Catalog,
        (id, live): (VolumeId, &Live),
        page: VirtualPage,
    ) -> std::result::Result<bool, Failure> {
        let Some(chunk) = self.copying else { return Ok(false) };
        let first = page.0 / chunk * chunk;
        let (mut editor, record) = meta.handle_editor(id);
        let end = (first + chunk).min(pages_of(record.size)).max(page.0 + 1);
        let (mut runs, mut shared, mut at) = (Vec::new(), false, first);
        while at < end {
            let Run { data, len, .. } = lookup(editor.tables, record, VirtualPage(at), end - at).map_err(Stop::from)?;
            if let Some((_, birth)) = data
                && birth <= record.shared_at
                && !shared
            {
                // The counts may still show that the page is exclusive.
                for p in at..at + len {
                    if !editor.is_alone_for_good(record, VirtualPage(p))? {
                        shared = true;
                        break;
                    }
                }
            }
            runs.push((at, len, data.map(|(addr, _)| addr)));
            at += len;
        }
        let (covered, shared_at) = (self.covered(), record.shared_at);
        let left = |&(at, len, data): &ChunkRun| data.is_some() && (at < covered.start || at + len > covered.end);
        if !shared || !runs.iter().any(left) {
            return Ok(false);
        }
        let new = self.new_pages(&runs);
        meta.admits(id, live.claims.pages(), new)?;
        let all = self.needed(&runs).iter().map(|r| r.end - r.start).sum();
        if admit_divergence(meta, id, live.new_pages.pages(), all).is_err() {
            return Ok(false);
        }
        let Some(faults) = self.place_chunk(meta, id, (chunk, shared_at), &runs)? else { return Ok(false) };
        self.claim.add(&live.claims, new);
        self.new_pages.add(&live.new_pages, all);
        self.forget_from(first * PAGE_BYTES);
        for fault in faults {
            self.copy_for(&runs, &fault);
            self.faults.push(fault);
        }
        self.next = self.end.min(end * PAGE_BYTES);
        Ok(true)
    }

    /// Allocates space for what the runs and the write need of a chunk.
    fn place_chunk(
        &self,
        meta: &mut Catalog,
        id: VolumeId,
        (chunk_pages, shared_at): (u64, Epoch),
        runs: &[ChunkRun],
    ) -> std::result::Result<Option<Vec<Fault>>, Failure> {
        let needed = self.needed(runs);
        let pages: u64 = needed.iter().map(|r| r.end - r.start).sum();
        let Ok(reserved) = reserve_for(meta, id, Need::Write(pages)) else { return Ok(None) };
        meta.space.find_reserved(&reserved).map_err(Stop::from)?;
        let mut faults = Vec::new();
        let refused = needed.into_iter().find_map(|extent| {
            let want = |at: u64| {
                let (pages, write) = ((extent.end - at).min(BLOCK_PAGES - at % BLOCK_PAGES), extent.clone());
                AllocRequest { volume: id, at: VirtualPage(at), pages, chunk_pages, shared_at, write, beside: None }
            };
            let mut at = extent.start;
            while at < extent.end {
                let (to, len) = match alloc::alloc_data(&mut meta.space, want(at), &reserved) {
                    Ok(found) => found,
                    Err(refusal) => return Some(refusal),
                };
                faults.push(Fault { at: VirtualPage(at), len, to, shared: true, relocated: false, sum: None });
                at += len;
            }
            None
        });
        let Some(refusal) = refused else { return Ok(Some(faults)) };
        // The attempt is repeated or nothing is copied: return what was allocated.
        faults.iter().for_each(|fault| alloc::return_pages(&mut meta.space, fault.to, fault.len));
        match refusal {
            Refusal::NoSpace => Ok(None),
            Refusal::Miss(miss) => Err(Failure::Stop(miss.into())),
        }
    }

    /// Appends what `fault` maps to the last copy if it is contiguous with it, else adds a copy.
    fn copy_for(&mut self, runs: &[ChunkRun], fault: &Fault) {
        let from = self.sources(runs, fault.at.0..fault.at.0 + fault.len);
        match self.copies.last_mut() {
            Some(last) if last.at.0 + last.pages() == fault.at.0 && last.to.0 + last.pages() == fault.to.0 => {
                let all = last.from.drain(..).chain(from).collect();
                last.from = read_through(joined(all));
            }
            _ => self.copies.push(ChunkCopy { at: fault.at, to: fault.to, from: read_through(from) }),
        }
    }

    /// Pages that the write replaces completely.
    fn covered(&self) -> Range<u64> {
        let first = self.start.div_ceil(PAGE_BYTES);
        first..(self.end / PAGE_BYTES).max(first)
    }

    /// Pages that the write touches.
    fn touched(&self) -> Range<u64> {
        self.start / PAGE_BYTES..self.end.div_ceil(PAGE_BYTES)
    }

    /// Pages of holes that the write touches.
    fn new_pages(&self, runs: &[ChunkRun]) -> u64 {
        let touched = self.touched();
        let holes = runs.iter().filter(|(_, _, data)| data.is_none());
        holes.map(|&(at, len, _)| (at + len).min(touched.end).saturating_sub(at.max(touched.start))).sum()
    }

    /// Pages that get a new place: mapped ones and written ones.
    fn needed(&self, runs: &[ChunkRun]) -> Vec<Range<u64>> {
        let touched = self.touched();
        let mut out: Vec<Range<u64>> = Vec::new();
        for &(at, len, data) in runs {
            let part = match data {
                Some(_) => at..at + len,
                None => correct!(
                    at.max(touched.start)..(at + len).min(touched.end),
                    Bug::CopyFillsHoles => at..at + len
                ),
            };
            match out.last_mut() {
                Some(last) if last.end == part.start => last.end = part.end.max(part.start),
                _ if part.start < part.end => out.push(part),
                _ => {}
            }
        }
        out
    }

    /// Sources of the pages of `range`.
    fn sources(&self, runs: &[ChunkRun], range: Range<u64>) -> Vec<(u64, OldContents)> {
        let covered = self.covered();
        let mut out: Vec<(u64, OldContents)> = Vec::new();
        for &(at, len, data) in runs {
            let (from, to) = (at.max(range.start), (at + len).min(range.end));
            let cuts = [from, covered.start.clamp(from, to.max(from)), covered.end.clamp(from, to.max(from)), to];
            for pair in cuts.windows(2).filter(|pair| pair[0] < pair[1]) {
                let old = match data {
                    _ if covered.contains(&pair[0]) => OldContents::Covered,
                    Some(addr) => OldContents::At(PageAddr(addr.0 + pair[0] - at)),
                    None => OldContents::Hole,
                };
                out.push((pair[1] - pair[0], old));
            }
        }
        out
    }
}

/// Merges contiguous runs.
fn joined(runs: Vec<(u64, OldContents)>) -> Vec<(u64, OldContents)> {
    let mut out: Vec<(u64, OldContents)> = Vec::with_capacity(runs.len());
    for (len, old) in runs {
        match (out.last_mut(), old) {
            (Some((before, OldContents::At(addr))), OldContents::At(next)) if next.0 == addr.0 + *before => {
                *before += len
            }
            (Some((before, OldContents::Hole)), OldContents::Hole)
            | (Some((before, OldContents::Covered)), OldContents::Covered) => *before += len,
            _ => out.push((len, old)),
        }
    }
    out
}

/// Merges reads that are separated by a short covered stretch, if what lies between them is that stretch.
fn read_through(runs: Vec<(u64, OldContents)>) -> Vec<(u64, OldContents)> {
    let mut out: Vec<(u64, OldContents)> = Vec::with_capacity(runs.len());
    for (len, old) in runs {
        if let (OldContents::At(next), [.., (before, OldContents::At(addr)), (gap, OldContents::Covered)]) =
            (old, &mut out[..])
            && *gap <= READ_THROUGH_PAGES
            && next.0 == addr.0 + *before + *gap
        {
            *before += *gap + len;
            out.pop();
            continue;
        }
        out.push((len, old));
    }
    out
}

impl<D: Device> Volume<D> {
    /// Writes a plan that has copies, and maps it. Leaves the write queue when all of it was submitted.
    pub(super) async fn write_copying(
        &self,
        queued: QueuedWrite<Buf>,
        work: &mut PendingWrite,
        buf: Buf,
    ) -> (Result<()>, Buf) {
        let own = buf.len();
        let bytes = Rc::new(self.with_merged(work, buf));
        let parts = self.start_copies(&work.plan, &bytes);
        give_followers(&queued, work, &parts);
        let copies = self.live.begin_break(parts, &queued, work.plan.end() * PAGE_BYTES);
        let written = correct!(
            self.write_uncopied(work, &bytes).await,
            Bug::CopyMappedBeforeWritten => self.publish(&work.plan).await.and(self.write_uncopied(work, &bytes).await)
        );
        for part in &copies.parts {
            part.ticket.wait_submitted().await;
        }
        queued.submitted(&work.merged);
        let copied = self.await_copies(work, &copies).await;
        let result = match written.and(copied) {
            Ok(()) => correct!(self.publish(&work.plan).await, Bug::CopyMappedBeforeWritten => Ok(())),
            Err(e) => correct!(
                Err(e),
                Bug::CancelledCopyMapped => match work.plan.copies.len() {
                    0 | 1 => Err(e),
                    _ => self.publish(&work.plan).await.and(Err(e)),
                }
            ),
        };
        self.live.end_break(&copies, result.clone());
        let mut buf = Rc::try_unwrap(bytes).unwrap_or_else(|shared| Buf::copy_of(&shared));
        buf.set_len(own);
        (result, buf)
    }

    /// The client's bytes followed by those of the merged writes.
    fn with_merged(&self, work: &PendingWrite, buf: Buf) -> Buf {
        if work.merged.is_empty() {
            return buf;
        }
        let more: usize = work.merged.iter().map(|taken| taken.with_payload(|b| b.len())).sum();
        let mut all = self.store.device.buffer(buf.len() + more);
        let mut at = buf.len();
        all[..at].copy_from_slice(&buf);
        for taken in &work.merged {
            at += taken.with_payload(|b| {
                all[at..at + b.len()].copy_from_slice(b);
                b.len()
            });
        }
        all
    }

    /// Writes what is not copied: pieces in place, and covered chunks.
    async fn write_uncopied(&self, work: &PendingWrite, bytes: &Buf) -> Result<()> {
        if work.plan.segments.is_empty() && work.plan.partials.is_empty() {
            return Ok(());
        }
        let pages = self.compose(work, bytes).await?;
        // The copies hold the client's buffer until they end.
        let (rest, segments) = self.assemble(work, &pages, bytes, &[]);
        self.store.counters.data_writes.add(&segments);
        let (result, _) = self.store.device.write(rest, segments, false).await;
        self.device_error(work.offset, result)
    }

    /// Starts the copies of `plan`; `bytes` is the data from its start on.
    fn start_copies(&self, plan: &WritePlan, bytes: &Rc<Buf>) -> Vec<CopyPart> {
        let (mut parts, group) = (Vec::with_capacity(plan.copies.len()), JobGroup::default());
        for copy in &plan.copies {
            let range = copy.range();
            let (from, to) = (range.start.max(plan.start), range.end.min(plan.end));
            let given = (from < to).then(|| ProvidedBytes {
                at: from - range.start,
                range: (from - plan.start) as usize..(to - plan.start) as usize,
                bytes: bytes.clone(),
            });
            let ticket =
                self.store.copier.submit(&self.activity.copies, self.job(copy, &group), given.into_iter().collect());
            parts.push(CopyPart { range, ticket });
        }
        parts
    }

    /// Counts each run as one request, although sub-jobs split it. Where the device cloned, counts what was
    /// read and written besides.
    fn count_copy(&self, copy: &ChunkCopy, moved: Moved) {
        let counters = &self.store.counters;
        if moved.offloaded > 0 {
            let both = [(&counters.data_reads, moved.read), (&counters.data_writes, moved.written)];
            both.iter().filter(|(_, bytes)| *bytes > 0).for_each(|(count, bytes)| count.add_one(*bytes));
            return;
        }
        counters.data_writes.add_one(copy.pages() * PAGE_BYTES);
        for &(len, old) in &copy.from {
            if matches!(old, OldContents::At(_)) {
                counters.data_reads.add_one(len * PAGE_BYTES);
            }
        }
    }

    fn job(&self, copy: &ChunkCopy, group: &JobGroup) -> Job<CachedDevice<D>> {
        let place = |page: PageAddr| Place { device: self.store.device.clone(), offset: page.offset() };
        let target = |page: PageAddr| {
            correct!(
                place(page),
                Bug::SharedCacheKeepsCopied => Place { device: self.store.device.unseen().clone(), ..place(page) }
            )
        };
        let source = |&(len, old): &(u64, OldContents)| {
            let from = match old {
                OldContents::At(page) => CopySource::Device(place(page)),
                OldContents::Hole => correct!(CopySource::Zeroes, Bug::CopyFillsHoles => CopySource::Given),
                OldContents::Covered => CopySource::Given,
            };
            Piece { len: len * PAGE_BYTES, from }
        };
        let (first, pages) = (copy.at, copy.pages());
        Job {
            source: copy.from.iter().map(source).collect(),
            destinations: smallvec![target(copy.to)],
            near: first.block().saturating_sub(1)..VirtualPage(first.0 + pages - 1).block() + 2,
            group: group.clone(),
            checksums: Vec::new(),
            hold: None,
        }
    }

    /// Waits for all copies of a write. If one failed, the others are discarded.
    async fn await_copies(&self, work: &PendingWrite, copies: &InflightBreak) -> Result<()> {
        let mut result = Ok(());
        for (part, copy) in copies.parts.iter().zip(&work.plan.copies) {
            let done = part.ticket.wait_done().await;
            self.count_copy(copy, part.ticket.moved());
            let Err(error) = done else { continue };
            let at = part.range.start;
            let what = |doing| format!("{doing} the chunk at {at} of {} to break it", self.shown_name());
            let error = match error {
                CopyError::Read(e) => Error::io(what("reading"), e),
                CopyError::Write(e) => Error::io(what("writing a copy of"), e),
                CopyError::Cancelled => Error::new(ErrorKind::Io, what("giving up the copy of")),
            };
            if result.is_ok() {
                result = Err(error);
                copies.parts.iter().for_each(|other| other.ticket.cancel());
            }
        }
        result
    }
}

/// Merges the writes queued directly behind, up to the end of the last copy.
fn give_followers(queued: &QueuedWrite<Buf>, work: &mut PendingWrite, parts: &[CopyPart]) {
    let plan = &work.plan;
    let Some(last) = parts.last().filter(|last| plan.end.is_multiple_of(PAGE_BYTES) && last.range.contains(&plan.end))
    else {
        return;
    };
    let (mut at, had) = (plan.end, work.merged.len());
    let limit = plan.end().next_multiple_of(BLOCK_PAGES).min(last.range.end / PAGE_BYTES);
    queued.merge_followers(&mut work.merged, plan.end(), limit, is_mergeable);
    for taken in &work.merged[had..] {
        let bytes = Rc::new(taken.with_payload(|b| Buf::copy_of(b)));
        let len = bytes.len();
        let given = last.ticket.give(ProvidedBytes { at: at - last.range.start, range: 0..len, bytes });
        debug_assert!(given, "nothing of a copy that has just begun is written");
        at += len as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_that_go_on_are_one() {
        let at = |page| OldContents::At(PageAddr(page));
        let runs = vec![
            (2, at(5)),
            (3, at(7)),
            (1, at(11)),
            (1, OldContents::Hole),
            (1, OldContents::Hole),
            (4, OldContents::Covered),
        ];
        assert_eq!(joined(runs), [(5, at(5)), (1, at(11)), (2, OldContents::Hole), (4, OldContents::Covered)]);
    }

    #[test]
    fn what_a_write_covers_is_read_only_where_that_saves_a_request() {
        let at = |page| OldContents::At(PageAddr(page));
        let short = vec![(4, at(100)), (2, OldContents::Covered), (10, at(106))];
        assert_eq!(read_through(short), [(16, at(100))]);
        let long = vec![(4, at(100)), (17, OldContents::Covered), (10, at(121))];
        assert_eq!(read_through(long.clone()), long);
        let elsewhere = vec![(4, at(100)), (2, OldContents::Covered), (10, at(500))];
        assert_eq!(read_through(elsewhere.clone()), elsewhere);
        let twice = vec![(1, at(10)), (1, OldContents::Covered), (1, at(12)), (1, OldContents::Covered), (1, at(14))];
        assert_eq!(read_through(twice), [(5, at(10))]);
        let edge = vec![(2, OldContents::Covered), (10, at(2)), (1, OldContents::Hole), (3, OldContents::Covered)];
        assert_eq!(read_through(edge.clone()), edge);
    }
}
