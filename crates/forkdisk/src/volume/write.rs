//! Writing: plan, write the data, publish the mappings, answer.

use smallvec::smallvec;

use crate::device::{Buf, Device, Segment, Segments};
use crate::error::{Error, Result};
use crate::format::Record;
use crate::planted::{Bug, planted};
use crate::pool::{Ended, WhenFull, no_space};
use crate::sync::{Hold, PlanGuard};
use crate::types::PAGE_SIZE;

use super::Volume;
use super::fault::{Partial, WritePlan};
use super::through::Under;

impl<D: Device> Volume<D> {
    /// Writes all of `buf` at `offset`. With `fua` it is durable when this returns.
    pub async fn write(&self, offset: u64, buf: Buf, fua: bool) -> (Result<()>, Buf) {
        if let Err(e) = self.check_write(offset, buf.len() as u64) {
            return (Err(e), buf);
        }
        if buf.is_empty() {
            return (Ok(()), buf);
        }
        let (result, buf) = match &self.under {
            Under::Itself(origin) => return origin.write(&self.inner, offset, buf, fua).await,
            Under::Snapshot(..) => self.write_over(offset, buf).await,
            Under::Nothing => self.write_locked(offset, buf).await,
        };
        if result.is_ok() && fua && !planted(Bug::FuaWithoutCommit) {
            return (self.inner.clone().commit().await, buf);
        }
        (result, buf)
    }

    pub(super) async fn write_locked(&self, offset: u64, buf: Buf) -> (Result<()>, Buf) {
        let page = PAGE_SIZE as u64;
        let range = offset / page..(offset + buf.len() as u64).div_ceil(page);
        let fresh = || WritePlan::new(offset, buf.len() as u64, self.inner.device.block_size());
        let mut plan = fresh();
        let mut hold = Hold::Shared;
        let (lock, guard) = loop {
            let in_place = |plan: &mut WritePlan| plan.is_in_place(&mut self.inner.meta.borrow_mut(), self.id);
            if hold == Hold::Shared && !in_place(&mut plan) {
                hold = Hold::Alone;
            }
            let (lock, waited) = match self.locks.try_lock(range.clone(), hold) {
                Some(lock) => (lock, false),
                None => (self.locks.lock(range.clone(), hold).await, true),
            };
            let lock = (!planted(Bug::LockReleasedEarly)).then_some(lock);
            let guard = self.inner.generations.enter();
            // Judged again after a wait: whoever held the range meanwhile may have changed it.
            if waited {
                plan = fresh();
            }
            if hold == Hold::Alone || !waited || in_place(&mut plan) {
                break (lock, guard);
            }
        };
        let guard = match hold {
            // Planned as a whole, and it needs nothing. A new plan could need pages, which the shared
            // lock does not allow.
            Hold::Shared => guard,
            Hold::Alone => match self.plan(&mut plan, guard, &fresh).await {
                Ok(guard) => guard,
                Err(e) => return (Err(e), buf),
            },
        };
        let early = planted(Bug::MappedBeforeWritten);
        if early && let Err(e) = self.publish(&plan).await {
            return (Err(e), buf);
        }
        let (written, buf) = self.put(offset, &plan, buf).await;
        let result = match written {
            Ok(()) if !early => self.publish(&plan).await,
            Err(e) if planted(Bug::FailedWritePublished) => self.publish(&plan).await.and(Err(e)),
            other => other,
        };
        drop((guard, lock));
        self.inner.commit_soon();
        self.inner.checkpoint_soon();
        (result, buf)
    }

