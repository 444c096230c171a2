//! Making holes: TRIM and WRITE ZEROES.

use crate::catalog::{Failure, reserve_for};
use crate::device::{Buf, Device};
use crate::error::Result;
use crate::format::Record;
use crate::map::{Stop, lookup};
use crate::planted::correct;
use crate::space::Need;
use crate::store::{EditError, no_space_error};
use crate::types::{PAGE_BYTES, VirtualPage};

use super::Volume;
use super::backing::Backing;

impl<D: Device> Volume<D> {
    pub(super) async fn discard_range(&self, offset: u64, len: u64) -> Result<()> {
        self.check_write(offset, len)?;
        if self.has_backing() {
            // A hole would show the backing.
            return Ok(());
        }
        let (first, end) = (offset.div_ceil(PAGE_BYTES), self.whole_end(offset + len));
        match self.unmap(first, end).await {
            Err(EditError::NoSpace) | Ok(()) => Ok(()),
            Err(EditError::Error(e)) => Err(e),
        }
    }

    pub(super) async fn zero_range(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        self.check_write(offset, len)?;
        match self.backing() {
            Backing::None => {}
            Backing::Origin(origin) => return origin.write_zeroes(&self.store, offset, len, fua).await,
            Backing::Snapshot(..) => {
                self.write_zeroes_with_backing(offset, len).await?;
                return if fua { self.flush().await } else { Ok(()) };
            }
        }
        let stop = offset + len;
        let (first, end) = (offset.div_ceil(PAGE_BYTES), self.whole_end(stop));
        if first >= end {
            self.zero_edge(offset, stop).await?;
        } else {
            self.zero_edge(offset, first * PAGE_BYTES).await?;
            self.zero_edge((end * PAGE_BYTES).min(stop), stop).await?;
            self.unmap(first, end).await.map_err(|ended| match ended {
                EditError::NoSpace => no_space_error(),
                EditError::Error(e) => e,
            })?;
        }
        if fua { self.commit().await } else { Ok(()) }
    }

    /// First page that does not end at or before `stop`; the last page of a volume counts as whole.
    fn whole_end(&self, stop: u64) -> u64 {
        if stop == self.size() { stop.div_ceil(PAGE_BYTES) } else { stop / PAGE_BYTES }
    }

    async fn zero_edge(&self, from: u64, to: u64) -> Result<()> {
        if from >= to {
            return Ok(());
        }
        let extents = self.extents(from, to - from).await?;
        if extents.iter().all(|e| !e.data) {
            return Ok(());
        }
        self.write_range(from, Buf::zeroed((to - from) as usize), false, false).await.0
    }

    /// Zeroes the rest of the volume's last page.
    pub(crate) async fn zero_beyond_end(&self) -> Result<()> {
        let size = self.size();
        let rest = (size.next_multiple_of(PAGE_BYTES) - size) as usize;
        let last = VirtualPage(size / PAGE_BYTES);
        let mapped = self.store.retry_no_alloc(|meta| {
            let record = meta.directory.of_handle(self.id);
            Ok(lookup(&mut meta.tables, record, last, 1).map_err(Stop::from)?.data.is_some())
        });
        if rest == 0 || !mapped.await? {
            return Ok(());
        }
        self.write_stored(size, Buf::zeroed(rest), false).await.0
    }

    /// Unmaps pages `first..end` in steps of at most a virtual block.
    pub(super) async fn unmap(&self, first: u64, end: u64) -> std::result::Result<(), EditError> {
        if first >= end {
            return Ok(());
        }
        let held = correct!(first..end, Bug::DiscardIgnoresWriters => end..end);
        let _lock = self.lock_behind_writes(held).await;
        let mut at = first;
        let mut retried = false;
        while at < end {
            self.store.wait_below_dirty_limit().await.map_err(EditError::Error)?;
            self.store.check_writable().map_err(EditError::Error)?;
            let step = self.store.retry_on_miss(|meta| {
                let _ = reserve_for(meta, self.id, Need::Step)?;
                let (mut editor, record) = meta.editor_for(self.id).ok_or(Failure::Gone)?;
                let next = editor.unmap_step(record, VirtualPage(at), VirtualPage(end))?;
                meta.journal.append(&Record::Unmap { volume: self.id, at: VirtualPage(at), len: next.0 - at });
                Ok(next.0)
            });
            match step.await {
                Ok(next) => (at, retried) = (next, false),
                Err(EditError::NoSpace) if !retried => {
                    retried = true;
                    self.store.clone().checkpoint().await.map_err(EditError::Error)?;
                }
                Err(ended) => return Err(ended),
            }
        }
        self.store.commit_soon();
        self.store.checkpoint_soon();
        Ok(())
    }
}
