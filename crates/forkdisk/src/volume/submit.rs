//! Writing the data of a planned write. Nothing is visible before it is published, except in place.

use std::future::Future;

use smallvec::smallvec;

use crate::device::{Buf, Device, IoResult, Segment, Segments, add_segment};
use crate::error::{Error, Result};
use crate::planted::correct;
use crate::sync::{MergedWrite, QueuedWrite};
use crate::types::PAGE_SIZE;

use super::Volume;
use super::fault::{Partial, WritePlan};
use super::pending_write::PendingWrite;

impl<D: Device> Volume<D> {
    /// Submits the data in ascending order, with the completed `pages`, leaves the write queue, and waits for
    /// the end.
    pub(super) async fn submit_planned(
        &self,
        queued: QueuedWrite<Buf>,
        work: &mut PendingWrite,
        pages: Vec<Buf>,
        buf: Buf,
    ) -> (Result<()>, Buf) {
        let counters = &self.store.counters;
        // The end of a merged request is that of the latest write.
        let more = if work.merged.is_empty() { work.more } else { self.live.more.get() };
        let (result, buf) = match self.assembled(work, &pages, &buf) {
            Some((whole, segments)) => {
                counters.data_writes.add(&segments);
                work.plan.checksum_data(&self.store.meta.borrow().journal, &whole, &segments);
                let write = self.submit(whole, segments, more);
                queued.submitted(&work.merged);
                (write.await.0, buf)
            }
            None => {
                let segments = work.plan.segments.clone();
                counters.data_writes.add(&segments);
                work.plan.checksum_data(&self.store.meta.borrow().journal, &buf, &segments);
                let write = self.submit(buf, segments, more);
                queued.submitted(&work.merged);
                write.await
            }
        };
        (self.device_error(work.offset, result), buf)
    }

    /// Submits a data write with the hint whether more writes follow.
    fn submit(&self, buf: Buf, segments: Segments, more: bool) -> impl Future<Output = IoResult> + 'static {
        let device = &self.store.device;
        device.cork(more);
        let write = device.write(buf, segments, false);
        // Writes of the engine itself are awaited: no further write follows.
        device.cork(false);
        write
    }

    /// Copies all data to one buffer, with its segments, if it cannot be written from `buf`: because pages
    /// were completed, writes were merged, or whole pages are not aligned in it.
    fn assembled(&self, work: &PendingWrite, pages: &[Buf], buf: &Buf) -> Option<(Buf, Segments)> {
        let WritePlan { segments, partials, .. } = &work.plan;
        let odd = segments.first().is_some_and(|s| !s.at.is_multiple_of(self.store.device.block_size()));
        if partials.is_empty() && work.merged.is_empty() && !odd {
            return None;
        }
        Some(self.assemble(work, pages, buf, &work.merged))
    }

    /// Lays the planned part of `own`, the data of the writes `along` behind it and the completed `pages`
    /// into a new buffer that starts at the first page; its segments are in ascending order.
    pub(super) fn assemble(
        &self,
        work: &PendingWrite,
        pages: &[Buf],
        own: &[u8],
        along: &[MergedWrite<Buf>],
    ) -> (Buf, Segments) {
        let WritePlan { segments, partials, .. } = &work.plan;
        let lead = (work.offset % PAGE_SIZE as u64) as usize;
        let len = (work.plan.end() - work.offset / PAGE_SIZE as u64) as usize * PAGE_SIZE;
        let mut whole = self.store.device.buffer(len);
        let mut at = lead + own.len();
        whole[lead..at].copy_from_slice(own);
        for taken in along {
            at += taken.with_payload(|more| {
                correct!(whole[at..at + more.len()].copy_from_slice(more), Bug::TakenAlongForgotten => ());
                more.len()
            });
        }
        let mut pieces: Vec<Segment> = segments.iter().map(|s| Segment { at: s.at + lead, ..*s }).collect();
        for (partial, page) in partials.iter().zip(pages) {
            let at = (lead + partial.at) / PAGE_SIZE * PAGE_SIZE;
            whole[at..at + PAGE_SIZE].copy_from_slice(page);
            pieces.push(Segment { offset: partial.to.offset(), at, len: PAGE_SIZE });
        }
        pieces.sort_unstable_by_key(|s| s.at);
        let mut segments = Segments::new();
        pieces.iter().for_each(|s| add_segment(&mut segments, s.offset, s.at, s.len));
        (whole, segments)
    }

    /// Reads and completes the pages of which only a part is written.
    pub(super) async fn compose(&self, work: &PendingWrite, data: &[u8]) -> Result<Vec<Buf>> {
        let mut pages = Vec::with_capacity(work.plan.partials.len());
        for partial in &work.plan.partials {
            pages.push(self.complete(partial, data).await?);
        }
        Ok(pages)
    }

    async fn complete(&self, partial: &Partial, data: &[u8]) -> Result<Buf> {
        let mut page = self.store.device.buffer(PAGE_SIZE);
        match partial.from {
            Some(from) => {
                let segment = Segment { offset: from.offset(), at: 0, len: PAGE_SIZE };
                self.store.counters.data_reads.add_one(PAGE_SIZE as u64);
                let (result, read) = self.store.device.read(page, smallvec![segment]).await;
                result.map_err(|e| Error::io(format!("reading {} to complete a page", self.shown_name()), e))?;
                page = read;
            }
            // The new page has old contents of another owner: write all of it, zeroes included.
            None => correct!(
                page.fill(0),
                Bug::ZeroFillSkipped => page = read_old(self, partial, page).await
            ),
        }
        page[partial.within..partial.within + partial.len].copy_from_slice(&data[partial.at..partial.at + partial.len]);
        Ok(page)
    }
}

/// Reads the old contents of the new page of `partial`.
#[cfg(feature = "planted")]
async fn read_old<D: Device>(volume: &Volume<D>, partial: &Partial, page: Buf) -> Buf {
    let segment = Segment { offset: partial.to.offset(), at: 0, len: PAGE_SIZE };
    volume.store.device.read(page, smallvec![segment]).await.1
}
