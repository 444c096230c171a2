//! Planning which pages are copied for which snapshots before they are overwritten, and to which places. If there is no
//! space, the origin's policy decides: nothing is written without its copy.

use std::rc::Rc;
use std::time::Duration;

use crate::catalog::{Catalog, ExceptionView, Failure, exceptions};
use crate::copier::DataChecksums;
use crate::device::Device;
use crate::error::Result;
use crate::format::{OriginFull, Record};
use crate::map::Stop;
use crate::planted::correct;
use crate::runtime::LocalFuture;
use crate::space::{AllocRequest, Need, alloc};
use crate::store::{PoolEvent, Retry, Store, events, no_space_error};
use crate::types::{BLOCK_PAGES, Epoch, PAGE_BYTES, PageAddr, VirtualPage, VolumeId};

use super::Origin;

/// Pages of the origin to be copied to a place in the pool.
pub struct PageCopy {
    pub sequence: VolumeId,
    pub at: VirtualPage,
    pub len: u64,
    pub to: PageAddr,
    /// Checksums of what was written, as reported by the copier.
    pub checksums: DataChecksums,
}

/// Progress of counting what is to be copied.
struct PageCount {
    view: usize,
    next: VirtualPage,
    pages: u64,
}

/// Copies decided so far.
pub struct CopyPlan {
    views: Vec<ExceptionView>,
    count: PageCount,
    /// Index of the view being planned, and the next page.
    view: usize,
    next: VirtualPage,
    start: VirtualPage,
    end: VirtualPage,
    pub copies: Vec<PageCopy>,
}

impl CopyPlan {
    pub fn new(views: Vec<ExceptionView>, start: VirtualPage, end: VirtualPage) -> CopyPlan {
        let count = PageCount { view: 0, next: start, pages: 0 };
        CopyPlan { views, count, view: 0, next: start, start, end, copies: Vec::new() }
    }

    /// Refuses unless there is space for all of it: pages allocated in vain are free again only after the
    /// next checkpoint. A repeated attempt counts on from where the last one stopped: the exceptions of a
    /// large range may be more than the cache holds.
    pub fn admit(
        &mut self,
        meta: &mut Catalog,
        origin: VolumeId,
        chunk_pages: u64,
    ) -> std::result::Result<(), Failure> {
        while let Some(&view) = self.views.get(self.count.view) {
            while let Some(len) = exceptions::missing_exception(meta, origin, view, &mut self.count.next, self.end)? {
                self.count.pages += len;
                self.count.next.0 += len;
            }
            (self.count.view, self.count.next) = (self.count.view + 1, self.start);
        }
        let pages = self.count.pages;
        // Besides the data: pages of the ordered map, a path for each view and at worst one more per copy.
        let tables = 12 * self.views.len() as u64 + pages / chunk_pages;
        let _ = meta.reserve(Need::CopyOut { pages, tables })?;
        Ok(())
    }

    /// Plans on from where the last attempt stopped.
    pub fn advance(
        &mut self,
        meta: &mut Catalog,
        origin: VolumeId,
        chunk_pages: u64,
    ) -> std::result::Result<(), Failure> {
        while let Some(&view) = self.views.get(self.view) {
            let sequence = match view {
                ExceptionView::Chained { from, .. } => from,
                ExceptionView::Independent(id) => id,
            };
            while let Some(len) = exceptions::missing_exception(meta, origin, view, &mut self.next, self.end)? {
                let at = self.next;
                let pages = len.min(BLOCK_PAGES - at.index() as u64);
                let reserved = meta.reserve(Need::CopyOut { pages, tables: 0 })?;
                meta.space.find_reserved(&reserved).map_err(Stop::from)?;
                // Exceptions are never shared.
                let (shared_at, write) = (Epoch(0), at.0..at.0 + len);
                let want = AllocRequest { volume: sequence, at, pages, chunk_pages, shared_at, write, beside: None };
                let (to, len) = alloc::alloc_data(&mut meta.space, want, &reserved).map_err(Stop::from)?;
                self.add(sequence, at, len, to);
                self.next = VirtualPage(at.0 + len);
            }
            (self.view, self.next) = (self.view + 1, self.start);
        }
        Ok(())
    }

