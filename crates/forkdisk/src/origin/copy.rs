//! Copying out what is about to be overwritten: copy durable in the pool → record durable.
//!
//! One commit serves all who copy at the same time, and a sequential writer copies many chunks at
//! once. Requests start in the order of their offsets.

use std::rc::Rc;

use smallvec::smallvec;

use crate::device::{Device, Segment, Segments};
use crate::error::{Error, Result};
use crate::format::Record;
use crate::map::Stop;
use crate::planted::{Bug, planted};
use crate::pool::{Ended, Failure, Inner, Meta};
use crate::space::Want;
use crate::sync::{Hold, PlanGuard, RangeGuard};
use crate::types::{BLOCK_PAGES, Epoch, PAGE_SIZE, PageAddr, VirtualPage, VolumeId};
use crate::volume::push;

use super::full::Patience;
use super::{Origin, View};

const PAGE: u64 = PAGE_SIZE as u64;
/// Bytes read by one request.
const WINDOW: u64 = 1 << 20;
/// Pages of the pool kept back for tables and for verbs that free space.
const RESERVE: u64 = 64;

/// Pages of the origin on their way to a place in the pool.
struct Copy {
    sequence: VolumeId,
    at: VirtualPage,
    len: u64,
    to: PageAddr,
}

/// What is to be copied, as far as it has been decided.
struct CopyPlan {
    views: Vec<View>,
    /// The view whose copies are being planned, and the page planned next.
    view: usize,
    next: VirtualPage,
    start: VirtualPage,
    end: VirtualPage,
    copies: Vec<Copy>,
}

impl CopyPlan {
    fn new(views: Vec<View>, start: VirtualPage, end: VirtualPage) -> CopyPlan {
        CopyPlan { views, view: 0, next: start, start, end, copies: Vec::new() }
    }

    /// Refuses unless there is room for all of it: what is handed out in vain comes back with the next
    /// checkpoint only.
    fn admit(&self, meta: &mut Meta, origin: VolumeId, chunk_pages: u64) -> std::result::Result<(), Failure> {
        let mut pages = 0;
        for &view in &self.views {
            let mut next = self.start;
            while let Some((at, len)) = meta.unkept(origin, view, next, self.end)? {
                pages += len;
                next = VirtualPage(at.0 + len);
            }
        }
        // Besides the data: pages of the ordered map, at worst a path per chunk and view.
        let tables = (12 + pages / chunk_pages) * self.views.len() as u64;
        match meta.space.available() < meta.checkpoint_pages() + RESERVE + tables + pages {
            true => Err(Failure::Stop(Stop::NoSpace)),
            false => Ok(()),
        }
    }

    /// Plans on from where the last attempt stopped.
    fn advance(&mut self, meta: &mut Meta, origin: VolumeId, chunk_pages: u64) -> std::result::Result<(), Failure> {
        while let Some(&view) = self.views.get(self.view) {
            let sequence = match view {
                View::Chained { from, .. } => from,
                View::Independent(id) => id,
            };
            while let Some((at, len)) = meta.unkept(origin, view, self.next, self.end)? {
                let pages = len.min(BLOCK_PAGES - at.index() as u64);
                let need = meta.checkpoint_pages() + RESERVE + pages;
                meta.space.ensure_known(need).map_err(Stop::from)?;
                // Nothing kept is ever shared.
                let (shared_at, write) = (Epoch(0), at.0..at.0 + len);
                let want = Want { volume: sequence, at, pages, chunk_pages, shared_at, write };
                let (to, len) = meta.space.alloc_data(want).map_err(Stop::from)?;
                self.copies.push(Copy { sequence, at, len, to });
                self.next = VirtualPage(at.0 + len);
            }
            (self.view, self.next) = (self.view + 1, self.start);
        }
        Ok(())
    }
}

impl<D: Device> Origin<D> {
    /// Keeps what the range holds for everybody who would lose it, and more for whoever writes on behind
    /// it. The chunks stay held, shared, at the place in the queue that this call had.
    pub(super) async fn copy_out(
        &self,
        inner: &Rc<Inner<D>>,
        offset: u64,
        end: u64,
        patience: &mut Patience,
    ) -> Result<RangeGuard> {
        let limit = inner.meta.borrow().protects(self.id).map_or(0, |(p, _)| p.copy_ahead);
        let mut ahead = self.streams.borrow_mut().ahead(limit);
        loop {
            let far = (end + ahead).next_multiple_of(self.chunk).min(self.size);
            let mut held = self.locks.lock(self.chunks(offset, far), Hold::Alone).await;
            inner.admit().await?;
            match self.copy_held(inner, offset, far).await {
                Ok(()) => {
                    held.share();
                    return Ok(held);
                }
                Err(Ended::Error(e)) => return Err(e),
                // What is not asked for yet is not worth waiting for.
                Err(Ended::NoSpace) if ahead > 0 => ahead = 0,
                Err(Ended::NoSpace) => {
                    drop(held);
                    self.wait_for_space(inner, patience).await?;
                }
            }
        }
    }

