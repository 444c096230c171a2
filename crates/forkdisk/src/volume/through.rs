//! Volumes whose data, or a part of it, lies in an origin: the origin itself, its snapshots, and what
//! was cloned from them.

use std::cell::Cell;
use std::rc::Rc;

use crate::device::{Buf, Device};
use crate::error::{Error, ErrorKind, Result};
use crate::format::VolumeState;
use crate::origin::{Origin, View, refuse_rolling};
use crate::pool::{Inner, Meta};
use crate::sync::{Event, Hold};
use crate::types::{PAGE_SIZE, VolumeId};

use super::Volume;

const PAGE: u64 = PAGE_SIZE as u64;
/// Bytes of zeroes written at once.
const ZEROES: u64 = 1 << 20;

/// What lies under a volume's own pages.
pub(super) enum Under<D: Device> {
    /// Nothing: zeroes.
    Nothing,
    /// It is an origin, and has no pages of its own.
    Itself(Rc<Origin<D>>),
    /// An origin's snapshot of so many bytes.
    Snapshot(Rc<Origin<D>>, View, u64),
}

impl<D: Device> Clone for Under<D> {
    fn clone(&self) -> Self {
        match self {
            Under::Nothing => Under::Nothing,
            Under::Itself(origin) => Under::Itself(origin.clone()),
            Under::Snapshot(origin, view, size) => Under::Snapshot(origin.clone(), *view, *size),
        }
    }
}

impl<D: Device> Under<D> {
    /// What lies under `id`; its origin's device must be open.
    pub fn of(inner: &Inner<D>, meta: &Meta, id: VolumeId) -> Result<Under<D>> {
        let gone = || Error::new(ErrorKind::NotFound, "it has been deleted meanwhile");
        if meta.directory.get(id).ok_or_else(gone)?.record.state == VolumeState::Origin {
            return Ok(Under::Itself(inner.attached(id)?));
        }
        match meta.view_of(id) {
            None => Ok(Under::Nothing),
            Some((origin, view)) => {
                // The origin may have become longer since.
                let size = meta.shown_by(id).ok_or_else(gone)?;
                Ok(Under::Snapshot(inner.attached(origin)?, view, size))
            }
        }
    }

    pub fn is_nothing(&self) -> bool {
        matches!(self, Under::Nothing)
    }
}

/// How far a volume is with becoming independent of what it was cloned from.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Stage {
    /// What lies under it shows through where it has nothing of its own.
    #[default]
    Through,
    /// Whatever could show through is its own by now: nobody looks below any more. A hole would still show it
    /// after a crash.
    Complete,
    /// Nothing lies under it.
    Ended,
}

/// Whether what a volume was cloned from still lies under it, and who is looking there.
#[derive(Default)]
pub(crate) struct Rest {
    stage: Cell<Stage>,
    lookers: Cell<usize>,
    left: Event,
}

/// Somebody who reads what lies under a volume.
pub(super) struct Looker<'a>(&'a Rest);

impl Drop for Looker<'_> {
    fn drop(&mut self) {
        self.0.lookers.set(self.0.lookers.get() - 1);
        if self.0.lookers.get() == 0 {
            self.0.left.notify();
        }
    }
}

impl Rest {
    pub(super) fn look(&self) -> Looker<'_> {
        self.lookers.set(self.lookers.get() + 1);
        Looker(self)
    }

    /// From now on nobody looks below; returns when the last who did has left.
    pub(super) async fn complete(&self) {
        self.stage.set(Stage::Complete);
        while self.lookers.get() > 0 {
            self.left.wait().await;
        }
    }

    /// It could not be made to last.
    pub(super) fn reopen(&self) {
        self.stage.set(Stage::Through);
    }

    /// Nothing lies under the volume.
    pub fn end(&self) {
        self.stage.set(Stage::Ended);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.stage.get() == Stage::Ended
    }
}

impl<D: Device> Volume<D> {
    /// What lies under the volume's own pages.
    pub(super) fn under(&self) -> &Under<D> {
        if self.rest.has_ended() { &Under::Nothing } else { &self.under }
    }

    /// What of it is to be looked at.
    pub(super) fn seen_below(&self) -> &Under<D> {
        if self.rest.stage.get() == Stage::Through { &self.under } else { &Under::Nothing }
    }

    /// The least that the devices below read and write at once, in bytes.
    pub(super) fn unit(&self) -> usize {
        let own = self.inner.device.block_size();
        match &self.under {
            Under::Nothing => own,
            Under::Itself(origin) => origin.device.block_size(),
            Under::Snapshot(origin, ..) => own.max(origin.device.block_size()),
        }
    }

    /// Refuses to change a snapshot that its origin is being rolled back to; waits until it is durable that this has
    /// ended: a crash before would bring back from it once more.
    async fn refuse_rolled(&self) -> Result<()> {
        let Under::Snapshot(origin, ..) = &self.under else { return Ok(()) };
        origin.rollback_ended().await;
        let meta = self.inner.meta.borrow();
        match meta.rolling(origin.id).is_some_and(|rolling| rolling.snapshot == self.id) {
            true => refuse_rolling(&meta, origin.id),
            false => Ok(()),
        }
    }

    /// Writes to a volume that shows through to an origin's snapshot: pages written in part are
    /// completed with what shows through.
    pub(super) async fn write_over(&self, offset: u64, buf: Buf) -> (Result<()>, Buf) {
        if let Err(e) = self.refuse_rolled().await {
            return (Err(e), buf);
        }
        let (size, end) = (self.size(), offset + buf.len() as u64);
        let (first, last) = (offset / PAGE, end.div_ceil(PAGE));
        if offset.is_multiple_of(PAGE) && (end.is_multiple_of(PAGE) || end == size) {
            let _pages = self.edges.lock(first..last, Hold::Shared).await;
            return self.write_locked(offset, buf).await;
        }
        let pages = self.edges.lock(first..last, Hold::Alone).await;
        if self.rest.has_ended() {
            // Others no longer hold the pages they complete.
            drop(pages);
            return self.write_locked(offset, buf).await;
        }
        let start = first * PAGE;
        let wide = self.inner.device.buffer(((last * PAGE).min(size) - start) as usize);
        let (read, mut wide) = self.read(start, wide).await;
        if let Err(e) = read {
            return (Err(e), buf);
        }
        let at = (offset - start) as usize;
        wide[at..at + buf.len()].copy_from_slice(&buf);
        (self.write_locked(start, wide).await.0, buf)
    }

    /// Zeroes that hide what shows through.
    pub(super) async fn write_zeroes_over(&self, offset: u64, len: u64) -> Result<()> {
        let mut done = 0;
        while done < len {
            let n = ZEROES.min(len - done);
            self.write_over(offset + done, Buf::zeroed(n as usize)).await.0?;
            done += n;
        }
        Ok(())
    }
}