    /// Asserts that no copy leaves its block, in the origin or in the pool.
    pub fn check(&self) {
        let within = |index: usize, len: u64| len > 0 && index as u64 + len <= BLOCK_PAGES;
        let is_whole = |copy: &PageCopy| within(copy.at.index(), copy.len) && within(copy.to.index(), copy.len);
        assert!(self.copies.iter().all(is_whole), "a copy stays within a block");
    }

    /// Pages allocated for it.
    pub fn pages(&self) -> u64 {
        self.copies.iter().map(|copy| copy.len).sum()
    }

    /// Extends the last copy if it is contiguous on both sides: exceptions of older snapshots split the
    /// range, but not the copy.
    fn add(&mut self, sequence: VolumeId, at: VirtualPage, len: u64, to: PageAddr) {
        let goes_on = |last: &&mut PageCopy| {
            last.sequence == sequence
                && (last.at.0 + last.len, last.to.0 + last.len) == (at.0, to.0)
                && (last.at.block(), last.to.block()) == (at.block(), to.block())
        };
        match self.copies.last_mut().filter(goes_on) {
            Some(last) => last.len += len,
            None => self.copies.push(PageCopy { sequence, at, len, to, checksums: Rc::default() }),
        }
    }
}

impl<D: Device> Origin<D> {
    /// First byte of the range that a snapshot needs and would lose.
    pub(super) async fn first_missing_exception(&self, store: &Store<D>, offset: u64, end: u64) -> Result<Option<u64>> {
        let last = correct!(end, Bug::SecondChunkForgotten => end.min((offset / self.chunk + 1) * self.chunk));
        let (first, last) = (VirtualPage(offset / PAGE_BYTES), VirtualPage(last.div_ceil(PAGE_BYTES)));
        let mut search = MissingException::new(self.id, first, last);
        let mut retry = Retry::new(store);
        loop {
            let failure = match search.advance(&mut store.meta.borrow_mut()) {
                Ok(found) => return Ok(found.map(|page| page.0 * PAGE_BYTES)),
                Err(failure) => failure,
            };
            retry.missed(failure).await?;
        }
    }
}

/// Search for the first page that a snapshot needs and would lose.
pub struct MissingException {
    origin: VolumeId,
    first: VirtualPage,
    last: VirtualPage,
    /// Progress, valid as long as the same snapshots need copies.
    views: Vec<ExceptionView>,
    view: usize,
    at: VirtualPage,
    found: Option<VirtualPage>,
}

impl MissingException {
    /// Searches from `first` to before `last`.
    pub fn new(origin: VolumeId, first: VirtualPage, last: VirtualPage) -> MissingException {
        MissingException { origin, first, last, views: Vec::new(), view: 0, at: first, found: None }
    }

    /// Searches on from where the last attempt stopped.
    pub fn advance(&mut self, meta: &mut Catalog) -> std::result::Result<Option<VirtualPage>, Failure> {
        let views = exceptions::copy_out_views(meta, self.origin);
        let now = correct!(
            views,
            Bug::OldCopyTakenForNew => views.into_iter().map(from_first_snapshot).collect(),
            Bug::IndependentNotKept => views.into_iter().filter(is_chained).collect()
        );
        if now != self.views {
            (self.views, self.view, self.at, self.found) = (now, 0, self.first, None);
        }
        while let Some(&view) = self.views.get(self.view) {
            let end = self.found.unwrap_or(self.last);
            if exceptions::missing_exception(meta, self.origin, view, &mut self.at, end)?.is_some() {
                self.found = Some(self.at);
            }
            (self.view, self.at) = (self.view + 1, self.first);
        }
        Ok(self.found)
    }
}

