//! Copying out what is about to be overwritten: copy durable in the pool → record durable.
//!
//! The pool's copier moves the bytes, in the order of their offsets, with its buffers and no faster than
//! its throttles and the origin's allow. One commit serves all who copy at the same time, and a sequential
//! writer copies many chunks at once. The records vouch for what was copied (see `journal::witness`), so
//! that one flush makes copies and records durable.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use crate::copier::{CopyError, Group, Job, MAX_DESTINATIONS, Piece, Place, Source};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::format::{Record, Witness, witness_sum};
use crate::map::Stop;
use crate::planted::{Bug, planted};
use crate::pool::{Ended, Failure, Inner, Meta, gone};
use crate::space::Want;
use crate::sync::{Hold, PlanGuard, RangeGuard};
use crate::types::{BLOCK_PAGES, Epoch, PAGE_SIZE, PageAddr, VirtualPage, VolumeId};

use super::full::Patience;
use super::{Origin, View};

const PAGE: u64 = PAGE_SIZE as u64;
/// Pages of the pool kept back for tables and for verbs that free space.
const RESERVE: u64 = 64;
/// How much, in what is copied ahead at most, is copied for those who wait before they are answered.
const SERVED: u64 = 2;
/// How long a write waits for others behind it where there were some before.
const GATHER: Duration = Duration::from_micros(300);

/// Pages of the origin on their way to a place in the pool.
struct Copy {
    sequence: VolumeId,
    at: VirtualPage,
    len: u64,
    to: PageAddr,
    /// What was written there, as far as the copier has told.
    witnesses: Rc<RefCell<Vec<Witness>>>,
}

/// How much is to be copied, as far as it has been counted.
struct Count {
    view: usize,
    next: VirtualPage,
    pages: u64,
}

/// What is to be copied, as far as it has been decided.
struct CopyPlan {
    views: Vec<View>,
    count: Count,
    /// The view whose copies are being planned, and the page planned next.
    view: usize,
    next: VirtualPage,
    start: VirtualPage,
    end: VirtualPage,
    copies: Vec<Copy>,
}

impl CopyPlan {
    fn new(views: Vec<View>, start: VirtualPage, end: VirtualPage) -> CopyPlan {
        let count = Count { view: 0, next: start, pages: 0 };
        CopyPlan { views, count, view: 0, next: start, start, end, copies: Vec::new() }
    }

    /// Refuses unless there is room for all of it: what is handed out in vain comes back with the next
    /// checkpoint only. An attempt that is repeated counts on from where the last one stopped: all that is
    /// kept of a large range may be more than the cache holds.
    fn admit(&mut self, meta: &mut Meta, origin: VolumeId, chunk_pages: u64) -> std::result::Result<(), Failure> {
        while let Some(&view) = self.views.get(self.count.view) {
            while let Some(len) = meta.unkept(origin, view, &mut self.count.next, self.end)? {
                self.count.pages += len;
                self.count.next.0 += len;
            }
            (self.count.view, self.count.next) = (self.count.view + 1, self.start);
        }
        let pages = self.count.pages;
        // Besides the data: pages of the ordered map, a path for each view and at worst one more per copy.
        let tables = 12 * self.views.len() as u64 + pages / chunk_pages;
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
            while let Some(len) = meta.unkept(origin, view, &mut self.next, self.end)? {
                let at = self.next;
                let pages = len.min(BLOCK_PAGES - at.index() as u64);
                let need = meta.checkpoint_pages() + RESERVE + pages;
                meta.space.ensure_known(need).map_err(Stop::from)?;
                // Nothing kept is ever shared.
                let (shared_at, write) = (Epoch(0), at.0..at.0 + len);
                let want = Want { volume: sequence, at, pages, chunk_pages, shared_at, write };
                let (to, len) = meta.space.alloc_data(want).map_err(Stop::from)?;
                self.add(sequence, at, len, to);
                self.next = VirtualPage(at.0 + len);
            }
            (self.view, self.next) = (self.view + 1, self.start);
        }
        Ok(())
    }

    /// What lies behind the last one on both sides goes along with it: what older snapshots keep cuts the
    /// range to pieces, but no copy has to be.
    fn add(&mut self, sequence: VolumeId, at: VirtualPage, len: u64, to: PageAddr) {
        let goes_on = |last: &&mut Copy| {
            last.sequence == sequence
                && (last.at.0 + last.len, last.to.0 + last.len) == (at.0, to.0)
                && (last.at.block(), last.to.block()) == (at.block(), to.block())
        };
        match self.copies.last_mut().filter(goes_on) {
            Some(last) => last.len += len,
            None => self.copies.push(Copy { sequence, at, len, to, witnesses: Rc::default() }),
        }
    }
}

