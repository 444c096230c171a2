//! Volumes whose data, or a part of it, lies in an origin: the origin itself, its snapshots, and clones of
//! those.

use std::rc::Rc;

use crate::catalog::{Catalog, ExceptionView, refuse_during_rollback};
use crate::device::{Buf, Device};
use crate::error::{Error, ErrorKind, Result};
use crate::format::VolumeState;
use crate::origin::{Origin, Origins};
use crate::sync::LockMode;
use crate::types::{PAGE_BYTES, VolumeId};

use super::Volume;

/// Zeroes written at once, in bytes.
const ZERO_BUFFER_BYTES: u64 = 1 << 20;

/// What a volume reads where it has no page of its own.
pub(super) enum Backing<D: Device> {
    /// Zeroes.
    None,
    /// The origin itself, which has no pages in the pool.
    Origin(Rc<Origin<D>>),
    /// A snapshot of an origin, and its length in bytes.
    Snapshot(Rc<Origin<D>>, ExceptionView, u64),
}

impl<D: Device> Clone for Backing<D> {
    fn clone(&self) -> Self {
        match self {
            Backing::None => Backing::None,
            Backing::Origin(origin) => Backing::Origin(origin.clone()),
            Backing::Snapshot(origin, view, size) => Backing::Snapshot(origin.clone(), *view, *size),
        }
    }
}

impl<D: Device> Backing<D> {
    /// The backing of `id`; the device of its origin must be open.
    pub fn of(origins: &Origins<D>, meta: &Catalog, id: VolumeId) -> Result<Backing<D>> {
        let gone = || Error::new(ErrorKind::NotFound, "it has been deleted meanwhile");
        if meta.directory.get(id).ok_or_else(gone)?.record.state == VolumeState::Origin {
            return Ok(Backing::Origin(origins.attached(id)?));
        }
        match meta.view_of(id) {
            None => Ok(Backing::None),
            Some((origin, view)) => {
                // The origin may have grown since.
                let size = meta.backing_size(id).ok_or_else(gone)?;
                Ok(Backing::Snapshot(origins.attached(origin)?, view, size))
            }
        }
    }

    pub fn is_none(&self) -> bool {
        matches!(self, Backing::None)
    }
}

impl<D: Device> Volume<D> {
    /// The largest block size of the devices below, in bytes.
    pub(super) fn backing_block_size(&self) -> usize {
        let own = self.store.device.block_size();
        match &self.backing {
            Backing::None => own,
            Backing::Origin(origin) => origin.device.block_size(),
            Backing::Snapshot(origin, ..) => own.max(origin.device.block_size()),
        }
    }

    /// Refuses to change a snapshot while its origin is being rolled back to it; waits until the end of a
    /// rollback is durable, since after a crash it would continue.
    async fn refuse_during_rollback(&self) -> Result<()> {
        let Backing::Snapshot(origin, ..) = &self.backing else { return Ok(()) };
        origin.rollback_ended().await;
        let meta = self.store.meta.borrow();
        match meta.rollback(origin.id).is_some_and(|rollback| rollback.snapshot == self.id) {
            true => refuse_during_rollback(&meta, origin.id),
            false => Ok(()),
        }
    }

    /// Writes to a volume with a snapshot of an origin as backing: completes partial pages from the backing.
    pub(super) async fn write_with_backing(&self, offset: u64, buf: Buf, more: bool) -> (Result<()>, Buf) {
        if let Err(e) = self.refuse_during_rollback().await {
            return (Err(e), buf);
        }
        let (size, end) = (self.size(), offset + buf.len() as u64);
        let (first, last) = (offset / PAGE_BYTES, end.div_ceil(PAGE_BYTES));
        if offset.is_multiple_of(PAGE_BYTES) && (end.is_multiple_of(PAGE_BYTES) || end == size) {
            let _pages = self.live.edges.lock(first..last, LockMode::Shared).await;
            return self.write_stored(offset, buf, more).await;
        }
        let pages = self.live.edges.lock(first..last, LockMode::Exclusive).await;
        if self.live.backing.is_removed() {
            // Other writes no longer hold the pages that they complete.
            drop(pages);
            return self.write_stored(offset, buf, more).await;
        }
        let start = first * PAGE_BYTES;
        let wide = self.store.device.buffer(((last * PAGE_BYTES).min(size) - start) as usize);
        let (read, mut wide) = self.read(start, wide).await;
        if let Err(e) = read {
            return (Err(e), buf);
        }
        let at = (offset - start) as usize;
        wide[at..at + buf.len()].copy_from_slice(&buf);
        (self.write_stored(start, wide, more).await.0, buf)
    }

    /// Writes zeroes that hide the backing.
    pub(super) async fn write_zeroes_with_backing(&self, offset: u64, len: u64) -> Result<()> {
        let mut done = 0;
        while done < len {
            let n = ZERO_BUFFER_BYTES.min(len - done);
            self.write_with_backing(offset + done, Buf::zeroed(n as usize), false).await.0?;
            done += n;
        }
        Ok(())
    }
}