/// The view of a snapshot that begins with the first exception of all.
#[cfg(feature = "planted")]
fn from_first_snapshot(view: ExceptionView) -> ExceptionView {
    match view {
        ExceptionView::Chained { below, .. } => ExceptionView::Chained { from: VolumeId(0), below },
        ExceptionView::Independent(_) => view,
    }
}

#[cfg(feature = "planted")]
fn is_chained(view: &ExceptionView) -> bool {
    matches!(view, ExceptionView::Chained { .. })
}

/// Checkpoints that one write starts to get freed space back.
const MAX_CHECKPOINTS: u32 = 2;

/// What a write has tried to get space.
#[derive(Default)]
pub struct SpaceWait {
    emptied: u32,
    /// Most pages that were free before an attempt: more free pages are worth another attempt.
    free: u64,
    /// The rest of its wait.
    left: Option<LocalFuture<()>>,
}

impl SpaceWait {
    /// Notes an attempt with this many free pages.
    pub fn note_attempt(&mut self, free: u64) {
        if free > self.free {
            (self.free, self.emptied) = (free, 0);
        }
    }
}

impl<D: Device> Origin<D> {
    /// Waits for space or frees some; fails if neither helps. Holds nothing meanwhile.
    pub(super) async fn wait_for_space(&self, store: &Rc<Store<D>>, patience: &mut SpaceWait) -> Result<()> {
        store.check_writable()?;
        let free = store.meta.borrow().space.available();
        if free > patience.free {
            // Some was freed since the attempt failed.
            patience.note_attempt(free);
            return Ok(());
        }
        if patience.emptied < MAX_CHECKPOINTS && store.has_pending_space() {
            patience.emptied += 1;
            return store.clone().checkpoint().await;
        }
        store.full.set(true);
        let policy = store.meta.borrow().protects(self.id).map_or(OriginFull::Error, |(p, _)| p.when_full);
        match policy {
            OriginFull::Wait(seconds) => {
                let sleep = || store.runtime.sleep(Duration::from_secs(u64::from(seconds)));
                if patience.left.is_none() {
                    events::report_waiting(store, self.id);
                }
                let left = patience.left.get_or_insert_with(sleep);
                // Other waiting writes start checkpoints, too; those alone free nothing.
                while store.meta.borrow().space.available() <= patience.free {
                    if !store.wait_for_space(left).await {
                        return events::report_if_full(store, self.id, Err(no_space_error()));
                    }
                    store.check_writable()?;
                }
                Ok(())
            }
            OriginFull::DropOldest => {
                let Some(id) = oldest_droppable(self, store) else {
                    return events::report_if_full(store, self.id, Err(no_space_error()));
                };
                let dropped = store
                    .verb(|meta| {
                        // It may have been deleted or opened since.
                        let found = meta.directory.get(id).filter(|_| meta.directory.is_snapshot(id));
                        let name = found.map(|v| meta.directory.full_name(&v.record));
                        Ok((Record::Delete { ids: name.iter().map(|_| id).collect() }, name))
                    })
                    .await?;
                if let Some(snapshot) = dropped {
                    store.counters.dropped.add(1);
                    events::report(store, &PoolEvent::Dropped { snapshot });
                }
                store.hooks.reap_soon();
                store.hooks.wait_freed().await
            }
            OriginFull::Error => events::report_if_full(store, self.id, Err(no_space_error())),
        }
    }
}

fn oldest_droppable<D: Device>(origin: &Origin<D>, store: &Store<D>) -> Option<VolumeId> {
    let meta = store.meta.borrow();
    let chain = meta.directory.chain(origin.id)?;
    let mut all: Vec<VolumeId> = chain.chained.iter().chain(&chain.independent).copied().collect();
    all.sort_unstable();
    all.into_iter().find(|&id| {
        let idle = |v: &crate::catalog::CatalogEntry| v.record.flags.droppable && !v.pending;
        meta.directory.get(id).is_some_and(idle)
            && store.live.borrow().handles(id) == 0
            && meta.directory.clones_backed_by(id).is_none()
    })
}
