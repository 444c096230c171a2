//! Writing a planned write's data. Nothing of it is visible before it is published, except in place.

use smallvec::smallvec;

use crate::device::{Buf, Device, Segment, Segments};
use crate::error::{Error, Result};
use crate::planted::{Bug, planted};
use crate::sync::Turn;
use crate::types::{PAGE_SIZE, PageAddr};

use super::Volume;
use super::fault::Partial;
use super::turn::Work;

impl<D: Device> Volume<D> {
    /// Submits the data, which includes the completed `pages`, gives up the turn, and waits for the end.
    pub(super) async fn put(
        &self,
        turn: Turn<Buf>,
        work: &Work,
        pages: Vec<(PageAddr, Buf)>,
        buf: Buf,
    ) -> (Result<()>, Buf) {
        let (device, counters) = (&self.inner.device, &self.inner.counters);
        counters.data_writes.add(&work.plan.segments);
        pages.iter().for_each(|_| counters.data_writes.add_one(PAGE_SIZE as u64));
        let copy = self.copied(work, &buf);
        let one = |at: PageAddr| smallvec![Segment { offset: at.offset(), at: 0, len: PAGE_SIZE }];
        let ragged: Vec<_> = pages.into_iter().map(|(at, page)| device.write(page, one(at), false)).collect();
        // All are submitted before the first is waited for.
        let (mut result, buf) = match copy {
            Some((copy, segments)) => {
                let whole = device.write(copy, segments, false);
                turn.submitted(&work.along);
                (whole.await.0, buf)
            }
            None if work.plan.segments.is_empty() => {
                turn.submitted(&work.along);
                (Ok(()), buf)
            }
            None => {
                let whole = device.write(buf, work.plan.segments.clone(), false);
                turn.submitted(&work.along);
                whole.await
            }
        };
        for page in ragged {
            let (outcome, _) = page.await;
            result = result.and(outcome);
        }
        (self.explain(work.offset, result), buf)
    }

    /// The whole pages' data in a buffer of its own, and its segments there, if it cannot be written
    /// from `buf`: because others were taken along, or because a write that begins within a device
    /// block has its whole pages at odd places.
    fn copied(&self, work: &Work, buf: &Buf) -> Option<(Buf, Segments)> {
        let segments = &work.plan.segments;
        let (first, last) = (segments.first()?, segments.last()?);
        if work.along.is_empty() && first.at.is_multiple_of(self.inner.device.block_size()) {
            return None;
        }
        let from = first.at;
        let mut copy = self.inner.device.buffer(last.at + last.len - from);
        let own = buf.len().min(last.at + last.len);
        copy[..own - from].copy_from_slice(&buf[from..own]);
        let mut at = buf.len() - from;
        for taken in &work.along {
            at += taken.look(|more| {
                if !planted(Bug::TakenAlongForgotten) {
                    copy[at..at + more.len()].copy_from_slice(more);
                }
                more.len()
            });
        }
        Some((copy, segments.iter().map(|s| Segment { at: s.at - from, ..*s }).collect()))
    }

    /// The pages of which only pieces are written, as a whole.
    pub(super) async fn completed(&self, work: &Work, data: &[u8]) -> Result<Vec<(PageAddr, Buf)>> {
        let mut pages = Vec::with_capacity(work.plan.partials.len());
        for partial in &work.plan.partials {
            pages.push((partial.to, self.complete(partial, data).await?));
        }
        Ok(pages)
    }

    async fn complete(&self, partial: &Partial, data: &[u8]) -> Result<Buf> {
        let mut page = self.inner.device.buffer(PAGE_SIZE);
        match partial.from {
            Some(from) => {
                let segment = Segment { offset: from.offset(), at: 0, len: PAGE_SIZE };
                self.inner.counters.data_reads.add_one(PAGE_SIZE as u64);
                let (result, read) = self.inner.device.read(page, smallvec![segment]).await;
                result.map_err(|e| Error::io(format!("reading {} to complete a page", self.name()), e))?;
                page = read;
            }
            None if planted(Bug::ZeroFillSkipped) => {
                // Whatever lay in the new page: that is what the zeroes are for.
                let segment = Segment { offset: partial.to.offset(), at: 0, len: PAGE_SIZE };
                page = self.inner.device.read(page, smallvec![segment]).await.1;
            }
            None => page.fill(0),
        }
        page[partial.within..partial.within + partial.len].copy_from_slice(&data[partial.at..partial.at + partial.len]);
        Ok(page)
    }
}