impl<D: Device> Origin<D> {
    /// Keeps what the range holds for everybody who would lose it, and more for whoever writes on behind
    /// it. Without `patience` nobody waits for space.
    pub(super) async fn copy_out(
        &self,
        inner: &Rc<Inner<D>>,
        offset: u64,
        end: u64,
        mut patience: Option<&mut Patience>,
    ) -> std::result::Result<(), Ended> {
        let mut limit = inner.meta.borrow().protects(self.id).map_or(0, |(p, _)| p.copy_ahead);
        loop {
            let far = self.streams.borrow_mut().far(offset, end, limit);
            // Who comes behind meanwhile waits behind, and this behind those whose stream it goes on with: it may be kept
            // for by then.
            let reach = far.reach.next_multiple_of(self.chunk).min(self.size);
            let from = self.streams.borrow().begins(offset, limit);
            let turn = self.turns.lock(self.chunks(from, reach), Hold::Alone).await;
            if far.alone {
                inner.runtime.sleep(GATHER).await;
            }
            if self.first_lacking(inner, offset, end).await?.is_none() {
                return Ok(());
            }
            // Those before it are kept for as well: they may wait elsewhere.
            let from = self.streams.borrow().begins(offset, limit).max(from);
            let from = self.first_lacking(inner, from, end).await?.unwrap_or(offset);
            let far = self.streams.borrow_mut().far(offset, end, reach.saturating_sub(end));
            if far.alone {
                self.streams.borrow_mut().came_alone(end);
            }
            let far = far.end.next_multiple_of(self.chunk).min(reach);
            let mut held = self.locks.lock(self.chunks(from, far), Hold::Alone).await;
            inner.admit().await?;
            match self.copy_held(inner, from, far).await {
                Ok(()) => {
                    let _along = self.copy_what_is_written_again(inner, limit).await;
                    self.copy_for_who_came(inner, offset..end, (from, far), limit, &mut held).await;
                    if !planted(Bug::OriginBeforeRecord) {
                        inner.clone().commit().await.map_err(Ended::Error)?;
                    }
                    return Ok(());
                }
                Err(Ended::Error(e)) => return Err(Ended::Error(e)),
                // What is not asked for yet is not worth waiting for.
                Err(Ended::NoSpace) if limit > 0 => limit = 0,
                Err(Ended::NoSpace) => {
                    drop((held, turn));
                    let Some(patience) = patience.as_deref_mut() else { return Err(Ended::NoSpace) };
                    self.wait_for_space(inner, patience).await?;
                }
            }
        }
    }

    /// Copies on behind `done`, up to where the chunks are held, for those who have come behind the write in `range` while
    /// it was copied, so that one commit serves them, too. Whatever stands in the way, they meet it themselves.
    async fn copy_for_who_came(
        &self,
        inner: &Rc<Inner<D>>,
        range: Range<u64>,
        (from, mut done): (u64, u64),
        limit: u64,
        held: &mut RangeGuard,
    ) {
        loop {
            let asked = self.streams.borrow_mut().came(range.start, range.end, SERVED * limit);
            let far = asked.next_multiple_of(self.chunk).min(self.size);
            if far <= done || !held.widen(self.chunks(from, far)) || self.copy_held(inner, done, far).await.is_err() {
                return;
            }
            done = far;
        }
    }

