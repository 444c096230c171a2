//! Range clone: shares pages of one volume with another.

use crate::catalog::reserve_for;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::Record;
use crate::map::shared_level;
use crate::planted::correct;
use crate::space::Need;
use crate::store::{EditError, no_space_error};
use crate::types::{BLOCK_PAGES, PAGE_BYTES, VirtualPage, VolumeId, entry_span};

use super::Volume;

/// Bytes copied at once where sharing is not possible.
const COPY_BYTES: u64 = 1 << 20;

impl<D: Device> Volume<D> {
    /// Shares `len` bytes of `source` from `from` with this volume at `to`. If both offsets are equal modulo
    /// the page size, whole pages are shared and only partial pages at the edges copied; otherwise all is
    /// copied. Each step is one map entry (a page, a block or a whole table): after a crash each page has its
    /// old or its new contents.
    ///
    /// # Errors
    /// `Invalid` for a range past the end of one of them, or for overlapping ranges of one volume, `ReadOnly`
    /// for a snapshot; and those of [changing](crate#errors).
    pub async fn clone_range(&self, source: &Volume<D>, from: u64, to: u64, len: u64) -> Result<()> {
        let cloned = self.clone_parts(source, from, to, len).await;
        let cloned = self.wait_process_safe(cloned).await;
        self.note_dirty();
        cloned
    }

    async fn clone_parts(&self, source: &Volume<D>, from: u64, to: u64, len: u64) -> Result<()> {
        source.check_range(from, len)?;
        self.check_write(to, len)?;
        if source.id == self.id && from < to + len && to < from + len {
            return Err(Error::new(ErrorKind::Invalid, "the ranges of a clone within one volume overlap"));
        }
        let first = to.next_multiple_of(PAGE_BYTES);
        let end = (to + len) / PAGE_BYTES * PAGE_BYTES;
        let through = self.has_backing() || source.has_backing();
        if from % PAGE_BYTES != to % PAGE_BYTES || first >= end || through {
            return self.copy_range(source, from, to, len).await;
        }
        self.copy_range(source, from, to, first - to).await?;
        self.share_range(source, (from + (first - to)) / PAGE_BYTES, first / PAGE_BYTES, (end - first) / PAGE_BYTES)
            .await?;
        self.copy_range(source, from + (end - to), end, to + len - end).await
    }

    async fn copy_range(&self, source: &Volume<D>, from: u64, to: u64, len: u64) -> Result<()> {
        let mut done = 0;
        while done < len {
            let n = COPY_BYTES.min(len - done);
            let (read, buf) = source.read_range(from + done, self.store.device.buffer(n as usize)).await;
            correct!(read?, Bug::CopyErrorSwallowed => ());
            self.write_range(to + done, buf, false, false).await.0?;
            done += n;
        }
        Ok(())
    }

    async fn share_range(&self, source: &Volume<D>, from: u64, to: u64, pages: u64) -> Result<()> {
        let mut done = 0;
        while done < pages {
            self.store.wait_below_dirty_limit().await?;
            let (f, t) = (VirtualPage(from + done), VirtualPage(to + done));
            let max = self.step(source, f, t, pages - done);
            let _alone = self.lock_behind_writes(t.0..t.0 + max).await;
            // The volume may have been resized, and its map have another height.
            self.check_write(t.0 * PAGE_BYTES, (pages - done) * PAGE_BYTES)?;
            if self.step(source, f, t, pages - done) != max {
                continue;
            }
            let step = self.store.retry_on_miss(|meta| {
                let _ = reserve_for(meta, self.id, Need::Step)?;
                self.check_quota_for_sharing(meta, source, f, t, max)?;
                let dead = VolumeId(meta.next_id);
                let len = meta.share_step(source.id, f, self.id, t, max, dead)?;
                let (source, target) = (source.id, self.id);
                meta.journal.append(&Record::CloneRange { source, from: f, target, to: t, len, dead });
                Ok(len)
            });
            match step.await {
                Ok(len) => done += len,
                Err(EditError::NoSpace) => return Err(no_space_error()),
                Err(EditError::Error(e)) => return Err(e),
            }
            // Planned writes in place to the source end before its pages are shared.
            self.store.generations.barrier().await;
        }
        if from == 0 && to == 0 && pages >= source.size().div_ceil(PAGE_BYTES) {
            self.hooks.note_cloned(&self.store.meta.borrow(), source.id, self.id);
        }
        self.hooks.reap_soon();
        self.store.commit_soon();
        self.store.checkpoint_soon();
        Ok(())
    }

    /// Most pages that the next step may change: one entry of the highest level at which both sides are
    /// aligned, or up to the end of a virtual block of either.
    fn step(&self, source: &Volume<D>, from: VirtualPage, to: VirtualPage, pages: u64) -> u64 {
        let meta = self.store.meta.borrow();
        let room = |p: VirtualPage| BLOCK_PAGES - p.index() as u64;
        match shared_level(source.record(&meta), from, self.record(&meta), to, pages) {
            Some(level) => entry_span(level),
            None => pages.min(room(from)).min(room(to)),
        }
    }
}
