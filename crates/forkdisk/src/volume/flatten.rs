//! Flattening: a clone of an origin's snapshot gets pages of its own for everything that it reads from its
//! backing, and no longer depends on the snapshot.
//!
//! The backing never changes, and a volume with a backing never loses a page of its own. So one pass
//! suffices, and each part is a write of what could be read there before: it is ordered with other writers of
//! the same pages and changes nothing for readers. Pages of zeroes stay holes. The end is one journal record
//! behind those of all copies: after a crash the volume depends on the snapshot, or is independent.

use std::ops::Range;

use crate::catalog::{pages_of, reserve_for};
use crate::device::{Buf, Device};
use crate::error::Result;
use crate::format::Record;
use crate::map::{Stop, lookup};
use crate::planted::correct;
use crate::runtime::yield_now;
use crate::space::Need;
use crate::store::no_space_error;
use crate::sync::LockMode;
use crate::types::{BLOCK_PAGES, PAGE_BYTES, PAGE_SIZE, VirtualPage};

use super::Volume;
use super::backing::Backing;

/// Lock number, beyond all pages, held while a volume is flattened: one flatten at a time.
const FLATTEN_LOCK_INDEX: u64 = u64::MAX - 1;
/// Runs of the map looked up in one step.
const LOOKUPS_PER_STEP: usize = 256;

/// Result of flattening a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FlattenReport {
    /// Bytes copied.
    pub copied: u64,
    /// Whether the volume depends on no origin; false if it ended early.
    pub independent: bool,
}

impl<D: Device> Volume<D> {
    /// Makes the volume independent of its backing; see [`Pool::flatten`](crate::Pool::flatten).
    pub(crate) async fn flatten(&self, mut progress: impl FnMut(u64, u64) -> bool) -> Result<FlattenReport> {
        let _one = self.live.edges.lock(FLATTEN_LOCK_INDEX..FLATTEN_LOCK_INDEX + 1, LockMode::Exclusive).await;
        let mut report = FlattenReport::default();
        let Backing::Snapshot(_, _, below) = self.backing() else {
            // Another call flattened it.
            return Ok(FlattenReport { independent: true, ..report });
        };
        let bytes = (*below).min(self.size());
        let mut at = correct!(0, Bug::FlattenRecordFirst => record_first(self)?);
        while let Some(next) = self.next_backed_page(at, pages_of(bytes)).await? {
            if !progress((next * PAGE_BYTES).min(bytes), bytes) {
                self.store.clone().commit().await?;
                return Ok(report);
            }
            let client = &self.activity.copies;
            let goes_on = || progress((next * PAGE_BYTES).min(bytes), bytes);
            let Some(mut pace) = self.store.copier.pace(client, goes_on).await else {
                self.store.clone().commit().await?;
                return Ok(report);
            };
            let stride = self.store.copier.stride(client).map_or(BLOCK_PAGES, |bytes| bytes / PAGE_BYTES);
            at = pages_of(bytes).min((next / BLOCK_PAGES + 1) * BLOCK_PAGES).min(next + stride);
            report.copied += self.copy_from_backing(next..at, |read| pace.moved(read)).await?;
        }
        self.remove_backing().await?;
        report.independent = true;
        let _ = progress(bytes, bytes);
        Ok(report)
    }

    /// The first page in `at..end` that the volume does not have.
    async fn next_backed_page(&self, mut at: u64, end: u64) -> Result<Option<u64>> {
        while at < end {
            let (next, found) = self
                .store
                .retry_no_alloc(|meta| {
                    let record = meta.directory.of_handle(self.id);
                    let mut next = at;
                    for _ in 0..LOOKUPS_PER_STEP {
                        let run =
                            lookup(&mut meta.tables, record, VirtualPage(next), end - next).map_err(Stop::from)?;
                        if run.data.is_none() {
                            return Ok((next, true));
                        }
                        next += run.len;
                        if next >= end {
                            break;
                        }
                    }
                    Ok((next, false))
                })
                .await?;
            if found {
                return Ok(Some(next));
            }
            at = next;
            yield_now().await;
        }
        Ok(None)
    }