    /// Completes `plan`, waiting for space if need be. Never holds a plan while it waits.
    async fn plan(&self, plan: &mut WritePlan, guard: PlanGuard, fresh: &impl Fn() -> WritePlan) -> Result<PlanGuard> {
        let mut guard = Some(guard);
        let mut waited = false;
        let mut emptied = 0;
        loop {
            if guard.is_none() {
                self.inner.admit().await?;
                guard = Some(self.inner.generations.enter());
                *plan = fresh();
            }
            if self.inner.is_overdue() {
                guard = None;
                continue;
            }
            match self.inner.edit(|meta| plan.advance(meta, self.id)).await {
                Ok(()) => return Ok(guard.take().expect("entered above")),
                Err(Ended::Error(e)) => return Err(e),
                Err(Ended::NoSpace) if planted(Bug::FullLeavesHalf) => self.publish(plan).await?,
                Err(Ended::NoSpace) => {}
            }
            guard = None;
            self.inner.check_writable()?;
            // What was given up comes back with a checkpoint; tables it replaces with one more.
            if emptied < 2 && self.inner.has_pending_space() {
                emptied += 1;
                self.inner.clone().checkpoint().await?;
                continue;
            }
            self.inner.full.set(true);
            match self.inner.options.when_full {
                WhenFull::Wait(time) if !waited => {
                    waited = true;
                    emptied = 0;
                    self.inner.wait_for_space(time).await;
                }
                _ => return Err(no_space()),
            }
        }
    }

    /// Writes the data. Nothing of it is visible before it is published, except in place.
    async fn put(&self, offset: u64, plan: &WritePlan, buf: Buf) -> (Result<()>, Buf) {
        let mut pages = Vec::with_capacity(plan.partials.len());
        for partial in &plan.partials {
            match self.complete(partial, &buf).await {
                Ok(page) => pages.push((partial, page)),
                Err(e) => return (Err(e), buf),
            }
        }
        let device = &self.inner.device;
        // All are submitted before the first is waited for.
        let copy = self.realigned(&plan.segments, &buf);
        let ragged: Vec<_> = pages
            .into_iter()
            .map(|(p, page)| {
                device.write(page, smallvec![Segment { offset: p.to.offset(), at: 0, len: PAGE_SIZE }], false)
            })
            .collect();
        let (mut result, buf) = match copy {
            Some((copy, segments)) => (device.write(copy, segments, false).await.0, buf),
            None if plan.segments.is_empty() => (Ok(()), buf),
            None => device.write(buf, plan.segments.clone(), false).await,
        };
        for page in ragged {
            let (outcome, _) = page.await;
            result = result.and(outcome);
        }
        (result.map_err(|e| Error::io(format!("writing {} at {offset}", self.name()), e)), buf)
    }

    /// A copy of what `segments` take from `buf`, at places that suit the device; `None` if those in
    /// `buf` do. A write that begins within a device block has its whole pages at odd places.
    fn realigned(&self, segments: &Segments, buf: &Buf) -> Option<(Buf, Segments)> {
        let block = self.inner.device.block_size();
        let (first, last) = (segments.first()?, segments.last()?);
        if first.at.is_multiple_of(block) {
            return None;
        }
        let (from, to) = (first.at, last.at + last.len);
        let mut copy = self.inner.device.buffer(to - from);
        copy.copy_from_slice(&buf[from..to]);
        Some((copy, segments.iter().map(|s| Segment { at: s.at - from, ..*s }).collect()))
    }

    /// The whole page of which a piece is written.
    async fn complete(&self, partial: &Partial, data: &[u8]) -> Result<Buf> {
        let mut page = self.inner.device.buffer(PAGE_SIZE);
        match partial.from {
            Some(from) => {
                let segment = Segment { offset: from.offset(), at: 0, len: PAGE_SIZE };
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

    /// Maps what was written to new pages.
    async fn publish(&self, plan: &WritePlan) -> Result<()> {
        for fault in &plan.faults {
            self.inner
                .look(|meta| {
                    meta.map(self.id, fault.at, fault.len, fault.to)?;
                    let len = fault.len as u32;
                    meta.journal.append(&Record::Map { volume: self.id, at: fault.at, len, to: fault.to });
                    Ok(())
                })
                .await?;
        }
        Ok(())
    }
}