    /// Copies what lacks a copy; the chunks are held alone.
    async fn copy_held(&self, inner: &Rc<Inner<D>>, offset: u64, end: u64) -> std::result::Result<(), Ended> {
        let chunk_pages = self.chunk / PAGE;
        let start = VirtualPage(offset / self.chunk * chunk_pages);
        let end = VirtualPage(end.div_ceil(self.chunk) * chunk_pages).min(VirtualPage(self.size.div_ceil(PAGE)));
        let guard = inner.generations.enter();
        let mut plan = CopyPlan::new(inner.meta.borrow().views_to_keep(self.id), start, end);
        inner.edit(|meta| plan.admit(meta, self.id, chunk_pages)).await?;
        inner.edit(|meta| plan.advance(meta, self.id, chunk_pages)).await?;
        if plan.copies.is_empty() {
            return Ok(());
        }
        self.copy_and_publish(inner, plan, guard).await.map_err(Ended::Error)
    }

    async fn copy_and_publish(&self, inner: &Rc<Inner<D>>, plan: CopyPlan, guard: PlanGuard) -> Result<()> {
        if planted(Bug::RecordBeforeCopy) {
            self.publish(inner, &plan).await?;
            inner.clone().commit().await?;
            return self.transfer(inner, &plan).await;
        }
        self.transfer(inner, &plan).await?;
        self.publish(inner, &plan).await?;
        drop(guard);
        if planted(Bug::OriginBeforeRecord) {
            return Ok(());
        }
        inner.clone().commit().await
    }

    /// Moves the bytes: all reads start, then each write as soon as its read has ended.
    async fn transfer(&self, inner: &Inner<D>, plan: &CopyPlan) -> Result<()> {
        let mut reads = Vec::new();
        let mut at = plan.start.0;
        while at < plan.end.0 {
            let stop = (at + WINDOW / PAGE).min(plan.end.0);
            let within = |c: &&Copy| c.at.0 < stop && c.at.0 + c.len > at;
            let from = plan.copies.iter().filter(within).map(|c| c.at.0.max(at)).min();
            let to = plan.copies.iter().filter(within).map(|c| (c.at.0 + c.len).min(stop)).max();
            if let (Some(from), Some(to)) = (from, to) {
                let mut buf = inner.device.buffer(((to - from) * PAGE) as usize);
                let real = (to * PAGE).min(self.size) - from * PAGE;
                buf[real as usize..].fill(0);
                let segment = Segment { offset: from * PAGE, at: 0, len: real as usize };
                reads.push((from, to, self.device.read(buf, smallvec![segment])));
            }
            at = stop;
        }
        let mut writes = Vec::new();
        let mut result = Ok(());
        for (from, to, read) in reads {
            let (outcome, buf) = read.await;
            let outcome = outcome.map_err(|e| Error::io(format!("reading the origin at {}", from * PAGE), e));
            if !planted(Bug::OriginCopyErrorSwallowed) {
                result = result.and(outcome);
            }
            if result.is_ok() {
                writes.push(inner.device.write(buf, places(plan, from, to), false));
            }
        }
        for write in writes {
            let (outcome, _) = write.await;
            result = result.and(outcome.map_err(|e| Error::io("writing the pool to keep a chunk", e)));
        }
        result
    }

    /// From now on the copies are found. A snapshot deleted meanwhile needs none.
    async fn publish(&self, inner: &Inner<D>, plan: &CopyPlan) -> Result<()> {
        let chunk_pages = self.chunk / PAGE;
        for copy in &plan.copies {
            let mut done = 0;
            inner
                .look(|meta| {
                    while done < copy.len {
                        let chain = meta.directory.chain(self.id);
                        let lives = chain.is_some_and(|c| {
                            c.chained.contains(&copy.sequence) || c.independent.contains(&copy.sequence)
                        });
                        if !lives {
                            return Ok(());
                        }
                        let at = VirtualPage(copy.at.0 + done);
                        let len = (copy.len - done).min(chunk_pages - at.0 % chunk_pages);
                        let to = PageAddr(copy.to.0 + done);
                        meta.keep(self.id, copy.sequence, at, len, to)?;
                        let (origin, sequence) = (self.id, copy.sequence);
                        meta.journal.append(&Record::Keep { origin, sequence, at, len: len as u32, to });
                        done += len;
                    }
                    Ok(())
                })
                .await?;
        }
        Ok(())
    }
}

/// All places of the pool to which pages `from..to` of the origin go, of which a buffer holds just
/// those.
fn places(plan: &CopyPlan, from: u64, to: u64) -> Segments {
    let mut segments = Segments::new();
    for copy in &plan.copies {
        let (first, end) = (copy.at.0.max(from), (copy.at.0 + copy.len).min(to));
        if first < end {
            let place = PageAddr(copy.to.0 + first - copy.at.0).offset();
            push(&mut segments, place, ((first - from) * PAGE) as usize, ((end - first) * PAGE) as usize);
        }
    }
    segments
}