    /// Copies these pages of one virtual block from the backing; returns the bytes copied. `moved` gets the
    /// bytes read for it.
    async fn copy_from_backing(&self, pages: Range<u64>, mut moved: impl FnMut(u64)) -> Result<u64> {
        // Holds the pages like a write that completes them from the backing: no write comes in between.
        let _pages = correct!(
            Some(self.live.edges.lock(pages.clone(), LockMode::Exclusive).await),
            Bug::FlattenIgnoresWriters => None
        );
        let (mut at, mut copied) = (pages.start, 0);
        while let Some(first) = self.next_backed_page(at, pages.end).await? {
            at = self.next_own_page(first, pages.end).await?;
            let (offset, end) = (first * PAGE_BYTES, (at * PAGE_BYTES).min(self.size()));
            let (read, buf) = self.read_range(offset, self.store.device.buffer((end - offset) as usize)).await;
            read?;
            moved(end - offset);
            for piece in not_zero(&buf) {
                self.check_space_for(piece.len() as u64).await?;
                let mut part = self.store.device.buffer(piece.len());
                part.copy_from_slice(&buf[piece.clone()]);
                copied += part.len() as u64;
                self.write_stored(offset + piece.start as u64, part, false).await.0?;
            }
        }
        Ok(copied)
    }

    /// The first page in `at..end` that the volume has, else `end`.
    async fn next_own_page(&self, at: u64, end: u64) -> Result<u64> {
        let own = self.store.retry_no_alloc(|meta| {
            let record = meta.directory.of_handle(self.id);
            let mut next = at;
            while next < end {
                let run = lookup(&mut meta.tables, record, VirtualPage(next), end - next).map_err(Stop::from)?;
                if run.data.is_some() {
                    break;
                }
                next += run.len;
            }
            Ok(next)
        });
        own.await
    }

    /// Fails at once where a write would wait for space, since other requests wait for the locks held here.
    async fn check_space_for(&self, bytes: u64) -> Result<()> {
        let has_room = || reserve_for(&self.store.meta.borrow(), self.id, Need::Write(pages_of(bytes))).is_ok();
        if !has_room() && self.store.has_pending_space() {
            self.store.clone().checkpoint().await?;
        }
        if has_room() { Ok(()) } else { Err(no_space_error()) }
    }

    /// Removes the backing: the volume has pages for everything that it read from there.
    async fn remove_backing(&self) -> Result<()> {
        // Completions of pages from the backing have ended, and none begins.
        let edges = self.live.edges.lock(0..FLATTEN_LOCK_INDEX, LockMode::Exclusive).await;
        self.live.backing.stop_readers().await;
        let noted = self.store.note(|_| Ok((Record::Flatten { id: self.id }, ())));
        if let Err(error) = noted {
            self.live.backing.reopen();
            return Err(error);
        }
        drop(edges);
        self.store.clone().commit().await
    }
}

/// Records that the volume is independent; returns the first page to copy.
#[cfg(feature = "planted")]
fn record_first<D: Device>(volume: &Volume<D>) -> Result<u64> {
    volume.store.note(|_| Ok((Record::Flatten { id: volume.id }, ())))?;
    Ok(0)
}

/// Parts of `bytes` with other bytes than zeroes, in whole pages except for the last.
fn not_zero(bytes: &Buf) -> Vec<Range<usize>> {
    let mut parts: Vec<Range<usize>> = Vec::new();
    let mut at = 0;
    for page in bytes.chunks(PAGE_SIZE) {
        let range = at..at + page.len();
        at = range.end;
        if page.iter().all(|&byte| byte == 0) {
            continue;
        }
        match parts.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => parts.push(range),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_zeroes_are_left_out() {
        let mut bytes = vec![0; 5 * PAGE_SIZE + 512];
        assert!(not_zero(&Buf::copy_of(&bytes)).is_empty());
        [PAGE_SIZE, 2 * PAGE_SIZE + 1, 5 * PAGE_SIZE + 511].iter().for_each(|&at| bytes[at] = 1);
        let parts = not_zero(&Buf::copy_of(&bytes));
        assert_eq!(parts, [PAGE_SIZE..3 * PAGE_SIZE, 5 * PAGE_SIZE..5 * PAGE_SIZE + 512]);
    }
}