    /// With the first copy for a new snapshot: copies the chunks that are written again and again. Whatever stands in the
    /// way, who writes them next meets it. They are held as long as what is returned is.
    async fn copy_what_is_written_again(&self, inner: &Rc<Inner<D>>, limit: u64) -> Vec<RangeGuard> {
        if limit == 0 {
            return Vec::new();
        }
        let views = inner.meta.borrow().views_to_keep(self.id);
        let chunks = self.again.borrow_mut().due(&views, self.chunk);
        let (mut held, mut copies) = (Vec::new(), Vec::new());
        for chunk in chunks {
            let (start, end) = (chunk * self.chunk, ((chunk + 1) * self.chunk).min(self.size));
            let lacks_a_copy = matches!(self.first_lacking(inner, start, end).await, Ok(Some(_)));
            if lacks_a_copy && let Some(guard) = self.locks.try_lock(chunk..chunk + 1, Hold::Alone) {
                held.push(guard);
                copies.push(Box::pin(self.copy_held(inner, start, end)));
            }
        }
        poll_fn(|cx| {
            copies.retain_mut(|copy| copy.as_mut().poll(cx).is_pending());
            if copies.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        held
    }

    /// Copies what lacks a copy, and notes it; the chunks are held alone. Nothing of it is durable yet.
    async fn copy_held(&self, inner: &Rc<Inner<D>>, offset: u64, end: u64) -> std::result::Result<(), Ended> {
        let chunk_pages = self.chunk / PAGE;
        let start = VirtualPage(offset / self.chunk * chunk_pages);
        let end = VirtualPage(end.div_ceil(self.chunk) * chunk_pages).min(VirtualPage(self.size.div_ceil(PAGE)));
        let guard = inner.generations.enter();
        let mut plan = CopyPlan::new(inner.meta.borrow().views_to_keep(self.id), start, end);
        inner.edit(|meta| plan.admit(meta, self.id, chunk_pages)).await?;
        if let Err(ended) = inner.edit(|meta| plan.advance(meta, self.id, chunk_pages)).await {
            let mut meta = inner.meta.borrow_mut();
            plan.copies.iter().for_each(|copy| meta.space.untake(copy.to, copy.len));
            return Err(ended);
        }
        if plan.copies.is_empty() {
            return Ok(());
        }
        let outcome = self.copy_and_publish(inner, &plan, guard).await;
        if outcome.is_err() {
            inner.meta.borrow_mut().space.abandon(plan.copies.iter().map(|copy| copy.len).sum());
        }
        outcome.map_err(Ended::Error)
    }

    async fn copy_and_publish(&self, inner: &Rc<Inner<D>>, plan: &CopyPlan, guard: PlanGuard) -> Result<()> {
        if planted(Bug::RecordBeforeCopy) {
            self.publish(inner, plan).await?;
            inner.clone().commit().await?;
            return self.transfer(inner, plan).await;
        }
        self.transfer(inner, plan).await?;
        self.publish(inner, plan).await?;
        drop(guard);
        Ok(())
    }

    /// Moves the bytes. What several snapshots need of the same pages is read once.
    async fn transfer(&self, inner: &Inner<D>, plan: &CopyPlan) -> Result<()> {
        let Some(client) = inner.meta.borrow().directory.get(self.id).map(|v| v.copies.client().clone()) else {
            return Err(gone());
        };
        let (mut left, mut tickets, group): (Vec<&Copy>, _, _) =
            (plan.copies.iter().collect(), Vec::new(), Group::default());
        while let Some(&first) = left.first() {
            let mut alike = Vec::new();
            left.retain(|copy| {
                let same = (copy.at, copy.len) == (first.at, first.len) && alike.len() < MAX_DESTINATIONS;
                if same {
                    alike.push(*copy);
                }
                !same
            });
            tickets.push((first.at, inner.copier.submit(&client, self.job(inner, &alike, &group), Vec::new())));
        }
        let mut result = Ok(());
        for (at, ticket) in tickets {
            let failed = match ticket.done().await {
                Err(CopyError::Read(e)) if !planted(Bug::OriginCopyErrorSwallowed) => {
                    Error::io(format!("reading the origin at {}", at.0 * PAGE), e)
                }
                Err(CopyError::Write(e)) => Error::io("writing the pool to keep a chunk", e),
                // It fell together with one that says why.
                Ok(()) | Err(_) => continue,
            };
            result = result.and(Err(failed));
        }
        result
    }

    /// One read of the origin, written to the places of all these copies.
    fn job(&self, inner: &Inner<D>, copies: &[&Copy], group: &Group) -> Job<D> {
        let (at, len) = (copies[0].at, copies[0].len);
        let real = ((at.0 + len) * PAGE).min(self.size) - at.0 * PAGE;
        let place = Place { device: self.device.clone(), offset: at.0 * PAGE };
        let mut source = vec![Piece { len: real, from: Source::Device(place) }];
        if real < len * PAGE {
            source.push(Piece { len: len * PAGE - real, from: Source::Zeroes });
        }
        let places = |copy: &&Copy| Place { device: inner.device.clone(), offset: copy.to.offset() };
        let told: Vec<_> = copies.iter().map(|copy| (copy.to, copy.witnesses.clone())).collect();
        let witness = move |at: u64, bytes: &[u8]| {
            for (to, witnesses) in &told {
                let to = PageAddr(to.0 + at / PAGE);
                let pages = (bytes.len() as u64 / PAGE) as u32;
                witnesses.borrow_mut().push(Witness { to, pages, sum: witness_sum(to, bytes) });
            }
        };
        Job {
            source,
            destinations: copies.iter().map(places).collect(),
            near: at.0..at.0 + len,
            group: group.clone(),
            witness: Some(Rc::new(witness)),
        }
    }

    /// From now on the copies are found. A snapshot deleted meanwhile needs none.
    async fn publish(&self, inner: &Inner<D>, plan: &CopyPlan) -> Result<()> {
        let chunk_pages = self.chunk / PAGE;
        for copy in &plan.copies {
            let witnesses = copy.witnesses.take();
            let known = witnesses.iter().map(|w| u64::from(w.pages)).sum::<u64>() == copy.len;
            let mut vouched = known.then_some(&witnesses[..]);
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
                        meta.journal
                            .append_copied(&Record::Keep { origin, sequence, at, len: len as u32, to }, vouched);
                        vouched = vouched.map(|_| &[][..]);
                        done += len;
                    }
                    Ok(())
                })
                .await?;
        }
        Ok(())
    }
}
