//! Range clone: pages of one volume shared into another.

use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::format::Record;
use crate::map::Stop;
use crate::planted::{Bug, planted};
use crate::pool::{Ended, Failure, STEP_PAGES};
use crate::sync::Hold;
use crate::types::{BLOCK_PAGES, PAGE_SIZE, VirtualPage};

use super::Volume;

const PAGE: u64 = PAGE_SIZE as u64;
/// Bytes copied at once where nothing can be shared.
const COPY: u64 = 1 << 20;

impl<D: Device> Volume<D> {
    /// Shares `len` bytes of `source` from `from` with this volume at `to`. Where both lie alike
    /// within their pages, whole pages are shared and only ragged edges copied; otherwise all is
    /// copied. Done in steps of at most a block: a crash in the middle leaves a part of it done, and
    /// every page shows what it did before or what it shall.
    pub async fn clone_range(&self, source: &Volume<D>, from: u64, to: u64, len: u64) -> Result<()> {
        source.check_range(from, len)?;
        self.check_write(to, len)?;
        if source.id == self.id && from < to + len && to < from + len {
            return Err(Error::new(ErrorKind::Invalid, "the ranges of a clone within one volume overlap"));
        }
        let first = to.next_multiple_of(PAGE);
        let end = (to + len) / PAGE * PAGE;
        if from % PAGE != to % PAGE || first >= end {
            return self.copy_range(source, from, to, len).await;
        }
        self.copy_range(source, from, to, first - to).await?;
        self.share_range(source, (from + (first - to)) / PAGE, first / PAGE, (end - first) / PAGE).await?;
        self.copy_range(source, from + (end - to), end, to + len - end).await
    }

    async fn copy_range(&self, source: &Volume<D>, from: u64, to: u64, len: u64) -> Result<()> {
        let mut done = 0;
        while done < len {
            let n = COPY.min(len - done);
            let (read, buf) = source.read_range(from + done, self.inner.device.buffer(n as usize)).await;
            if !planted(Bug::CopyErrorSwallowed) {
                read?;
            }
            self.write_range(to + done, buf, false).await.0?;
            done += n;
        }
        Ok(())
    }

    async fn share_range(&self, source: &Volume<D>, from: u64, to: u64, pages: u64) -> Result<()> {
        let mut done = 0;
        while done < pages {
            self.inner.admit().await?;
            let (f, t) = (VirtualPage(from + done), VirtualPage(to + done));
            let room = |p: VirtualPage| BLOCK_PAGES - p.index() as u64;
            let max = (pages - done).min(room(f)).min(room(t));
            let _alone = self.locks.lock(t.0..t.0 + max, Hold::Alone).await;
            let step = self.inner.edit(|meta| {
                if meta.space.available() < meta.checkpoint_pages() + STEP_PAGES {
                    return Err(Failure::Stop(Stop::NoSpace));
                }
                self.admits_sharing(meta, source, f, t, max)?;
                let len = meta.share_step(source.id, f, self.id, t, max)?;
                meta.journal.append(&Record::CloneRange { source: source.id, from: f, target: self.id, to: t, len });
                Ok(len)
            });
            match step.await {
                Ok(len) => done += len,
                Err(Ended::NoSpace) => return Err(crate::pool::no_space()),
                Err(Ended::Error(e)) => return Err(e),
            }
            // Writes in place of the source that were planned before end before others share the pages.
            self.inner.generations.barrier().await;
        }
        self.inner.commit_soon();
        self.inner.checkpoint_soon();
        Ok(())
    }
}
